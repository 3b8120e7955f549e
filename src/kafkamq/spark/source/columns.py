"""What a row of ``format("kafkamq")`` is, by view; records in, Arrow columns out.

Every view starts from the same committed records. ``records`` gives them as they are; the others
decode what the protocol wrote, by the same code as workers and trackers, so that SQL needs to know
nothing about the wire. Times are UTC. Those of ``deliveries`` and ``in_flight`` are made in
``folding.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from kafkamq.errors import UnsupportedVersionError, WireError
from kafkamq.markers.wire.markers import decode_marker, decode_slim
from kafkamq.queue.wire import headers as names
from kafkamq.queue.wire.headers import MessageHeaders, read_message_headers
from kafkamq.queue.wire.keys import split_key
from kafkamq.spark.blocks import FoldRow
from kafkamq.transport.log_reader import Record
from kafkamq.transport.record import LOG_APPEND_TIME, all_headers
from kafkamq.types import Marker, MarkerType

if TYPE_CHECKING:
    import pyarrow as pa

_HEADERS = ("headers", "ARRAY<STRUCT<key: STRING, value: BINARY>>")
_BATCHES = (
    "ARRAY<STRUCT<partition: INT, topic_id: STRING, leader_epoch: INT, offsets: ARRAY<BIGINT>>>"
)
_PLACE = (("partition", "INT"), ("offset", "BIGINT"), ("timestamp", "TIMESTAMP"))
_ORIGIN = (
    ("origin_topic", "STRING"),
    ("origin_partition", "INT"),
    ("origin_offset", "BIGINT"),
    ("origin_timestamp", "TIMESTAMP"),
)
_MESSAGE = (
    ("queue_id", "STRING"),
    ("id", "STRING"),
    ("user_key", "BINARY"),
    ("delivery_count", "INT"),  # which attempt it was; 0: SCHEDULE
    ("partition", "INT"),  # of the message; of a SCHEDULE: of the markers topic
    ("offset", "BIGINT"),
    ("topic_id", "STRING"),
    ("leader_epoch", "INT"),
)
COLUMNS: dict[str, tuple[tuple[str, str], ...]] = {
    "records": (
        ("topic", "STRING"),
        *_PLACE,
        ("timestamp_type", "INT"),  # 1: LogAppendTime, 0: the sender's
        ("key", "BINARY"),
        ("value", "BINARY"),
    ),
    "messages": (
        ("queue_id", "STRING"),
        ("id", "STRING"),
        ("user_key", "BINARY"),
        ("value", "BINARY"),
        _HEADERS,  # the user's
        ("delivery_count", "INT"),
        ("ttl_ms", "BIGINT"),
        *_PLACE,
        *_ORIGIN,
        ("ack_token", "STRING"),  # of a stream that acknowledges (read_queue), else null
    ),
    "dead_letters": (
        ("queue_id", "STRING"),
        ("id", "STRING"),
        ("reason", "STRING"),
        ("error", "STRING"),
        ("delivery_count", "INT"),
        ("user_key", "BINARY"),
        ("value", "BINARY"),
        _HEADERS,  # the user's
        *_ORIGIN,
        *_PLACE,
    ),
    "markers": (
        ("marker_partition", "INT"),
        ("marker_offset", "BIGINT"),
        ("timestamp", "TIMESTAMP"),
        ("type", "STRING"),  # null: the record is no marker, see error
        ("outcome", "STRING"),  # END
        ("partition", "INT"),  # of the message; END of a SCHEDULE: of the markers topic
        ("offset", "BIGINT"),
        ("topic_id", "STRING"),  # hexadecimal; empty: unknown
        ("leader_epoch", "INT"),  # plus one; 0: unknown
        ("of_schedule", "BOOLEAN"),
        ("carried_forward", "BOOLEAN"),
        ("consumer_id", "STRING"),  # who wrote it; TICK: the engine
        ("redeliver_after_ms", "BIGINT"),
        ("delivery_count", "INT"),  # START; of batches: null, as their messages say it
        ("max_deliveries", "INT"),  # START; 0: the tracker's default
        ("max_lease_ms", "BIGINT"),  # START; 0: the tracker's default
        ("queue_id", "STRING"),  # START, SCHEDULE
        ("user_key", "BINARY"),
        ("id", "STRING"),
        ("message_timestamp", "TIMESTAMP"),  # START
        ("expires_at", "TIMESTAMP"),  # START, SCHEDULE
        ("by_reference", "BOOLEAN"),  # START
        ("reason", "STRING"),  # NACK, REJECT, DEAD_LETTERED
        ("engine_epoch", "BIGINT"),  # TICK
        ("batches", _BATCHES),  # of these messages; null: of that at partition, offset
        ("error", "STRING"),  # why the record could not be decoded
    ),
    "deliveries": (
        *_MESSAGE,
        *_ORIGIN,
        ("consumer_id", "STRING"),  # who STARTed it, the last one if there were several
        ("started_at", "TIMESTAMP"),  # first START
        ("ended_at", "TIMESTAMP"),  # first END; null: open
        ("duration_ms", "BIGINT"),  # between them
        ("outcome", "STRING"),  # of that END; REDELIVERED, DEAD_LETTERED: no verdict came
        ("is_late", "BOOLEAN"),  # the verdict came after the lease's end
        ("reason", "STRING"),
        ("nack_delay_ms", "BIGINT"),
        ("starts", "INT"),  # more than one: another worker, or the same one again
        ("message_timestamp", "TIMESTAMP"),
        ("marker_partition", "INT"),
        ("start_offset", "BIGINT"),
        ("end_offset", "BIGINT"),
    ),
    "in_flight": (
        *_MESSAGE,
        ("state", "STRING"),  # held, waiting (nacked with a delay), scheduled, due
        ("consumer_id", "STRING"),  # who holds it, or held it last
        ("started_at", "TIMESTAMP"),
        ("outcome", "STRING"),  # the verdict, null: none
        ("remaining_ms", "BIGINT"),  # by the partition's clock; negative: over
        ("marker_partition", "INT"),
        ("start_offset", "BIGINT"),
    ),
    "blocks": (
        ("group_key", "STRING"),
        ("topic", "STRING"),
        ("partition", "INT"),
        ("range_start", "BIGINT"),  # of what the batch reads of this partition
        ("range_end", "BIGINT"),
        ("first_offset", "BIGINT"),
        # What ``spark/blocks.py`` makes.
        ("block", "BINARY"),
    ),
}
"""Columns of each view, as (name, Spark type); ``records`` may have ``headers`` as well."""

Column = list[Any]


def columns_of(view: str, include_headers: bool) -> tuple[tuple[str, str], ...]:
    return (*COLUMNS[view], _HEADERS) if include_headers else COLUMNS[view]


def arrow_columns(
    view: str, records: Sequence[Record], schema: pa.Schema, tokens: Sequence[str] | None = None
) -> pa.RecordBatch:
    """Return the records as one Arrow batch of that view; ``schema`` may have headers behind
    ``records``.

    Raises:
        UnsupportedVersionError: A marker of a newer version (R21).
    """
    columns = _BUILDERS[view](records)
    if view == "records" and len(schema) > len(columns):
        columns.append(all_headers(records))
    if view == "messages":
        columns.append([None] * len(records) if tokens is None else list(tokens))
    return arrow_batch(columns, schema)


def arrow_batch(columns: Sequence[Column], schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    arrays = [
        _header_array(column, field.type)
        if field.name == "headers"
        else pa.array(column, type=field.type)
        for column, field in zip(columns, schema, strict=True)
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


def _place(records: Sequence[Record]) -> list[Column]:
    return [
        [records[0].partition()] * len(records),
        [record.offset() for record in records],
        [micros(record.timestamp()[1]) for record in records],
    ]


def micros(timestamp_ms: int) -> int | None:
    """Spark's timestamps are microseconds; a record without a time has none."""
    return timestamp_ms * 1000 if timestamp_ms > 0 else None


def text(data: bytes | None) -> str:
    return "" if data is None else data.decode("utf-8", "replace")


def _records(records: Sequence[Record]) -> list[Column]:
    return [
        [records[0].topic()] * len(records),
        *_place(records),
        [int(record.timestamp()[0] == LOG_APPEND_TIME) for record in records],
        [record.key() for record in records],
        [record.value() for record in records],
    ]


def _origin_columns(records: Sequence[Record], read: Sequence[MessageHeaders]) -> list[Column]:
    """Return where the first copy stood: a first copy is its own origin."""
    origins = [headers.origin for headers in read]
    pairs = list(zip(records, origins, strict=True))
    return [
        [record.topic() if origin is None else origin.topic for record, origin in pairs],
        [record.partition() if origin is None else origin.partition for record, origin in pairs],
        [record.offset() if origin is None else origin.offset for record, origin in pairs],
        [
            micros(record.timestamp()[1] if origin is None else origin.timestamp_ms)
            for record, origin in pairs
        ],
    ]


def _messages(records: Sequence[Record]) -> list[Column]:
    keys = [split_key(record.key()) for record in records]
    read = [read_message_headers(headers) for headers in all_headers(records)]
    return [
        [text(queue_id) for queue_id, _ in keys],
        [headers.id for headers in read],
        [user_key for _, user_key in keys],
        [record.value() for record in records],
        [headers.user for headers in read],
        [headers.delivery_count for headers in read],
        [headers.ttl_ms for headers in read],
        *_place(records),
        *_origin_columns(records, read),
    ]


def _last(headers: Sequence[tuple[str, bytes | None]], name: str) -> str | None:
    for one, value in reversed(headers):
        if one == name:
            return text(value)
    return None


def _dead_letters(records: Sequence[Record]) -> list[Column]:
    keys = [split_key(record.key()) for record in records]
    raw = all_headers(records)
    read = [read_message_headers(headers) for headers in raw]
    queue_ids = [_last(headers, names.QUEUE_ID) for headers in raw]
    return [
        [
            text(key[0]) if queue_id is None else queue_id
            for key, queue_id in zip(keys, queue_ids, strict=True)
        ],
        [headers.id for headers in read],
        [_last(headers, names.REASON) for headers in raw],
        [_last(headers, names.ERROR) for headers in raw],
        [headers.delivery_count for headers in read],
        [user_key for _, user_key in keys],
        [record.value() for record in records],
        [headers.user for headers in read],
        *_origin_columns(records, read),
        *_place(records),
    ]


def decoded(record: Record) -> tuple[Marker | None, str | None]:
    """Return the marker, or what is wrong with the record."""
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


def _markers(records: Sequence[Record]) -> list[Column]:
    read = [decoded(record) for record in records]
    markers = [marker for marker, _ in read]

    def column(read: Callable[[Marker], Any], *kinds: MarkerType) -> Column:
        """Return a value for markers of these types (none named: of every type), else null."""
        return [
            None if marker is None or (kinds and marker.type not in kinds) else read(marker)
            for marker in markers
        ]

    start, schedule = MarkerType.START, MarkerType.SCHEDULE
    keys = [b"" if marker is None else marker.key for marker in markers]
    split = [split_key(key) if key else (None, None) for key in keys]
    ids = [None if marker is None else marker.message_id for marker in markers]
    return [
        *_place(records),
        column(lambda marker: marker.type.name),
        column(lambda marker: marker.outcome.name, MarkerType.END),
        [None if one is None else one.partition for one in ids],
        [None if one is None else one.offset for one in ids],
        [None if one is None else one.topic_id.hex() for one in ids],
        [None if one is None else one.leader_epoch for one in ids],
        column(lambda marker: marker.of_schedule),
        column(lambda marker: marker.carried_forward),
        column(lambda marker: marker.consumer_id),
        column(lambda marker: marker.redeliver_after_ms),
        column(lambda marker: None if marker.batches else marker.delivery_count, start),
        column(lambda marker: marker.max_deliveries, start),
        column(lambda marker: marker.max_lease_ms, start),
        [None if queue_id is None else text(queue_id) for queue_id, _ in split],
        [user_key for _, user_key in split],
        column(lambda marker: _last(marker.headers, names.ID), start, schedule),
        column(lambda marker: micros(marker.message_timestamp_ms), start),
        column(lambda marker: micros(marker.expires_at_ms), start, schedule),
        column(lambda marker: marker.by_reference, start),
        column(lambda marker: marker.reason or None),
        column(lambda marker: marker.engine_epoch, MarkerType.TICK),
        column(_batches_of),
        [error for _, error in read],
    ]


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


_BUILDERS: dict[str, Callable[[Sequence[Record]], list[Column]]] = {
    "records": _records,
    "messages": _messages,
    "dead_letters": _dead_letters,
    "markers": _markers,
}


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
