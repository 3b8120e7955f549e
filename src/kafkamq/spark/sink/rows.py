"""The rows of the Kafka sink, column by column, and the identity of each.

Rows are records of a topic, or messages of a queue. An identity is 64 bits of a row's content, of
all its columns. It does not depend on order, task or machine, so that a repeated batch can be
compared with what was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kafkamq.errors import ConfigError
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

MAX_SLOTS = 4096  # of a frame that is cut by its rows' content
IDENTITY = "_identity"
_SLOT = "_slot_of_"
_TYPES = {
    "value": ("binary", "string"),
    "key": ("binary", "string"),
    "headers": (
        "array<struct<key:string,value:binary>>",
        "array<struct<key:string,value:string>>",
    ),
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
_MIX = 0x9E37_79B9_7F4A_7C15  # odd, so that nothing is lost by multiplying


def slot_column(slots: int) -> str:
    """The column with a row's slot; its name says how many there are."""
    return f"{_SLOT}{slots}"


def slots_of(columns: Iterable[str]) -> int | None:
    """How many slots the rows were cut into; None: they were not."""
    for name in columns:
        count = name.removeprefix(_SLOT)
        if count != name and count.isdigit():
            return int(count)
    return None


def check_columns(types: Mapping[str, str]) -> None:
    """Refuse columns that the sink does not know or cannot write."""
    types = {name: kind for name, kind in types.items() if slots_of([name]) is None}
    unknown = sorted(set(types) - set(_TYPES))
    if unknown or "value" not in types:
        raise ConfigError(
            f"the rows have the columns {', '.join(types)}: the sink needs `value` and "
            f"knows {', '.join(SINK_COLUMNS)}; select and rename before"
        )
    check_types(types)


def check_message_columns(types: Mapping[str, str]) -> None:
    """Refuse columns that a message of a queue does not have."""
    types = {name: kind for name, kind in types.items() if slots_of([name]) is None}
    wrong = [name for name in types if name not in _MESSAGE_TYPES]
    if wrong or "payload" not in types:
        said = [_MEANT.get(name, f"no {name}") for name in wrong]
        if not any("payload" in each for each in (*types, *said)):
            said.append("to_json(struct(*)) AS payload")
        raise ConfigError(
            f"the rows have the columns {', '.join(types)}: a message needs `payload` and knows "
            f"{', '.join(MESSAGE_COLUMNS)}; select {', '.join(said)}"
        )
    check_types(types, _MESSAGE_TYPES)


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


@dataclass(slots=True)
class Rows:
    """Some rows; a column that is None is absent or null in every row."""

    values: list[bytes | None]
    keys: list[bytes | None] | None
    headers: list[Headers] | None
    partitions: list[int | None] | None
    topics: list[str | None] | None
    identities: np.ndarray[Any, Any]  # uint64
    labels: Sequence[Sequence[Any]] | None = None  # of messages: ids, delays, TTLs

    def __len__(self) -> int:
        return len(self.values)


def read_rows(batch: pa.RecordBatch) -> Rows:
    """The rows of an Arrow batch whose columns were checked; other columns are passed over."""
    columns = {
        name: column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
        if column.null_count < len(column)
    }
    values = _bytes(columns.get("value", columns.get("payload")), len(batch))
    keys = _bytes(columns["key"], len(batch)) if "key" in columns else None
    headers, header_marks = _headers(columns.get("headers"))
    partitions = columns["partition"].to_pylist() if "partition" in columns else None
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
    """Headers of each row, and what they add to its identity."""
    import numpy as np

    if column is None:
        return None, None
    counts = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(counts, dtype=np.int64)
    starts = ends - counts
    entries = column.flatten()
    coded = entries.field(0).dictionary_encode()  # a few names, again and again
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

    nothing = np.zeros(len(values), np.uint64)  # as a column of nulls, see _hashes
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
    """One number from several, each in its place; of rows and of headers with other seeds."""
    import numpy as np

    result = np.full(len(parts[0]), seed, np.uint64)
    for part in parts:
        result = (result ^ part) * np.uint64(_MIX)
        result ^= result >> np.uint64(29)
    return result


def _hashes(values: Sequence[object]) -> np.ndarray[Any, Any]:
    """SipHash of each, the same in every process; 0 for None."""
    import numpy as np
    import pandas as pd

    cells = np.empty(len(values), object)
    cells[:] = values
    hashes = pd.util.hash_array(cells, categorize=False)
    hashes[pd.isna(cells)] = 0
    return hashes
