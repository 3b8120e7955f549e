"""The ledger's records of groups' positions: versioned, bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkamq.errors import UnsupportedVersionError, WireError
from kafkamq.markers.wire.records import (
    GroupPosition,
    decode_group_position,
    encode_group_position,
    position_prefix,
)

POSITION = GroupPosition(topic_id=bytes(range(16)), offset=5000, at_ms=1_700_000_000_000)
GOLDEN = b'{"v":1,"topic":"000102030405060708090a0b0c0d0e0f","offset":5000,"at_ms":1700000000000}'


def test_golden_record() -> None:
    assert encode_group_position(POSITION) == GOLDEN
    assert decode_group_position(GOLDEN) == POSITION
    assert position_prefix("kafkamq/ns/a") == b"kafkamq-position\0kafkamq/ns/a\0"


@given(st.binary(max_size=16), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_round_trip(topic_id: bytes, offset: int, at_ms: int) -> None:
    position = GroupPosition(topic_id, offset, at_ms)
    assert decode_group_position(encode_group_position(position)) == position


@given(st.none() | st.binary(max_size=200))
def test_anything_else_is_refused(value: bytes | None) -> None:
    with pytest.raises(WireError):
        decode_group_position(value)


@pytest.mark.parametrize(
    "value",
    [
        GOLDEN.replace(b"5000", b"-1"),
        GOLDEN.replace(b"5000", b"true"),
        GOLDEN.replace(b"0001", b"xx01"),
        GOLDEN.replace(b'"topic"', b'"tropic"'),
    ],
)
def test_a_broken_field_is_refused(value: bytes) -> None:
    with pytest.raises(WireError):
        decode_group_position(value)


def test_a_newer_version_says_so() -> None:
    with pytest.raises(UnsupportedVersionError):
        decode_group_position(GOLDEN.replace(b'"v":1', b'"v":2'))
