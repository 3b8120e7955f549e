"""Makes the consumer of a queue, whichever its backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.markers.consumer import MarkersConsumer
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.dead_letter_writer import DeadLetterBox
from kafkamq.queue.message import Message
from kafkamq.queue.names import group_of, group_of_workers
from kafkamq.queue.namespace import Namespace
from kafkamq.queue.queue_topic import require_dead_letters
from kafkamq.queue.rules.capabilities import default_order, order_feature, require
from kafkamq.types import Backend

__all__ = ["ConsumerPlan", "check_order", "open_consumer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerPlan:
    """What is known of a consumer's use when it is made.

    Attributes:
        on_lease_lost: As for ``Queue.consumer``.
        ordering: What stays in order; None: what the backend has.
        concurrency: How many handlers there will be; 0: unknown.
        handler_timeout_ms: The longest that one may take; 0: unknown.
    """

    on_lease_lost: Callable[[Message], None] | None = None
    ordering: str | None = None
    concurrency: int = 0
    handler_timeout_ms: int = 0


def check_order(queue: QueueConfig, plan: ConsumerPlan) -> str:
    """What stays in order.

    Raises:
        ConfigError: The backend lacks that.
    """
    ordering = plan.ordering or default_order(queue.backend)
    require(queue.backend, order_feature(ordering), f"queue {queue.queue_id!r}: {ordering=}")
    return ordering


def open_consumer(namespace: Namespace, queue: QueueConfig, plan: ConsumerPlan) -> Consumer:
    """A consumer that has begun to work.

    Raises:
        ConfigError: The backend, or the cluster, lacks what is asked.
        BrokerError, DeadlineExceededError: The cluster refused, or does not answer.
    """
    ordering = check_order(queue, plan)
    if queue.backend is Backend.MARKERS:
        namespace.look_for_foreign_workers(queue)
        return MarkersConsumer(namespace, queue, plan.on_lease_lost)
    config = namespace.config
    require_dead_letters(config, queue)
    letters = DeadLetterBox(config, queue)
    group_id = group_of_workers(config, queue)
    if queue.backend is Backend.OFFSETS:
        from kafkamq.parallel.queue_consumer import OffsetsConsumer

        return OffsetsConsumer(
            config, queue, letters, plan.on_lease_lost, group_id=group_id, ordering=ordering
        )
    if queue.backend is Backend.SHARE:
        from kafkamq.share.queue_consumer import ShareConsumer

        return ShareConsumer(
            config,
            queue,
            letters,
            plan.on_lease_lost,
            group_id=group_id,
            concurrency=plan.concurrency,
            handler_timeout_ms=plan.handler_timeout_ms,
        )
    from kafkamq.claims.queue_consumer import ClaimsConsumer

    group_id = queue.group_id or _claims_group(config, queue)
    return ClaimsConsumer(
        config, queue, letters, plan.on_lease_lost, group_id=group_id, ordering=ordering
    )


def _claims_group(config: ServiceConfig, queue: QueueConfig) -> str:
    """As ``group_of``; the coordination log's records are separated by slashes."""
    return group_of(config, queue.queue_id).replace("/", ".")
