"""A driver that writes a queue's messages to a Delta table with ``ack(table=...)``.

In a process of its own: Delta must be there when the JVM starts. It reads commands from its input:

- ``break``: run the query; its batch fails when it is written, before the ENDs;
- ``die``: the same, and the process kills itself there;
- ``run``: run the query until the queue is empty;
- ``try``: the same; print what it failed with;
- ``failed``: print how many tasks have failed;
- ``rows``: print what is in the table, as JSON;
- ``pruned``: print how many files the table has, and into how many a late batch has to look;
- ``refused``: print what is said of tables that cannot be merged into;
- ``merged``: write rows of many partitions, two batches at once and one of them again; print how
  many rows there are, how many of them differ, how many views are left, and what is said of rows
  without origin.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.spark_cluster import EXECUTOR_SETTINGS
from pyspark.errors import PySparkException
from pyspark.sql import functions as fn
from tests.integration.tracker_logs import Logs
from tests.spark.processes import Told, answer, told

from kafkamq.config import ServiceConfig
from kafkamq.dev.artifacts import fetch_modules, parse_list
from kafkamq.errors import ConfigError, KafkaMQError
from kafkamq.spark import Batch, ack, map_messages, read_queue, register, write_once
from kafkamq.spark.session import build_session
from kafkamq.spark.tables import origin_ranges
from kafkamq.types import Nack

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MAX_ROWS = 10
LATER = b"later"
"""What so begins is nacked at first."""
SLOW = b"slow"
"""What has it in it is in a worker's hands for a while."""
_SLOW_S = 0.1
LATE = 8  # offsets from here on are in the last file
_LIST = Path(__file__).with_name("delta-4.4.0.txt")
_SCHEMA = (
    "origin_topic STRING, origin_partition INT, origin_offset BIGINT, origin_timestamp TIMESTAMP, "
    "result BINARY"
)


@contextmanager
def delta_driver(
    logs: Logs, folder: Path, recipe: str = "table", master: str = "local[2]"
) -> Iterator[Told]:
    """This program in a process of its own; its table is ``done`` in the folder."""
    program = [sys.executable, "-m", "tests.spark.delta_driver"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    arguments = logs.bootstrap, logs.config.namespace, folder, recipe, "3", master
    with told([*program, *arguments], environment) as process:
        yield process


def in_hands(folder: Path, worker: int) -> Path:
    """There while the worker has a row that is slow."""
    return folder / f"in-hands-{worker}"


def by_batch_number(table: str) -> Any:
    """Rely on the batch's number, which does not suffice: Delta passes over one that it knows."""

    def write(frame: DataFrame, batch: int) -> DataFrame:
        origin = [name for name in frame.columns if name.startswith("origin_")]
        rows = frame.where("verdict = 'ack'").select(*origin, "result")
        numbered = rows.write.format("delta").option("txnAppId", "q").option("txnVersion", batch)
        numbered.mode("append").save(table)
        return frame.select("ack_token", "verdict", "delay", "reason")

    return write


def pruned(spark: SparkSession) -> list[str]:
    done = spark.table("done").alias("done")
    late = done.where(origin_ranges(done.where(f"origin_offset >= {LATE}")))
    return [str(len(frame.inputFiles())) for frame in (done, late)]


def merged(spark: SparkSession, folder: str) -> list[str]:
    create(spark, folder, "many", _SCHEMA)

    def rows(first: int, name: str) -> DataFrame:
        return spark.sql(
            "SELECT 't' origin_topic, CAST(id % 70 AS INT) origin_partition, id origin_offset, "
            f"timestamp_millis(id) origin_timestamp, CAST('{name}' AS BINARY) result, "
            "concat('t', id) ack_token, IF(id % 2 = 0, '', NULL) verdict "
            f"FROM range({first}, {first + 140})"
        )

    batches = rows(0, "a"), rows(140, "b")
    write = partial(write_once, table="many")
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write, batches))
    write(batches[0])
    table = spark.table("many")
    views = [each.name for each in spark.catalog.listTables() if each.isTemporary]
    counts = [table.count(), table.distinct().count(), len(views)]
    try:
        write(batches[0].withColumn("origin_offset", fn.lit(None).cast("bigint")))
    except ConfigError as error:
        return [*map(str, counts), str(error)]
    return []


def create(spark: SparkSession, folder: str, name: str, columns: str, kind: str = "delta") -> None:
    spark.sql(f"CREATE TABLE {name} ({columns}) USING {kind} LOCATION '{folder}/{name}'")


def refused(spark: SparkSession, rows: DataFrame, folder: str) -> list[str]:
    create(spark, folder, "plain", _SCHEMA, "parquet")
    create(spark, folder, "short", "result BINARY")
    create(spark, folder, "wide", f"{_SCHEMA}, more INT")
    create(spark, folder, "dated", _SCHEMA.replace("TIMESTAMP", "DATE"))
    create(spark, folder, "worded", _SCHEMA.replace("INT,", "STRING,", 1))
    spark.conf.set("spark.sql.catalog.ice", "org.apache.iceberg.spark.SparkCatalog")

    def said_of(table: str, frame: DataFrame = rows) -> str:
        try:
            ack(frame, checkpoint="unused", table=table)
        except ConfigError as error:
            return str(error)
        return "nothing"

    names = ("plain", "short", "wide", "ice.db.done", "nowhere", "dated", "worded")
    local = rows.withColumn("origin_timestamp", fn.col("origin_timestamp").cast("timestamp_ntz"))
    frames = rows.drop("origin_offset"), local
    return [*map(said_of, names), *(said_of("done", frame) for frame in frames)]


def session(master: str) -> SparkSession:
    modules = parse_list(_LIST.read_text("ascii"), source=_LIST.name)
    folder = fetch_modules("delta-4.4.0", modules)
    return build_session(
        master=master,
        settings={
            **({} if master.startswith("local") else EXECUTOR_SETTINGS),
            "spark.jars": ",".join(str(folder / module.file_name) for module in modules),
            "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
            "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
            "spark.sql.shuffle.partitions": "2",
            "spark.databricks.delta.snapshotPartitions": "2",
        },
    )


def failed_tasks(spark: SparkSession) -> int:
    store = spark.sparkContext._jsc.sc().statusStore()
    return int(store.executorSummary("driver").failedTasks())


def broken(write: Any, *, is_killed: bool) -> Any:
    """A function for ``each_batch`` behind which nothing is acknowledged."""

    def write_and_end(frame: DataFrame, batch: Batch) -> None:
        assert batch.query_id, "the query's, in all its runs"
        write(frame, batch)
        if is_killed:
            os.killpg(os.getpgid(0), signal.SIGKILL)
        raise KafkaMQError("written, and then broken on purpose")

    return write_and_end


def main(
    bootstrap: str, namespace: str, folder: str, recipe: str, timeout: str, master: str
) -> None:
    spark = session(master)
    register(spark, ServiceConfig(bootstrap_servers=bootstrap, namespace=namespace))
    table = f"{folder}/done"
    spark.sql(f"CREATE TABLE IF NOT EXISTS done ({_SCHEMA}) USING delta LOCATION '{table}'")
    output: dict[str, Any] = {"table": "done"}
    write: Any = lambda frame, _: write_once(frame, "done")  # noqa: E731
    if recipe == "by batch number":
        write = by_batch_number(table)
        output = {"each_batch": write}

    def handle(message: Any) -> bytes | Nack:
        if SLOW in message.payload:
            mark = in_hands(Path(folder), os.getpid())
            mark.touch()
            time.sleep(_SLOW_S)
            mark.unlink()
        if message.payload.startswith(LATER) and message.delivery_count == 1:
            return Nack(0)
        return bytes(message.payload)

    def rows() -> DataFrame:
        stream = read_queue(
            spark, "work", redelivery_timeout=float(timeout), max_deliveries=99, max_rows=MAX_ROWS
        )
        return map_messages(stream, handle)

    def run(output: dict[str, Any]) -> list[str]:
        ack(rows(), checkpoint=f"{folder}/checkpoint", available_now=True, **output).wait()
        return []

    def fail(*, is_killed: bool) -> list[str]:
        try:
            return run({"each_batch": broken(write, is_killed=is_killed)})
        except (KafkaMQError, PySparkException) as error:
            assert "broken on purpose" in str(error), error  # noqa: PT017 - no test of pytest's
            return []

    def attempt() -> list[str]:
        try:
            return run(output)
        except Exception as error:  # noqa: BLE001 - whatever a lost process makes Spark raise
            return [str(error).partition("\n")[0]]

    commands: dict[str, Callable[[], list[str]]] = {
        "break": lambda: fail(is_killed=False),
        "die": lambda: fail(is_killed=True),
        "run": lambda: run(output),
        "try": attempt,
        "failed": lambda: [str(failed_tasks(spark))],
        "rows": lambda: [bytes(row.result).decode() for row in spark.table("done").collect()],
        "pruned": lambda: pruned(spark),
        "refused": lambda: refused(spark, rows(), folder),
        "merged": lambda: merged(spark, folder),
    }
    answer(commands)


if __name__ == "__main__":
    main(*sys.argv[1:])
