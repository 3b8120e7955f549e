"""Rows of ``benchmarks/spark.py``: a batch of one record beside a large, sparse state."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

from benchmarks.load import LoadProducer
from benchmarks.rows import Row, scaled
from benchmarks.spark_tracker import wait_until_live

from kafkamq.config import ServiceConfig
from kafkamq.markers.rules.hold import CHUNK_OFFSETS
from kafkamq.markers.wire.markers import encode_marker
from kafkamq.spark.tracker.tracker import SparkTracker
from kafkamq.types import Marker, MarkerType, MessageId

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["sparse_row"]

_DAY_MS = 86_400_000
_GOAL = 1.5
_WARM_UP = scaled(5)  # batches that do not count
_PATIENCE_S = 300.0


def sparse_row(
    config: ServiceConfig,
    running: SparkTracker,
    spark: SparkSession,
    *,
    schedules: int,
    batches: int,
) -> Row:
    """Medians of batches with one KEEPALIVE: beside SCHEDULEs far apart, and beside nothing.

    Args:
        config: A fresh namespace with two marker partitions. The first one gets the SCHEDULEs; the
            batches of the second one, in between, say what a batch costs without.
        running: Its tracker, with a short trigger.
        spark: Its session.
        schedules: How many, each in a chunk of the state of its own.
        batches: How many to measure of each partition.
    """
    producer = LoadProducer(config.bootstrap_servers, linger_ms=0)
    wait_until_live(running, 2)
    _write_schedules(config, producer, schedules)
    deadline_s = time.monotonic() + _PATIENCE_S
    while (found := running.statuses()[0].entries) < schedules:
        assert time.monotonic() < deadline_s, f"only {found} of {schedules} are known"
        running.wait(0.1)
    took: tuple[list[float], list[float]] = ([], [])
    for number in range(_WARM_UP + batches):
        for partition, measured in enumerate(took):
            batch_ms = _batch_ms(config, running, spark, producer, partition)
            if number >= _WARM_UP:
                measured.append(batch_ms)
    with_ms, without_ms = map(statistics.median, took)
    ratio = round(with_ms / without_ms, 3)
    name = f"a batch of one record with {schedules:,} sparse SCHEDULEs, beside none"
    return Row(name, round(with_ms), round(without_ms), ratio, "ms", _GOAL, ratio <= _GOAL)


def _write_schedules(config: ServiceConfig, producer: LoadProducer, schedules: int) -> None:
    for number in range(schedules):
        # As one that was carried: it names the record that it was first.
        first = MessageId(0, number * CHUNK_OFFSETS)
        delay_ms = _DAY_MS + number
        value = encode_marker(Marker(MarkerType.SCHEDULE, first, delay_ms, b"bench", b"x" * 100))
        producer.produce(config.marker_topic, value, partition=0)
        producer.poll(0)
    producer.confirm()


def _batch_ms(
    config: ServiceConfig,
    running: SparkTracker,
    spark: SparkSession,
    producer: LoadProducer,
    partition: int,
) -> float:
    """How long the next batch takes, with one record, by Spark's own measure."""
    (query,) = spark.streams.active
    last = max(each.batch for each in running.statuses().values())
    value = encode_marker(Marker(MarkerType.KEEPALIVE, None, 60_000, consumer_id="nobody"))
    producer.produce(config.marker_topic, value, partition=partition)
    producer.confirm()
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        for progress in query.recentProgress:
            if progress["batchId"] > last and progress["numInputRows"]:
                return float(progress["durationMs"]["triggerExecution"])
        assert time.monotonic() < deadline_s, "a batch does not end"
        running.wait(0.05)
