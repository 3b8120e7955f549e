"""Turns of a local tracker's loop, without brokers."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.errors import DeadlineExceededError
from kafkamq.markers.rules.hold import NEVER
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.markers.tracker.partition import Started, TrackedPartition
from kafkamq.markers.tracker.records import Quarantine
from kafkamq.queue.topics import create_topics
from kafkamq.queue.wire.headers import Origin
from kafkamq.transport import clock
from kafkamq.transport.memory.cluster import forget_cluster
from kafkamq.types import Marker, MarkerType, MessageId

CONFIG = ServiceConfig(bootstrap_servers="127.0.0.1:1")


class Refusing:
    """A producer for which there is no room."""

    asked: ClassVar[list[bytes | None]] = []

    def __init__(self, *_: object) -> None: ...

    def produce(self, _topic: str, value: bytes | None, *_: object, **__: object) -> None:
        self.asked.append(value)
        raise BufferError

    def poll(self, _: float) -> int:
        return 0


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One with two partitions, which it does not read yet."""
    monkeypatch.setattr("kafkamq.transport.producer.open_producer", Refusing)
    made: Any = object.__new__(LocalTracker)
    made._config = CONFIG
    made._partitions = {number: partition(number) for number in (3, 4)}
    made._quarantine = Quarantine(CONFIG)
    made._reader = SimpleNamespace(place=lambda _: None)
    made._starting = 1
    return made


class Busy:
    """Workers that are never idle, and do what they are told later."""

    running = 1000

    def __init__(self) -> None:
        self.begun: list[Any] = []

    def submit(self, job: Any, *_: object) -> None:
        self.begun.append(job)


def partition(number: int) -> TrackedPartition:
    return TrackedPartition(CONFIG.marker_topic, number, TrackerConfig(), NEVER)


def started(position: int) -> Started:
    ledger: Any = SimpleNamespace(last=SimpleNamespace(batch=1), epoch=1)
    return Started(ledger, position, "us")


def set_aside(tracker: Any, offset: int, value: bytes = b"bad") -> None:
    origin = Origin(CONFIG.marker_topic, 3, offset, 0)
    tracker._quarantine.put(origin, key=b"k", value=value, error="no marker")


def test_what_another_owner_has_passed_does_not_hide_what_is_not_in_the_quarantine(
    tracker: Any,
) -> None:
    part = tracker._partitions[3]
    tracker._started(part, started(100))
    tracker._starting = 1
    set_aside(tracker, 100)
    tracker._guard_positions()
    part = tracker._partitions[3] = partition(3)  # another replica had it meanwhile
    tracker._started(part, started(200))
    set_aside(tracker, 250)
    part.core.apply(300, 1000, Marker(MarkerType.TICK, consumer_id="us", engine_epoch=1))
    tracker._guard_positions()
    assert part.position() == 250


def test_a_record_that_is_read_again_is_written_once(tracker: Any) -> None:
    set_aside(tracker, 100, b"first")
    set_aside(tracker, 100, b"again")
    Refusing.asked.clear()
    tracker._guard_positions()
    assert Refusing.asked == [b"again"]


def test_one_partition_starts_however_much_is_due_elsewhere(tracker: Any) -> None:
    workers = tracker._workers = Busy()
    tracker._starter = SimpleNamespace(start=lambda *_: None)
    tracker._starting = 0
    first, second = tracker._partitions.values()
    for _ in range(2):
        tracker._act(first)
        tracker._act(second)
    assert len(workers.begun) == 1
    tracker._start_failed(first, DeadlineExceededError("no answer"))
    tracker._act(second)
    assert len(workers.begun) == 2


def test_a_loop_whose_quarantine_is_full_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    name = uuid.uuid4().hex
    config = ServiceConfig(bootstrap_servers=f"memory://{name}")
    create_topics(config)
    tracker = LocalTracker(config)
    for each in (tracker.member, tracker._reader):
        monkeypatch.setattr(each, "poll", lambda _, timeout_s: waited.append(timeout_s) or [])
    monkeypatch.setattr(Quarantine, "is_full", True)
    assert not tracker.run_once(0.02)
    assert sum(waited) == 0.02
    tracker.close()
    forget_cluster(name)


def test_a_machine_that_was_suspended_asks_for_the_time_when_it_goes_on(
    tracker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is silent, and a lease in it has ended meanwhile."""
    now_s = [0]
    monkeypatch.setattr(clock, "now_ns", lambda: now_s[0] * 1_000_000_000)
    ticks: list[int] = []
    tracker._ticker = SimpleNamespace(tick=lambda number, **_: ticks.append(number))
    tracker._workers = Busy()
    part = tracker._partitions[3] = partition(3)
    tracker._started(part, started(0))
    part.tick_sent(0)
    part.tick_done(0)
    part.core.apply(0, 1000, Marker(MarkerType.TICK, consumer_id="us", engine_epoch=1))
    start = Marker(MarkerType.START, MessageId(0, 1), redeliver_after_ms=3_600_000)
    part.core.apply(1, 1000, start)
    part.ticks.on_read(clock.monotonic_ms(), part.core.next_offset)
    tracker._act(part)
    assert ticks == []
    now_s[0] += 7200
    tracker._act(part)
    assert ticks == [3]
