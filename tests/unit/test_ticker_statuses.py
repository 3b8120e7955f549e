"""A status that could not be written is written again, the newest of its partition only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from kafkamq.config import ServiceConfig
from kafkamq.markers.tracker import records as ticker
from kafkamq.markers.tracker.records import Ticker
from kafkamq.markers.wire.records import TrackerStatus, decode_status

ONE = TrackerStatus(topic="m", partition=0, engine="e", epoch=1, batch=1)
TIMED_OUT = KafkaError(KafkaError._MSG_TIMED_OUT)


class Log:
    """In place of a producer: keeps what it was given, and reports what the test says."""

    def __init__(self) -> None:
        self.queue: list[tuple[TrackerStatus, Callable[[Any, Any], None]]] = []
        self.is_full = False

    def produce(self, *record: Any) -> None:
        if self.is_full:
            raise BufferError
        _, value, _, _, on_delivery, *_ = record
        self.queue.append((decode_status(value), on_delivery))

    def poll(self, _timeout_s: float) -> None:
        """Reports come when the test says so."""

    def report(self, error: KafkaError | None) -> list[int]:
        """Every record that waits gets this answer; returns their batches."""
        waiting, self.queue = self.queue, []
        for _, on_delivery in waiting:
            on_delivery(error, None)
        return [status.batch for status, _ in waiting]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    made = Log()
    monkeypatch.setattr("kafkamq.transport.producer.open_producer", lambda *_: made)
    monkeypatch.setattr(ticker, "AGAIN_S", 0.0)
    return made


def test_until_it_is_reported(log: Log) -> None:
    ours = Ticker(ServiceConfig(bootstrap_servers="nowhere:1"))
    ours.publish(ONE)
    for _ in range(3):
        assert log.report(TIMED_OUT) == [1]
        ours.poll()
    assert log.report(None) == [1]
    ours.poll()
    assert log.report(None) == []


def test_a_newer_one_takes_its_place(log: Log) -> None:
    ours = Ticker(ServiceConfig(bootstrap_servers="nowhere:1"))
    ours.publish(ONE)
    ours.publish(replace(ONE, batch=2))
    ours.publish(replace(ONE, partition=1, batch=7))
    assert log.report(TIMED_OUT) == [1, 2, 7]
    ours.poll()
    assert sorted(log.report(TIMED_OUT)) == [2, 7]


def test_a_full_queue_delays_it(log: Log) -> None:
    ours = Ticker(ServiceConfig(bootstrap_servers="nowhere:1"))
    log.is_full = True
    ours.publish(ONE)
    ours.poll()
    log.is_full = False
    ours.poll()
    assert log.report(None) == [1]
