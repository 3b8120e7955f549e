"""The exactly-once sink beside Spark's own Kafka sink, which writes at least once.

The same rows, from files that both read inside the JVM, in batches of 200,000 rows of 100 bytes;
the first batches of a query are not counted: they start its workers.
"""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.rows import scaled
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from kafkamq.spark import register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["sink_rates"]

BATCH_ROWS = scaled(200_000)
WARM_UP = scaled(2)  # batches
PATIENCE_S = 240
_COLUMNS = (
    "CAST(CAST(id AS STRING) AS BINARY) AS key",
    "CAST(rpad(CAST(id AS STRING), 100, 'x') AS BINARY) AS value",
)
_HEADERS = (
    "array(named_struct('key', 'trace', 'value', CAST(CAST(id AS STRING) AS BINARY)), "
    "named_struct('key', 'tenant', 'value', CAST('blue' AS BINARY))) AS headers"
)


def sink_rates(
    spark: SparkSession, servers: str, *, batches: int, rounds: int
) -> dict[tuple[str, bool], list[float]]:
    """Rows per second of each round, by (format, with headers); rounds of both alternate."""
    register(spark)
    found: dict[tuple[str, bool], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="kafkamq-bench-") as folder:
        _write_files(spark, f"{folder}/rows", batches + WARM_UP)
        for turn in range(rounds):
            for headers in (False, True):
                for name in ("kafka", "kafkamq-sink"):
                    checkpoint = f"{folder}/{name}-{headers}-{turn}"
                    frame = _frame(spark, f"{folder}/rows", headers)
                    rate = _rate(frame, servers, name, checkpoint, batches + WARM_UP)
                    found.setdefault((name, headers), []).append(rate)
    return found


def _write_files(spark: SparkSession, folder: str, files: int) -> None:
    """One folder for each batch, of two files: two tasks."""
    for number in range(files):
        rows = spark.range(number * BATCH_ROWS, (number + 1) * BATCH_ROWS, numPartitions=2)
        rows.selectExpr("id").write.parquet(f"{folder}/{number}")


def _frame(spark: SparkSession, folder: str, headers: bool) -> DataFrame:
    columns = (*_COLUMNS, _HEADERS) if headers else _COLUMNS
    stream = spark.readStream.schema("id BIGINT").option("maxFilesPerTrigger", 2)
    return stream.parquet(f"{folder}/*").selectExpr(*columns)


def _rate(frame: DataFrame, servers: str, name: str, checkpoint: str, batches: int) -> float:
    topic = f"bench-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(topic, 4, 1)])[topic].result(30)
    query = (
        frame.writeStream.format(name)
        .option("kafka.bootstrap.servers", servers)
        .option("topic", topic)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(PATIENCE_S), "the sink is too slow to be measured"
    progress = [each for each in query.recentProgress if each["numInputRows"]]
    assert len(progress) == batches, f"{len(progress)} batches instead of {batches}"
    counted = progress[WARM_UP:]
    took_s = sum(each["durationMs"]["triggerExecution"] for each in counted) / 1000
    admin.delete_topics([topic])[topic].result(30)
    assert not Path(checkpoint, "state").exists()
    return sum(each["numInputRows"] for each in counted) / took_s
