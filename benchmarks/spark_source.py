"""The Python source beside Spark's own Kafka source: all columns of 100-byte records, to nowhere.

The same topic, read whole in a batch, and as a stream in batches of a quarter; the first batch of a
stream starts its workers and is not counted.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from typing import TYPE_CHECKING

from benchmarks.load import LoadProducer
from benchmarks.rows import IS_BRIEF
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from kafkamq.spark.formats import register_source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["source_rates"]

PARTITIONS = 4
PAYLOAD = b"x" * 100
HEADERS = [("trace", b"0123456789abcdef"), ("tenant", b"blue")]
PATIENCE_S = 240


def source_rates(
    spark: SparkSession, servers: str, *, records: int, rounds: int
) -> dict[tuple[str, str, bool], list[float]]:
    """Rows per second of each round, by (kind, format, with headers); rounds of both alternate."""
    register_source(spark)
    topics = {headers: _topic(servers, records, headers) for headers in (False, True)}
    found: dict[tuple[str, str, bool], list[float]] = {}
    for turn in range(int(IS_BRIEF), rounds + 1):  # the round 0 is there to warm up
        for headers, topic in topics.items():
            for kind, measure in (("batch", _batch), ("stream", _stream)):
                for name in ("kafka", "kafkamq"):
                    rate = measure(spark, servers, topic, name, headers, records)
                    if turn:
                        found.setdefault((kind, name, headers), []).append(rate)
    return found


def _topic(servers: str, records: int, headers: bool) -> str:
    topic = f"bench-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(30)
    producer = LoadProducer(servers, batch_size=500_000)
    for number in range(records):
        producer.write(
            topic,
            PAYLOAD,
            b"%d" % number,
            number % PARTITIONS,
            headers=HEADERS if headers else None,
        )
    producer.confirm()
    return topic


def _options(servers: str, topic: str, name: str, headers: bool) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": servers,
        "subscribe" if name == "kafka" else "topic": topic,
        "includeHeaders": str(headers).lower(),
        "startingOffsets": "earliest",
    }


def _batch(
    spark: SparkSession, servers: str, topic: str, name: str, headers: bool, records: int
) -> float:
    begin_s = time.monotonic()
    frame = spark.read.format(name).options(**_options(servers, topic, name, headers)).load()
    frame.write.format("noop").mode("overwrite").save()
    return records / (time.monotonic() - begin_s)


def _stream(
    spark: SparkSession, servers: str, topic: str, name: str, headers: bool, records: int
) -> float:
    limit = "maxOffsetsPerTrigger" if name == "kafka" else "maxRowsPerTrigger"
    with tempfile.TemporaryDirectory(prefix="kafkamq-bench-") as folder:
        query = (
            spark.readStream.format(name)
            .options(**_options(servers, topic, name, headers))
            .option(limit, records // 4)
            .load()
            .writeStream.format("noop")
            .option("checkpointLocation", f"{folder}/checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(PATIENCE_S), "the source is too slow to be measured"
    counted = [each for each in query.recentProgress if each["numInputRows"]][1:]
    took_s = sum(each["durationMs"]["triggerExecution"] for each in counted) / 1000
    return sum(each["numInputRows"] for each in counted) / took_s
