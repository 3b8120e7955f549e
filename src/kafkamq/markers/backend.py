"""The backend ``markers``: a topic of markers, folded by a tracker, remembers what is done."""

from __future__ import annotations

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import ConfigError, WireError
from kafkamq.markers.consumer import MarkersConsumer
from kafkamq.markers.membership import check_session, look_for_mqgo_workers
from kafkamq.markers.producer import AnyTopicProducer, MarkersProducer
from kafkamq.markers.tokens import TokenSettler
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.backend import Connections, ConsumerPlan, Settler, StoredMessage
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.namespace import create_queue_topics
from kafkamq.queue.producer import Producer
from kafkamq.transport.record import RecordLike, headers_of


class _MarkersBackend:
    def open_consumer(
        self, connections: Connections, queue: QueueConfig, plan: ConsumerPlan
    ) -> Consumer:
        if not queue.topic:
            look_for_mqgo_workers(connections.namespace, queue)
        check_session(connections.config, queue)
        return MarkersConsumer(connections.namespace_of(queue), queue, plan.on_lease_lost)

    def open_producer(self, connections: Connections, queue: QueueConfig) -> Producer:
        connections.namespace_of(queue).require(queue.max_lease_ms)
        make = AnyTopicProducer if queue.topic else MarkersProducer
        return make(connections.sender(queue), queue)

    def open_settler(self, connections: Connections, queue: QueueConfig) -> Settler:
        return TokenSettler(connections.namespace_of(queue), queue)

    def create_topics(
        self, config: ServiceConfig, queue: QueueConfig, *, partitions: int, replication_factor: int
    ) -> None:
        """``Service.create_topics`` makes those that all queues share; most queues have none."""
        if not queue.topic:
            raise ConfigError(
                f"queue {queue.queue_id!r} shares its namespace's topics, whose partitions "
                "Service.create_topics() sets"
            )
        create_queue_topics(
            config, queue, partitions=partitions, replication_factor=replication_factor
        )

    def stored_payload(
        self, config: ServiceConfig, record: RecordLike, queue_id: str
    ) -> StoredMessage | None:
        """Return a message of the shared topic, or the SCHEDULE of a delayed one."""
        if record.topic() != config.marker_topic:
            return StoredMessage(record.key() or b"", record.value(), headers_of(record))
        try:
            marker = decode_marker(record.value())
        except WireError:
            return None
        return StoredMessage(marker.key, marker.value, marker.headers)


backend = _MarkersBackend()
