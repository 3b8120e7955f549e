"""The backend ``claims``: a coordination log says who owns a partition, and what is done."""

from __future__ import annotations

from kafkamq.claims.queue_consumer import ClaimsConsumer
from kafkamq.claims.topic import coordination_topic, heartbeat_s, init_topic
from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.queue.backend import TopicBackend


class _ClaimsBackend(TopicBackend):
    def create_topics(
        self, config: ServiceConfig, queue: QueueConfig, *, partitions: int, replication_factor: int
    ) -> None:
        super().create_topics(
            config, queue, partitions=partitions, replication_factor=replication_factor
        )
        init_topic(
            config.bootstrap_servers,
            coordination_topic(config),
            partitions=1,
            replication_factor=replication_factor,
            heartbeat_interval=heartbeat_s(queue),
            kafka=config.kafka,
        )


backend = _ClaimsBackend(ClaimsConsumer)
