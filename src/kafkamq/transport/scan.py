"""Reads a topic once, up to its end: for looks at dead letters, ledgers and waiting messages."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping

from confluent_kafka import Message, TopicPartition

from kafkamq.config import ServiceConfig
from kafkamq.transport.admin import Admin
from kafkamq.transport.clients import open_consumer
from kafkamq.transport.errors import ErrorWatch, Meaning, broker_error, is_retriable, meaning
from kafkamq.transport.settings import consumer_settings

__all__ = ["scan"]

STALL_S = 30.0  # without a record or an end of the log: give up
_BATCH = 1000
_WAIT_MS = 20  # nothing is waited for at the end of the log


def scan(
    config: ServiceConfig,
    topic: str,
    starts: Mapping[int, int] | None = None,
    *,
    group_id: str = "kafkamq.reader",
) -> Generator[Message, None, None]:
    """The committed records of a topic up to the end of each partition, each in log order.

    Args:
        config: The cluster.
        topic: What to read.
        starts: First offset by partition; partitions that are missing are not read. None: all,
            from their beginning.
        group_id: Whose right to describe the group is used; nothing is committed.

    Raises:
        BrokerError: The topic does not exist, a start is outside the log, or the broker refuses.
        DeadlineExceededError: No broker answers.
    """
    if starts is None:
        with Admin(config) as admin:
            count = admin.require_topic(topic).partitions
            bounds = admin.log_bounds(topic, range(count))
        # Told to begin at the beginning librdkafka takes half a second to find it.
        starts = {number: first for number, (first, end) in bounds.items() if end > first}
    if not starts:
        return
    open_partitions = set(starts)
    watch = ErrorWatch(config.bootstrap_servers)
    settings = consumer_settings(
        config,
        group_id=group_id,
        **{"enable.partition.eof": True, "fetch.wait.max.ms": _WAIT_MS},
    )
    consumer = open_consumer(settings, watch)
    doing = f"reading {topic}"
    try:
        consumer.assign(
            [TopicPartition(topic, partition, offset) for partition, offset in starts.items()]
        )
        last_news_s = time.monotonic()
        while open_partitions:
            # `consume` alone would wait for a full batch.
            first = consumer.poll(0.2)
            records = [] if first is None else [first, *consumer.consume(_BATCH, 0)]
            watch.check(doing)
            if records:
                last_news_s = time.monotonic()
            elif time.monotonic() - last_news_s > STALL_S:
                raise watch.deadline(doing, STALL_S)
            yield from _records(records, open_partitions, doing)
    finally:
        consumer.close()


def _records(
    records: Iterable[Message], open_partitions: set[int], doing: str
) -> Iterator[Message]:
    for record in records:
        error = record.error()
        if error is None:
            yield record
        elif meaning(error) is Meaning.LOG_END:
            open_partitions.discard(record.partition() or 0)
        elif not is_retriable(error):
            raise broker_error(error, doing)
