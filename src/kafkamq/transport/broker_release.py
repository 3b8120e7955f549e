"""Which release of Kafka a broker is: what it answers to an ApiVersions request, version 3.

librdkafka sends it too, but tells nobody the answer. A broker answers it before any credentials.
Source: Kafka protocol, ApiVersions; KIP-511, KIP-584.
"""

from __future__ import annotations

import socket
import struct

from kafkamq.config import ServiceConfig
from kafkamq.errors import WireError

_PLAIN = ("PLAINTEXT", "SASL_PLAINTEXT")
_TIMEOUT_S = 5.0


def broker_release(config: ServiceConfig, address: str) -> str | None:
    """Return the release as "4.2"; None over TLS, of one before 3.3, or without an answer."""
    if config.kafka.get("security.protocol", "PLAINTEXT").upper() not in _PLAIN:
        return None
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S) as connection:
            connection.sendall(encode_request("kafkamq", "1"))
            with connection.makefile("rb") as answer:
                (size,) = struct.unpack(">i", answer.read(4))
                return release_of(answer.read(min(size, MAX_RESPONSE_BYTES))) if size > 0 else None
    except (OSError, ValueError, struct.error, WireError):
        return None


MAX_RESPONSE_BYTES = 1 << 20
_KEY = 18
_VERSION = 3
_FEATURE = b"\x11metadata.version"

# The highest metadata.version that each release knows; a broker says the highest of its own.
_RELEASES = (
    (7, "3.3"),
    (8, "3.4"),
    (11, "3.5"),
    (14, "3.6"),
    (19, "3.7"),
    (20, "3.8"),
    (21, "3.9"),
    (25, "4.0"),
    (27, "4.1"),
    (29, "4.2"),
)


def encode_request(client: str, version: str) -> bytes:
    """Return the request with its length; ``client`` and ``version`` name who asks."""
    # Without a client id, and without tags.
    header = struct.pack(">hhih", _KEY, _VERSION, 1, -1) + b"\0"
    body = _compact(client) + _compact(version) + b"\0"
    return struct.pack(">i", len(header) + len(body)) + header + body


def _compact(text: str) -> bytes:
    encoded = text.encode("ascii")
    assert len(encoded) < 127, "a length of one byte"
    return bytes((len(encoded) + 1,)) + encoded


def release_of(response: bytes) -> str:
    """Return the release that answered, as "4.2"; "4.2 or newer" beyond those that are known.

    The features that a broker supports come before those in use, which have the same names.
    """
    try:
        _, error = struct.unpack_from(">ih", response)
        if error:
            raise WireError(f"the broker answers ApiVersions with error {error}")
        at = response.find(_FEATURE)
        if at < 0:
            raise WireError("the broker names no feature metadata.version")
        _, level = struct.unpack_from(">hh", response, at + len(_FEATURE))
    except struct.error as failure:
        raise WireError("an ApiVersions response is cut off") from failure
    for highest, release in _RELEASES:
        if level <= highest:
            return release
    return f"{_RELEASES[-1][1]} or newer"
