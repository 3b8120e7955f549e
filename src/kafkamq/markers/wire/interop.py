"""Records of kafka-mq-go and of kmq are written and read here as their clients do.

kafka-mq-go's message: key = queue id, value = payload, no headers. Its marker: key = queue id,
value = protobuf with fields 1-6 of ``markers.proto``. An END always means done: its clients know no
other verdict, and a nack of theirs is an END too. They cannot see a message with a user key (R25).

kmq's marker: key 12 bytes, int32 partition and int64 offset, big-endian. Value: one byte of type; a
START (1) has the redelivery timeout after it, int64 big-endian, in ms; an END (0) is that byte
alone. A null or empty value is a null marker, which says nothing. A payload is never in a marker.

Source: kafka-mq-go README, Design; kmq README, Client flow, and layout as measured on its records.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kafkamq.errors import WireError
from kafkamq.markers.rules.handout import expires_at_ms
from kafkamq.markers.wire.marker_writer import (
    MAX_DURATION_MS,
    StartEncoder,
    encode_end,
    encode_keepalive,
)
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.wire.headers import MessageHeaders, read_message_headers
from kafkamq.queue.wire.keys import join_key
from kafkamq.types import Headers, Marker, MarkerType, MessageId, Outcome

CONSUMER_GROUP_PREFIX = "kafka-mq-"
"""The consumer group of a queue of kafka-mq-go is this and the queue id."""

REDELIVERY_COUNT = "kmq-redelivery-count"
"""Header of a redelivered message: redeliveries so far, so one less than a delivery count."""

_KEY = struct.Struct(">iq")
_START = struct.Struct(">bq")
_END_VALUE = b"\0"


@dataclass(frozen=True, slots=True)
class GoRecord:
    key: bytes
    value: bytes


def encode_go_message(queue_id: str, payload: bytes) -> GoRecord:
    """Return a message record as kafka-mq-go's producer sends it."""
    return GoRecord(join_key(queue_id), payload)


def encode_go_marker(queue_id: str, marker: Marker) -> GoRecord:
    """Return a marker record as kafka-mq-go's consumer writes it.

    Raises:
        WireError: the marker has a type or an outcome that kafka-mq-go does not know.
    """
    identity = marker.message_id
    if identity is None:
        raise WireError("kafka-mq-go's markers always name a message")
    bare = MessageId(identity.partition, identity.offset)
    if marker.type is MarkerType.START and marker.value is not None:
        encoder = StartEncoder(redeliver_after_ms=marker.redeliver_after_ms)
        value = encoder.encode(bare, marker.key, marker.value, delivery_count=0)
    elif marker.type is MarkerType.END and marker.outcome is Outcome.ACK:
        value = encode_end(bare, Outcome.ACK)
    elif marker.type is MarkerType.KEEPALIVE:
        value = encode_keepalive(bare, redeliver_after_ms=marker.redeliver_after_ms)
    else:
        raise WireError(f"kafka-mq-go has no marker for {marker.type.name} {marker.outcome.name}")
    return GoRecord(join_key(queue_id), value)


def decode_go_marker(key: bytes | None, value: bytes | None) -> tuple[bytes, Marker]:
    """Queue id and marker of a record that one of its consumers wrote.

    Raises:
        WireError: the record has no key, or its value is no marker.
    """
    if not key:
        raise WireError("a marker of kafka-mq-go has its queue id as key")
    return key, decode_marker(value)


def is_go_start(start: Marker) -> bool:
    """Return whether its workers wrote this START, which says nothing of holder or time."""
    return not (start.consumer_id or start.headers or start.message_timestamp_ms)


def completed_start(
    start: Marker,
    key: bytes,
    headers: Headers,
    timestamp_ms: int,
    *,
    read: MessageHeaders | None = None,
) -> Marker:
    """Return a START that says nothing of the message itself, with what its own record says.

    One of its workers; or one with batches (R29).

    Args:
        read: What is believed of the headers, where that is not all of them.
    """
    known = read_message_headers(headers) if read is None else read
    began_ms = timestamp_ms if known.origin is None else known.origin.timestamp_ms
    # ``replace`` takes longer, and there may be a million of them.
    return Marker(
        MarkerType.START,
        start.message_id,
        start.redeliver_after_ms,
        key,
        start.value,
        known.delivery_count,
        headers,
        expires_at_ms(known.ttl_ms, began_ms),
        start.consumer_id,
        timestamp_ms,
        start.by_reference,
        max_deliveries=start.max_deliveries,
        max_lease_ms=start.max_lease_ms,
        message_topic=start.message_topic,
        batches=start.batches,
    )


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
    """Return the marker of a record, or None for a null marker. A START is by reference.

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
    """Return the header's value: one byte if it fits (signed), else int32 big-endian.

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
