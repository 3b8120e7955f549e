"""The backend ``share``: the broker's share group remembers what is done (KIP-932)."""

from __future__ import annotations

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.queue.backend import ConsumerPlan
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.dead_letter_writer import DeadLetterWriter
from kafkamq.queue.names import group_of_workers
from kafkamq.queue.topic_backend import TopicBackend
from kafkamq.share.queue_consumer import ShareConsumer

__all__ = ["backend"]


class _ShareBackend(TopicBackend):
    def _consumer(
        self,
        config: ServiceConfig,
        queue: QueueConfig,
        letters: DeadLetterWriter,
        plan: ConsumerPlan,
    ) -> Consumer:
        return ShareConsumer(
            config,
            queue,
            letters,
            plan.on_lease_lost,
            group_id=group_of_workers(config, queue),
            concurrency=plan.concurrency,
            handler_timeout_ms=plan.handler_timeout_ms,
        )


backend = _ShareBackend()
