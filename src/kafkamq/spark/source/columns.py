"""What a row of ``format("kafkamq")`` is, by view; records in, Arrow columns out.

Every view starts from the same committed records. ``records`` gives them as they are; the others
decode what the protocol wrote, by the same code as workers and trackers, so that SQL needs to know
nothing about the wire. Times are UTC. The attempts of ``deliveries`` and ``in_flight`` are folded
in ``folding.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from operator import itemgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kafkamq.errors import UnsupportedVersionError, WireError
from kafkamq.markers.rules.attempts import Attempt, OpenAttempt
from kafkamq.markers.wire.markers import decode_marker, decode_slim
from kafkamq.queue.wire import headers as names
from kafkamq.queue.wire.headers import MessageHeaders, Origin, read_message_headers
from kafkamq.queue.wire.keys import split_key
from kafkamq.spark.blocks import FoldRow
from kafkamq.transport.log_reader import Record
from kafkamq.transport.record import LOG_APPEND_TIME, all_headers
from kafkamq.types import Marker, MarkerType, MessageId, Outcome

if TYPE_CHECKING:
    import pyarrow as pa

UNKNOWN = -1
"""The ``delivery_count`` of an attempt whose message is gone."""

_Cells = list[Any]
_Column = tuple[str, str, Callable[[Any], _Cells]]
"""Name, Spark's type, and what makes its cells of some rows."""

_HEADERS = "ARRAY<STRUCT<key: STRING, value: BINARY>>"
_BATCHES = (
    "ARRAY<STRUCT<partition: INT, topic_id: STRING, leader_epoch: INT, offsets: ARRAY<BIGINT>>>"
)
_NOWHERE = SimpleNamespace(topic=None, partition=None, offset=None, timestamp_ms=0)


def micros(timestamp_ms: int) -> int | None:
    """Spark's timestamps are microseconds; a record without a time has none."""
    return timestamp_ms * 1000 if timestamp_ms > 0 else None


def text(data: bytes | None) -> str:
    return "" if data is None else data.decode("utf-8", "replace")


def _last(headers: Sequence[tuple[str, bytes | None]], name: str) -> str | None:
    for one, value in reversed(headers):
        if one == name:
            return text(value)
    return None


@dataclass
class _Records:
    """Some records of one partition, and what several columns need of them."""

    records: Sequence[Record]
    tokens: Sequence[str] | None = None

    @cached_property
    def keys(self) -> list[tuple[bytes, bytes | None]]:
        return [split_key(record.key()) for record in self.records]

    @cached_property
    def headers(self) -> list[Sequence[tuple[str, bytes | None]]]:
        return all_headers(self.records)

    @cached_property
    def read(self) -> list[MessageHeaders]:
        return [read_message_headers(headers) for headers in self.headers]

    @cached_property
    def origins(self) -> list[Origin]:
        """Return where the first copies stood: a first copy is its own origin."""
        return [
            headers.origin
            or Origin(record.topic(), record.partition(), record.offset(), record.timestamp()[1])
            for record, headers in zip(self.records, self.read, strict=True)
        ]

    @cached_property
    def decoded(self) -> list[tuple[Marker | None, str | None]]:
        return [decoded(record) for record in self.records]

    @cached_property
    def marker_keys(self) -> list[tuple[bytes, bytes | None] | tuple[None, None]]:
        keys = [b"" if marker is None else marker.key for marker, _ in self.decoded]
        return [split_key(key) if key else (None, None) for key in keys]


@dataclass
class _Attempts:
    """Some attempts of one marker partition; ``found``: what a tracker says of them."""

    attempts: Sequence[Attempt]
    marker_partition: int
    message_topic: str = ""
    found: Sequence[OpenAttempt] = ()

    @cached_property
    def keys(self) -> list[tuple[bytes, bytes | None]]:
        return [split_key(attempt.key) for attempt in self.attempts]

    @cached_property
    def origins(self) -> list[Any]:
        return [self._origin(attempt) for attempt in self.attempts]

    def _origin(self, attempt: Attempt) -> Any:
        if attempt.delivery_count == UNKNOWN:
            return _NOWHERE
        one, at_ms = attempt.message_id, attempt.message_timestamp_ms
        first = Origin(self.message_topic, one.partition, one.offset, at_ms)
        return read_message_headers(attempt.headers).origin or first


def _of_markers(read: Callable[[Marker], Any], *kinds: MarkerType) -> Callable[[_Records], _Cells]:
    """Read a value of markers of these types (none named: of every type); of others null."""
    return lambda of: [
        None if marker is None or (kinds and marker.type not in kinds) else read(marker)
        for marker, _ in of.decoded
    ]


def _of_ids(read: Callable[[MessageId], Any]) -> Callable[[_Records], _Cells]:
    return _of_markers(lambda each: None if each.message_id is None else read(each.message_id))


def _known(read: Callable[[Attempt], Any]) -> Callable[[_Attempts], _Cells]:
    """Read what the message or its START says; null where neither does."""
    return lambda of: [
        None if each.delivery_count == UNKNOWN else read(each) for each in of.attempts
    ]


def _ended(read: Callable[[Attempt], Any]) -> Callable[[_Attempts], _Cells]:
    return lambda of: [None if each.outcome is None else read(each) for each in of.attempts]


def _any(read: Callable[[Attempt], Any]) -> Callable[[_Attempts], _Cells]:
    return lambda of: list(map(read, of.attempts))


def _batches_of(marker: Marker) -> list[dict[str, object]] | None:
    if not marker.batches:
        return None
    return [
        {
            "partition": each.partition,
            "topic_id": each.topic_id.hex(),
            "leader_epoch": each.leader_epoch,
            "offsets": [one.offset for one in each.message_ids()],
        }
        for each in marker.batches
    ]


_START, _SCHEDULE = MarkerType.START, MarkerType.SCHEDULE
_PLACE: tuple[_Column, ...] = (
    ("partition", "INT", lambda of: [of.records[0].partition()] * len(of.records)),
    ("offset", "BIGINT", lambda of: [record.offset() for record in of.records]),
    ("timestamp", "TIMESTAMP", lambda of: [micros(each.timestamp()[1]) for each in of.records]),
)
_ID: _Column = ("id", "STRING", lambda of: [headers.id for headers in of.read])
_USER_KEY: _Column = ("user_key", "BINARY", lambda of: [user_key for _, user_key in of.keys])
_VALUE: _Column = ("value", "BINARY", lambda of: [record.value() for record in of.records])
_USER: _Column = ("headers", _HEADERS, lambda of: [headers.user for headers in of.read])
_COUNT: _Column = ("delivery_count", "INT", lambda of: [each.delivery_count for each in of.read])
_ORIGIN: tuple[_Column, ...] = (
    ("origin_topic", "STRING", lambda of: [one.topic for one in of.origins]),
    ("origin_partition", "INT", lambda of: [one.partition for one in of.origins]),
    ("origin_offset", "BIGINT", lambda of: [one.offset for one in of.origins]),
    ("origin_timestamp", "TIMESTAMP", lambda of: [micros(one.timestamp_ms) for one in of.origins]),
)
_MESSAGE: tuple[_Column, ...] = (
    ("queue_id", "STRING", lambda of: [text(queue_id) for queue_id, _ in of.keys]),
    ("id", "STRING", _known(lambda each: read_message_headers(each.headers).id)),
    _USER_KEY,
    ("delivery_count", "INT", _known(lambda each: each.delivery_count)),  # 0: SCHEDULE
    # Of the message; of a SCHEDULE: of the markers topic.
    ("partition", "INT", _any(lambda each: each.message_id.partition)),
    ("offset", "BIGINT", _any(lambda each: each.message_id.offset)),
    ("topic_id", "STRING", _any(lambda each: each.message_id.topic_id.hex())),
    ("leader_epoch", "INT", _any(lambda each: each.message_id.leader_epoch)),
)
_STARTED: _Column = ("started_at", "TIMESTAMP", _any(lambda each: micros(each.started_ms)))
_OUTCOME: _Column = ("outcome", "STRING", _any(lambda each: getattr(each.outcome, "name", None)))
_START_PLACE: tuple[_Column, ...] = (
    ("marker_partition", "INT", lambda of: [of.marker_partition] * len(of.attempts)),
    ("start_offset", "BIGINT", _any(lambda each: each.start_offset)),
)
_ALL_HEADERS: _Column = ("headers", _HEADERS, lambda of: of.headers)

COLUMNS: dict[str, tuple[_Column, ...]] = {
    "records": (
        ("topic", "STRING", lambda of: [of.records[0].topic()] * len(of.records)),
        *_PLACE,
        # 1: LogAppendTime, 0: the sender's.
        (
            "timestamp_type", "INT",
            lambda of: [int(each.timestamp()[0] == LOG_APPEND_TIME) for each in of.records],
        ),
        ("key", "BINARY", lambda of: [record.key() for record in of.records]),
        _VALUE,
    ),
    "messages": (
        ("queue_id", "STRING", lambda of: [text(queue_id) for queue_id, _ in of.keys]),
        *(_ID, _USER_KEY, _VALUE, _USER, _COUNT),
        ("ttl_ms", "BIGINT", lambda of: [headers.ttl_ms for headers in of.read]),
        *(*_PLACE, *_ORIGIN),
        # Of a stream that acknowledges, else null.
        ("ack_token", "STRING", lambda of: of.tokens or [None] * len(of.records)),
    ),
    "dead_letters": (
        (
            "queue_id", "STRING",
            lambda of: [
                text(key) if (told := _last(headers, names.QUEUE_ID)) is None else told
                for (key, _), headers in zip(of.keys, of.headers, strict=True)
            ],
        ),
        _ID,
        ("reason", "STRING", lambda of: [_last(each, names.REASON) for each in of.headers]),
        ("error", "STRING", lambda of: [_last(each, names.ERROR) for each in of.headers]),
        *(_COUNT, _USER_KEY, _VALUE, _USER, *_ORIGIN, *_PLACE),
    ),
    "markers": (
        *(("marker_partition", *_PLACE[0][1:]), ("marker_offset", *_PLACE[1][1:]), _PLACE[2]),
        ("type", "STRING", _of_markers(lambda each: each.type.name)),  # null: no marker, see error
        ("outcome", "STRING", _of_markers(lambda each: each.outcome.name, MarkerType.END)),
        # Of the message; END of a SCHEDULE: of the markers topic.
        ("partition", "INT", _of_ids(lambda one: one.partition)),
        ("offset", "BIGINT", _of_ids(lambda one: one.offset)),
        ("topic_id", "STRING", _of_ids(lambda one: one.topic_id.hex())),  # empty: unknown
        ("leader_epoch", "INT", _of_ids(lambda one: one.leader_epoch)),  # plus one; 0: unknown
        ("of_schedule", "BOOLEAN", _of_markers(lambda each: each.of_schedule)),
        ("carried_forward", "BOOLEAN", _of_markers(lambda each: each.carried_forward)),
        # Who wrote it; TICK: the engine.
        ("consumer_id", "STRING", _of_markers(lambda each: each.consumer_id)),
        ("redeliver_after_ms", "BIGINT", _of_markers(lambda each: each.redeliver_after_ms)),
        # Of batches null, as their messages say it.
        (
            "delivery_count", "INT",
            _of_markers(lambda each: None if each.batches else each.delivery_count, _START),
        ),
        # 0: the tracker's default.
        ("max_deliveries", "INT", _of_markers(lambda each: each.max_deliveries, _START)),
        ("max_lease_ms", "BIGINT", _of_markers(lambda each: each.max_lease_ms, _START)),
        (
            "queue_id", "STRING",
            lambda of: [None if one is None else text(one) for one, _ in of.marker_keys],
        ),
        ("user_key", "BINARY", lambda of: [user_key for _, user_key in of.marker_keys]),
        (
            "id", "STRING",
            _of_markers(lambda each: _last(each.headers, names.ID), _START, _SCHEDULE),
        ),
        (
            "message_timestamp", "TIMESTAMP",
            _of_markers(lambda each: micros(each.message_timestamp_ms), _START),
        ),
        (
            "expires_at", "TIMESTAMP",
            _of_markers(lambda each: micros(each.expires_at_ms), _START, _SCHEDULE),
        ),
        ("by_reference", "BOOLEAN", _of_markers(lambda each: each.by_reference, _START)),
        # Of a NACK, REJECT or DEAD_LETTERED.
        ("reason", "STRING", _of_markers(lambda each: each.reason or None)),
        ("engine_epoch", "BIGINT", _of_markers(lambda each: each.engine_epoch, MarkerType.TICK)),
        # It is of these messages; null: of that at partition, offset.
        ("batches", _BATCHES, _of_markers(_batches_of)),
        ("error", "STRING", lambda of: [error for _, error in of.decoded]),
    ),
    "deliveries": (
        *(*_MESSAGE, *_ORIGIN),
        # Who STARTed it, the last one if there were several.
        ("consumer_id", "STRING", _any(lambda each: each.consumer_id)),
        _STARTED,  # first START
        ("ended_at", "TIMESTAMP", _ended(lambda each: micros(each.ended_ms))),  # first END
        ("duration_ms", "BIGINT", _ended(lambda each: each.ended_ms - each.started_ms)),
        _OUTCOME,  # REDELIVERED, DEAD_LETTERED: no verdict came
        ("is_late", "BOOLEAN", _ended(lambda each: each.is_late)),  # behind the lease's end
        ("reason", "STRING", _ended(lambda each: each.reason or None)),
        (
            "nack_delay_ms", "BIGINT",
            _ended(lambda each: each.delay_ms if each.outcome is Outcome.NACK else None),
        ),
        # More than one: another worker, or the same one again.
        ("starts", "INT", _any(lambda each: each.starts)),
        ("message_timestamp", "TIMESTAMP", _any(lambda each: micros(each.message_timestamp_ms))),
        *_START_PLACE,
        ("end_offset", "BIGINT", _ended(lambda each: each.end_offset)),
    ),
    "in_flight": (
        *_MESSAGE,
        # held, waiting (nacked with a delay), scheduled, due
        ("state", "STRING", lambda of: [each.state for each in of.found]),
        # Who holds it, or held it last.
        ("consumer_id", "STRING", lambda of: [each.consumer_id for each in of.found]),
        *(_STARTED, _OUTCOME),
        # By the partition's clock; negative: over.
        ("remaining_ms", "BIGINT", lambda of: [each.remaining_ms for each in of.found]),
        *_START_PLACE,
    ),
}  # fmt: skip
"""Columns of each view that is made of records or attempts."""

_BLOCKS = (
    ("group_key", "STRING"),
    ("topic", "STRING"),
    ("partition", "INT"),
    ("range_start", "BIGINT"),  # of what the batch reads of this partition
    ("range_end", "BIGINT"),
    ("first_offset", "BIGINT"),
    # What ``spark/blocks.py`` makes.
    ("block", "BINARY"),
)


def columns_of(view: str, include_headers: bool) -> tuple[tuple[str, str], ...]:
    """Return names and Spark's types; ``records`` may have ``headers`` as well."""
    if view == "blocks":
        return _BLOCKS
    columns = (*COLUMNS[view], _ALL_HEADERS) if include_headers else COLUMNS[view]
    return tuple((name, kind) for name, kind, _ in columns)


def arrow_columns(
    view: str, records: Sequence[Record], schema: pa.Schema, tokens: Sequence[str] | None = None
) -> pa.RecordBatch:
    """Return the records as one Arrow batch; ``schema`` may have headers behind ``records``.

    Raises:
        UnsupportedVersionError: A marker of a newer version (R21).
    """
    columns = (*COLUMNS[view], _ALL_HEADERS)[: len(schema)]
    return _arrow_batch(columns, _Records(records, tokens), schema)


def deliveries_batch(
    attempts: Sequence[Attempt], schema: pa.Schema, *, message_topic: str, marker_partition: int
) -> pa.RecordBatch:
    rows = _Attempts(attempts, marker_partition, message_topic)
    return _arrow_batch(COLUMNS["deliveries"], rows, schema)


def in_flight_batch(
    found: Sequence[OpenAttempt], schema: pa.Schema, *, marker_partition: int
) -> pa.RecordBatch:
    rows = _Attempts([each.attempt for each in found], marker_partition, found=found)
    return _arrow_batch(COLUMNS["in_flight"], rows, schema)


def _arrow_batch(
    columns: Sequence[_Column], rows: _Records | _Attempts, schema: pa.Schema
) -> pa.RecordBatch:
    import pyarrow as pa

    arrays = [
        _header_array(read(rows), field.type)
        if field.name == "headers"
        else pa.array(read(rows), type=field.type)
        for (_, _, read), field in zip(columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _header_array(column: Sequence[Sequence[tuple[str, bytes | None]]], kind: pa.DataType) -> Any:
    import pyarrow as pa

    ends = [0, *accumulate(map(len, column))]
    flat = list(chain.from_iterable(column))
    entry = kind.value_type
    pairs = pa.StructArray.from_arrays(
        [
            pa.array(list(map(itemgetter(part), flat)), type=entry.field(part).type)
            for part in (0, 1)
        ],
        fields=[entry.field(0), entry.field(1)],
    )
    return pa.ListArray.from_arrays(pa.array(ends, type=pa.int32()), pairs, type=kind)


def decoded(record: Record) -> tuple[Marker | None, str | None]:
    try:
        return decode_marker(
            record.value(),
            topic=record.topic(),
            partition=record.partition(),
            offset=record.offset(),
        ), None
    except UnsupportedVersionError:
        raise
    except WireError as error:
        return None, error.reason


def fold_rows(
    records: Sequence[Record], refused: Callable[[Record, WireError], None]
) -> list[FoldRow]:
    """Return records of a markers topic as a tracker folds them; payloads stay behind (R18)."""
    rows: list[FoldRow] = []
    for record in records:
        offset = record.offset()
        kind, timestamp_ms = record.timestamp()
        marker: Marker | None = None
        try:
            marker = decode_slim(record.value())
        except UnsupportedVersionError as error:
            raise UnsupportedVersionError(
                error.reason, topic=record.topic(), partition=record.partition(), offset=offset
            ) from None
        except WireError as error:
            refused(record, error)
        rows.append((offset, timestamp_ms if kind == LOG_APPEND_TIME else -1, marker))
    return rows
