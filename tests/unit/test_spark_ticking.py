"""When a TICK is written just before Spark reads it, and when it was read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.markers.wire.status import TrackerStatus
from kafkamq.spark.progress import batch_ends
from kafkamq.spark.tracker import ticking
from kafkamq.spark.tracker.ticking import Lag, TickKeeper, batch_is_near

MIDNIGHT_MS = 1_795_305_600_000.0


@pytest.mark.parametrize(
    ("trigger_ms", "past_ms", "is_near"),
    [
        (1000, 0, False),
        (1000, 840, False),
        (1000, 860, True),
        (1000, 999, True),
        (5000, 900, False),
        (5000, 4900, True),
        (100, 1, True),  # batches follow each other more closely than TICKs can be timed
        (0, 500, True),
    ],
)
def test_a_batch_is_near_before_a_multiple_of_the_trigger(
    trigger_ms: int, past_ms: int, is_near: bool
) -> None:
    assert batch_is_near(trigger_ms, MIDNIGHT_MS + past_ms) is is_near


def test_a_slow_batch_does_not_make_the_lag_long() -> None:
    lag = Lag()
    lag.note(2500)  # the first one of a query
    assert lag.hear(1, 10_000) == 0
    for _ in range(4):
        lag.note(450)
    assert lag.hear(5, 20_000) == 450
    lag.note(2500)
    assert lag.hear(6, 23_000) == 450
    for _ in range(5):
        lag.note(9000)
    assert lag.hear(11, 90_000) == 3000


def test_a_batch_was_not_read_before_the_one_before_it_was_heard_of() -> None:
    lag = Lag()
    for batch in range(5):
        lag.hear(batch, 3000 * (batch + 1))
        lag.note(2500)
    assert lag.hear(5, 15_400) == 400  # a quick one, and nobody knows how quick yet
    assert lag.hear(5, 15_500) == 500  # another partition of it
    assert lag.hear(4, 15_550) == 550  # told again


class World:
    """A silent marker partition, a query that reads what is there, and statuses that may be lost.

    A START with a lease of 6 s is at offset 10; the query reads it in its first batch.
    """

    T = 6_000

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = 1_000_000
        self.end = 10
        self.ticks: list[int] = []
        self.statuses: list[TrackerStatus] = []
        monkeypatch.setattr(ticking, "monotonic_ms", lambda: self.now_ms)
        monkeypatch.setattr(ticking, "batch_is_near", lambda *_: True)
        monkeypatch.setattr(ticking, "Ticker", lambda _: self)
        monkeypatch.setattr(ticking, "StatusReader", lambda _: self)
        config = ServiceConfig(bootstrap_servers="nowhere:1")
        self.topic = config.marker_topic
        self.keeper = TickKeeper(
            config, TrackerConfig(), engine="e", epoch=1, token="t", trigger_ms=1000
        )
        self.keeper.begin([0])

    # What the keeper has in place of a Ticker and a StatusReader.

    def tick_all(self, numbers: list[int], **_: object) -> dict[int, int]:
        return {number: self._append() for number in numbers}

    def tick(self, number: int, *, on_done: Callable[[int, int], None], **_: object) -> None:
        self.ticks.append(self.now_ms)
        on_done(number, self._append())

    def poll(self, _: float = 0.0) -> list[TrackerStatus]:
        told, self.statuses = self.statuses, []
        return told

    def _append(self) -> int:
        self.end += 1
        return self.end - 1

    # What happens.

    def batch(self, *, deadline_ms: int | None = None, is_told: bool = True) -> None:
        status = TrackerStatus(topic=self.topic, partition=0, engine="e", epoch=1)
        held = {} if deadline_ms is None else {"entries": 1}
        if is_told:
            self.statuses.append(
                replace(
                    status,
                    **held,
                    clock_ms=self.now_ms,
                    position=self.end,
                    deadline_ms=deadline_ms,
                    warn_ms=None if deadline_ms is None else deadline_ms - self.T // 4,
                )
            )
        source = {"endOffset": {self.topic: {"0": self.end}, ":topic-id": {self.topic: "x"}}}
        self.keeper.batch_done(batch_ends({"sources": [source]}, self.topic))

    def pass_time(self, ms: int) -> None:
        until_ms = self.now_ms + ms
        while self.now_ms < until_ms:
            self.now_ms += 100
            self.keeper.step(0)


def test_a_lost_status_does_not_silence_a_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.batch()  # reads the start's TICK: nothing is open
    world.pass_time(3_000)
    assert not world.ticks
    world.end += 1  # a START; the status of the batch that reads it is lost
    world.batch(is_told=False)
    world.pass_time(60_000)
    assert len(world.ticks) == 1  # one until it is read
    began_ms = world.ticks[0]
    for _ in range(5):  # the status topic has no leader: its time must pass all the same
        world.batch(is_told=False)
        world.pass_time(2_000)
    assert [at - began_ms for at in world.ticks[1:]] == [
        at - began_ms for at in range(world.ticks[1], world.now_ms, 2_000)
    ]
    assert len(world.ticks) == 6
    world.batch()  # told again, and nothing is open
    world.pass_time(60_000)
    assert len(world.ticks) == 6


def test_a_start_whose_first_status_is_lost_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.batch(is_told=False)
    world.pass_time(2_000)
    assert len(world.ticks) == 1


def test_a_status_that_is_late_costs_no_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    for _ in range(20):
        world.end += 1
        world.batch(is_told=False)
        world.pass_time(900)
        world.batch()
        world.pass_time(100)
    assert not world.ticks


def test_a_told_lease_is_ticked_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.end += 1
    world.batch(deadline_ms=world.now_ms + World.T)
    world.pass_time(World.T)
    assert 1 <= len(world.ticks) <= 2  # an early one, and the one before the batch
    assert world.ticks[0] >= world.now_ms - World.T // 4


def test_a_partition_that_rests_gets_a_tick_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batch commits the position again: Kafka forgets one of a group that is silent."""
    monkeypatch.setattr(ticking, "MAX_REST_MS", 60_000)
    world = World(monkeypatch)
    world.pass_time(3_000)
    world.batch()
    for count in (1, 2, 3):
        world.pass_time(59_000)
        assert len(world.ticks) == count - 1
        world.pass_time(1_500)
        assert len(world.ticks) == count
        world.batch()
