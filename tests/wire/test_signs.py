"""Signs of life: versioned, bounded, beside the statuses of one topic (R36)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkamq.errors import UnsupportedVersionError, WireError
from kafkamq.markers.wire.records import (
    Sign,
    SignKind,
    decode_sign,
    decode_status_key,
    encode_sign,
    is_sign_key,
    sign_key,
    status_key,
)

SIGN = Sign(
    topic="ns.markers", kind=SignKind.ACTIVE, engine="spark-1", start="ab", epoch=3, number=7
)


@pytest.mark.parametrize("kind", SignKind)
def test_a_sign_comes_back(kind: SignKind) -> None:
    sign = Sign(topic="t", kind=kind, engine="e", start="s", epoch=1, number=2)
    assert decode_sign(encode_sign(sign)) == sign
    assert is_sign_key(sign_key(sign))


def test_the_bytes() -> None:
    assert encode_sign(SIGN) == (
        b'{"version":1,"topic":"ns.markers","kind":"active","engine":"spark-1","start":"ab",'
        b'"epoch":3,"number":7}'
    )
    assert sign_key(SIGN) == b"ns.markers/active"


def test_no_status_is_taken_for_a_sign_or_a_sign_for_a_status() -> None:
    assert not is_sign_key(status_key("ns.markers", 12))
    assert not is_sign_key(None)
    for kind in SignKind:
        with pytest.raises(WireError):
            decode_status_key(
                sign_key(Sign(topic="t", kind=kind, engine="spark-1", start="s", epoch=1))
            )


def test_fields_of_a_later_release_are_ignored_and_its_version_is_not() -> None:
    fields = json.loads(encode_sign(SIGN))
    assert decode_sign(json.dumps({**fields, "mood": "good"}).encode()) == SIGN
    with pytest.raises(UnsupportedVersionError):
        decode_sign(json.dumps({**fields, "version": 2}).encode())
    with pytest.raises(WireError):
        decode_sign(json.dumps({**fields, "kind": "asleep"}).encode())


@given(st.binary(max_size=200))
def test_anything_else_is_a_wire_error(value: bytes) -> None:
    with pytest.raises(WireError):
        decode_sign(value)
