"""A Kafka cluster in memory: topics, time, and what its clients share.

One condition guards everything. A cluster has no threads: what falls due (timeouts of transactions,
sessions and messages) happens when somebody calls or waits.
"""

from __future__ import annotations

import math
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, Uuid

from kafkamq.transport.memory.failures import failure
from kafkamq.transport.memory.faults import Faults
from kafkamq.transport.memory.groups import Groups
from kafkamq.transport.memory.log import Partition, Place, Topic
from kafkamq.transport.memory.transactions import Transactions

if TYPE_CHECKING:
    from kafkamq.transport.memory.producer import Producer

__all__ = ["Cluster", "cluster_of", "forget_cluster"]

_LONGEST_WAIT_S = 1.0
_clusters: dict[str, Cluster] = {}

BROKER_SETTINGS = {
    "auto.create.topics.enable": "false",
    "default.replication.factor": "1",
    "message.max.bytes": "1048588",
    "num.partitions": "1",
    "offsets.retention.minutes": "10080",
    "transaction.max.timeout.ms": "900000",
}


def cluster_of(address: str) -> Cluster:
    """The cluster of an address; made when it is first asked for."""
    name = address.removeprefix("memory://")
    return _clusters.get(name) or _clusters.setdefault(name, Cluster(name))


def forget_cluster(name: str) -> None:
    """The next client of this name finds an empty cluster."""
    _clusters.pop(name, None)


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class Cluster:
    """One cluster of one broker.

    Attributes:
        name: What stands behind ``memory://``.
        now_ms: The broker's time, which may step; by default the wall clock.
        changed: Guards everything, and is notified of every change.
        topics: By name.
        settings: Of the broker.
        faults: What is wrong now.
        groups: Consumer groups and what they committed.
        transactions: Transactional ids.
    """

    def __init__(self, name: str, *, now_ms: Callable[[], int] = _wall_ms) -> None:
        self.name = name
        self.now_ms = now_ms
        self.changed = threading.Condition()
        self.topics: dict[str, Topic] = {}
        self.settings = dict(BROKER_SETTINGS)
        self.faults = Faults()
        self.groups = Groups(self)
        self.transactions = Transactions(self)
        self._last_id = 0
        self._due_s = math.inf
        self._backlog: dict[Producer, None] = {}

    # ---- time

    def due(self, at_s: float) -> None:
        """Something is to be done then (monotonic)."""
        self._due_s = min(self._due_s, at_s)

    def tick(self) -> float:
        """Do what is due; the monotonic time."""
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = math.inf
            self.transactions.expire(now_s)
            for producer in list(self._backlog):
                producer.pump(now_s)
            self.groups.tick(now_s)
            self.changed.notify_all()
        return now_s

    def wait(self, until_s: float) -> None:
        """Wait for a change, but not beyond this time or what is due; hold ``changed``."""
        now_s = time.monotonic()
        until_s = min(until_s, self._due_s, now_s + _LONGEST_WAIT_S)
        self.changed.wait(max(0.0, until_s - now_s))

    def keep(self, producer: Producer, *, has_backlog: bool) -> None:
        """Whether a producer has records that wait for something."""
        if has_backlog:
            self._backlog[producer] = None
        else:
            self._backlog.pop(producer, None)

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

    def partition(self, place: Place) -> Partition | None:
        """The partition, if there is one."""
        topic = self.topics.get(place[0])
        if topic is None or not 0 <= place[1] < len(topic.partitions):
            return None
        return topic.partitions[place[1]]

    def _topics_changed(self) -> None:
        self.groups.topics_changed()
        self.due(0.0)  # records may have waited for the topic
        self.changed.notify_all()
