"""The topic of one queue: made, checked, and what its producer must know of it."""

from __future__ import annotations

import time

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.queue.namespace import CONNECT_TIMEOUT_S, Namespace, NamespaceFacts
from kafkamq.queue.topics import log_settings
from kafkamq.transport.admin import Admin

_LETTER_OVERHEAD_BYTES = 9216  # what a dead letter adds: reason, error text, origin, framing


class QueueTopic(Namespace):
    """The facts of a queue's own topic, in the form that senders know."""

    def __init__(self, config: ServiceConfig, queue: QueueConfig) -> None:
        super().__init__(config)
        self._queue = queue

    def require(self, max_lease_ms: int) -> NamespaceFacts:
        """The facts; a topic of any kind will do."""
        del max_lease_ms
        return self.facts()

    def _ask(self) -> NamespaceFacts:
        with Admin(self.config, timeout_s=CONNECT_TIMEOUT_S) as admin:
            topic = admin.require_topic(self._queue.topic)
            letters = admin.topics([self.config.dead_letter_topic])
        limit = topic.max_message_bytes
        for found in letters.values():
            limit = min(limit, found.max_message_bytes - _LETTER_OVERHEAD_BYTES)
        self._asked_s = time.monotonic()
        return NamespaceFacts(
            message_topic_id=topic.topic_id,
            message_partitions=topic.partitions,
            marker_partitions=1,
            message_retention_ms=-1,
            marker_retention_ms=-1,
            max_message_bytes=limit,
            max_marker_bytes=0,
        )


def require_dead_letters(config: ServiceConfig, queue: QueueConfig) -> None:
    """See that a queue's topic is there, and the one for what it gives up."""
    with Admin(config, timeout_s=CONNECT_TIMEOUT_S) as admin:
        admin.require_topic(queue.topic)
        if config.dead_letter_topic not in admin.topics([config.dead_letter_topic]):
            raise ConfigError(
                f"topic {config.dead_letter_topic} does not exist: queue {queue.queue_id!r} needs "
                "it for its dead letters; create it with Queue.create_topics()"
            )


def create_queue_topics(
    config: ServiceConfig,
    queue: QueueConfig,
    *,
    partitions: int,
    replication_factor: int,
    timeout_s: float = 30.0,
) -> None:
    """Create what a queue needs and does not exist: its topic, and dead letters."""
    if partitions < 1:
        raise ConfigError(f"partitions is {partitions}: it must be >= 1")
    with Admin(config, timeout_s=timeout_s) as admin:
        common = log_settings(admin, replication_factor)
        limit = 1024 * 1024 + 65_536
        letters = {
            **common,
            "retention.ms": "-1",
            "max.message.bytes": str(limit + _LETTER_OVERHEAD_BYTES + 65_536),
        }
        wanted = {
            queue.topic: {**common, "max.message.bytes": str(limit)},
            config.dead_letter_topic: letters,
        }
        admin.create_topics(
            {name: (partitions, settings) for name, settings in wanted.items()},
            replication_factor=replication_factor,
        )
