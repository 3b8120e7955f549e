"""Reads the demo's topics while it runs and counts, in a thread of its own."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kafkamq.config import ServiceConfig
from kafkamq.errors import WireError
from kafkamq.markers.wire.markers import decode_slim
from kafkamq.queue.wire.headers import read_message_headers
from kafkamq.queue.wire.keys import split_key
from kafkamq.transport.admin import Admin
from kafkamq.transport.follower import Follower
from kafkamq.transport.record import Record, headers_of
from kafkamq.types import Marker, MarkerType, Outcome, PartitionId, PartitionOffset, expand

BATCH = 2000
POLL_S = 0.1


@dataclass(slots=True)
class DemoRecorder:
    """Counts of one run, by what its topics hold, in whatever order they are read. Pure.

    The verdict does not use it: that is a Spark SQL job over the whole logs (``verdict.py``).
    """

    queue_of: dict[PartitionOffset, str] = field(default_factory=dict)
    ended: dict[PartitionOffset, Outcome] = field(default_factory=dict)
    started: set[PartitionOffset] = field(default_factory=set)
    scheduled: set[PartitionOffset] = field(default_factory=set)
    fired: set[PartitionOffset] = field(default_factory=set)
    first_copies: Counter[str] = field(default_factory=Counter)
    dead: Counter[str] = field(default_factory=Counter)
    keepalives: int = 0
    ticks: int = 0

    def message(self, place: PartitionOffset, queue_id: str, *, is_first: bool) -> None:
        self.queue_of[place] = queue_id
        if is_first:
            self.first_copies[queue_id] += 1

    def dead_letter(self, queue_id: str) -> None:
        self.dead[queue_id] += 1

    def marker(self, place: PartitionOffset, marker: Marker) -> None:
        """A record of the markers topic, at ``place`` there."""
        if marker.type is MarkerType.TICK:
            self.ticks += 1
        elif marker.type is MarkerType.KEEPALIVE:
            self.keepalives += 1
        elif marker.batches:
            for each in expand(marker):
                self.marker(place, each)
        elif marker.type is MarkerType.SCHEDULE:
            self.scheduled.add(place if marker.message_id is None else _at(marker))
        elif marker.type is MarkerType.START:
            self.started.add(_at(marker))
        elif marker.of_schedule:
            self.fired.add(_at(marker))
        elif marker.outcome is Outcome.ACK:
            self.ended.setdefault(_at(marker), Outcome.ACK)
        elif marker.outcome in (Outcome.REDELIVERED, Outcome.DEAD_LETTERED):
            self.ended[_at(marker)] = marker.outcome

    @property
    def sent(self) -> int:
        """Return messages that were sent: first copies, and delayed ones that are still to come."""
        return sum(self.first_copies.values()) + len(self.scheduled - self.fired)

    @property
    def held(self) -> int:
        """Copies that a worker has taken and nothing has ended."""
        return len(self.started - self.ended.keys())

    def count(self, outcome: Outcome) -> int:
        return sum(1 for found in self.ended.values() if found is outcome)

    def is_settled(self, planned: int) -> bool:
        """Return whether all of ``planned`` messages are in the logs and nothing is open."""
        return (
            self.sent >= planned
            and self.scheduled <= self.fired
            and self.queue_of.keys() <= self.ended.keys()
        )

    def open_copies(self) -> int:
        return len(self.queue_of.keys() - self.ended.keys())


def _at(marker: Marker) -> PartitionOffset:
    # The decoder refuses such STARTs and ENDs.
    assert marker.message_id is not None
    return marker.message_id.partition, marker.message_id.offset


@dataclass(frozen=True, slots=True)
class Snapshot:
    sent: int = 0
    delayed: int = 0
    held: int = 0
    acked: int = 0
    redelivered: int = 0
    dead: int = 0
    open_copies: int = 0
    keepalives: int = 0
    ticks: int = 0
    is_settled: bool = False


class Background:
    """A thread beside the demo, for a block; what ends it is raised where the demo looks next."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.stopping = threading.Event()
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run_work, name=name, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._thread.join(5.0)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run_work(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - ``check`` raises it
            self._error = error


class DemoFollower(Background):
    """Follows messages, markers and dead letters from their beginning; any thread may look."""

    def __init__(self, config: ServiceConfig, *, planned: int) -> None:
        super().__init__("demo-follower", self._run)
        self._config = config
        self._planned = planned
        self._recorder = DemoRecorder()
        self._lock = threading.Lock()

    def snapshot(self) -> Snapshot:
        self.check()
        with self._lock:
            recorder = self._recorder
            return Snapshot(
                sent=recorder.sent,
                delayed=len(recorder.scheduled - recorder.fired),
                held=recorder.held,
                acked=recorder.count(Outcome.ACK),
                redelivered=recorder.count(Outcome.REDELIVERED),
                dead=sum(recorder.dead.values()),
                open_copies=recorder.open_copies(),
                keepalives=recorder.keepalives,
                ticks=recorder.ticks,
                is_settled=recorder.is_settled(self._planned),
            )

    def _run(self) -> None:
        # librdkafka retries; a real outage shows as a demo that never settles.
        follower = Follower(
            self._config,
            "following the demo",
            group_id=f"{self._config.namespace}.demo",
            ignores=lambda _: True,
        )
        try:
            follower.place(_beginnings(self._config, self._topics()))
            while not self.stopping.is_set():
                self._apply(follower.poll(BATCH, POLL_S))
        finally:
            follower.close()

    def _topics(self) -> tuple[str, str, str]:
        config = self._config
        return config.message_topic, config.marker_topic, config.dead_letter_topic

    def _apply(self, records: Iterable[Record]) -> None:
        messages, markers, _ = self._topics()
        with self._lock:
            for record in records:
                place = (record.partition() or 0, record.offset() or 0)
                if record.topic() == markers:
                    self._marker(place, record)
                    continue
                queue_id = split_key(record.key())[0].decode("utf-8", "replace")
                if record.topic() == messages:
                    pairs = headers_of(record)
                    is_first = read_message_headers(pairs).origin is None
                    self._recorder.message(place, queue_id, is_first=is_first)
                else:
                    self._recorder.dead_letter(queue_id)

    def _marker(self, place: tuple[int, int], record: Record) -> None:
        # What is no marker goes to the quarantine; the verdict counts what is really open.
        with contextlib.suppress(WireError):
            self._recorder.marker(place, decode_slim(record.value()))


def _beginnings(config: ServiceConfig, topics: Iterable[str]) -> dict[PartitionId, int]:
    found = {}
    with Admin(config) as admin:
        for topic in topics:
            bounds = admin.log_bounds(topic, range(admin.require_topic(topic).partitions))
            found.update({(topic, number): first for number, (first, _) in bounds.items()})
    return found
