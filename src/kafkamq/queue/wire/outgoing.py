"""What a sender gives, checked before anything of it reaches Kafka's C client.

That client ends the process over a header name that UTF-8 does not have, and cuts one at its NUL.
"""

from __future__ import annotations

from collections.abc import Mapping

from kafkamq.config import utf8
from kafkamq.errors import ConfigError
from kafkamq.queue.wire.headers import ID, RESERVED, TTL_MS
from kafkamq.types import Headers

MAX_ID_BYTES = 1024
_HEADER_OVERHEAD_BYTES = 8  # lengths of a name and a value
_UUID_BYTES = 36
_INT64_DIGITS = 19
OWN_HEADER_BYTES = len(ID) + _UUID_BYTES + len(TTL_MS) + _INT64_DIGITS + 2 * _HEADER_OVERHEAD_BYTES
"""What ``kafkamq-id`` and ``kafkamq-ttl-ms`` add to a record at most, the id being a UUID."""


def checked_id(id: str) -> bytes:
    """The id as it travels."""
    encoded = utf8(id, name="id")
    if not 0 < len(encoded) <= MAX_ID_BYTES:
        raise ConfigError(f"id is {id!r:.80}: it must be a text of 1-{MAX_ID_BYTES} bytes of UTF-8")
    return encoded


def checked_headers(headers: Mapping[str, bytes] | None) -> tuple[Headers, int]:
    """The sender's headers in their order, and the bytes that they add to a record.

    Raises:
        ConfigError: No mapping; a name that is no text, holds a NUL or belongs to the protocol; a
            value that is not bytes. Names the header.
    """
    if headers is None:
        return (), 0
    if not isinstance(headers, Mapping):
        raise ConfigError(
            f"headers is a {type(headers).__name__}: it must be a mapping of names to bytes"
        )
    size = 0
    for name, value in headers.items():
        encoded = utf8(name, name="the name of a header")
        if b"\0" in encoded:
            raise ConfigError(f"headers has {name!r}: a name must be free of NUL characters")
        if name in RESERVED:
            raise ConfigError(f"headers has {name!r}: names of the protocol cannot be sent")
        size += len(encoded) + payload_bytes(value, name=f"header {name!r}")
        size += _HEADER_OVERHEAD_BYTES
    return tuple(headers.items()), size


def payload_bytes(payload: bytes | None, *, name: str = "payload") -> int:
    """The size of a payload, or of a header's value."""
    if payload is None:
        return 0
    if not isinstance(payload, bytes):
        raise ConfigError(f"{name} is a {type(payload).__name__}: it must be bytes, or None")
    return len(payload)
