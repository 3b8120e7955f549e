"""kmq's markers: 12 bytes of key, 9 or 1 of value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.strategies import INT32, INT64, bounded, durations

from kafkamq.errors import WireError
from kafkamq.markers.wire.interop import (
    REDELIVERY_COUNT,
    decode_kmq_marker,
    decode_redelivery_count,
    encode_kmq_end,
    encode_kmq_start,
    encode_redelivery_count,
)
from kafkamq.types import Marker, MarkerType, MessageId

KEY = bytes.fromhex("00000003 000000000000012c")
START = bytes.fromhex("01 000000000000ea60")


def test_golden_bytes() -> None:
    message_id = MessageId(3, 300)
    assert encode_kmq_start(message_id, redeliver_after_ms=60_000) == (KEY, START)
    assert encode_kmq_end(message_id) == (KEY, b"\0")
    assert decode_kmq_marker(KEY, START) == Marker(
        MarkerType.START, message_id, 60_000, by_reference=True
    )
    assert decode_kmq_marker(KEY, b"\0") == Marker(MarkerType.END, message_id)


def test_a_null_marker_says_nothing() -> None:
    assert decode_kmq_marker(KEY, b"") is None
    assert decode_kmq_marker(KEY, None) is None


@bounded
@given(st.integers(0, INT32), st.integers(0, INT64), durations)
def test_what_is_encoded_is_decoded(partition: int, offset: int, timeout_ms: int) -> None:
    message_id = MessageId(partition, offset)
    start = decode_kmq_marker(*encode_kmq_start(message_id, redeliver_after_ms=timeout_ms))
    assert start == Marker(MarkerType.START, message_id, timeout_ms, by_reference=True)
    end = decode_kmq_marker(*encode_kmq_end(message_id))
    assert end == Marker(MarkerType.END, message_id)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, b"\0"),
        (b"", b"\0"),
        (KEY[:-1], b"\0"),
        (KEY + b"\0", b"\0"),
        (b"\xff" + KEY[1:], b"\0"),
        (KEY[:4] + b"\xff" + KEY[5:], b"\0"),
        (KEY, b"\0\0"),
        (KEY, b"\1"),
        (KEY, START[:-1]),
        (KEY, START + b"\0"),
        (KEY, b"\2" + START[1:]),
        (KEY, b"\1" + b"\xff" * 8),
        (KEY, b"\1\x7f" + b"\xff" * 7),
    ],
)
def test_other_layouts_are_refused(key: bytes | None, value: bytes) -> None:
    with pytest.raises(WireError):
        decode_kmq_marker(key, value)


@bounded
@given(st.none() | st.binary(max_size=14), st.none() | st.binary(max_size=12))
def test_random_bytes_decode_or_raise_wire_error(key: bytes | None, value: bytes | None) -> None:
    try:
        marker = decode_kmq_marker(key, value)
    except WireError:
        return
    assert marker is None or marker.message_id is not None


@pytest.mark.parametrize(
    ("message_id", "timeout_ms"),
    [
        (MessageId(-1, 0), 1),
        (MessageId(2**31, 0), 1),
        (MessageId(0, 2**63), 1),
        (MessageId(0, -1), 1),
        (MessageId(0, 0), -1),
        (MessageId(0, 0), 2**63),
    ],
)
def test_numbers_that_it_cannot_hold(message_id: MessageId, timeout_ms: int) -> None:
    with pytest.raises(WireError):
        encode_kmq_start(message_id, redeliver_after_ms=timeout_ms)


@pytest.mark.parametrize(
    ("count", "value"),
    [
        (0, b"\0"),
        (3, b"\3"),
        (127, b"\x7f"),
        (128, b"\0\0\0\x80"),
        (INT32, b"\x7f\xff\xff\xff"),
    ],
)
def test_golden_redelivery_counts(count: int, value: bytes) -> None:
    assert encode_redelivery_count(count) == value
    assert decode_redelivery_count(value) == count


def test_redelivery_counts_of_other_forms() -> None:
    assert REDELIVERY_COUNT == "kmq-redelivery-count"
    assert decode_redelivery_count(None) == 0
    assert decode_redelivery_count(b"\0\0\0\3") == 3
    for value in (b"", b"\0\0", b"\xff", b"\xff\xff\xff\xff", b"\0" * 8):
        with pytest.raises(WireError):
            decode_redelivery_count(value)
    for count in (-1, 2**31):
        with pytest.raises(WireError):
            encode_redelivery_count(count)
