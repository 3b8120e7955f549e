"""Status records: versioned, bounded, open for fields of later releases."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.strategies import INT64, bounded, counts, texts, times

from kafkamq.errors import UnsupportedVersionError, WireError
from kafkamq.markers.wire.records import (
    MAX_STATUS_BYTES,
    TrackerStatus,
    decode_status,
    decode_status_key,
    encode_status,
    status_key,
)

STATUS = TrackerStatus(
    topic="ns.markers",
    partition=3,
    engine="local-1",
    epoch=2,
    clock_ms=1000,
    position=50,
    committable_offset=40,
    entries=4,
    due=1,
    awaited=1,
    deadline_ms=1500,
    warn_ms=1400,
    late_verdicts=1,
    malformed=2,
    redelivered=3,
    dead_lettered=4,
    batch=5,
    is_live=False,
)


def test_golden_record() -> None:
    assert status_key("ns.markers", 3) == b"ns.markers/3"
    assert json.loads(encode_status(STATUS)) == {
        "version": 1,
        "topic": "ns.markers",
        "partition": 3,
        "engine": "local-1",
        "epoch": 2,
        "clock_ms": 1000,
        "position": 50,
        "committable_offset": 40,
        "entries": 4,
        "due": 1,
        "awaited": 1,
        "deadline_ms": 1500,
        "warn_ms": 1400,
        "late_verdicts": 1,
        "malformed": 2,
        "redelivered": 3,
        "dead_lettered": 4,
        "batch": 5,
        "is_live": False,
    }
    assert decode_status(encode_status(STATUS)) == STATUS


@bounded
@given(
    st.builds(
        TrackerStatus,
        topic=texts,
        partition=counts,
        engine=texts,
        epoch=times,
        clock_ms=times,
        entries=times,
        due=times,
        deadline_ms=st.none() | times,
        warn_ms=st.none() | times,
        is_live=st.booleans(),
    )
)
def test_what_is_encoded_is_decoded(status: TrackerStatus) -> None:
    assert decode_status(encode_status(status)) == status


def changed(**values: object) -> bytes:
    return json.dumps({**json.loads(encode_status(STATUS)), **values}).encode()


def test_fields_of_later_releases_are_ignored() -> None:
    assert decode_status(changed(colour="green")) == STATUS


@pytest.mark.parametrize("name", [field.name for field in fields(TrackerStatus)])
def test_every_field_is_checked(name: str) -> None:
    other = "1" if isinstance(getattr(STATUS, name), int) else 1
    for wrong in ([], {}, 1.5, other, -1, INT64 + 1):
        with pytest.raises(WireError):
            decode_status(changed(**{name: wrong}))
        with pytest.raises(WireError):
            encode_status(replace(STATUS, **{name: wrong}))


@pytest.mark.parametrize(
    "value", [None, b"", b"{}", b"[]", b"\xff\xfe", b"[" * 10_000, b" " * (MAX_STATUS_BYTES + 1)]
)
def test_other_values_are_refused(value: bytes | None) -> None:
    with pytest.raises(WireError):
        decode_status(value)


def test_a_newer_version_is_told_apart() -> None:
    with pytest.raises(UnsupportedVersionError, match="upgrade"):
        decode_status(b'{"version": 2}')


def test_keys_name_topic_and_partition() -> None:
    assert decode_status_key(b"ns.markers/3") == ("ns.markers", 3)
    for key in (
        None,
        b"",
        b"ns.markers",
        b"ns.markers/",
        b"ns.markers/x",
        b"t/-1",
        b"\xff/1",
        b"t/99999999999",
    ):
        with pytest.raises(WireError):
            decode_status_key(key)


@bounded
@given(st.binary(max_size=60))
def test_random_bytes_decode_or_raise_wire_error(data: bytes) -> None:
    for decode in (decode_status, decode_status_key):
        with suppress(WireError):
            decode(data)


def test_a_status_that_says_nothing_of_what_is_awaited_is_refused() -> None:
    values = json.loads(encode_status(STATUS))
    del values["awaited"]
    with pytest.raises(WireError, match="awaited"):
        decode_status(json.dumps(values).encode())
