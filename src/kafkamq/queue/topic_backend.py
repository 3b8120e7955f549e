"""What backends have in common whose queues have a topic of their own."""

from __future__ import annotations

from collections.abc import Callable

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.queue.backend import ConsumerPlan, StoredMessage
from kafkamq.queue.connections import Connections, Settler
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.dead_letter_writer import RequeueWriter, TopicOutbox
from kafkamq.queue.producer import Producer
from kafkamq.queue.queue_topic import create_queue_topics, require_dead_letters
from kafkamq.queue.wire.keys import join_key
from kafkamq.transport.record import RecordLike, headers_of


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
