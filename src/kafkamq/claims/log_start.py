"""Where a reader of a log of claims begins: a window before its last record, by broker time."""

from __future__ import annotations

import time
from dataclasses import dataclass

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]  # not in its __all__

from kafkamq.claims.topic import CoordinationTopic
from kafkamq.errors import BrokerError
from kafkamq.transport.admin import Admin
from kafkamq.transport.errors import Meaning, broker_error, meaning
from kafkamq.transport.port import Consumer as KafkaConsumer

__all__ = ["Starts", "find_starts"]


@dataclass(frozen=True, slots=True)
class Starts:
    """By partition: where to begin, and where it ended just now.

    Attributes:
        starts: Offset, and the broker's time in s since when that is everything; None: always.
        ends: Offsets.
        latest_ms: The broker's time of the topic's last record; -1: there is none.
    """

    starts: dict[int, tuple[int, float | None]]
    ends: dict[int, int]
    latest_ms: int


def find_starts(
    admin: Admin, consumer: KafkaConsumer, topic: CoordinationTopic, *, window_ms: int
) -> Starts:
    """Ask the brokers.

    Raises:
        BrokerError, DeadlineExceededError: They do not tell.
    """
    name, partitions = topic.name, list(range(topic.partitions))
    bounds = admin.log_bounds(name, partitions)
    latest = _latest_times(admin, name, partitions) if topic.has_broker_time else {}
    now_ms = time.time_ns() // 1_000_000
    since = {number: latest.get(number, now_ms) - window_ms for number in partitions}
    wanted = [TopicPartition(name, number, max(0, at)) for number, at in since.items()]
    try:
        found = consumer.offsets_for_times(wanted, timeout=10.0)
    except KafkaException as error:
        raise broker_error(error, f"looking for the start in {name}") from error
    starts: dict[int, tuple[int, float | None]] = {}
    for place in found:
        if place.error is not None:
            raise broker_error(place.error, f"looking for the start in {name}")
        first, end = bounds[place.partition]
        start = end if place.offset < 0 else max(place.offset, first)
        starts[place.partition] = (start, None if start == 0 else since[place.partition] / 1000)
    ends = {number: end for number, (_, end) in bounds.items()}
    return Starts(starts, ends, max(latest.values(), default=-1))


def _latest_times(admin: Admin, topic: str, partitions: list[int]) -> dict[int, int]:
    """The broker's time of the last record of each partition; absent: it has none."""
    newest = OffsetSpec.max_timestamp()  # type: ignore[no-untyped-call]  # of confluent_kafka
    wanted = {TopicPartition(topic, number): newest for number in partitions}
    futures = admin.client.list_offsets(wanted)
    times: dict[int, int] = {}
    for place, future in futures.items():
        try:
            found = admin.wait(future, f"looking for the last record of {topic}")
        except BrokerError as error:
            if meaning(error) is Meaning.UNSUPPORTED:  # before Kafka 3.0
                return {}
            raise
        if found.offset >= 0 and found.timestamp >= 0:
            times[place.partition] = found.timestamp
    return times
