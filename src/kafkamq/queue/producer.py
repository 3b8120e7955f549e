"""Sends messages to one queue, now or later."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from datetime import timedelta

from kafkamq.config import QueueConfig, milliseconds
from kafkamq.errors import ConfigError, StateError, WireError
from kafkamq.markers.wire.markers import decode_marker, encode_end, encode_schedule
from kafkamq.queue.delivery import Delivery
from kafkamq.queue.ids import uuid7
from kafkamq.queue.namespace import Namespace
from kafkamq.queue.sender import Sender
from kafkamq.queue.wire.headers import message_headers
from kafkamq.queue.wire.keys import join_key, split_key
from kafkamq.queue.wire.outgoing import OWN_HEADER_BYTES, checked_headers, checked_id, payload_bytes
from kafkamq.queue.wire.partitions import key_partition
from kafkamq.transport.admin import Admin
from kafkamq.transport.record_reader import RecordReader
from kafkamq.types import (
    Headers,
    Marker,
    MarkerType,
    MessageId,
    Outcome,
    OutgoingMessage,
    ScheduleToken,
)

__all__ = ["Producer"]

MAX_DELAY_MS = 10 * 365 * 86_400_000
_CANCEL_TIMEOUT_S = 30.0


class Producer:
    """Sends to one queue; idempotent, acks=all, thread-safe.

    Without a key the partition is random, with one it follows from the key (R26's murmur2).
    """

    def __init__(self, namespace: Namespace, sender: Sender, config: QueueConfig) -> None:
        self._namespace = namespace
        self._sender = sender
        self._queue_id = config.queue_id
        self._record_key = join_key(config.queue_id)

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def __repr__(self) -> str:
        return f"<Producer of {self._queue_id!r}>"

    @property
    def queue_id(self) -> str:
        """The queue that it sends to."""
        return self._queue_id

    @property
    def is_full(self) -> bool:
        """Whether ``send`` would wait, because Kafka takes messages more slowly than they come."""
        return self._sender.is_full

    def send(
        self,
        payload: bytes | None,
        *,
        key: bytes | str | None = None,
        headers: Mapping[str, bytes] | None = None,
        delay: float | timedelta = 0.0,
        ttl: float | timedelta | None = None,
        id: str | None = None,
    ) -> Delivery:
        """Queue one message and return; the delivery says what became of it.

        Args:
            payload: Anything; None is a null payload, which is not the same as an empty one.
            key: Messages of one key are in one partition.
            headers: Travel with every copy, untouched. Names ``kafkamq-...`` that the protocol
                uses are refused.
            delay: Seconds until it enters the queue. The token of the confirmed send cancels it.
            ttl: Seconds in the queue, from its first copy's append, after which it is not handed
                out any more but goes to the dead letters as ``expired``.
            id: A label that travels with every copy; a UUIDv7 when not given. It does not
                deduplicate.

        Raises:
            ConfigError: Something of a wrong type, a negative delay or ttl, a header name of the
                protocol's, or a message that is larger than what could be copied (R11).
            DeadlineExceededError: The send queue stayed full for 30 s.
            StateError: The service is closed, or this is a forked child.
        """
        delay_ms = milliseconds(delay, name="delay") if delay else 0
        ttl_ms = None if ttl is None else milliseconds(ttl, name="ttl")
        record_key = self._record_key if key is None else join_key(self._record_key, key)
        size = len(record_key) + payload_bytes(payload) + OWN_HEADER_BYTES
        if id is None:
            message_id = uuid7()
        else:
            message_id = id
            size += len(checked_id(id))
        own, own_bytes = checked_headers(headers)
        size += own_bytes
        every = message_headers(own, id=message_id, ttl_ms=ttl_ms)
        facts = self._namespace.facts()
        config = self._namespace.config
        if size > facts.max_message_bytes:
            raise ConfigError(
                f"the message has {size} bytes with key and headers: {config.message_topic} and "
                f"{config.dead_letter_topic} take {facts.max_message_bytes} at most "
                "(max.message.bytes less what a copy adds); send a reference to the data instead"
            )
        if delay_ms:
            return self._schedule(payload, record_key, every, message_id, delay_ms)
        count = facts.message_partitions
        partition = (
            int(random.random() * count) if key is None else key_partition(record_key, count)
        )
        topic = config.message_topic
        delivery = Delivery(self._sender, self._queue_id, message_id, topic, False)
        self._sender.produce(topic, payload, record_key, partition, every, delivery._report)
        return delivery

    def send_many(self, messages: Iterable[OutgoingMessage]) -> list[Delivery]:
        """Queue many messages; as ``send``, one after the other."""
        return [
            self.send(
                message.payload,
                key=message.key,
                headers=message.headers,
                delay=message.delay,
                ttl=message.ttl,
                id=message.id,
            )
            for message in messages
        ]

    def cancel(self, token: ScheduleToken) -> None:
        """Take back a delayed message; returns when the cancellation is in the log.

        Args:
            token: ``SentMessage.schedule`` of the confirmed send.

        Raises:
            ConfigError: No token; a ``SentMessage`` is none, its offset may name another message.
            StateError: It is too late, the message enters the queue; or there is no such message.
            BrokerError, DeadlineExceededError: Kafka did not confirm; ask again.
        """
        if not isinstance(token, ScheduleToken):
            raise ConfigError(
                f"token is a {type(token).__name__}: give the schedule of a confirmed, delayed "
                "send (producer.send(..., delay=...).result().schedule)"
            )
        self._require_place(token)
        marker, due_ms = self._read_schedule(token)
        identity = MessageId(token.partition, token.offset)
        topic = self._namespace.config.marker_topic
        delivery = Delivery(self._sender, token.queue_id, "", topic, False)
        key = b"" if marker is None else marker.key
        value = encode_end(identity, Outcome.ACK, of_schedule=True)
        self._sender.produce(topic, value, key, token.partition, None, delivery._report)
        sent = delivery.result(_CANCEL_TIMEOUT_S)
        # The log's clock at the END against the deadline (R2): later, and trackers ignore it.
        if marker is not None and sent.timestamp_ms > due_ms:
            raise StateError(
                f"the message was due {sent.timestamp_ms - due_ms} ms before its cancellation: "
                "it enters the queue, or has done so"
            )

    def flush(self, timeout: float = 30.0) -> None:
        """Wait until all sends of this service so far are confirmed or failed; drops nothing.

        Raises:
            DeadlineExceededError: Not in time; the sends go on.
        """
        self._sender.check("flushing")
        self._sender.flush(timeout)

    def _schedule(
        self, payload: bytes | None, key: bytes, headers: Headers, id: str, delay_ms: int
    ) -> Delivery:
        if delay_ms > MAX_DELAY_MS:
            raise ConfigError(f"delay is {delay_ms / 1000:g} s: ten years at most")
        facts = self._namespace.facts()
        topic = self._namespace.config.marker_topic
        value = encode_schedule(key, payload, redeliver_after_ms=delay_ms, headers=headers)
        if len(value) > facts.max_marker_bytes:
            raise ConfigError(
                f"the delayed message has {len(value)} bytes as a marker: {topic} takes "
                f"{facts.max_marker_bytes} at most (max.message.bytes)"
            )
        partition = int(random.random() * facts.marker_partitions)  # R26
        delivery = Delivery(self._sender, self._queue_id, id, topic, True)
        self._sender.produce(topic, value, key, partition, None, delivery._report)
        return delivery

    def _require_place(self, token: ScheduleToken) -> None:
        """The token names a place that the log has, or has had."""
        config = self._namespace.config
        with Admin(config, timeout_s=_CANCEL_TIMEOUT_S) as admin:
            _, end = admin.log_ends(config.marker_topic).get(token.partition, (0, 0))
        if not 0 <= token.offset < end:
            raise self._no_schedule(token)

    def _no_schedule(self, token: ScheduleToken) -> StateError:
        place = f"{self._namespace.config.marker_topic}[{token.partition}]@{token.offset}"
        return StateError(
            f"{place} holds no delayed message of queue {self._queue_id!r}; use the token of the "
            "confirmed send"
        )

    def _read_schedule(self, token: ScheduleToken) -> tuple[Marker | None, int]:
        """The SCHEDULE and the broker time when it is due; None when retention has removed it."""
        config = self._namespace.config
        topic, partition, offset = config.marker_topic, token.partition, token.offset
        reader = RecordReader(config, topic)
        try:
            record = reader.read(partition, offset, timeout_s=_CANCEL_TIMEOUT_S)
        finally:
            reader.close()
        if record is None:  # carried forward since (R19); what is known of it is gone
            return None, 0
        try:
            marker = decode_marker(record.value(), topic=topic, partition=partition, offset=offset)
        except WireError:
            marker = None
        wanted = self._queue_id.encode()
        if (
            marker is None
            or marker.type is not MarkerType.SCHEDULE
            or marker.carried_forward
            or split_key(marker.key)[0] != wanted
        ):
            raise self._no_schedule(token)
        return marker, record.timestamp()[1] + marker.redeliver_after_ms
