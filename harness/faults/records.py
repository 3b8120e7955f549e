"""Reads whole topics of a real cluster as the records that checkers take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from confluent_kafka import Consumer, KafkaError, TopicPartition

from kafkamq.config import ServiceConfig
from kafkamq.errors import DeadlineExceededError
from kafkamq.testing.history import LogRecord, record_of


@dataclass(frozen=True, slots=True)
class NamespaceRecords:
    """The committed records of a namespace's topics."""

    messages: list[LogRecord]
    markers: list[LogRecord]
    dead_letters: list[LogRecord]


def read_namespace(config: ServiceConfig) -> NamespaceRecords:
    """Return all records of a namespace, now."""
    topics = (config.message_topic, config.marker_topic, config.dead_letter_topic)
    kafka = config.kafka
    return NamespaceRecords(
        *(read_records(config.bootstrap_servers, topic, kafka=kafka) for topic in topics)
    )


def read_records(
    bootstrap_servers: str,
    topic: str,
    *,
    timeout_s: float = 60.0,
    kafka: Mapping[str, str] | None = None,
) -> list[LogRecord]:
    """Return all committed records of a topic that are there now, partition by partition in order.

    Raises:
        DeadlineExceededError: the ends were not reached in time.
    """
    settings: dict[str, object] = {
        "bootstrap.servers": bootstrap_servers,
        "group.id": "kafkamq.checker",
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "fetch.wait.max.ms": 20,
        "log_level": 0,
        **(kafka or {}),
    }
    deadline_s = time.monotonic() + timeout_s
    records: list[LogRecord] = []
    with contextlib.closing(Consumer(settings)) as consumer:
        count = len(consumer.list_topics(topic, timeout=20).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, number, 0) for number in range(count)])
        ended: set[int | None] = set()
        while len(ended) < count:
            if time.monotonic() > deadline_s:
                raise DeadlineExceededError(f"{topic} was not read to its end in {timeout_s:g} s")
            first = consumer.poll(0.5)
            for message in [] if first is None else [first, *consumer.consume(5000, 0)]:
                error = message.error()
                if error is None:
                    records.append(record_of(cast(Any, message)))
                elif error.code() == KafkaError._PARTITION_EOF:
                    ended.add(message.partition())
    records.sort(key=lambda record: (record.partition, record.offset))
    return records


def committed_positions(
    bootstrap_servers: str, group_id: str, topic: str, partitions: int
) -> Mapping[int, int]:
    """Return what a group has committed in the partitions of a topic; where it has nothing, no
    entry.
    """
    wanted = [TopicPartition(topic, number) for number in range(partitions)]
    settings = {"bootstrap.servers": bootstrap_servers, "group.id": group_id, "log_level": 0}
    with contextlib.closing(Consumer(settings)) as consumer:
        found = consumer.committed(wanted, timeout=10)
    return {place.partition: place.offset for place in found if place.offset >= 0}


def log_end(bootstrap_servers: str, topic: str, partition: int) -> int:
    """Return the offset behind the last record of a partition, open transactions included."""
    settings = {
        "bootstrap.servers": bootstrap_servers,
        "group.id": "kafkamq.checker",
        "isolation.level": "read_uncommitted",
        "log_level": 0,
    }
    with contextlib.closing(Consumer(settings)) as consumer:
        return int(consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)[1])
