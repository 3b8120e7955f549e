"""Sends messages to one queue, now or later."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

from kafkamq.config import QueueConfig, milliseconds, utf8, wait_seconds
from kafkamq.errors import ConfigError
from kafkamq.queue.delivery import Delivery, Destination
from kafkamq.queue.ids import uuid7
from kafkamq.queue.rules.capabilities import Feature, require
from kafkamq.queue.sender import Sender
from kafkamq.queue.wire.headers import ID, message_headers
from kafkamq.queue.wire.outgoing import OWN_HEADER_BYTES, checked_headers, checked_id, payload_bytes
from kafkamq.queue.wire.partitions import key_partition
from kafkamq.transport.producer import NewRecord
from kafkamq.types import Headers, OutgoingMessage, ScheduleToken

_TOGETHER = 500  # messages that ``send_many`` gives to the client at once


class Producer:
    """Sends to one queue; idempotent, acks=all, thread-safe.

    Without a key the partition is random, with one it follows from the key (R26's murmur2).
    """

    _unkeyed: bytes | None = None  # the record's key of a message without one
    _is_stamped = False  # whether its records have more headers than the sender's, id and TTL

    def __init__(self, sender: Sender, queue: QueueConfig) -> None:
        """Made by ``Queue.producer``: of a queue with a topic of its own, or of a subclass."""
        self._sender = sender
        self._namespace = sender.namespace
        self._queue = queue
        self._topic = queue.topic or self._namespace.config.message_topic
        self._destination = Destination(sender, queue.queue_id, self._topic)

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def __repr__(self) -> str:
        return f"<Producer of {self.queue_id!r}>"

    @property
    def queue_id(self) -> str:
        """The queue that it sends to."""
        return self._queue.queue_id

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
                protocol's, or a message that is larger than what could be copied (R11). Or the
                backend has no delays, or no TTL.
            DeadlineExceededError: The send queue stayed full for 30 s.
            StateError: The service is closed, or this is a forked child.
        """
        if delay:
            self._require(Feature.DELAYED_SEND, "send(delay=...)")
            delay_ms = milliseconds(delay, name="delay")
        record, delivery = self._outgoing(payload, key, headers, ttl, id)
        if delay and delay_ms:
            return self._schedule(payload, record[1], record[3] or (), delivery._id, delay_ms)
        self._sender.produce(self._topic, *record)
        return delivery

    def send_many(self, messages: Iterable[OutgoingMessage]) -> list[Delivery]:
        """Queue many messages; as ``send``, one after the other."""
        deliveries: list[Delivery] = []
        waiting: list[NewRecord] = []
        # What an iterator is still to bring may take long.
        together = _TOGETHER if isinstance(messages, Sequence) else 1
        try:
            for message in messages:
                if message.delay:
                    self._produce_all(waiting)
                    delivery = self.send(
                        message.payload,
                        key=message.key,
                        headers=message.headers,
                        delay=message.delay,
                        ttl=message.ttl,
                        id=message.id,
                    )
                else:
                    record, delivery = self._outgoing(
                        message.payload, message.key, message.headers, message.ttl, message.id
                    )
                    waiting.append(record)
                    if len(waiting) >= together:
                        self._produce_all(waiting)
                deliveries.append(delivery)
        finally:
            self._produce_all(waiting)  # also those before one that is refused
        return deliveries

    def _produce_all(self, waiting: list[NewRecord]) -> None:
        """Queue these in their order; they are forgotten first: an interrupt sends none twice."""
        records, done = list(waiting), 0
        waiting.clear()
        while done < len(records):
            done += self._sender.produce_all(self._topic, records[done:])
            if done < len(records):  # it waits for room, or says why it is refused
                self._sender.produce(self._topic, *records[done])
                done += 1

    def _outgoing(
        self,
        payload: bytes | None,
        key: bytes | str | None,
        headers: Mapping[str, bytes] | None,
        ttl: float | timedelta | None,
        id: str | None,
    ) -> tuple[NewRecord, Delivery]:
        """Check a message, and make its record and its delivery."""
        size = OWN_HEADER_BYTES
        size += len(payload) if isinstance(payload, bytes) else payload_bytes(payload)
        record_key = self._unkeyed if key is None else self._key_of(key)
        if record_key is not None:
            size += len(record_key)
        if id is None:
            id = uuid7()
        else:
            size += len(checked_id(id))
        if headers is None and ttl is None and not self._is_stamped:
            every: Headers = ((ID, id.encode()),)
        else:
            own, own_bytes = checked_headers(headers)
            size += own_bytes
            ttl_ms = None
            if ttl is not None:
                self._require(Feature.TTL, "send(ttl=...)")
                ttl_ms = milliseconds(ttl, name="ttl")
            every = self._headers_of(own, id, ttl_ms)
        facts = self._namespace.facts()
        if size > facts.max_message_bytes:
            raise ConfigError(
                f"the message has {size} bytes with key and headers: {self._topic} and "
                f"{self._namespace.config.dead_letter_topic} take {facts.max_message_bytes} at most"
                " (max.message.bytes less what a copy or a dead letter adds); send a reference to"
                " the data instead"
            )
        count = facts.message_partitions
        if key is None or record_key is None:
            partition = int(random.random() * count)
        else:
            partition = key_partition(record_key, count)
        delivery = Delivery(self._destination, id)
        return (payload, record_key, partition, every, delivery._report), delivery

    def cancel(self, token: ScheduleToken) -> None:
        """Take back a delayed message; returns when the cancellation is in the log.

        Args:
            token: ``SentMessage.schedule`` of the confirmed send.

        Raises:
            ConfigError: No token; a ``SentMessage`` is none, its offset may name another message.
                Or the backend has no delayed sends.
            StateError: It is too late, the message enters the queue; or there is no such message.
            BrokerError, DeadlineExceededError: Kafka did not confirm; ask again.
        """
        del token
        self._require(Feature.DELAYED_SEND, "cancel()")

    def flush(self, timeout: float | timedelta = 30.0) -> None:
        """Wait until all sends of this service so far are confirmed or failed; drops nothing.

        Raises:
            ConfigError: ``timeout`` is no time.
            DeadlineExceededError: Not in time; the sends go on.
        """
        timeout_s = wait_seconds(timeout, may_be_endless=True)
        self._sender.check("flushing")
        self._sender.flush(timeout_s)

    def _headers_of(self, own: Headers, id: str, ttl_ms: int | None) -> Headers:
        return message_headers(own, id=id, ttl_ms=ttl_ms)

    # What a backend with a shared topic, or with delays, does otherwise.

    def _key_of(self, key: bytes | str) -> bytes:
        record_key = utf8(key, name="key") if isinstance(key, str) else key
        payload_bytes(record_key, name="key")
        return record_key

    def _schedule(
        self, payload: bytes | None, key: bytes | None, headers: Headers, id: str, delay_ms: int
    ) -> Delivery:
        raise NotImplementedError

    def _require(self, feature: Feature, asked: str) -> None:
        require(self._queue.backend, feature, f"queue {self.queue_id!r}: {asked}")
