"""The demo's judge: a Spark process of its own that asks SQL what the logs say.

It starts when the tracker tracks, with the lowest priority, and rehearses: the first run of the
queries costs three times as much as the next, as Spark compiles them. What it finds then is thrown
away.
"""

from __future__ import annotations

import os
import queue
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kafkamq.config import ServiceConfig
from kafkamq.dev.children import Orders, serve, tell
from kafkamq.dev.demo.verdict import HISTORY_SCHEMA, verdict_rows
from kafkamq.spark.formats import Views
from kafkamq.spark.session import build_session, session_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOWEST_PRIORITY = 19
MASTER = "local[2]"
DRIVER_MEMORY = "1g"
# Better code would come too late.
QUICK_JVM = "-XX:TieredStopAtLevel=1"
MESSAGES_PER_TASK = 50_000


def _run(orders: Orders) -> None:
    """Rehearses, then gives a verdict per order, until the demo is gone."""
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    orders.follow(inbox.put)
    os.nice(LOWEST_PRIORITY)
    first = orders.first
    spark = demo_session("judge", Path(first["folder"]), messages=first["messages"])
    _ask(spark, orders.config, first["histories"])
    while True:
        inbox.get()
        tell("verdict", rows=_ask(spark, orders.config, first["histories"]))


def _ask(spark: SparkSession, config: ServiceConfig, histories: str) -> list[dict[str, Any]]:
    views = Views(spark, config)
    for name in ("messages", "markers", "dead_letters"):
        getattr(views, name)().createOrReplaceTempView(name)
    spark.read.schema(HISTORY_SCHEMA).json(histories).createOrReplaceTempView("history")
    return verdict_rows(spark)


def demo_session(name: str, folder: Path, *, messages: int) -> SparkSession:
    """Return the session of the process ``name``, sized for so many messages in all."""
    # Spark leaves files behind when it ends with us.
    files = folder / f"spark-{name}"
    files.mkdir()
    usual = session_settings(master=MASTER, driver_memory=DRIVER_MEMORY)
    options = "spark.driver.extraJavaOptions"
    return build_session(
        app_name=f"kafkamq demo: {name}",
        master=MASTER,
        driver_memory=DRIVER_MEMORY,
        settings={
            options: f"{usual[options]} {QUICK_JVM} -Djava.io.tmpdir={files}",
            "spark.local.dir": str(files),
            "spark.sql.warehouse.dir": str(files / "warehouse"),
            "spark.sql.shuffle.partitions": str(1 + min(3, messages // MESSAGES_PER_TASK)),
            "spark.sql.debug.maxToStringFields": "200",
        },
    )


if __name__ == "__main__":
    serve(_run)
