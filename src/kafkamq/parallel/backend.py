"""The backend ``offsets``: what is done is in the commits of a consumer group."""

from __future__ import annotations

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.parallel.queue_consumer import OffsetsConsumer
from kafkamq.queue.backend import ConsumerPlan
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.dead_letter_writer import DeadLetterWriter
from kafkamq.queue.names import group_of_workers
from kafkamq.queue.topic_backend import TopicBackend

__all__ = ["backend"]


class _OffsetsBackend(TopicBackend):
    def _consumer(
        self,
        config: ServiceConfig,
        queue: QueueConfig,
        letters: DeadLetterWriter,
        plan: ConsumerPlan,
    ) -> Consumer:
        return OffsetsConsumer(
            config,
            queue,
            letters,
            plan.on_lease_lost,
            group_id=group_of_workers(config, queue),
            ordering=plan.ordering or "key",
        )


backend = _OffsetsBackend()
