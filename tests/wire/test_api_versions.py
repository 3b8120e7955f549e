"""ApiVersions: hostile answers are WireErrors, a known one names the release."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkamq.errors import WireError
from kafkamq.transport.broker_release import encode_request, release_of


def response(level: int, *, name: bytes = b"metadata.version") -> bytes:
    """Write it as a broker does: one API, and one feature between others."""
    keys = b"\x02" + struct.pack(">hhh", 18, 0, 4) + b"\0"
    other = bytes((6,)) + b"other" + struct.pack(">hh", 0, 1) + b"\0"
    feature = bytes((len(name) + 1,)) + name + struct.pack(">hh", 7, level) + b"\0"
    features = b"\x03" + other + feature
    tags = b"\x02" + b"\x01\x02ab" + b"\x00" + bytes((len(features),)) + features
    return struct.pack(">ih", 1, 0) + keys + struct.pack(">i", 0) + tags


@pytest.mark.parametrize(
    ("level", "release"),
    [(7, "3.3"), (14, "3.6"), (21, "3.9"), (25, "4.0"), (29, "4.2"), (99, "4.2 or newer")],
)
def test_the_level_of_metadata_names_the_release(level: int, release: str) -> None:
    assert release_of(response(level)) == release


def test_an_answer_without_that_feature_is_refused() -> None:
    with pytest.raises(WireError):
        release_of(response(29, name=b"kraft.version"))


@given(st.integers(0, 80))
def test_a_cut_answer_is_refused(size: int) -> None:
    whole = response(29)
    if size < len(whole) - 1:  # behind the level only its tags are missing
        with pytest.raises(WireError):
            release_of(whole[:size])


@given(st.binary(max_size=200))
def test_any_bytes_are_an_answer_or_refused(data: bytes) -> None:
    with suppress(WireError):
        assert release_of(data)


def test_the_request_has_its_length_before_it() -> None:
    request = encode_request("kafkamq", "1")
    assert struct.unpack(">i", request[:4]) == (len(request) - 4,)
