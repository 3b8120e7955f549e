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
from kafkamq.dev.demo.session import demo_session
from kafkamq.dev.demo.verdict import HISTORY_SCHEMA, verdict_rows
from kafkamq.spark.views import Views

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOWEST_PRIORITY = 19


def main() -> None:
    """Rehearses, then gives a verdict per order, until the demo is gone."""
    serve(_run)


def _run(orders: Orders) -> None:
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


if __name__ == "__main__":
    main()
