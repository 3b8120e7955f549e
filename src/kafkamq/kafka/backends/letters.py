"""Dead letters of queues with a topic of their own: in Kafka before the message counts as done."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Protocol

from confluent_kafka import KafkaError, Message

from kafkamq.clients.errors import broker_error
from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import KafkaMQError
from kafkamq.kafka.backends.message import TopicMessage
from kafkamq.kafka.backends.topic import QueueTopic
from kafkamq.kafka.sender import Sender
from kafkamq.types import DeadLetterReason
from kafkamq.wire.headers import Origin, dead_letter_headers
from kafkamq.wire.keys import join_key

__all__ = ["DeadLetterBox", "Letters"]

_ANY_PARTITION = -1


class Letters(Protocol):
    """Where a consumer puts what it gives up."""

    def park(self, message: TopicMessage, reason: DeadLetterReason, error: str) -> Future[None]:
        """Write a dead letter; done when it is kept, or has failed."""

    def close(self, timeout_s: float) -> None:
        """Write no more."""


class DeadLetterBox:
    """Writes to the namespace's dead letters, with the key that messages of a namespace have."""

    def __init__(self, config: ServiceConfig, queue: QueueConfig) -> None:
        self._topic = config.dead_letter_topic
        self._queue_id = queue.queue_id
        self._place = QueueTopic(config, queue)
        self._lock = threading.Lock()
        self._sender: Sender | None = None  # few consumers have anything to give up

    def park(self, message: TopicMessage, reason: DeadLetterReason, error: str) -> Future[None]:
        """Write a dead letter; the future is done when Kafka has it, or with a BrokerError."""
        parked: Future[None] = Future()

        def delivered(failure: KafkaError | None, _record: Message) -> None:
            if failure is None:
                parked.set_result(None)
            else:
                doing = f"writing a dead letter to {self._topic}"
                parked.set_exception(broker_error(failure, doing))

        place = message.message_id
        headers = dead_letter_headers(
            message.raw_headers,
            reason=reason,
            error=error,
            delivery_count=message.delivery_count,
            origin=Origin(message.topic, place.partition, place.offset, message.timestamp_ms),
            queue_id=self._queue_id,
        )
        key = join_key(self._queue_id, message.key)
        try:
            sender = self._connected()
            sender.produce(self._topic, message.payload, key, _ANY_PARTITION, headers, delivered)
        except KafkaMQError as refused:
            parked.set_exception(refused)
        return parked

    def close(self, timeout_s: float) -> None:
        """Flush, and end."""
        if self._sender is not None:
            self._sender.close(timeout_s)

    def _connected(self) -> Sender:
        with self._lock:
            if self._sender is None:
                self._sender = Sender(self._place)
            return self._sender
