"""STARTs a batch in the source process, before any task sees its rows (R5).

Spark's log of planned batches takes the place of the group's committed offset: a range is planned
before its first START is written. It may have been STARTed before: by a driver that was killed
since, or by another query. So it is looked at together with the markers that were written since it
was planned (docs/spark.md, "How a batch goes", says what becomes of each message). What is STARTed
again is looked up again behind its START: a tracker may have been quicker, or its lease may have
ended by then, which no START undoes: a copy will come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kafkamq.config import QueueConfig
from kafkamq.markers.rules.batching import gather, oldest_by_reference_ms
from kafkamq.markers.rules.handout import expires_at_ms, has_expired, is_last_delivery
from kafkamq.markers.rules.hold import DUE
from kafkamq.markers.rules.pipeline import MAX_AGE_MS
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.markers.state import broker_ms
from kafkamq.markers.wire.marker_writer import (
    MAX_MARKER_BYTES,
    StartEncoder,
    encode_batch_start,
    encode_identity,
    encode_known_end,
    encode_named,
    encode_reference,
)
from kafkamq.queue.namespace import NamespaceFacts
from kafkamq.queue.wire.headers import read_message_headers
from kafkamq.queue.wire.keys import CHUNK_OFFSETS, join_key, marker_key, marker_partition
from kafkamq.spark.marker_log import MarkerLog, RecordMetadata
from kafkamq.spark.options import SourceOptions
from kafkamq.spark.queues.acks import ENDED, NACKED
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.log_reader import LogRange, Record, log_reader
from kafkamq.transport.record import LOG_APPEND_TIME, headers_of
from kafkamq.types import Marker, MarkerType, MessageId, Outcome, expand

BATCH = "spark-"
# Ends the consumer_id of what a run STARTs and does not hand out: nobody renews it.
LEFT = "-left"
# The reason of a REJECT that nobody was asked for (R10).
EXPIRED = "expired"
VOID = "void"
MAX_INLINE_BYTES = 65_536  # R11
_SETTLED = (Outcome.REDELIVERED, Outcome.DEAD_LETTERED)
VERDICTS = (Outcome.ACK, Outcome.NACK, Outcome.REJECT)


@dataclass(slots=True)
class Waiting:
    """A message that waits to be handed out: what its START needs, but for its payload."""

    partition: int
    offset: int
    log: tuple[bytes, int]
    timestamp_ms: int
    delivery_count: int
    expiry_ms: int
    is_broker_time: bool
    route: int = -1

    def outlives(self, oldest_ms: int) -> bool:
        """Say whether its START may refer to it (R28), and it is told from others there (R13)."""
        return all(self.log) and self.is_broker_time and self.timestamp_ms >= oldest_ms

    @property
    def place(self) -> tuple[int, int]:
        return self.partition, self.offset

    @classmethod
    def of(cls, record: Record) -> Waiting:
        headers = headers_of(record)
        (kind, timestamp_ms), count, expiry_ms = record.timestamp(), 1, 0
        if headers:
            read = read_message_headers(headers)
            count, origin = read.delivery_count, read.origin
            begun_ms = timestamp_ms if origin is None else origin.timestamp_ms
            expiry_ms = expires_at_ms(read.ttl_ms, begun_ms)
        one, is_broker_time = identity_of(record, b""), kind == LOG_APPEND_TIME
        return cls(
            one.partition, one.offset, one.log, timestamp_ms, count, expiry_ms, is_broker_time
        )


def identity_of(record: Record, topic_id: bytes) -> MessageId:
    """Whom a message's markers name (R13)."""
    epoch = record.leader_epoch()
    epoch_on_wire = 0 if epoch is None else epoch + 1
    return MessageId(record.partition(), record.offset(), topic_id, epoch_on_wire)


@dataclass(frozen=True, kw_only=True)
class StartPlan:
    consumer_id: str
    facts: NamespaceFacts
    marker_ends: dict[int, int]
    is_repeated: bool

    @property
    def marker_partitions(self) -> int:
        """When the batch was planned: where its STARTs go (R26)."""
        return len(self.marker_ends) or self.facts.marker_partitions

    def routes(self, ranges: Iterable[LogRange]) -> set[int]:
        """Return the marker partitions where something may be said of these messages (R26).

        A worker's START went by the number of marker partitions that it knew: any from then to now.
        """
        return {
            marker_partition(each.partition, chunk * CHUNK_OFFSETS, count)
            for each in ranges
            for chunk in range(each.start // CHUNK_OFFSETS, (each.end - 1) // CHUNK_OFFSETS + 1)
            for count in range(self.marker_partitions, self.facts.marker_partitions + 1)
        }

    def is_of_topic(self, one: MessageId) -> bool:
        """Return whether it is of no other topic of this name (R13)."""
        known = self.facts.message_topic_id
        return not one.topic_id or not known or one.topic_id == known


@dataclass(frozen=True, slots=True)
class Start:
    """It says where one record STARTed messages of a partition, or that they have a verdict."""

    topic_id: bytes
    marker_partition: int
    start_offset: int
    start_ms: int
    is_reference: bool


Handed = dict[int, dict[Start, list[int]]]
"""What a run hands out: by partition, the offsets of each START."""


def addressed(
    messages: Mapping[int, Sequence[Waiting]], encode: Callable[[bytes], bytes], *, together: bool
) -> list[tuple[int, bytes, bytes]]:
    """Markers (partition, key, value) that name these, by marker partition."""
    return [
        (route, marker_key(*named[0].place), encode(identity))
        for route, of_route in messages.items()
        for identity, named in encode_named(of_route, together=together)
    ]


def handed_out(count: int, runs: int) -> int:
    """Return how many of ``count`` open messages are handed out behind so many runs of a batch.

    A batch that kills who works on it would be repeated without end, and each run is a sign of
    life for all of it. So it hands out all of them twice, as drivers are also restarted on purpose;
    then half, a quarter and so on, down to one, which has a few runs alone; then none. The others
    keep the STARTs that they have, and come back with their deliveries counted.
    """
    if runs < 2:
        return count
    return max(count >> runs - 1, int(runs <= count.bit_length() + 1))


_Started = tuple[Waiting, RecordMetadata, bool]


class Starter:
    """One run of one batch; one owner thread. ``check`` raises where another query started later.

    Attributes:
        held: What it holds when it has STARTed: by marker partition.
    """

    def __init__(
        self,
        plan: StartPlan,
        ranges: Sequence[LogRange],
        options: SourceOptions,
        log: MarkerLog,
        check: Callable[[], None],
    ) -> None:
        acknowledge = options.acknowledge
        assert acknowledge is not None, "a stream that acknowledges"
        self.held: dict[int, list[Waiting]] = {}
        self._plan = plan
        self._ranges = {each.partition: each for each in ranges}
        self._options = options
        self._acknowledge: QueueConfig = acknowledge
        self._log = log
        self._check = check
        # Of all runs of this batch.
        self._consumers = plan.consumer_id.rpartition("-")[0] + "-"
        self._queue_key = join_key(options.queue_id)
        # What the markers since the batch was planned say of its messages, by their places. Of the
        # first START: its marker partition and topic id; of a verdict: whether it was a nack.
        self._begun: dict[tuple[int, int], tuple[int, bytes]] = {}
        self._settled: dict[tuple[int, int], int] = {}
        self._verdicts: dict[tuple[int, int], bool] = {}
        self._given_back: set[tuple[int, int]] = set()
        self._rejected: set[tuple[int, int]] = set()
        self._runs: set[str] = set()
        self._trackers: dict[int, RedeliveryTracker] = {}
        self._read_to: dict[int, int] = {}
        self._looked_ms = 0
        self._has_read_on = False
        self._handed: Handed = {}
        self._logs: dict[tuple[bytes, int], tuple[bytes, int]] = {}

    def start(
        self, messages: Sequence[Waiting], share: Callable[[int, int], int] = handed_out
    ) -> Handed:
        """START what is open; returns what tasks are to hand out."""
        self._looked_ms = monotonic_ms()
        self._read_to = self._read_history(self._plan.marker_ends)
        open_ = self._open(messages)
        count = share(len(open_), len(self._runs))
        # Before what may kill the process: nothing looks for these behind the batch (R5).
        unread = [one for one in open_[count:] if one.place not in self._begun]
        self._start(unread, self._plan.consumer_id + LEFT)
        started = self._look_again(self._start(open_[:count], self._plan.consumer_id))
        dropped = self._settled_before(started)
        alive = [each for each in started if each[0].place not in dropped]
        dropped |= self._expired(alive)
        for one, place, is_reference in alive:
            if one.place not in dropped:
                self._hand_out(one, place, is_reference)
                self.held.setdefault(one.route, []).append(one)
        return self._handed

    def _open(self, messages: Iterable[Waiting]) -> list[Waiting]:
        """Name these, and hand out what has its verdict; returns what is to be STARTed."""
        open_ = []
        for one in messages:
            self._name(one)
            if not self._is_ended(one) and not self._is_elsewhere(one.place):
                open_.append(one)
        return open_

    def _is_elsewhere(self, place: tuple[int, int]) -> bool:
        """Return whether it is done, or its copy is what will be handed out."""
        return place in self._settled or place in self._rejected or place in self._given_back

    def _still_open(self, messages: Sequence[Waiting]) -> list[Waiting]:
        """Return what is still open: an ack behind an old look may be forgotten by now (R12)."""
        if messages and monotonic_ms() - self._looked_ms > MAX_AGE_MS:
            self._looked_ms = monotonic_ms()
            self._check()
            self._read_to |= self._read_history(self._read_to)
            self._has_read_on = True
        return self._open(messages) if self._has_read_on else list(messages)

    def _name(self, one: Waiting) -> None:
        begun = self._begun.get(one.place)
        if begun is not None:
            # Its markers stay together (R26), under the name of its first START.
            one.route, topic_id = begun
        else:
            topic_id = self._plan.facts.message_topic_id
            one.route = marker_partition(*one.place, self._plan.marker_partitions)
        log = topic_id, one.log[1]
        # It is one object: batches are gathered by it.
        one.log = self._logs.setdefault(log, log)

    def _is_ended(self, one: Waiting) -> bool:
        """Return whether it has its verdict, and hand it out with that."""
        is_nack = self._verdicts.get(one.place)
        if is_nack is not None:
            self._hand_out(one, RecordMetadata(NACKED if is_nack else ENDED, 0))
        return is_nack is not None

    def _hand_out(self, one: Waiting, at: RecordMetadata, is_reference: bool = False) -> None:
        start = Start(one.log[0], one.route, at.offset, at.timestamp_ms, is_reference)
        self._handed.setdefault(one.partition, {}).setdefault(start, []).append(one.offset)

    def _look_again(self, started: Sequence[_Started]) -> list[_Started]:
        """Read on up to these STARTs; returns those that still were without a verdict.

        A transaction that was committed just now may hide verdicts at the first look.
        """
        places = {one.place for one, *_ in started}
        if not self._plan.is_repeated and self._begun.keys().isdisjoint(places):
            # It is the first time: nothing else can have been said of them.
            return list(started)
        # Up to the STARTs, beyond whatever transaction is still open there.
        behind: dict[int, int] = {}
        for one, place, _ in started:
            known = behind.get(one.route, self._read_to.get(one.route, 0))
            behind[one.route] = max(known, place.offset + 1)
        self._read_to |= self._read_history(self._read_to, behind)
        return [each for each in started if not self._is_ended(each[0])]

    def _settled_before(self, started: Sequence[_Started]) -> set[tuple[int, int]]:
        """Places of messages that were settled before these STARTs, or that a tracker will."""
        lost = [
            one
            for one, place, _ in started
            if self._settled.get(one.place, place.offset) < place.offset
        ]
        # A START that nobody remembers the end of (R12) would be tracked.
        self._end(lost, Outcome.ACK)
        due = {
            one.place for one, *_ in started if self._is_due(one) or one.place in self._given_back
        }
        return due | {one.place for one in lost}

    def _is_due(self, one: Waiting) -> bool:
        """Return whether its lease has ended by the log, as far as that was read."""
        tracker = self._trackers.get(one.route)
        hold = None if tracker is None else tracker.hold_of(MessageId(*one.place, *one.log))
        return hold is not None and bool(hold.flags & DUE)

    def _expired(self, started: Sequence[_Started]) -> set[tuple[int, int]]:
        """Reject what had expired when it was STARTed (R10); return their places."""
        expired = [
            one for one, place, _ in started if has_expired(one.expiry_ms, place.timestamp_ms)
        ]
        self._end(expired, Outcome.REJECT, EXPIRED)
        return {one.place for one in expired}

    # ---- what is written

    def _start(self, messages: Sequence[Waiting], consumer_id: str) -> list[_Started]:
        acknowledge = self._acknowledge
        encoder = StartEncoder(
            consumer_id=consumer_id,
            redeliver_after_ms=acknowledge.redelivery_timeout_ms,
            max_deliveries=acknowledge.max_deliveries,
            max_lease_ms=acknowledge.max_lease_ms,
        )
        started: list[_Started] = []
        left = list(messages)
        if acknowledge.batch_markers and broker_ms(self._log.namespace) is None:
            # R28: a report tells the time.
            started += self._start_alone(left[:1], encoder)
            left = left[1:]
        alone, named = self._shared_out(self._still_open(left))
        markers, members = [], []
        for route, of_route in named.items():
            for batches, each in gather(of_route):
                value = encode_batch_start(encoder, batches, self._queue_key)
                markers.append((route, marker_key(each[0].partition, each[0].offset), value))
                members.append(each)
        for each, place in zip(members, self._log.write(markers), strict=True):
            started += [(one, place, True) for one in each]
        return started + self._start_alone(alone, encoder)

    def _shared_out(
        self, messages: Iterable[Waiting]
    ) -> tuple[list[Waiting], dict[int, list[Waiting]]]:
        """Return who gets a START alone (R6, R28), and who shares one, by marker partition."""
        acknowledge, oldest_ms = self._acknowledge, None
        now_ms = broker_ms(self._log.namespace)
        if acknowledge.batch_markers and now_ms is not None:
            retention_ms = self._plan.facts.message_retention_ms
            oldest_ms = oldest_by_reference_ms(
                now_ms, max_lease_ms=acknowledge.max_lease_ms, retention_ms=retention_ms
            )
        alone: list[Waiting] = []
        named: dict[int, list[Waiting]] = {}
        for one in messages:
            is_last = is_last_delivery(one.delivery_count, acknowledge.max_deliveries)
            if oldest_ms is None or is_last or not one.outlives(oldest_ms):
                alone.append(one)
            else:
                named.setdefault(one.route, []).append(one)
        return alone, named

    def _start_alone(self, messages: Sequence[Waiting], encoder: StartEncoder) -> list[_Started]:
        of_partition: dict[int, dict[int, Waiting]] = {}
        for one in messages:
            of_partition.setdefault(one.partition, {})[one.offset] = one
        started: list[_Started] = []
        for partition, of in of_partition.items():
            wanted = LogRange(self._options.topic, partition, min(of), max(of) + 1)
            lossy = not self._options.fail_on_data_loss
            reader = log_reader(self._options.config, is_short=True)
            for records in reader.read(wanted, skips_lost=lossy):
                found = {each.offset(): each for each in records if each.offset() in of}
                open_ = self._still_open([of[offset] for offset in found])
                starts = [self._encode(one, found[one.offset], encoder) for one in open_]
                markers = [
                    (one.route, marker_key(*one.place), start)
                    for one, start in zip(open_, starts, strict=True)
                ]
                for one, place in zip(open_, self._log.write(markers), strict=True):
                    started.append((one, place, False))
        return started

    def _encode(self, one: Waiting, record: Record, encoder: StartEncoder) -> bytes:
        value = record.value()
        identity = encode_identity(*one.place, *one.log)
        key, headers = record.key() or b"", headers_of(record)
        known = one.delivery_count, headers, one.expiry_ms, one.timestamp_ms
        max_bytes = min(self._plan.facts.max_marker_bytes, MAX_MARKER_BYTES)
        if value is None or len(value) <= MAX_INLINE_BYTES:
            start = encoder.encode_known(identity, key, value, *known, False)
            if len(start) <= max_bytes:
                return start
        return encode_reference(encoder, identity, key, *known, max_bytes)

    def _end(self, messages: Iterable[Waiting], outcome: Outcome, reason: str = "") -> None:
        by_route: dict[int, list[Waiting]] = {}
        for one in messages:
            by_route.setdefault(one.route, []).append(one)

        def encode(identity: bytes) -> bytes:
            return encode_known_end(identity, outcome, VOID, 0, reason)

        self._log.write(addressed(by_route, encode, together=self._acknowledge.batch_markers))

    # ---- what is read

    def _read_history(
        self, begins: Mapping[int, int], ends: dict[int, int] | None = None
    ) -> dict[int, int]:
        """Read on in the markers of this batch, by default to their ends; returns how far."""
        if ends is None:
            ends = self._log.ends(sorted(self._plan.routes(self._ranges.values())))
        for route, end in ends.items():
            begin = begins.get(route, 0)
            new = RedeliveryTracker(begin, partition=route)
            tracker = self._trackers.setdefault(route, new)
            for offset, _, log_ms, marker in self._log.read(route, begin, end):
                tracker.apply(offset, log_ms, marker)
                for each in () if marker is None else expand(marker):
                    self._note(route, offset, each)
        return ends

    def _note(self, route: int, offset: int, marker: Marker) -> None:
        one = marker.message_id
        wanted = None if one is None else self._ranges.get(one.partition)
        if one is None or wanted is None or marker.of_schedule:
            return
        if not wanted.start <= one.offset < wanted.end or not self._plan.is_of_topic(one):
            return
        place, is_own = (one.partition, one.offset), marker.consumer_id.startswith(self._consumers)
        if marker.type is MarkerType.START:
            self._begun.setdefault(place, (route, one.topic_id))
            if is_own:
                self._runs.add(marker.consumer_id.removesuffix(LEFT))
        elif marker.type is not MarkerType.END:
            return
        elif marker.outcome in _SETTLED:
            self._settled.setdefault(place, offset)
        elif marker.consumer_id == VOID:
            # A handler's own reason may be "expired", too.
            if marker.outcome is Outcome.REJECT:
                self._rejected.add(place)
        elif marker.outcome in VERDICTS and not is_own:
            if marker.outcome is Outcome.ACK:
                self._settled.setdefault(place, offset)
            else:
                self._given_back.add(place)
        elif marker.outcome in VERDICTS:
            is_nack = marker.outcome is Outcome.NACK
            self._verdicts[place] = is_nack and self._verdicts.get(place, True)
