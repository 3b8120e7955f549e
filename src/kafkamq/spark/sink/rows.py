"""What the Kafka sink is given: its options, its columns, and its rows with the identity of each.

Rows are records of a topic, or messages of a queue; options and columns are checked when a query is
planned. An identity is 64 bits of a row's content, of all its columns. It does not depend on order,
task or machine, so that a repeated batch can be compared with what was written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from kafkamq.config import ServiceConfig, one_of
from kafkamq.errors import ConfigError
from kafkamq.queue.wire.keys import join_key
from kafkamq.spark.options import parse_service
from kafkamq.types import Headers

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

SINK_COLUMNS: Mapping[str, str] = {
    "value": "BINARY",
    "key": "BINARY",
    "headers": "ARRAY<STRUCT<key: STRING, value: BINARY>>",
    "partition": "INT",
    "topic": "STRING",
}
"""Columns that rows may have; ``value`` they must. Strings are written as UTF-8."""

MESSAGE_COLUMNS: Mapping[str, str] = {
    "payload": "BINARY",
    "key": "BINARY",
    "id": "STRING",
    "headers": SINK_COLUMNS["headers"],
    "delay": "DOUBLE",  # until it enters the queue, in s
    "ttl": "DOUBLE",  # in the queue, in s
}
"""Columns that rows may have which are messages of a queue; ``payload`` they must."""

MAX_SLOTS = 4096
IDENTITY = "_identity"
_SLOT = "_slot_of_"
_OPTIONS = {"topic", "queue", "namespace", "ledgertopic", "sinkid", "guarantee"}
_SPARKS = {"checkpointlocation", "path", "queryname"}
_MAX_ID = 100
_TYPES = {
    "value": ("binary", "string"),
    "key": ("binary", "string"),
    "headers": ("array<struct<key:string,value:binary>>", "array<struct<key:string,value:string>>"),
    "partition": ("tinyint", "smallint", "int", "bigint"),
    "topic": ("string",),
    IDENTITY: ("bigint",),
}
_NUMBERS = ("tinyint", "smallint", "int", "bigint", "float", "double", "decimal")
_MESSAGE_TYPES = {
    "payload": _TYPES["value"],
    **{name: _TYPES[name] for name in ("key", "headers", IDENTITY)},
    "id": ("string",),
    "delay": _NUMBERS,
    "ttl": _NUMBERS,
}
_MEANT = {
    "value": "value AS payload",
    "result": "result AS payload",
    "user_key": "user_key AS key",
    "ttl_ms": "ttl_ms / 1000 AS ttl",
}
_LABELS = ("id", "delay", "ttl")
_ROW = 0x243F_6A88_85A3_08D3
_HEADER = 0x1319_8A2E_0370_7344
_MESSAGE = 0xA409_3822_299F_31D0
# It is odd, so that nothing is lost by multiplying.
_MIX = 0x9E37_79B9_7F4A_7C15


def slot_column(slots: int) -> str:
    """Return the column with a row's slot; its name says how many there are."""
    return f"{_SLOT}{slots}"


def slots_of(columns: Iterable[str]) -> int | None:
    """Return how many slots the rows were cut into; None: they were not."""
    for name in columns:
        count = name.removeprefix(_SLOT)
        if count != name and count.isdigit():
            return int(count)
    return None


def check_columns(types: Mapping[str, str], *, are_messages: bool = False) -> None:
    """Refuse columns that the sink, or a message of a queue, does not know or have so."""
    types = {name: kind for name, kind in types.items() if slots_of([name]) is None}
    known, needed = (_MESSAGE_TYPES, "payload") if are_messages else (_TYPES, "value")
    wrong = [name for name in types if name not in known]
    if wrong or needed not in types:
        advice = (
            f"the sink needs `value` and knows {', '.join(SINK_COLUMNS)}; select and rename before"
        )
        if are_messages:
            wanted = [_MEANT.get(name, f"no {name}") for name in wrong]
            if not any("payload" in each for each in (*types, *wanted)):
                wanted.append("to_json(struct(*)) AS payload")
            advice = (
                "a message needs `payload` and knows "
                f"{', '.join(MESSAGE_COLUMNS)}; select {', '.join(wanted)}"
            )
        raise ConfigError(f"the rows have the columns {', '.join(types)}: {advice}")
    check_types(types, known)


def check_types(types: Mapping[str, str], known: Mapping[str, Sequence[str]] = _TYPES) -> None:
    """Refuse columns that have another type than is known of them."""
    for name, found in types.items():
        if found in known[name] or found.partition("(")[0] in known[name]:
            continue
        instead = "cast it before"
        if found.startswith(("struct", "array", "map")):
            instead = f"write map_entries({name})" if name == "headers" else f"to_json({name})"
        elif known[name] is _NUMBERS:
            instead = "write it as a number of seconds"
        wanted = " or ".join(known[name])
        raise ConfigError(f"column {name} is {found}: it must be {wanted}; {instead}")


class Guarantee(Enum):
    EXACTLY_ONCE = "exactly-once"
    AT_LEAST_ONCE = "at-least-once"


@dataclass(frozen=True, kw_only=True)
class SinkOptions:
    config: ServiceConfig  # where, and Kafka's properties
    topic: str  # topic: of rows that name none; empty: every row names one
    queue_id: str = ""  # queue: whose messages the rows are
    ledger_topic: str = ""  # ledgerTopic: whose committed offsets are the ledger
    sink_id: str = ""  # sinkId; empty: the id of the streaming query
    guarantee: Guarantee = Guarantee.EXACTLY_ONCE  # guarantee


def sink_name(sink_id: str, queue_id: str) -> str:
    """Return what a sink is called in its ledger, which the sinks of several queues share."""
    if not queue_id:
        return sink_id
    return f"{sink_id}-{hashlib.blake2b(queue_id.encode(), digest_size=6).hexdigest()}"


def parse_sink_options(
    options: Mapping[str, str], service: ServiceConfig | None, types: Mapping[str, str]
) -> SinkOptions:
    """Read the options of a query, and check its columns; ``types``: as Spark names them."""
    given = {name.lower(): value for name, value in options.items()}
    own = {name: value for name, value in given.items() if not name.startswith("kafka.")}
    unknown = sorted(set(own) - _OPTIONS - _SPARKS)
    if unknown:
        raise ConfigError(
            f"unknown option {unknown[0]}: known are topic, queue, namespace, ledgerTopic, "
            "sinkId, guarantee and Kafka's own properties as kafka.NAME"
        )
    config = parse_service(given, service)
    topic, queue_id = own.get("topic", ""), own.get("queue", "")
    guarantee = one_of(Guarantee, "guarantee", own.get("guarantee", "exactly-once"))
    if not (topic or queue_id or "topic" in types):
        raise ConfigError(
            "option topic is missing: name the topic, or give the rows a column `topic`; or name "
            "the queue to send to; or acknowledge, with mode = ack"
        )
    if queue_id:
        join_key(queue_id)
        if topic or guarantee is not Guarantee.EXACTLY_ONCE:
            raise ConfigError("queue excludes topic, and is always written exactly once")
    check_columns(types, are_messages=bool(queue_id))
    ledger_topic = own.get("ledgertopic", "") or (config.ledger_topic if queue_id else topic)
    if not ledger_topic:
        raise ConfigError(
            "option ledgerTopic is missing: rows name their topics themselves, so name one "
            "existing topic whose committed offsets shall be the ledger"
        )
    sink_id = own.get("sinkid", "")
    if len(sink_id) > _MAX_ID or not all(each.isalnum() or each in "-_." for each in sink_id):
        raise ConfigError(
            f"sinkId is {sink_id!r}: it must be at most {_MAX_ID} letters, digits, '-', '_' and '.'"
        )
    return SinkOptions(
        config=config,
        topic=topic,
        queue_id=queue_id,
        ledger_topic=ledger_topic,
        sink_id=sink_id,
        guarantee=guarantee,
    )


@dataclass(slots=True)
class Rows:
    """Some rows; a column that is None is absent or null in every row."""

    values: list[bytes | None]
    keys: list[bytes | None] | None
    headers: list[Headers] | None
    partitions: list[int | None] | None
    topics: list[str | None] | None
    identities: np.ndarray[Any, Any]
    labels: Sequence[Sequence[Any]] | None = None

    def __len__(self) -> int:
        return len(self.values)


def read_rows(batch: pa.RecordBatch) -> Rows:
    """Get the rows of an Arrow batch whose columns were checked; other columns are passed over."""
    columns = {
        name: column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
        if column.null_count < len(column)
    }
    values = _bytes(columns.get("value", columns.get("payload")), len(batch))
    keys = _bytes(columns["key"], len(batch)) if "key" in columns else None
    headers, header_marks = _headers(columns.get("headers"))
    partitions = None
    if "partition" in columns:
        partitions = [None if each == -1 else each for each in columns["partition"].to_pylist()]
    topics = columns["topic"].to_pylist() if "topic" in columns else None
    labels = None
    if "payload" in batch.schema.names:
        nothing = [None] * len(batch)
        labels = [columns[each].to_pylist() if each in columns else nothing for each in _LABELS]
    if IDENTITY in columns:
        import numpy as np

        identities = columns[IDENTITY].to_numpy(zero_copy_only=False).astype(np.uint64)
    else:
        identities = _identities(values, keys, header_marks, partitions, topics)
        if labels is not None:
            identities = _mixed([identities, *map(_hashes, labels)], _MESSAGE)
    return Rows(values, keys, headers, partitions, topics, identities, labels)


def _bytes(column: pa.Array | None, count: int) -> list[bytes | None]:
    import pyarrow as pa

    if column is None:
        return [None] * count
    if not pa.types.is_binary(column.type) and not pa.types.is_large_binary(column.type):
        column = column.cast(pa.binary())
    found: list[bytes | None] = column.to_pylist()
    return found


def _headers(column: pa.Array | None) -> tuple[list[Headers] | None, np.ndarray[Any, Any] | None]:
    """Return headers of each row, and what they add to its identity."""
    import numpy as np

    if column is None:
        return None, None
    counts = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(counts, dtype=np.int64)
    starts = ends - counts
    entries = column.flatten()
    if entries.null_count or entries.field(0).null_count:
        raise ConfigError("column headers has a null, or a header without a name: filter them out")
    coded = entries.field(0).dictionary_encode()
    known = coded.dictionary.to_pylist()
    indices = coded.indices.to_numpy(zero_copy_only=False)
    names = np.array(known, object)[indices].tolist()
    values = _bytes(entries.field(1), len(entries))
    pairs = list(zip(names, values, strict=True))
    headers = [
        tuple(pairs[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]
    # Their order counts: each is weighed by its place among those of its row.
    places = np.arange(len(pairs), dtype=np.int64) - np.repeat(starts, counts)
    marks = _mixed([_hashes(known)[indices], _hashes(values)], _HEADER) * (
        2 * places.astype(np.uint64) + 1
    )
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(marks, dtype=np.uint64)))
    return headers, sums[ends] - sums[starts]


def _identities(
    values: Sequence[bytes | None],
    keys: Sequence[bytes | None] | None,
    header_marks: np.ndarray[Any, Any] | None,
    partitions: Sequence[int | None] | None,
    topics: Sequence[str | None] | None,
) -> np.ndarray[Any, Any]:
    import numpy as np

    nothing = np.zeros(len(values), np.uint64)
    places = [0 if each is None else each + 1 for each in partitions or ()]
    return _mixed(
        [
            _hashes(values),
            nothing if keys is None else _hashes(keys),
            nothing if header_marks is None else header_marks,
            np.array(places, np.int64).astype(np.uint64) if places else nothing,
            nothing if topics is None else _hashes(topics),
        ],
        _ROW,
    )


def _mixed(parts: Sequence[np.ndarray[Any, Any]], seed: int) -> np.ndarray[Any, Any]:
    """Get one number from several, each in its place; of rows and of headers with other seeds."""
    import numpy as np

    result = np.full(len(parts[0]), seed, np.uint64)
    for part in parts:
        result = (result ^ part) * np.uint64(_MIX)
        result ^= result >> np.uint64(29)
    return result


def _hashes(values: Sequence[object]) -> np.ndarray[Any, Any]:
    """Return SipHash of each, the same in every process; 0 for None."""
    import numpy as np
    import pandas as pd

    cells = np.empty(len(values), object)
    cells[:] = values
    hashes = pd.util.hash_array(cells, categorize=False)
    hashes[pd.isna(cells)] = 0
    return hashes
