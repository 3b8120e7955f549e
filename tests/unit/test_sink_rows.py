"""Rows of the Kafka sink and the rules of its ledger, without Spark and without Kafka."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkamq.errors import ConfigError, StateError
from kafkamq.spark.sink.ledger import TASKS, CellEntry, is_written, unconfirmed
from kafkamq.spark.sink.options import parse_sink_options
from kafkamq.spark.sink.rows import check_columns, read_rows, slot_column, slots_of

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
    ("options", "has_topics", "message"),
    [
        ({"topic": "t"}, False, "kafka.bootstrap.servers is missing"),
        ({"kafka.bootstrap.servers": "a:1"}, False, "option topic is missing"),
        ({"kafka.bootstrap.servers": "a:1"}, True, "option ledgerTopic is missing"),
    ],
)
def test_missing_options_are_named(options: dict[str, str], has_topics: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_sink_options(options, None, has_topics=has_topics)
