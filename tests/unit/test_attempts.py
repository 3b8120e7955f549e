"""What an attempt is told of: its own START, its holder's signs of life, its first END."""

from __future__ import annotations

from typing import Any

import pytest

from kafkamq.markers.rules.attempts import Attempt, Attempts
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.types import Marker, MarkerType, MessageId, Outcome

ONE = MessageId(0, 7)
LEASE_MS = 1000


class Log:
    """Attempts of one marker partition, folded as they are written."""

    def __init__(self) -> None:
        self.attempts = Attempts(RedeliveryTracker(0, partition=0))
        self.next = 0

    def write(
        self, kind: MarkerType, consumer: str, *, at_ms: int = 0, of: Any = ONE, **more: Any
    ) -> None:
        marker = Marker(kind, of, LEASE_MS, consumer_id=consumer, delivery_count=1, **more)
        time_ms = 10_000_000 + at_ms
        self.attempts.apply(self.next, time_ms, time_ms, marker)
        self.next += 1

    def start(self, consumer: str = "a", **more: Any) -> None:
        self.write(MarkerType.START, consumer, **more)

    def end(self, outcome: Outcome, consumer: str = "a", **more: Any) -> None:
        self.write(MarkerType.END, consumer, outcome=outcome, **more)

    def ended(self) -> list[tuple[Outcome | None, str, bool]]:
        return [
            (each.outcome, each.consumer_id, each.is_late) for each in self.attempts.take_ended()
        ]

    @property
    def open(self) -> list[Attempt]:
        return list(self.attempts.attempts.values())


@pytest.fixture
def log() -> Log:
    return Log()


def test_r08_a_release_is_the_holders_alone(log: Log) -> None:
    log.start("a")
    log.end(Outcome.RELEASE, "b")
    assert log.ended() == []
    log.end(Outcome.ACK, "a")
    assert log.ended() == [(Outcome.ACK, "a", False)]


def test_r08_the_first_end_is_the_outcome(log: Log) -> None:
    log.start()
    log.end(Outcome.NACK)
    log.end(Outcome.REDELIVERED, "engine")
    assert log.ended() == [(Outcome.NACK, "a", False)]
    assert log.open == []


def test_r07_a_start_of_what_waits_is_none_of_its_attempt(log: Log) -> None:
    log.start("a")
    log.start("b")
    assert [(each.starts, each.consumer_id) for each in log.open] == [(2, "b")]
    log.end(Outcome.NACK, "b")
    log.start("c")
    assert [(each.starts, each.consumer_id) for each in log.open] == [(2, "b")]


def test_r09_a_verdict_behind_the_leases_end_is_late(log: Log) -> None:
    log.start()
    for part in range(1, 9):  # no gap in which nobody could have renewed it (R3)
        log.write(MarkerType.TICK, "engine", at_ms=part * LEASE_MS // 4, of=None)
    log.end(Outcome.ACK, at_ms=2 * LEASE_MS)
    assert log.ended() == [(Outcome.ACK, "a", True)]


def test_r12_a_zombies_start_is_no_attempt(log: Log) -> None:
    log.start()
    log.end(Outcome.ACK)
    log.start("zombie")
    assert log.open == []
