"""What the queues of one service share: facts of the namespace, senders, open consumers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import KafkaMQError, StateError
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.namespace import Namespace
from kafkamq.queue.queue_topic import AnyTopic, QueueTopic
from kafkamq.queue.sender import Sender
from kafkamq.transport.clients import ForkCheck
from kafkamq.types import Backend, Outcome


class Settler(Protocol):
    """Gives verdicts on a queue's messages by their tokens; see ``Queue.ack``."""

    def settle(
        self,
        text: str,
        outcome: Outcome,
        *,
        reason: str = "",
        delay_ms: int | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """Give the verdict on the message of this token, and wait for what becomes of it."""

    def extend(self, text: str, extension_ms: int, *, timeout_s: float = 30.0) -> None:
        """Hold it for at least so long from now."""

    def close(self, timeout_s: float = 30.0) -> None:
        """End its clients."""


class Connections:
    """Owned by a ``Service``, given to backends; thread-safe."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.namespace = Namespace(config)
        self._fork_check = ForkCheck("Service")
        self._lock = threading.RLock()  # a settler asks for its namespace
        # By the topic of their queues; and by the queue, where each names the topic otherwise.
        self._senders: dict[tuple[str, str], Sender] = {}
        self._topics: dict[tuple[str, str], AnyTopic] = {}
        self._consumers: list[Consumer] = []
        self._settlers: dict[QueueConfig, Settler] = {}
        self._is_closed = False

    def check(self) -> None:
        """Refuse work on a closed service, and in a forked child."""
        self._fork_check.check()
        if self._is_closed:
            raise StateError(f"the service of namespace {self.config.namespace!r} is closed")

    def sender(self, queue: QueueConfig) -> Sender:
        """The one that all producers to a queue's topic share: the namespace's, or its own."""
        with self._lock:
            name = _name_of(queue)
            sender = self._senders.get(name)
            if sender is None:
                sender = self._senders[name] = Sender(self._place(queue))
            return sender

    def settler(self, queue: QueueConfig, make: Callable[[], Settler]) -> Settler:
        """The one that gives verdicts by token on a queue's messages."""
        with self._lock:
            if queue not in self._settlers:
                self._settlers[queue] = make()
            return self._settlers[queue]

    def namespace_of(self, queue: QueueConfig) -> Namespace:
        """Of a queue of the markers backend: what its messages stand in."""
        with self._lock:
            return self._place(queue)

    def _place(self, queue: QueueConfig) -> Namespace:
        if not queue.topic:
            return self.namespace
        if queue.backend is not Backend.MARKERS:
            return QueueTopic(self.config, queue)
        name = _name_of(queue)
        if name not in self._topics:
            self._topics[name] = AnyTopic(self.config, queue)
        return self._topics[name]

    def add(self, consumer: Consumer) -> None:
        with self._lock:
            self._consumers = [each for each in self._consumers if not each.is_closed]
            self._consumers.append(consumer)

    def close(self, timeout: float) -> None:
        """Close all consumers and confirm all sends; idempotent."""
        if self._fork_check.is_forked:
            return
        with self._lock:
            self._is_closed = True
            consumers, self._consumers = self._consumers, []
            senders, self._senders = self._senders, {}
            settlers, self._settlers = self._settlers, {}
        deadline_s = time.monotonic() + timeout
        failures: list[KafkaMQError] = []
        ends: list[Callable[[float], None]] = [
            *(consumer.close for consumer in consumers),
            *(settler.close for settler in settlers.values()),
            *(sender.close for sender in senders.values()),
        ]
        for end in ends:
            try:
                end(max(1.0, deadline_s - time.monotonic()))
            except KafkaMQError as error:  # noqa: PERF203 - the others are closed as well
                failures.append(error)
        for namespace in (self.namespace, *self._topics.values()):
            namespace.close()
        if failures:
            raise failures[0]


def _name_of(queue: QueueConfig) -> tuple[str, str]:
    is_any_topic = bool(queue.topic) and queue.backend is Backend.MARKERS
    return queue.topic, queue.queue_id if is_any_topic else ""
