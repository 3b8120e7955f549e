"""What a backend is, where each is found, and what a service gives it (``Connections``).

A new backend needs these, and no more:

1. A package beside ``kafkamq.markers`` whose module ``backend`` has an instance of
   ``QueueBackend``, named ``backend``. If its queues have a topic of their own, it inherits from
   ``TopicBackend``, and its consumer from ``TopicConsumer``.
2. A member of ``Backend`` in ``kafkamq/types.py``, and a line in ``_HOMES`` below.
3. A row in ``queue/rules/capabilities.py``, which says what it can do.
4. A line in ``_CONSUMERS`` of ``testing/memory_backend.py``, for its double.
5. Its name in ``tests/contract/worlds.py``, whose tests say what every backend promises.
6. A member of ``Contender`` in ``dev/compare/plan.py``, for ``kafkamq compare``.
7. In ``pyproject.toml``, the package in the lists of import-linter's contracts: the layer of
   backends, its ``rules`` and ``wire`` among the pure ones, and who may not import a client.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import ConfigError, KafkaMQError, StateError
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.dead_letter_writer import RequeueWriter, TopicOutbox
from kafkamq.queue.message import Message
from kafkamq.queue.namespace import (
    AnyTopic,
    Namespace,
    QueueTopic,
    create_queue_topics,
    require_dead_letters,
)
from kafkamq.queue.producer import Producer, Sender
from kafkamq.queue.rules.capabilities import default_order, order_feature, require
from kafkamq.queue.wire.keys import join_key
from kafkamq.transport.clients import ForkCheck
from kafkamq.transport.record import RecordLike, headers_of
from kafkamq.types import Backend, Headers, Outcome

_HOMES = {
    Backend.MARKERS: "kafkamq.markers.backend",
    Backend.OFFSETS: "kafkamq.parallel.backend",
    Backend.SHARE: "kafkamq.share.backend",
    Backend.CLAIMS: "kafkamq.claims.backend",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerPlan:
    """What is known of a consumer's use when it is made."""

    on_lease_lost: Callable[[Message], None] | None = None
    ordering: str | None = None
    concurrency: int = 0
    handler_timeout_ms: int = 0


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as its record has it; ``key`` begins with the queue's id (``wire/keys.py``)."""

    key: bytes
    payload: bytes | None
    headers: Headers


class QueueBackend(Protocol):
    """Who remembers what is done, and how its queues are sent to and received from."""

    def open_consumer(
        self, connections: Connections, queue: QueueConfig, plan: ConsumerPlan
    ) -> Consumer:
        """Get a consumer that has begun to work; ``plan.ordering`` is one that the backend has."""

    def open_producer(self, connections: Connections, queue: QueueConfig) -> Producer:
        """Return a producer; errors as for ``open_consumer``."""

    def open_settler(self, connections: Connections, queue: QueueConfig) -> Settler:
        """Return what gives verdicts by token; asked of backends that have them."""

    def create_topics(
        self, config: ServiceConfig, queue: QueueConfig, *, partitions: int, replication_factor: int
    ) -> None:
        """Create what a queue needs and does not exist; see ``Queue.create_topics``."""

    def stored_payload(
        self, config: ServiceConfig, record: RecordLike, queue_id: str
    ) -> StoredMessage | None:
        """Return the message of a record that a dead letter refers to (R11); None: it is none."""


def load(backend: Backend) -> QueueBackend:
    # By name: no layer below the backends imports one of them.
    return cast("QueueBackend", import_module(_HOMES[backend]).backend)


def check_order(queue: QueueConfig, plan: ConsumerPlan) -> str:
    """Return the order that is kept among records."""
    ordering = plan.ordering or default_order(queue.backend)
    require(queue.backend, order_feature(ordering), f"queue {queue.queue_id!r}: {ordering=}")
    return ordering


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
        """Close the settler's clients."""


class Connections:
    """Owned by a ``Service``, given to backends; thread-safe."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.namespace = Namespace(config)
        self._fork_check = ForkCheck("Service")
        # It is reentrant, as making a settler asks for its namespace.
        self._lock = threading.RLock()
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
        """Get the one that all producers to a queue's topic share: the namespace's, or its own."""
        with self._lock:
            name = _name_of(queue)
            sender = self._senders.get(name)
            if sender is None:
                sender = self._senders[name] = Sender(self._place(queue))
            return sender

    def settler(self, queue: QueueConfig, make: Callable[[], Settler]) -> Settler:
        """Return the one that gives verdicts by token on a queue's messages."""
        with self._lock:
            if queue not in self._settlers:
                self._settlers[queue] = make()
            return self._settlers[queue]

    def namespace_of(self, queue: QueueConfig) -> Namespace:
        """Return what the messages of a queue of the markers backend stand in."""
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


class TopicBackend:
    def __init__(
        self,
        make_consumer: Callable[
            [ServiceConfig, QueueConfig, RequeueWriter, ConsumerPlan], Consumer
        ],
    ) -> None:
        """What it makes owns the writer of dead letters."""
        self._make_consumer = make_consumer

    def open_consumer(
        self, connections: Connections, queue: QueueConfig, plan: ConsumerPlan
    ) -> Consumer:
        config = connections.config
        if queue.dead_letter_writer is None:
            require_dead_letters(config, queue)
        return self._make_consumer(config, queue, TopicOutbox(config, queue), plan)

    def open_producer(self, connections: Connections, queue: QueueConfig) -> Producer:
        return Producer(connections.sender(queue), queue)

    def open_settler(self, connections: Connections, queue: QueueConfig) -> Settler:
        raise ConfigError(f"queue {queue.queue_id!r}: its backend has no tokens")

    def create_topics(
        self, config: ServiceConfig, queue: QueueConfig, *, partitions: int, replication_factor: int
    ) -> None:
        create_queue_topics(
            config, queue, partitions=partitions, replication_factor=replication_factor
        )

    def stored_payload(
        self, config: ServiceConfig, record: RecordLike, queue_id: str
    ) -> StoredMessage | None:
        del config
        return StoredMessage(join_key(queue_id, record.key()), record.value(), headers_of(record))
