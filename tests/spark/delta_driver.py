"""A driver that writes a queue's messages to a Delta table as docs/spark.md says it.

In a process of its own: Delta must be there when the JVM starts. It reads commands from its input:

- ``break``: run the query; its batch fails when it is written, before the ENDs;
- ``die``: the same, and the process kills itself there;
- ``run``: run the query until the queue is empty;
- ``rows``: print what is in the table, as JSON.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

from kafkamq.config import ServiceConfig
from kafkamq.dev.artifacts import fetch_modules
from kafkamq.dev.modules import parse_list
from kafkamq.errors import KafkaMQError
from kafkamq.spark import ack, map_messages, read_queue, register
from kafkamq.spark.session import build_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_LIST = Path(__file__).with_name("delta-4.4.0.txt")
_DOCS = Path(__file__).parents[2] / "docs" / "spark.md"
_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def documented() -> Any:
    """``write_once`` out of the page."""
    (block,) = [text for text in _BLOCK.findall(_DOCS.read_text("utf-8")) if "MERGE INTO" in text]
    names: dict[str, Any] = {}
    exec(block, names)
    return names["write_once"]


def by_batch_number(table: str) -> Any:
    """What does not suffice: Delta passes over a batch whose number it knows."""

    def write(frame: DataFrame, batch: int) -> DataFrame:
        origin = [name for name in frame.columns if name.startswith("origin_")]
        rows = frame.where("verdict = 'ack'").select(*origin, "result")
        numbered = rows.write.format("delta").option("txnAppId", "q").option("txnVersion", batch)
        numbered.mode("append").save(table)
        return frame.select("ack_token", "verdict", "delay", "reason")

    return write


def session() -> SparkSession:
    modules = parse_list(_LIST.read_text("ascii"), source=_LIST.name)
    folder = fetch_modules("delta-4.4.0", modules)
    return build_session(
        settings={
            "spark.jars": ",".join(str(folder / module.file_name) for module in modules),
            "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
            "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
            "spark.sql.shuffle.partitions": "2",
            "spark.databricks.delta.snapshotPartitions": "2",
        }
    )


def main(bootstrap: str, namespace: str, folder: str, recipe: str, timeout: str) -> None:
    spark = session()
    register(spark, ServiceConfig(bootstrap_servers=bootstrap, namespace=namespace))
    table = f"{folder}/done"
    spark.sql(
        "CREATE TABLE IF NOT EXISTS done (origin_topic STRING, origin_partition INT, "
        "origin_offset BIGINT, origin_timestamp TIMESTAMP, result BINARY) "
        f"USING delta LOCATION '{table}'"
    )
    write = documented() if recipe == "documented" else by_batch_number(table)

    def handle(message: Any) -> bytes:
        return bytes(message.payload)

    def run(each_batch: Any) -> None:
        stream = read_queue(spark, "work", redelivery_timeout=float(timeout), max_deliveries=9)
        query = ack(
            map_messages(stream, handle),
            checkpoint=f"{folder}/checkpoint",
            each_batch=each_batch,
            available_now=True,
        )
        query.wait()

    for line in sys.stdin:
        command = line.strip()

        def ends(frame: DataFrame, batch: int, command: str = command) -> None:
            write(frame, batch)
            if command == "die":
                os.killpg(os.getpgid(0), signal.SIGKILL)
            raise KafkaMQError("written, and then broken on purpose")

        if command in ("break", "die"):
            try:
                run(ends)
            except (KafkaMQError, PySparkException) as error:
                assert "broken on purpose" in str(error), error  # noqa: PT017 - no test of pytest's
        elif command == "run":
            run(write)
        rows = spark.table("done").collect() if command == "rows" else []
        said = json.dumps([bytes(row.result).decode() for row in rows])
        sys.stdout.write(f"said {said}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
