"""What the queues of one service share: facts of the namespace, senders, open consumers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import KafkaMQError, StateError
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.namespace import Namespace
from kafkamq.queue.queue_topic import QueueTopic
from kafkamq.queue.sender import Sender
from kafkamq.transport.fork_check import ForkCheck


class Connections:
    """Owned by a ``Service``, given to backends; thread-safe."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.namespace = Namespace(config)
        self._fork_check = ForkCheck("Service")
        self._lock = threading.Lock()
        self._senders: dict[str, Sender] = {}  # by the topic of their queues
        self._consumers: list[Consumer] = []
        self._is_closed = False

    def check(self) -> None:
        """Refuse work on a closed service, and in a forked child."""
        self._fork_check.check()
        if self._is_closed:
            raise StateError(f"the service of namespace {self.config.namespace!r} is closed")

    def sender(self, queue: QueueConfig) -> Sender:
        """The one that all producers to a queue's topic share: the namespace's, or its own."""
        with self._lock:
            sender = self._senders.get(queue.topic)
            if sender is None:
                place = QueueTopic(self.config, queue) if queue.topic else self.namespace
                sender = self._senders[queue.topic] = Sender(place)
            return sender

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
        deadline_s = time.monotonic() + timeout
        failures: list[KafkaMQError] = []
        ends: list[Callable[[float], None]] = [
            *(consumer.close for consumer in consumers),
            *(sender.close for sender in senders.values()),
        ]
        for end in ends:
            try:
                end(max(1.0, deadline_s - time.monotonic()))
            except KafkaMQError as error:  # noqa: PERF203 - the others are closed as well
                failures.append(error)
        if failures:
            raise failures[0]
