"""Reads the demo's topics while it runs and counts, in a thread of its own."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field

from kafkamq.config import ServiceConfig
from kafkamq.errors import WireError
from kafkamq.markers.wire.markers import decode_slim
from kafkamq.queue.wire.headers import read_message_headers
from kafkamq.transport.admin import Admin
from kafkamq.transport.follower import Follower
from kafkamq.transport.record import Record, headers_of
from kafkamq.types import Marker, MarkerType, Outcome, PartitionId, PartitionOffset, expand

BATCH = 2000
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Snapshot:
    sent: int = 0
    delayed: int = 0
    held: int = 0
    acked: int = 0
    redelivered: int = 0
    dead: int = 0
    keepalives: int = 0
    is_settled: bool = False


@dataclass(slots=True)
class DemoRecorder:
    """Counts of one run, by what its topics hold, in whatever order they are read. Pure.

    The verdict does not use it: that is a Spark SQL job over the whole logs (``verdict.py``).
    """

    copies: set[PartitionOffset] = field(default_factory=set)
    ended: dict[PartitionOffset, Outcome] = field(default_factory=dict)
    started: set[PartitionOffset] = field(default_factory=set)
    scheduled: set[PartitionOffset] = field(default_factory=set)
    fired: set[PartitionOffset] = field(default_factory=set)
    first_copies: int = 0
    dead: int = 0
    keepalives: int = 0

    def message(self, place: PartitionOffset, *, is_first: bool) -> None:
        self.copies.add(place)
        self.first_copies += is_first

    def marker(self, place: PartitionOffset, marker: Marker) -> None:
        """A record of the markers topic, at ``place`` there."""
        if marker.type is MarkerType.TICK:
            return
        if marker.type is MarkerType.KEEPALIVE:
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

    def snapshot(self, planned: int) -> Snapshot:
        """Return the counts; settled: all of ``planned`` are in the logs, and nothing is open."""
        outcomes, delayed = Counter(self.ended.values()), len(self.scheduled - self.fired)
        # First copies, and delayed messages that are still to come.
        sent = self.first_copies + delayed
        has_ended = self.scheduled <= self.fired and self.copies <= self.ended.keys()
        return Snapshot(
            sent=sent,
            delayed=delayed,
            held=len(self.started - self.ended.keys()),
            acked=outcomes[Outcome.ACK],
            redelivered=outcomes[Outcome.REDELIVERED],
            dead=self.dead,
            keepalives=self.keepalives,
            is_settled=sent >= planned and has_ended,
        )


def _at(marker: Marker) -> PartitionOffset:
    # The decoder refuses such STARTs and ENDs.
    assert marker.message_id is not None
    return marker.message_id.partition, marker.message_id.offset


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
            return self._recorder.snapshot(self._planned)

    def _run(self) -> None:
        config = self._config
        # librdkafka retries; a real outage shows as a demo that never settles.
        follower = Follower(
            config,
            "following the demo",
            group_id=f"{config.namespace}.demo",
            ignores=lambda _: True,
        )
        places: dict[PartitionId, int] = {}
        with closing(follower), Admin(config) as admin:
            for topic in (config.message_topic, config.marker_topic, config.dead_letter_topic):
                bounds = admin.log_bounds(topic, range(admin.require_topic(topic).partitions))
                places |= {(topic, number): first for number, (first, _) in bounds.items()}
            follower.place(places)
            while not self.stopping.is_set():
                records = follower.poll(BATCH, POLL_S)
                with self._lock:
                    for record in records:
                        self._apply(record)

    def _apply(self, record: Record) -> None:
        place = (record.partition() or 0, record.offset() or 0)
        if record.topic() == self._config.marker_topic:
            # What is no marker goes to the quarantine; the verdict counts what is really open.
            with suppress(WireError):
                self._recorder.marker(place, decode_slim(record.value()))
        elif record.topic() == self._config.message_topic:
            is_first = read_message_headers(headers_of(record)).origin is None
            self._recorder.message(place, is_first=is_first)
        else:
            self._recorder.dead += 1
