"""Cells of markers and actions: what a tracker folds comes out as it went in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkamq.markers.rules.delivery import Carry, DueCause, Settle
from kafkamq.spark.blocks import Block, decode_actions, encode_actions, encode_block, pack, unpack
from kafkamq.spark.parallelism import group_key, spark_hash
from kafkamq.types import Marker, MarkerType, MessageBatch, MessageId, Outcome, expand

_INT64 = st.integers(0, 2**63 - 1)
_IDS = st.builds(
    MessageId,
    st.integers(0, 2**31 - 1),
    _INT64,
    st.one_of(st.just(b""), st.binary(min_size=16, max_size=16)),
    st.integers(0, 2**31 - 1),
)
_BATCHES = st.builds(
    MessageBatch,
    st.integers(0, 2**31 - 1),
    st.one_of(st.just(b""), st.binary(min_size=16, max_size=16)),
    st.integers(0, 2**31 - 1),
    _INT64,
    st.integers(1, 2**70 - 1),
)
_MARKERS = st.builds(
    Marker,
    st.sampled_from(MarkerType),
    message_id=st.one_of(st.none(), _IDS),
    redeliver_after_ms=_INT64,
    consumer_id=st.text(max_size=20),
    outcome=st.sampled_from(Outcome),
    max_lease_ms=_INT64,
    of_schedule=st.booleans(),
    engine_epoch=_INT64,
    batches=st.lists(_BATCHES, max_size=3).map(tuple),
)
_ROWS = st.lists(
    st.tuples(_INT64, st.integers(-1, 2**62), st.one_of(st.none(), _MARKERS)), max_size=30
)
_SETTLES = st.builds(
    Settle,
    _INT64,
    _IDS,
    st.booleans(),
    st.sampled_from(DueCause),
    _INT64,
    _INT64,
    _INT64,
    st.integers(-1, 2**62),
    st.integers(1, 2**64 - 1),
)
_CARRIES = st.builds(Carry, _INT64, _IDS, _INT64)


@given(_ROWS)
def test_rows_come_out_of_a_block_as_they_went_in(
    rows: list[tuple[int, int, Marker | None]],
) -> None:
    block = Block(encode_block(rows))
    assert list(block) == rows
    assert len(block) == len(rows)


@given(_ROWS)
def test_a_block_counts_outcomes(rows: list[tuple[int, int, Marker | None]]) -> None:
    block = Block(encode_block(rows))
    for outcome in (Outcome.REDELIVERED, Outcome.DEAD_LETTERED):
        said = [one for _, _, one in rows if one is not None and one.outcome is outcome]
        expected = sum(len(list(expand(one))) for one in said)
        assert block.count(outcome) == expected


@given(st.lists(st.one_of(_SETTLES, _CARRIES), max_size=30))
def test_actions_come_out_as_they_went_in(actions: list[Settle | Carry]) -> None:
    assert decode_actions(encode_actions(actions)) == actions


def test_payloads_stay_behind() -> None:
    marker = Marker(
        MarkerType.START, MessageId(0, 1), key=b"queue", value=b"secret payload",
        headers=(("name", b"secret header"),), reason="secret reason",
    )  # fmt: skip
    assert b"secret" not in encode_block([(0, 0, marker)])


def test_columns_are_of_64_bits_and_their_table_comes_back() -> None:
    assert unpack(pack([[1, 2], [3, -4]], {"a": "é"})) == ([[1, 2], [3, -4]], {"a": "é"})
    with pytest.raises(OverflowError):
        pack([[2**63]])


# Spark's own answers (4.2.1, `SELECT hash(text)`); a test with Spark compares more.
_HASHES = {"": 142593372, "a": 1485273170, "ab": -97053317, "abc": 1322437556, "abcd": -396302900}


@pytest.mark.parametrize(("text", "expected"), _HASHES.items())
def test_hash_is_sparks(text: str, expected: int) -> None:
    assert spark_hash(text) == expected


@given(st.integers(0, 300), st.integers(1, 64))
def test_partition_p_of_n_tasks_is_folded_in_task_p_mod_n(partition: int, tasks: int) -> None:
    key = group_key("some.markers", partition, tasks)
    assert spark_hash(key) % tasks == partition % tasks
    assert key.startswith(f"some.markers/{partition}/")
