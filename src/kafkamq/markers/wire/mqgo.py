"""kafka-mq-go's records, as its clients write and read them.

Message: key = queue id, value = payload, no headers. Marker: key = queue id, value = protobuf with
fields 1-6 of ``markers.proto``. An END always means done: its clients know no other verdict, and a
nack of theirs is an END too. Its clients cannot see a message with a user key (R25).

Source: kafka-mq-go README, Design.
"""

from __future__ import annotations

from dataclasses import dataclass

from kafkamq.errors import WireError
from kafkamq.markers.rules.handout import expires_at_ms
from kafkamq.markers.wire.markers import (
    StartEncoder,
    decode_marker,
    encode_end,
    encode_keepalive,
)
from kafkamq.queue.wire.headers import MessageHeaders, read_message_headers
from kafkamq.queue.wire.keys import join_key
from kafkamq.types import Headers, Marker, MarkerType, MessageId, Outcome

CONSUMER_GROUP_PREFIX = "kafka-mq-"
"""The consumer group of a queue of kafka-mq-go is this and the queue id."""

TRACKER_GROUP = "kafka-mq-redelivery"
"""The consumer group of its trackers; nothing of ours may write while it has members (R25)."""


@dataclass(frozen=True, slots=True)
class ForeignRecord:
    """Key and value of a record; there are no headers."""

    key: bytes
    value: bytes


def encode_foreign_message(queue_id: str, payload: bytes) -> ForeignRecord:
    """A message record as kafka-mq-go's producer sends it."""
    return ForeignRecord(join_key(queue_id), payload)


def encode_foreign_marker(queue_id: str, marker: Marker) -> ForeignRecord:
    """A marker record as kafka-mq-go's consumer writes it.

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
    return ForeignRecord(join_key(queue_id), value)


def decode_foreign_marker(key: bytes | None, value: bytes | None) -> tuple[bytes, Marker]:
    """Queue id and marker of a record that one of its consumers wrote.

    Raises:
        WireError: the record has no key, or its value is no marker.
    """
    if not key:
        raise WireError("a marker of kafka-mq-go has its queue id as key")
    return key, decode_marker(value)


def is_foreign_start(start: Marker) -> bool:
    """Whether its workers wrote this START: it says neither who holds the message nor since when,
    and nothing of what the message's headers say.
    """
    return not (start.consumer_id or start.headers or start.message_timestamp_ms)


def completed_start(
    start: Marker,
    key: bytes,
    headers: Headers,
    timestamp_ms: int,
    *,
    read: MessageHeaders | None = None,
) -> Marker:
    """A START that says nothing of the message itself, with what its own record says.

    One of its workers; or one with batches (R29).

    Args:
        start: The START.
        key: Of the message's own record.
        headers: All headers of it.
        timestamp_ms: The broker's, of it.
        read: What is believed of the headers, where that is not all of them.
    """
    known = read_message_headers(headers) if read is None else read
    began_ms = timestamp_ms if known.origin is None else known.origin.timestamp_ms
    return Marker(  # not by ``replace``: there may be a million of them
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
