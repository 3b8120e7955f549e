"""kmq's markers: another layout, and fewer kinds of them.

Key: 12 bytes, int32 partition and int64 offset, big-endian. Value: one byte of type; a START (1)
has the redelivery timeout after it, int64 big-endian, in ms; an END (0) is that byte alone. A null
or empty value is a null marker, which says nothing. A payload is never in a marker.

Source: kmq README, Client flow; layout as measured on its records.
"""

from __future__ import annotations

import struct

from kafkamq.errors import WireError
from kafkamq.markers.wire.markers import MAX_DURATION_MS
from kafkamq.types import Marker, MarkerType, MessageId, Outcome

REDELIVERY_COUNT = "kmq-redelivery-count"
"""Header of a redelivered message: redeliveries so far, so one less than a delivery count."""

_KEY = struct.Struct(">iq")
_START = struct.Struct(">bq")
_END_VALUE = b"\0"


def encode_kmq_start(message_id: MessageId, *, redeliver_after_ms: int) -> tuple[bytes, bytes]:
    """Key and value of a START.

    Raises:
        WireError: a number is outside its range.
    """
    if not 0 <= redeliver_after_ms <= MAX_DURATION_MS:
        raise WireError(f"cannot encode a duration of {redeliver_after_ms} ms")
    return _key(message_id), _START.pack(1, redeliver_after_ms)


def encode_kmq_end(message_id: MessageId) -> tuple[bytes, bytes]:
    """Key and value of an END.

    Raises:
        WireError: a number is outside its range.
    """
    return _key(message_id), _END_VALUE


def _key(message_id: MessageId) -> bytes:
    if not 0 <= message_id.partition < 1 << 31 or not 0 <= message_id.offset < 1 << 63:
        raise WireError("cannot encode a message_id that is negative or too large")
    return _KEY.pack(message_id.partition, message_id.offset)


def decode_kmq_marker(key: bytes | None, value: bytes | None) -> Marker | None:
    """The marker of a record, or None for a null marker. A START is by reference.

    Raises:
        WireError: key or value has another layout.
    """
    if key is None or len(key) != _KEY.size:
        raise WireError("the key of a kmq marker has 12 bytes")
    partition, offset = _KEY.unpack(key)
    if partition < 0 or offset < 0:
        raise WireError("a kmq marker with a negative partition or offset")
    if not value:
        return None
    message_id = MessageId(partition, offset)
    if value == _END_VALUE:
        return Marker(MarkerType.END, message_id, outcome=Outcome.ACK)
    if value[0] != 1 or len(value) != _START.size:
        raise WireError(f"a kmq marker of type {value[0]} and {len(value)} bytes")
    redeliver_after_ms = _START.unpack(value)[1]
    if not 0 <= redeliver_after_ms <= MAX_DURATION_MS:
        raise WireError(f"a kmq START with a timeout of {redeliver_after_ms} ms")
    return Marker(MarkerType.START, message_id, redeliver_after_ms, by_reference=True)


def encode_redelivery_count(count: int) -> bytes:
    """The header's value: one byte if it fits (signed), else int32 big-endian.

    Raises:
        WireError: the count is negative or over 2^31 - 1.
    """
    if not 0 <= count < 1 << 31:
        raise WireError(f"cannot encode a redelivery count of {count}")
    return count.to_bytes(1 if count < 128 else 4, "big")


def decode_redelivery_count(value: bytes | None) -> int:
    """Redeliveries so far; 0 without the header.

    Raises:
        WireError: the value has another length, or is negative.
    """
    if value is None:
        return 0
    if len(value) not in (1, 4):
        raise WireError(f"a {REDELIVERY_COUNT} header of {len(value)} bytes")
    count = int.from_bytes(value, "big", signed=True)
    if count < 0:
        raise WireError(f"a negative {REDELIVERY_COUNT} header")
    return count
