"""A Kafka cluster in memory: topics, time, and what its clients share.

One condition guards everything. A cluster has no threads: what falls due (timeouts of transactions,
sessions and messages) happens when somebody calls or waits.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping

from confluent_kafka import KafkaError, Uuid

from kafkamq.transport.memory.failures import failure
from kafkamq.transport.memory.groups import Groups
from kafkamq.transport.memory.log import Partition, Topic
from kafkamq.transport.memory.state import State
from kafkamq.transport.memory.transactions import Transactions

_clusters: dict[str, MemoryKafka] = {}

BROKER_SETTINGS = {
    "auto.create.topics.enable": "false",
    "default.replication.factor": "1",
    "group.consumer.heartbeat.interval.ms": "5000",
    "group.consumer.session.timeout.ms": "45000",
    "message.max.bytes": "1048588",
    "num.partitions": "1",
    "offset.metadata.max.bytes": "4096",
    "offsets.retention.minutes": "10080",
    "transaction.max.timeout.ms": "900000",
}


def cluster_of(address: str) -> MemoryKafka:
    """The cluster of an address; made when it is first asked for."""
    name = address.removeprefix("memory://")
    return _clusters.get(name) or _clusters.setdefault(name, MemoryKafka(name))


def forget_cluster(name: str) -> None:
    """The next client of this name finds an empty cluster."""
    _clusters.pop(name, None)


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class MemoryKafka(State):
    """One cluster of one broker; its time is the wall clock by default."""

    def __init__(self, name: str, *, now_ms: Callable[[], int] = _wall_ms) -> None:
        super().__init__(now_ms)
        self.name = name  # what stands behind ``memory://``
        self.settings = dict(BROKER_SETTINGS)  # the broker's
        self.groups = Groups(self)
        self.transactions = Transactions(self, self.groups.keep_known)
        self._last_id = 0

    def _work(self, now_s: float) -> None:
        self.transactions.expire(now_s)
        super()._work(now_s)
        self.groups.tick(now_s)

    # ---- topics

    def create_topic(
        self, name: str, partitions: int = 1, settings: Mapping[str, str] | None = None
    ) -> Topic:
        """Create a topic.

        Raises:
            KafkaException: It exists, or the number cannot be.
        """
        with self.changed:
            if name in self.topics:
                raise failure(KafkaError.TOPIC_ALREADY_EXISTS, f"Topic '{name}' already exists.")
            if partitions < 1:
                raise failure(KafkaError.INVALID_PARTITIONS, "Number of partitions must be >= 1")
            self._last_id += 1
            topic_id = Uuid(zlib.crc32(self.name.encode()), self._last_id)
            topic = self.topics[name] = Topic(name, topic_id, partitions, settings or {})
            self._topics_changed()
            return topic

    def delete_topic(self, name: str) -> None:
        """Delete a topic, and what groups have committed for it."""
        with self.changed:
            if self.topics.pop(name, None) is None:
                raise failure(KafkaError.UNKNOWN_TOPIC_OR_PART)
            self.groups.forget_topic(name)
            self._topics_changed()

    def add_partitions(self, name: str, count: int) -> None:
        """More partitions; clients that know the topic do not hear of it at once."""
        with self.changed:
            topic = self.topics[name]
            first = len(topic.partitions)
            topic.partitions += [Partition(topic, first + number) for number in range(count)]
            self._topics_changed()

    def delete_records(self, name: str, number: int, before: int) -> None:
        """Retention: what lies below this offset is gone."""
        with self.changed:
            self.topics[name].partitions[number].delete_before(before)
            self.changed.notify_all()

    def truncate(self, name: str, number: int, end: int) -> None:
        """An unclean election: what stands from this offset on is gone, and the log goes on there.

        No transaction may be open in the partition.
        """
        with self.changed:
            self.topics[name].partitions[number].truncate(end)
            self.changed.notify_all()

    def is_too_long(self, metadata: str | None) -> bool:
        """Whether the coordinator takes no such metadata of an offset; a NUL comes with them."""
        size = len(metadata.encode()) + 1 if metadata else 0
        return size > int(self.settings["offset.metadata.max.bytes"])

    def _topics_changed(self) -> None:
        self.groups.topics_changed()
        self.due(0.0)  # records may have waited for the topic
        self.changed.notify_all()
