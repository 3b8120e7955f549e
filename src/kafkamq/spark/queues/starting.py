"""Runs in Spark's workers: the rows of a queue, each STARTed before it is handed out (R5).

Spark's log of planned batches takes the place of the group's committed offset: a range is planned
before its first START is written. It may have been read before: by a driver that was killed since,
by a task that Spark repeats, by another use of the same frame. So it is read with the markers that
were written since it was planned:

- what a tracker settled meanwhile is not handed out: its copy is, in a batch of its own;
- what a worker or a batch of another query gave its verdict on meanwhile is not handed out either:
  it was done there;
- what has a verdict of this batch is handed out as before, so that a sink finds the rows that it
  knows, but not STARTed again (an END is in the log);
- the rest is STARTed, and if it was STARTed before, looked up again behind its START: a tracker may
  have been quicker, or its lease may have ended by then, which no START undoes: a copy will come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pyspark.sql.types import StructType

from kafkamq.markers.rules.batching import gather, oldest_by_reference_ms
from kafkamq.markers.rules.handout import expires_at_ms, has_expired, is_last_delivery
from kafkamq.markers.rules.hold import DUE
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.markers.wire.markers import (
    MAX_MARKER_BYTES,
    StartEncoder,
    encode_batch_start,
    encode_identity,
    encode_known_end,
    encode_named,
    encode_reference,
)
from kafkamq.queue.wire.headers import read_message_headers
from kafkamq.queue.wire.keys import join_key, split_key
from kafkamq.queue.wire.partitions import CHUNK_OFFSETS, marker_key, marker_partition
from kafkamq.spark.marker_log import MarkerLog, Place, marker_log
from kafkamq.spark.options import AcknowledgeOptions, SourceOptions
from kafkamq.spark.queues.tokens import ENDED, NACKED, AckToken
from kafkamq.spark.source.columns import arrow_columns
from kafkamq.spark.source.rows import RangePartition, made_of
from kafkamq.transport.log_reader import LogRange, Record, log_reader
from kafkamq.transport.record import LOG_APPEND_TIME, headers_of
from kafkamq.types import Marker, MarkerType, MessageId, Outcome, expand

if TYPE_CHECKING:
    import pyarrow as pa

BATCH = "spark-"  # begins the consumer_id of every batch; its plan and what is of one run follow
EXPIRED = "expired"  # R10: the reason of a REJECT that nobody was asked for
VOID = "void"  # who ends what nobody was handed: no verdict on the message
MAX_INLINE_BYTES = 65_536  # R11
_SETTLED = (Outcome.REDELIVERED, Outcome.DEAD_LETTERED)
VERDICTS = (Outcome.ACK, Outcome.NACK, Outcome.REJECT)


@dataclass(frozen=True, kw_only=True)
class StartPlan:
    """What the driver decided for one batch."""

    consumer_id: str  # of this batch alone (R7)
    topic_id: bytes
    marker_partitions: int  # when the batch was planned: where its STARTs go (R26)
    markers_now: int  # partitions may have been added since: where workers' STARTs go
    max_marker_bytes: int
    message_retention_ms: int  # as NamespaceFacts has it
    marker_ends: dict[int, int]  # by marker partition, when the batch was planned
    is_repeated: bool  # planned by another process than this driver's

    def routes(self, wanted: LogRange) -> set[int]:
        """The marker partitions where something may be said of a range's messages (R26)."""
        return _routes(wanted, self.marker_partitions) | _routes(wanted, self.markers_now)

    def is_of_topic(self, one: MessageId) -> bool:
        """R13: not of another topic of this name; brokers that are upgraded begin to tell ids."""
        return not one.topic_id or not self.topic_id or one.topic_id == self.topic_id


class QueuePartition(RangePartition):
    """A range of a queue that is acknowledged."""

    def __init__(self, wanted: LogRange, plan: StartPlan) -> None:
        super().__init__(wanted)
        self.plan = plan


def _routes(wanted: LogRange, marker_partitions: int) -> set[int]:
    chunks = range(wanted.start // CHUNK_OFFSETS, (wanted.end - 1) // CHUNK_OFFSETS + 1)
    return {
        marker_partition(wanted.partition, chunk * CHUNK_OFFSETS, marker_partitions)
        for chunk in chunks
    }


def identity_of(record: Record, topic_id: bytes) -> MessageId:
    """Whom a message's markers name (R13)."""
    epoch = record.leader_epoch()
    return MessageId(
        record.partition(), record.offset(), topic_id, 0 if epoch is None else epoch + 1
    )


def read_started(
    partition: QueuePartition, options: SourceOptions, schema: StructType
) -> Iterator[pa.RecordBatch]:
    """The rows of a range, with their tokens."""
    from pyspark.sql.pandas.types import to_arrow_schema

    arrow_schema = to_arrow_schema(schema, timezone="UTC")
    starter = _Starter(partition, options)
    reader = log_reader(options.config)
    own = join_key(options.queue_id)
    queue_id = own.partition(b"\0")[0]

    def batch(records: list[Record]) -> pa.RecordBatch | None:
        mine = [
            each for each in records if each.key() == own or split_key(each.key())[0] == queue_id
        ]
        taken = starter.take(mine) if mine else []
        rows = [row.record for row in taken]
        tokens = [row.token for row in taken]
        return arrow_columns("messages", rows, arrow_schema, tokens) if rows else None

    chunks = reader.read(partition.wanted, skips_lost=not options.fail_on_data_loss)
    for made in made_of(chunks, batch):
        if made is not None:
            yield made


def start_unread(
    plan: StartPlan, own: Mapping[LogRange, Iterable[int]], options: SourceOptions
) -> int:
    """START what no task has STARTed of a batch that is done; returns how many messages.

    A task STARTs what it reads, and an action may leave out rows of a task, or whole tasks, as
    ``limit(3).collect()`` does. Behind the queue's position nobody would look for these messages,
    so they are STARTed before it passes them (R5) and come back after the timeout.

    Args:
        plan: The batch's, as one that is repeated.
        own: Its ranges, each with the offsets of the queue's messages.
        options: The stream's.
    """
    log, reader = marker_log(options.config), log_reader(options.config)
    left = {(wanted.partition, offset) for wanted, offsets in own.items() for offset in offsets}
    routes = sorted({route for wanted in own for route in plan.routes(wanted)})
    # Behind an open transaction the second look waits for its end: STARTs may be hidden there.
    for ends_of in (log.ends, log.tops):
        if left:
            _take_out_started(left, plan, log, ends_of(routes))
    for wanted in own:
        if any(number == wanted.partition for number, _ in left):
            starter = _Starter(QueuePartition(wanted, plan), options)
            for records in reader.read(wanted, skips_lost=True):
                unread = [one for one in records if (wanted.partition, one.offset()) in left]
                if unread:
                    starter.take(unread)
    return len(left)


def _take_out_started(
    left: set[tuple[int, int]], plan: StartPlan, log: MarkerLog, ends: Mapping[int, int]
) -> None:
    """Leave in what no START names that was written since the batch was planned."""
    for route, end in ends.items():
        for *_, marker in log.read(route, plan.marker_ends.get(route, 0), end):
            if marker is None or marker.type is not MarkerType.START:
                continue
            named = (one for batch in marker.batches for one in batch.message_ids())
            ids = named if marker.message_id is None else (marker.message_id,)
            left -= {(one.partition, one.offset) for one in ids if plan.is_of_topic(one)}
            if not left:
                return


@dataclass(slots=True)
class _Row:
    """One message on its way to be handed out."""

    record: Record
    message_id: MessageId
    route: int
    delivery_count: int
    expiry_ms: int
    token: str = ""

    @property
    def partition(self) -> int:
        return self.message_id.partition

    @property
    def offset(self) -> int:
        return self.message_id.offset

    @property
    def log(self) -> tuple[bytes, int]:
        return self.message_id.log

    def outlives(self, oldest_ms: int) -> bool:
        """Whether its START may refer to it (R28), and it is told from others there (R13)."""
        kind, time_ms = self.record.timestamp()
        return all(self.log) and kind == LOG_APPEND_TIME and time_ms >= oldest_ms


@dataclass(slots=True)
class _History:
    """What the log says of the messages of a repeated range, by their offsets."""

    # Message offset -> marker partition and topic id of its first START.
    started: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    verdicts: dict[int, bool] = field(default_factory=dict)  # message offset -> only nacks
    # Message offset -> offset of a tracker's END, or of an ACK of elsewhere.
    settled: dict[int, int] = field(default_factory=dict)
    expired: set[int] = field(default_factory=set)
    given_back: set[int] = field(default_factory=set)  # nacked or rejected elsewhere
    trackers: dict[int, RedeliveryTracker] = field(default_factory=dict)  # by marker partition

    def is_elsewhere(self, offset: int) -> bool:
        """Whether it is done, or its copy is what will be handed out."""
        return offset in self.settled or offset in self.expired or offset in self.given_back

    def is_due(self, row: _Row) -> bool:
        """Whether its lease has ended by the log, as far as that was read."""
        tracker = self.trackers.get(row.route)
        if tracker is None:
            return False
        hold = tracker.hold_of(row.message_id)
        return hold is not None and bool(hold.flags & DUE)


class _Starter:
    def __init__(self, partition: QueuePartition, options: SourceOptions) -> None:
        self._plan = partition.plan
        self._wanted = partition.wanted
        # Of all runs of this batch; of all batches, where an earlier release planned it.
        self._consumers = self._plan.consumer_id.rpartition("-")[0] + "-"
        acknowledge = options.acknowledge
        assert acknowledge is not None, "a stream that acknowledges"
        self._acknowledge: AcknowledgeOptions = acknowledge
        self._log: MarkerLog = marker_log(options.config)
        self._queue_key = join_key(options.queue_id)
        self._encoder = StartEncoder(
            consumer_id=self._plan.consumer_id,
            redeliver_after_ms=acknowledge.redelivery_timeout_ms,
            max_deliveries=acknowledge.max_deliveries,
            max_lease_ms=acknowledge.max_lease_ms,
        )
        self._history = _History()
        self._read_to = self._read_history(self._plan.marker_ends)

    def take(self, records: Sequence[Record]) -> list[_Row]:
        """START these messages; returns what may be handed out."""
        history = self._history
        rows, new = [], []
        for record in records:
            row = self._row(record)
            offset = row.message_id.offset
            if offset in history.verdicts:
                self._mark_ended(row)
            elif history.is_elsewhere(offset):
                continue
            else:
                new.append(row)
            rows.append(row)
        started = self._start(new)
        started = self._look_again(started)
        dropped = self._settled_before(started)
        alive = [(row, place) for row, place in started if row.message_id.offset not in dropped]
        dropped |= self._expired(alive)
        return [row for row in rows if row.message_id.offset not in dropped]

    def _mark_ended(self, row: _Row) -> None:
        is_nacked = self._history.verdicts[row.message_id.offset]
        row.token = self._token(row, Place(NACKED if is_nacked else ENDED, 0))

    def _look_again(self, started: Sequence[tuple[_Row, Place]]) -> list[tuple[_Row, Place]]:
        """Read on up to these STARTs; returns those that still were without a verdict.

        A transaction that was committed just now may hide verdicts at the first look.
        """
        history = self._history
        offsets = {row.message_id.offset for row, _ in started}
        if not self._plan.is_repeated and history.started.keys().isdisjoint(offsets):
            return list(started)  # for the first time: nothing else can have been said of them
        # Up to the STARTs, beyond whatever transaction is still open there.
        behind: dict[int, int] = {}
        for row, place in started:
            behind[row.route] = max(behind.get(row.route, 0), place.offset + 1)
        self._read_to |= self._read_history(self._read_to, behind)
        open_ = []
        for row, place in started:
            if row.message_id.offset in history.verdicts:
                self._mark_ended(row)
            else:
                open_.append((row, place))
        return open_

    def _settled_before(self, started: Sequence[tuple[_Row, Place]]) -> set[int]:
        """Offsets of messages that were settled before these STARTs, or that a tracker will."""
        history = self._history
        lost = [
            row
            for row, place in started
            if history.settled.get(row.message_id.offset, place.offset) < place.offset
        ]
        # A START that nobody remembers the end of (R12) would be tracked.
        self._end(lost, Outcome.ACK, consumer_id=VOID)
        due = {
            row.message_id.offset
            for row, _ in started
            if history.is_due(row) or row.message_id.offset in history.given_back
        }
        return due | {row.message_id.offset for row in lost}

    def _row(self, record: Record) -> _Row:
        headers = read_message_headers(headers_of(record))
        timestamp_ms = record.timestamp()[1]
        origin = headers.origin
        one = identity_of(record, self._plan.topic_id)
        started = self._history.started.get(one.offset)
        if started is None:
            route = marker_partition(one.partition, one.offset, self._plan.marker_partitions)
        else:  # its markers stay together (R26), under the name that its first START gave it
            route, topic_id = started
            one = replace(one, topic_id=topic_id)
        return _Row(
            record,
            one,
            route,
            headers.delivery_count,
            expires_at_ms(headers.ttl_ms, timestamp_ms if origin is None else origin.timestamp_ms),
        )

    def _start(self, rows: Sequence[_Row]) -> list[tuple[_Row, Place]]:
        """Write the STARTs and give the rows their tokens."""
        if self._acknowledge.batch_markers and self._log.broker_ms() is None:
            # R28: a report tells the time.
            return [*self._write_starts(rows[:1]), *self._write_starts(rows[1:])]
        return self._write_starts(rows)

    def _write_starts(self, rows: Sequence[_Row]) -> list[tuple[_Row, Place]]:
        alone, named = self._shared_out(rows)
        values = [self._encode(row) for row in alone]
        members = [[row] for row in alone]
        for of_route in named.values():
            for batches, each in gather(of_route):
                values.append(encode_batch_start(self._encoder, batches, self._queue_key))
                members.append(each)
        markers = [
            (each[0].route, marker_key(each[0].partition, each[0].offset), value)
            for each, value in zip(members, values, strict=True)
        ]
        places = self._log.write(markers)
        started = [
            (row, place) for each, place in zip(members, places, strict=True) for row in each
        ]
        for number, (row, place) in enumerate(started):
            row.token = self._token(row, place, is_reference=number >= len(alone))
        return started

    def _shared_out(self, rows: Sequence[_Row]) -> tuple[list[_Row], dict[int, list[_Row]]]:
        """Who gets a START alone (R6, R28), and who shares one, by marker partition."""
        acknowledge, oldest_ms = self._acknowledge, None
        now_ms = self._log.broker_ms()
        if acknowledge.batch_markers and now_ms is not None:
            retention_ms = self._plan.message_retention_ms
            oldest_ms = oldest_by_reference_ms(
                now_ms, max_lease_ms=acknowledge.max_lease_ms, retention_ms=retention_ms
            )
        alone: list[_Row] = []
        named: dict[int, list[_Row]] = {}
        for row in rows:
            is_last = is_last_delivery(row.delivery_count, acknowledge.max_deliveries)
            if oldest_ms is None or is_last or not row.outlives(oldest_ms):
                alone.append(row)
            else:
                named.setdefault(row.route, []).append(row)
        return alone, named

    def _encode(self, row: _Row) -> bytes:
        record = row.record
        value = record.value()
        one = row.message_id
        identity = encode_identity(one.partition, one.offset, one.topic_id, one.leader_epoch)
        key, headers = record.key() or b"", headers_of(record)
        known = row.delivery_count, headers, row.expiry_ms, record.timestamp()[1]
        max_bytes = min(self._plan.max_marker_bytes, MAX_MARKER_BYTES)
        if value is None or len(value) <= MAX_INLINE_BYTES:
            start = self._encoder.encode_known(identity, key, value, *known, False)
            if len(start) <= max_bytes:
                return start
        return encode_reference(self._encoder, identity, key, *known, max_bytes)

    def _token(self, row: _Row, place: Place, *, is_reference: bool = False) -> str:
        message_ms = row.record.timestamp()[1] if is_reference else -1
        return AckToken(
            row.message_id,
            row.route,
            self._plan.consumer_id,
            row.delivery_count,
            self._acknowledge.redelivery_timeout_ms,
            place.offset,
            place.timestamp_ms,
            message_ms if self._acknowledge.batch_markers else None,
        ).encode()

    def _expired(self, started: Sequence[tuple[_Row, Place]]) -> set[int]:
        """R10: rejects what had expired when it was STARTed; their offsets."""
        expired = [row for row, place in started if has_expired(row.expiry_ms, place.timestamp_ms)]
        self._end(expired, Outcome.REJECT, reason=EXPIRED, consumer_id=VOID)
        return {row.message_id.offset for row in expired}

    def _end(
        self, rows: Iterable[_Row], outcome: Outcome, *, consumer_id: str, reason: str = ""
    ) -> None:
        by_route: dict[int, list[_Row]] = {}
        for row in rows:
            by_route.setdefault(row.route, []).append(row)
        ends = []
        for route, of_route in by_route.items():
            together = self._acknowledge.batch_markers
            for identity, named in encode_named(of_route, together=together):
                value = encode_known_end(identity, outcome, consumer_id, 0, reason)
                ends.append((route, marker_key(named[0].partition, named[0].offset), value))
        self._log.write(ends)

    def _read_history(
        self, begins: dict[int, int], ends: dict[int, int] | None = None
    ) -> dict[int, int]:
        """Read on in the markers of this range, by default to their ends; returns how far."""
        if ends is None:
            ends = self._log.ends(sorted(self._plan.routes(self._wanted)))
        for route, end in ends.items():
            begin = begins.get(route, 0)
            trackers = self._history.trackers
            tracker = trackers.setdefault(route, RedeliveryTracker(begin, partition=route))
            for offset, timestamp_ms, kind, marker in self._log.read(route, begin, end):
                is_log_time = kind == LOG_APPEND_TIME
                tracker.apply(offset, timestamp_ms if is_log_time else -1, marker)
                for each in () if marker is None else expand(marker):
                    self._note(route, offset, each)
        return ends

    def _note(self, route: int, offset: int, marker: Marker) -> None:
        wanted, history, one = self._wanted, self._history, marker.message_id
        if one is None or marker.of_schedule or one.partition != wanted.partition:
            return
        if not wanted.start <= one.offset < wanted.end:
            return
        if not self._plan.is_of_topic(one):
            return
        if marker.type is MarkerType.START:
            history.started.setdefault(one.offset, (route, one.topic_id))
        elif marker.type is not MarkerType.END:
            return
        elif marker.outcome in _SETTLED:
            history.settled.setdefault(one.offset, offset)
        elif marker.consumer_id == VOID:  # a handler's own reason may be "expired" too
            if marker.outcome is Outcome.REJECT:
                history.expired.add(one.offset)
        elif marker.outcome in VERDICTS and not marker.consumer_id.startswith(self._consumers):
            if marker.outcome is Outcome.ACK:
                history.settled.setdefault(one.offset, offset)
            else:
                history.given_back.add(one.offset)
        elif marker.outcome in VERDICTS:
            is_nack = marker.outcome is Outcome.NACK
            history.verdicts[one.offset] = is_nack and history.verdicts.get(one.offset, True)
