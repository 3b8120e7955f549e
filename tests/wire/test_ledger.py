"""The ledger's metadata text: versioned, bounded, strict."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.strategies import INT64, bounded, texts, times

from kafkamq.errors import UnsupportedVersionError, WireError
from kafkamq.markers.wire.records import (
    MAX_METADATA_BYTES,
    Position,
    decode_position,
    encode_position,
)

POSITION = Position(
    position=7, epoch=3, batch=12, rows_done=50_000, source_hash="ab12", engine="spark-1"
)
TEXT = '{"v":1,"p":7,"e":3,"b":12,"r":50000,"s":"ab12","i":"spark-1"}'


def test_golden_text() -> None:
    assert encode_position(POSITION) == TEXT
    assert decode_position(TEXT) == POSITION


def test_nothing_committed_yet() -> None:
    assert decode_position(None) is None
    assert decode_position("") is None
    assert decode_position("\0") is None


def test_one_trailing_nul_is_stripped() -> None:  # confluent-kafka appends it
    assert decode_position(TEXT + "\0") == POSITION
    with pytest.raises(WireError):
        decode_position(TEXT + "\0\0")


@bounded
@given(
    st.builds(
        Position,
        position=times,
        epoch=times,
        batch=times,
        rows_done=times,
        source_hash=texts,
        engine=texts,
    )
)
def test_what_is_encoded_is_decoded(position: Position) -> None:
    text = encode_position(position)
    assert decode_position(text) == position
    assert text.isascii()
    assert len(text) <= MAX_METADATA_BYTES


def changed(**values: object) -> str:
    return json.dumps({**json.loads(TEXT), **values})


@pytest.mark.parametrize(
    "text",
    [
        "metadata of somebody else",
        "[]",
        "7",
        "null",
        "{}",
        "[" * 4000,
        TEXT[:-1],
        TEXT + " " * MAX_METADATA_BYTES,
        changed(p=-1),
        changed(p=2**63),
        changed(p=1.0),
        changed(p=True),
        changed(p="7"),
        changed(e=None),
        changed(b=float("nan")),
        changed(r=[]),
        changed(s=1),
        changed(i="x" * 1025),
        changed(v=None),
        changed(v="1"),
        changed(v=-1),
        changed(v=0),
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(WireError) as caught:
        decode_position(text)
    assert not isinstance(caught.value, UnsupportedVersionError)


def test_a_newer_version_is_told_apart() -> None:
    with pytest.raises(UnsupportedVersionError, match="upgrade"):
        decode_position('{"v":2,"what":"ever"}')


@bounded
@given(
    st.text(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.dictionaries(st.sampled_from("vpebrsix"), inner) | st.lists(inner),
        max_leaves=12,
    ).map(json.dumps)
)
def test_random_texts_decode_or_raise_wire_error(text: str) -> None:
    with suppress(WireError):
        decode_position(text)


@pytest.mark.parametrize(
    "position",
    [
        Position(position=-1, epoch=0),
        Position(position=0, epoch=INT64 + 1),
        Position(position=0, epoch=0, engine="x" * 1025),
        Position(position=0, epoch=0, engine="\u20ac" * 700),  # 4,200 bytes as JSON
        Position(position=0, epoch=0, source_hash="x" * 5000),
    ],
)
def test_what_cannot_be_read_back_is_not_written(position: Position) -> None:
    with pytest.raises(WireError):
        encode_position(position)
