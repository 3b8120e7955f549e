"""What a sender gives: refused here, or Kafka's C client would end the process or change it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kafkamq.errors import ConfigError
from kafkamq.queue.wire.headers import checked_headers, checked_id, payload_bytes
from kafkamq.queue.wire.keys import join_key


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"\ud800": b"v"}, r"\\ud800"),
        ({"a\0b": b"v"}, r"a\\x00b.*NUL"),
        ({5: b"v"}, "5"),
        ({b"n": b"v"}, "b'n'"),
        ({None: b"v"}, "None"),
        ({"h": "text"}, "header 'h' is a str"),
        ({"h": 1}, "header 'h' is a int"),
        ({"h": bytearray(b"v")}, "header 'h' is a bytearray"),
        ({"kafkamq-id": b"v"}, "kafkamq-id"),
        ([("h", b"v")], "headers is a list"),
        (("h", b"v"), "headers is a tuple"),
        ((("h", b"v"), ("h",)), "headers is a tuple: it must be a mapping of names to bytes, or"),
        ("h", "headers is a str"),
    ],
)
def test_headers_that_cannot_be(headers: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        checked_headers(headers)


def test_headers_are_counted_in_bytes() -> None:  # R11
    headers: Mapping[str, Any] = {"é": b"12", "n": None}
    assert checked_headers(headers) == ((("é", b"12"), ("n", None)), 2 + 2 + 8 + 1 + 0 + 8)
    assert checked_headers(None) == checked_headers({}) == ((), 0)


@pytest.mark.parametrize("id", [5, b"i", "\ud800", "", "x" * 1025, "é" * 513])
def test_ids_that_cannot_be(id: Any) -> None:
    with pytest.raises(ConfigError, match="id is"):
        checked_id(id)
    assert checked_id("é" * 512) == "é".encode() * 512


@pytest.mark.parametrize("key", [5, "\ud800", ["k"], bytearray(b"k")])
def test_keys_that_cannot_be(key: Any) -> None:
    with pytest.raises(ConfigError, match="key is"):
        join_key("q", key)


@pytest.mark.parametrize("payload", ["text", 5, bytearray(b"x"), memoryview(b"x")])
def test_payloads_that_cannot_be(payload: Any) -> None:
    with pytest.raises(ConfigError, match="payload is a"):
        payload_bytes(payload)
    assert (payload_bytes(None), payload_bytes(b""), payload_bytes(b"abc")) == (0, 0, 3)
