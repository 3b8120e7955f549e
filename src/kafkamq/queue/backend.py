"""What a backend is and needs, and where each is found.

A new backend is a package beside ``kafkamq.markers``. Its module ``backend`` has an instance of
``QueueBackend``, named ``backend``. Besides that it needs a member of ``types.Backend``, a row in
``queue/rules/capabilities.py``, which says what it can do, a line in ``_HOMES`` below, one in
``_CONSUMERS`` of ``testing/memory_backend.py`` for its double, and its name in
``tests/contract/worlds.py``, whose tests say what every backend promises. If its queues have a
topic of their own, it inherits from ``TopicBackend`` and its consumer from ``TopicConsumer``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.queue.connections import Connections, Settler
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.message import Message
from kafkamq.queue.producer import Producer
from kafkamq.queue.rules.capabilities import default_order, order_feature, require
from kafkamq.transport.record import RecordLike
from kafkamq.types import Backend, Headers

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
        """A consumer that has begun to work; ``plan.ordering`` is one that the backend has."""

    def open_producer(self, connections: Connections, queue: QueueConfig) -> Producer:
        """A producer; errors as for ``open_consumer``."""

    def open_settler(self, connections: Connections, queue: QueueConfig) -> Settler:
        """What gives verdicts by token; asked of backends that have them."""

    def create_topics(
        self, config: ServiceConfig, queue: QueueConfig, *, partitions: int, replication_factor: int
    ) -> None:
        """Create what a queue needs and does not exist; see ``Queue.create_topics``."""

    def stored_payload(
        self, config: ServiceConfig, record: RecordLike, queue_id: str
    ) -> StoredMessage | None:
        """The message of a record that a dead letter refers to (R11); None: it is none."""


def load(backend: Backend) -> QueueBackend:
    # By name: no layer below the backends imports one of them.
    return cast("QueueBackend", import_module(_HOMES[backend]).backend)


def check_order(queue: QueueConfig, plan: ConsumerPlan) -> str:
    """The order that is kept among records."""
    ordering = plan.ordering or default_order(queue.backend)
    require(queue.backend, order_feature(ordering), f"queue {queue.queue_id!r}: {ordering=}")
    return ordering
