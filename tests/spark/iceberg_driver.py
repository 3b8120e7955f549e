"""A worker on Spark 4.1 that writes a queue's messages to an Iceberg table with ``write_once``.

In an environment of its own, where kafkamq has nothing of its extra ``spark``. It reads commands:

- ``die``: write a batch of messages, and kill its process group before they are acknowledged;
- ``run``: write and acknowledge messages until none has come for a while;
- ``rows``: print what is in the table, as JSON;
- ``merged``: write batches with copies, several rows of a message, and verdicts, at once and again;
  print what there is then, and how;
- ``raced``: write a batch beside another driver, that commits the same rows first;
- ``compacted``: write one beside a compaction of the table;
- ``refused``: print what is said of tables and rows that will not do.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as fn
from tests.spark.processes import answer
from tests.waiting import wait_until

import kafkamq.spark
from kafkamq import LeaseLostError, Service
from kafkamq.errors import ConfigError
from kafkamq.spark import rows_of, write_once
from kafkamq.spark.tables import origin_ranges

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TABLE = "ice.shop.done"
MANY = 10
IDLE_S = 5.0
_COLUMNS = (
    "origin_topic STRING, origin_partition INT, origin_offset BIGINT, origin_timestamp TIMESTAMP, "
    "value BINARY"
)


def session(jars: str, warehouse: str) -> SparkSession:
    builder = SparkSession.builder.master("local[2]")
    for name, value in {
        "spark.jars": jars,
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.catalog.ice": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.ice.type": "hadoop",
        "spark.sql.catalog.ice.warehouse": warehouse,
    }.items():
        builder = builder.config(name, value)
    spark: SparkSession = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def create(spark: SparkSession, table: str, columns: str = _COLUMNS) -> None:
    spark.sql(f"CREATE TABLE IF NOT EXISTS {table} ({columns}) USING iceberg")


def values(spark: SparkSession, table: str) -> list[str]:
    return [row[0] for row in spark.table(table).selectExpr("CAST(value AS STRING)").collect()]


def append(frame: DataFrame, table: str) -> None:
    """Append each batch, which does not suffice: a repeated one is there twice."""
    frame.select(*frame.sparkSession.table(table).columns).writeTo(table).append()


def merge(frame: DataFrame, table: str) -> None:
    """Merge, which does not suffice for two at once: Spark makes an append of it."""
    frame.createOrReplaceTempView("new")
    frame.sparkSession.sql(
        f"MERGE INTO {table} done USING new ON done.origin_topic = new.origin_topic AND "
        "done.origin_partition = new.origin_partition AND done.origin_offset = new.origin_offset "
        "WHEN NOT MATCHED THEN INSERT (origin_topic, origin_partition, origin_offset, "
        "origin_timestamp, value) VALUES (new.origin_topic, new.origin_partition, "
        "new.origin_offset, new.origin_timestamp, new.value)"
    )


WRITES: dict[str, Callable[[DataFrame, str], None]] = {
    "once": write_once,
    "append": append,
    "merge": merge,
}


def rows(spark: SparkSession, first: int, count: int = 140, copy: str = "a") -> DataFrame:
    """Of each message two rows; what is sent to odd places is nacked by one of them."""
    return spark.sql(
        "SELECT 't' origin_topic, CAST(id % 70 AS INT) origin_partition, id origin_offset, "
        "timestamp_millis(id) origin_timestamp, CAST(concat(id, part) AS BINARY) value, "
        f"concat(id, '{copy}') ack_token, IF(id % 7 = 3 AND part = 'y', 'nack', NULL) verdict "
        f"FROM range({first}, {first + count}) LATERAL VIEW explode(array('x', 'y')) AS part"
    )


def merged(spark: SparkSession) -> list[str]:
    create(spark, "ice.shop.many")
    batches = rows(spark, 0), rows(spark, 140)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda batch: write_once(batch, "ice.shop.many"), batches))
    twice = rows(spark, 0, copy="b").union(rows(spark, 0, copy="c"))
    for batch in (batches[0], rows(spark, 100, 100, copy="b"), twice):  # all of it is there
        write_once(batch, "ice.shop.many")
    write_once(rows(spark, 270, 20, copy="d"), "ice.shop.many")
    table = spark.table("ice.shop.many")
    kinds = spark.sql("SELECT operation FROM ice.shop.many.snapshots").collect()
    late = spark.table("ice.shop.many").alias("done")
    late = late.where(origin_ranges(rows(spark, 285, 1)))
    late.collect()
    scan: Any = late._jdf.queryExecution().executedPlan().collectLeaves().head()
    read, passed = (
        scan.metrics().apply(name).value() for name in ("resultDataFiles", "skippedDataFiles")
    )
    operations = [row.operation for row in kinds]
    return [*map(str, (table.count(), table.distinct().count(), read, passed)), *operations]


def raced(spark: SparkSession, folder: str, write: Callable[[DataFrame, str], None]) -> list[str]:
    """Another driver commits the same rows first."""
    name = f"ice.shop.raced_{write.__name__}"
    create(spark, name)
    batch = rows(spark, 0, 10).where("verdict IS NULL")
    paused(spark, folder, batch, name, write, lambda: write(batch, name))
    return values(spark, name)


def compacted(spark: SparkSession, folder: str) -> list[str]:
    """A batch is written beside a compaction; print how often it was joined, and what is there."""
    name = "ice.shop.compacted"
    create(spark, name)
    for first in range(0, 30, 10):
        write_once(rows(spark, first, 10), name)
    call = "CALL ice.system.rewrite_data_files(table => 'shop.compacted', "
    call += "options => map('rewrite-all', 'true'))"
    batch = rows(spark, 20, 20)
    times = paused(spark, folder, batch, name, write_once, lambda: spark.sql(call).collect())
    kinds = spark.sql(f"SELECT operation FROM {name}.snapshots ORDER BY committed_at").collect()
    table = spark.table(name)
    counts = table.count(), table.distinct().count()
    return [*map(str, (times, *counts)), *(row.operation for row in kinds)]


def paused(
    spark: SparkSession,
    folder: str,
    batch: DataFrame,
    table: str,
    write: Callable[[DataFrame, str], None],
    meanwhile: Callable[[], object],
) -> int:
    """Have a batch wait, when it is joined with the table; return how often it was joined."""
    here, go = Path(folder, f"{table}-here"), Path(folder, f"{table}-go")

    @fn.udf(returnType="binary", useArrow=False)
    def wait(value: bytes) -> bytes:
        with here.open("ab") as file:
            file.write(value + b"\n")
        wait_until(go.exists)
        return value

    # In one partition, to leave a core to the others.
    slow = batch.coalesce(1).withColumn("value", wait("value"))
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(write, slow, table)
        wait_until(lambda: here.exists() or done.done())
        meanwhile()
        go.touch()
        done.result()
    written = here.read_bytes().split()
    return len(written) // len(set(written))


def refused(spark: SparkSession) -> list[str]:
    create(spark, "ice.shop.short", "value BINARY")
    create(spark, "ice.shop.worded", _COLUMNS.replace("INT,", "STRING,", 1))
    frame = rows(spark, 0, 1)
    none = frame.withColumn("origin_offset", fn.lit(None).cast("bigint"))

    def said_of(table: str, frame: DataFrame = frame) -> str:
        try:
            write_once(frame, table)
        except ConfigError as error:
            return str(error)
        return "nothing"

    done: Any = spark.table(TABLE)._jdf.queryExecution().analyzed().collectLeaves().head()
    done.table().table().manageSnapshots().createBranch("next").commit()
    names = "short", "worded", "nowhere", "no-table", "done.branch_next"
    said = [said_of(f"ice.shop.{name}") for name in names]
    spark.conf.set("spark.wap.branch", "next")
    said.append(said_of(TABLE))
    spark.conf.unset("spark.wap.branch")
    said += [said_of(TABLE, frame) for frame in (frame.drop("ack_token"), none)]
    try:
        kafkamq.spark.read_queue(spark, "work")
    except ConfigError as error:
        said.append(str(error))
    return said


class Worker:
    """Receives, writes, acknowledges."""

    def __init__(self, spark: SparkSession, bootstrap: str, namespace: str) -> None:
        self._spark = spark
        queue = Service(bootstrap, namespace).queue("work", redelivery_timeout=3, max_deliveries=99)
        self._consumer = queue.consumer()

    def run(self, write: Callable[[DataFrame, str], None], *, dies: bool = False) -> list[str]:
        while messages := self._consumer.receive_many(MANY, IDLE_S):
            write(rows_of(self._spark, messages), TABLE)
            if dies:
                os.killpg(os.getpgid(0), signal.SIGKILL)
            for message in messages:
                with suppress(LeaseLostError):  # it is in the table, as its copy will find
                    message.ack()
            with suppress(LeaseLostError):
                self._consumer.flush()
        return []


def main(jars: str, folder: str, recipe: str, bootstrap: str, namespace: str) -> None:
    spark = session(jars, f"{folder}/warehouse")
    create(spark, TABLE)
    write = WRITES[recipe]
    worker = Worker(spark, bootstrap, namespace) if bootstrap else None
    commands: dict[str, Callable[[], list[str]]] = {
        "rows": lambda: values(spark, TABLE),
        "merged": lambda: merged(spark),
        "raced": lambda: raced(spark, folder, write),
        "compacted": lambda: compacted(spark, folder),
        "refused": lambda: refused(spark),
    }
    if worker is not None:
        commands["run"] = lambda: worker.run(write)
        commands["die"] = lambda: worker.run(write, dies=True)
    answer(commands)


if __name__ == "__main__":
    main(*sys.argv[1:])
