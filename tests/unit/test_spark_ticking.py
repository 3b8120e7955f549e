"""When the driver writes a TICK, and when the next batch finds something that is due."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.markers.wire.records import TrackerStatus
from kafkamq.spark.tracker import settling
from kafkamq.spark.tracker.settling import TickKeeper


class World:
    """A silent marker partition, and a query that reads what is there.

    A START with a lease of 6 s is at offset 10; the query reads it in its first batch.
    """

    T = 6_000

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = 1_000_000
        self.end = 10
        self.ticks: list[int] = []
        self.published: list[TrackerStatus] = []
        monkeypatch.setattr(settling, "monotonic_ms", lambda: self.now_ms)
        monkeypatch.setattr(settling, "Ticker", lambda _: self)
        config = ServiceConfig(bootstrap_servers="nowhere:1")
        self.topic = config.marker_topic
        self.keeper = TickKeeper(config, TrackerConfig(), token="t")
        self.keeper.begin([0], epoch=1)

    # What the keeper has in place of a Ticker.

    def tick_all(self, numbers: list[int], **_: object) -> dict[int, int]:
        return {number: self._append() for number in numbers}

    def tick(self, number: int, *, on_done: Callable[[int, int], None], **_: object) -> None:
        self.ticks.append(self.now_ms)
        on_done(number, self._append())

    def poll(self) -> None:
        pass

    def publish(self, status: TrackerStatus) -> None:
        self.published.append(status)

    def _append(self) -> int:
        self.end += 1
        return self.end - 1

    def close(self) -> None:
        pass

    # What happens.

    def batch(self, *, deadline_ms: int | None = None, due: int = 0, awaited: int = 0) -> None:
        status = TrackerStatus(topic=self.topic, partition=0, engine="e", epoch=1, due=due)
        status = replace(status, clock_ms=self.now_ms, position=self.end, awaited=awaited)
        if deadline_ms is not None:
            warn_ms = deadline_ms - self.T // 4
            status = replace(status, entries=1, deadline_ms=deadline_ms, warn_ms=warn_ms)
        self.keeper.take(status, self.now_ms)

    def pass_time(self, ms: int, *, is_read_soon: bool = True) -> None:
        until_ms = self.now_ms + ms
        while self.now_ms < until_ms:
            self.now_ms += 100
            self.keeper.step(is_read_soon=is_read_soon)


def test_a_told_lease_is_ticked_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.end += 1
    world.batch(deadline_ms=world.now_ms + World.T)
    world.pass_time(World.T)
    assert 1 <= len(world.ticks) <= 2  # an early one, and the one before the batch
    assert world.ticks[0] >= world.now_ms - World.T // 4


def test_a_partition_that_rests_gets_a_tick_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batch commits the position again: Kafka forgets one of a group that is silent."""
    monkeypatch.setattr(settling, "MAX_REST_MS", 60_000)
    world = World(monkeypatch)
    world.pass_time(3_000)
    world.batch()
    for count in (1, 2, 3):
        world.pass_time(59_000)
        assert len(world.ticks) == count - 1
        world.pass_time(1_500)
        assert len(world.ticks) == count
        world.batch()


def test_a_tick_that_can_wait_is_written_behind_the_batch_that_would_not_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    world.end += 1
    world.batch(deadline_ms=world.now_ms + world.T)
    world.pass_time(world.T - 1300)  # the early one, for R3
    assert len(world.ticks) == 1
    world.end += 1
    world.batch(deadline_ms=world.now_ms + 1300)
    world.pass_time(1300 + 100, is_read_soon=False)
    assert len(world.ticks) == 1
    world.pass_time(100)
    assert len(world.ticks) == 2


def test_a_batch_is_wanted_when_the_log_has_passed_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the estimate, and as long as what is due has not ended; not for what is awaited."""
    world = World(monkeypatch)
    assert not world.keeper.is_due()
    world.batch(deadline_ms=world.now_ms + 300)
    world.pass_time(300)
    assert not world.keeper.is_due()
    world.pass_time(100)
    assert world.keeper.is_due()
    world.end += 1
    world.batch(due=3, awaited=2)
    assert world.keeper.is_due()
    world.end += 1
    world.batch(due=2, awaited=2)
    assert not world.keeper.is_due()


def test_a_status_is_published_once_a_second_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    for position in range(11, 16):
        world.end = position
        world.batch()
        world.pass_time(100)
    assert [each.position for each in world.published] == [11]
    world.keeper.close()
    assert [each.position for each in world.published] == [11, 15]
