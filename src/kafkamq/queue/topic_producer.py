"""Sends to a queue that has a topic of its own."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import timedelta

from kafkamq.config import QueueConfig, utf8
from kafkamq.errors import ConfigError
from kafkamq.queue.delivery import Delivery
from kafkamq.queue.ids import uuid7
from kafkamq.queue.namespace import Namespace
from kafkamq.queue.producer import Producer
from kafkamq.queue.rules.capabilities import Feature, require
from kafkamq.queue.sender import Sender
from kafkamq.queue.wire.headers import message_headers
from kafkamq.queue.wire.outgoing import OWN_HEADER_BYTES, checked_headers, checked_id, payload_bytes
from kafkamq.queue.wire.partitions import key_partition
from kafkamq.types import ScheduleToken

__all__ = ["TopicProducer"]


class TopicProducer(Producer):
    """As ``Producer``: the record's key is the sender's, its partition murmur2's or random."""

    def __init__(self, topic: Namespace, sender: Sender, config: QueueConfig) -> None:
        """Made by ``Queue.producer``."""
        super().__init__(topic, sender, config)
        self._config = config

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
        """As ``Producer.send``; ``delay`` and ``ttl`` are refused where the backend lacks them."""
        backend, topic = self._config.backend, self._config.topic
        if delay:
            require(backend, Feature.DELAYED_SEND, f"queue {self._queue_id!r}: send(delay=...)")
        if ttl is not None:
            require(backend, Feature.TTL, f"queue {self._queue_id!r}: send(ttl=...)")
        record_key = utf8(key, name="key") if isinstance(key, str) else key
        size = payload_bytes(record_key, name="key") + payload_bytes(payload) + OWN_HEADER_BYTES
        message_id = uuid7() if id is None else id
        if id is not None:
            size += len(checked_id(id))
        own, own_bytes = checked_headers(headers)
        size += own_bytes
        facts = self._namespace.facts()
        if size > facts.max_message_bytes:
            raise ConfigError(
                f"the message has {size} bytes with key and headers: {topic} and "
                f"{self._namespace.config.dead_letter_topic} take {facts.max_message_bytes} at most"
                " (max.message.bytes less what a dead letter adds); send a reference to the data"
                " instead"
            )
        count = facts.message_partitions
        partition = (
            int(random.random() * count) if record_key is None else key_partition(record_key, count)
        )
        delivery = Delivery(self._sender, self._queue_id, message_id, topic, False)
        every = message_headers(own, id=message_id)
        # A sender's record may have no key; librdkafka takes None for that.
        self._sender.produce(
            topic,
            payload,
            record_key,
            partition,
            every,
            delivery._report,
        )
        return delivery

    def cancel(self, token: ScheduleToken) -> None:
        """There are no delayed sends to cancel here: ConfigError."""
        del token
        require(self._config.backend, Feature.DELAYED_SEND, f"queue {self._queue_id!r}: cancel()")
