"""Rows of the Kafka sink and the rules of its ledger, without Spark and without Kafka."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkamq.errors import ConfigError, StateError
from kafkamq.spark.sink.ledger import TASKS, CellEntry, is_written, unconfirmed
from kafkamq.spark.sink.rows import (
    check_columns,
    parse_sink_options,
    read_rows,
    slot_column,
    slots_of,
)

_BYTES = st.one_of(st.none(), st.binary(max_size=8))
_HEADERS = st.one_of(st.none(), st.lists(st.tuples(st.text(max_size=3), _BYTES), max_size=3))
_ROWS = st.lists(
    st.tuples(_BYTES, _BYTES, _HEADERS, st.one_of(st.none(), st.integers(0, 5))),
    min_size=1,
    max_size=20,
)
_TYPES = {
    "value": pa.binary(),
    "key": pa.binary(),
    "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    "partition": pa.int32(),
}
Row = tuple[object, ...]


def batch_of(rows: list[Row]) -> pa.RecordBatch:
    def cell(name: str, value: object) -> object:
        if name != "headers" or value is None:
            return value
        assert isinstance(value, list)
        return [{"key": key, "value": each} for key, each in value]

    columns = zip(*rows, strict=True)
    arrays = [
        pa.array([cell(name, value) for value in column], type=kind)
        for (name, kind), column in zip(_TYPES.items(), columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, names=list(_TYPES))


@given(_ROWS)
def test_rows_come_out_as_they_went_in(rows: list[Row]) -> None:
    read = read_rows(batch_of(rows))
    nothing = [None] * len(rows)
    assert read.values == [row[0] for row in rows]
    assert (read.keys or nothing) == [row[1] for row in rows]
    headers = [list(each) for each in read.headers or ()] or [[] for _ in rows]
    assert headers == [row[2] or [] for row in rows]
    assert (read.partitions or nothing) == [row[3] for row in rows]


@given(_ROWS)
def test_an_identity_is_the_content_wherever_a_row_stands(rows: list[Row]) -> None:
    together = read_rows(batch_of(rows)).identities.tolist()
    turned = read_rows(batch_of(rows[::-1])).identities.tolist()
    assert together == turned[::-1]
    assert together == [read_rows(batch_of([row])).identities[0] for row in rows]
    assert together == read_rows(batch_of([rows[0], *rows]).slice(1)).identities.tolist()


@given(_ROWS)
def test_rows_with_another_content_have_another_identity(rows: list[Row]) -> None:
    def content(row: Row) -> tuple[object, ...]:
        return row[0], row[1], str(row[2] or []), row[3]

    identities = read_rows(batch_of(rows)).identities.tolist()
    assert len(set(identities)) == len({content(row) for row in rows})


def test_the_order_of_headers_counts() -> None:
    first: Row = (b"v", None, [("a", b"1"), ("b", b"2")], None)
    second: Row = (b"v", None, [("b", b"2"), ("a", b"1")], None)
    assert len(set(read_rows(batch_of([first, second])).identities.tolist())) == 2


def test_no_partition_is_null_or_as_clients_write_it() -> None:
    batch = pa.RecordBatch.from_pydict({"value": [b"a"] * 3, "partition": [-1, None, 0]})
    read = read_rows(batch)
    assert read.partitions == [None, None, 0]
    first, second, third = read.identities.tolist()
    assert first == second != third


@pytest.mark.parametrize("header", [None, {"key": None, "value": b"v"}])
def test_a_header_that_is_null_or_has_no_name_is_refused(header: object) -> None:
    column = pa.array([[header], []], type=_TYPES["headers"])
    batch = pa.RecordBatch.from_arrays([pa.array([b"a", b"b"]), column], names=["value", "headers"])
    with pytest.raises(ConfigError, match="column headers has a null, or a header without a name"):
        read_rows(batch)


def test_slots_are_named_by_their_column() -> None:
    assert slots_of(["value", slot_column(12)]) == 12
    assert slots_of(["value", "_slot_of_", "_slot_of_x"]) is None
    check_columns({"value": "binary", slot_column(3): "int"})


def entry(batch: int, run: str, cut: str = TASKS) -> CellEntry:
    return CellEntry(batch, 1, 2, cut, run)


def test_only_the_same_batch_is_written() -> None:
    assert not is_written(None, 3, where="x")
    assert not is_written(entry(2, "r"), 3, where="x")
    assert is_written(entry(3, "r"), 3, where="x")
    with pytest.raises(StateError, match="checkpoint older than its ledger: x has written batch 4"):
        is_written(entry(4, "r"), 3, where="x")


def test_what_an_earlier_run_wrote_is_in_question_until_it_is_found_again() -> None:
    entries = {0: entry(7, "old"), 1: entry(6, "old"), 2: entry(7, "new")}
    assert set(unconfirmed(entries, batch=7, run="new", cut=TASKS)) == {0}
    assert not unconfirmed(entries, batch=8, run="new", cut=TASKS)


def test_a_slot_has_the_same_rows_as_long_as_their_number_is_the_same() -> None:
    entries = {0: entry(7, "old", "slots=4")}
    assert not unconfirmed(entries, batch=7, run="new", cut="slots=4")
    assert unconfirmed(entries, batch=7, run="new", cut="slots=5")
    assert unconfirmed(entries, batch=7, run="new", cut=TASKS)


@pytest.mark.parametrize(
    ("options", "columns", "message"),
    [
        ({"topic": "t"}, ("value",), "kafka.bootstrap.servers is missing"),
        ({"kafka.bootstrap.servers": "a:1"}, ("value",), "option topic is missing"),
        (
            {"kafka.bootstrap.servers": "a:1"},
            ("value", "topic"),
            "option ledgerTopic is missing",
        ),
        (
            {"kafka.bootstrap.servers": "a:1", "queue": "q", "topic": "t"},
            ("payload",),
            "queue excludes topic",
        ),
        ({"kafka.bootstrap.servers": "a:1", "queue": "a\0b"}, ("payload",), "queue_id is"),
    ],
)
def test_missing_options_are_named(
    options: dict[str, str], columns: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_sink_options(options, None, dict.fromkeys(columns, "string"))


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ({"value": "string"}, r"select value AS payload$"),
        ({"payload": "string", "user_key": "binary"}, r"select user_key AS key$"),
        ({"payload": "binary", "ttl_ms": "bigint"}, r"select ttl_ms / 1000 AS ttl$"),
        ({"n": "int", "key": "string"}, r"select no n, to_json\(struct\(\*\)\) AS payload$"),
        ({"payload": "struct<a:int>"}, r"payload is struct<a:int>: .*; to_json\(payload\)$"),
        ({"payload": "binary", "headers": "map<string,binary>"}, r"map_entries\(headers\)$"),
        ({"payload": "binary", "delay": "interval minute"}, "delay is interval minute.*seconds$"),
        ({"payload": "binary", "id": "bigint"}, "column id is bigint: it must be string; cast"),
    ],
)
def test_columns_that_a_message_does_not_have_are_refused_with_what_to_write(
    types: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_columns(types, are_messages=True)


def test_each_column_of_a_message_counts_for_its_identity() -> None:
    import pyarrow as pa

    def identity(**columns: object) -> int:
        rows = {"payload": [b"x"], "id": ["a"], "delay": [1.5], "ttl": [None]}
        schema = pa.schema(
            [
                ("payload", pa.binary()),
                ("id", pa.string()),
                ("delay", pa.float64()),
                ("ttl", pa.float64()),
            ]
        )
        changed = {**rows, **{name: [value] for name, value in columns.items()}}
        return int(read_rows(pa.RecordBatch.from_pydict(changed, schema=schema)).identities[0])

    assert identity() == identity()
    assert len({identity(), identity(id="b"), identity(delay=1.0), identity(ttl=1.5)}) == 4
    assert identity(ttl=1.5, delay=None) != identity(), "a value counts in its column"
