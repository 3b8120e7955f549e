"""The demo's Spark process: the redelivery tracker, then the verdict's SQL, in one JVM.

With ``--engine local`` the tracker is the in-process one, and Spark only judges.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.dev.demo.children import Orders, tell
from kafkamq.dev.demo.verdict import HISTORY_SCHEMA, verdict_rows
from kafkamq.errors import DeadlineExceededError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["main"]

_log = logging.getLogger(__name__)
LIVE_TIMEOUT_S = 90.0
POLL_S = 0.1
MASTER = "local[2]"
DRIVER_MEMORY = "1g"
QUICK_JVM = "-XX:TieredStopAtLevel=1"  # a minute's work: the better code would come too late


def main() -> None:
    """Obeys until the demo is gone."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("py4j").setLevel(logging.WARNING)
    orders = Orders()
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    orders.follow(inbox.put)
    try:
        folder = Path(orders.first["folder"])
        _Engine(folder, messages=orders.first["messages"]).run(inbox)
    except BaseException as error:
        _log.exception("the demo's Spark process failed")
        tell("error", text=f"{type(error).__name__}: {error}")
        raise


class _Engine:
    def __init__(self, folder: Path, *, messages: int) -> None:
        self._folder = folder
        self._shuffle_partitions = str(1 + min(3, messages // 50_000))
        self._spark: SparkSession | None = None
        self._failed: BaseException | None = None
        self._starting = threading.Thread(target=self._start_spark, name="spark-start")
        self._starting.start()
        self._tracking = ExitStack()
        self._config: ServiceConfig | None = None

    def run(self, inbox: queue.SimpleQueue[dict[str, Any]]) -> None:
        while True:
            order = inbox.get()
            if order["do"] == "track":
                self._track(order)
                tell("tracking")
            elif order["do"] == "verdict":
                tell("verdict", rows=self._judge(order["histories"]))

    def _start_spark(self) -> None:
        from kafkamq.spark.session import build_session, session_settings

        # Spark leaves files behind when it ends with us; there they go with the demo's folder.
        files = self._folder / "spark"
        files.mkdir()
        usual = session_settings(master=MASTER, driver_memory=DRIVER_MEMORY)
        options = "spark.driver.extraJavaOptions"
        try:
            self._spark = build_session(
                app_name="kafkamq demo",
                master=MASTER,
                driver_memory=DRIVER_MEMORY,
                settings={
                    options: f"{usual[options]} {QUICK_JVM} -Djava.io.tmpdir={files}",
                    "spark.local.dir": str(files),
                    "spark.sql.warehouse.dir": str(files / "warehouse"),
                    "spark.sql.shuffle.partitions": self._shuffle_partitions,
                    "spark.sql.debug.maxToStringFields": "200",
                },
            )
        except BaseException as error:  # noqa: BLE001  raised where Spark is needed
            self._failed = error

    def _session(self) -> SparkSession:
        self._starting.join()
        if self._failed is not None:
            raise self._failed
        assert self._spark is not None
        return self._spark

    def _track(self, order: dict[str, Any]) -> None:
        config = self._config = ServiceConfig(
            bootstrap_servers=order["bootstrap_servers"], namespace=order["namespace"]
        )
        settings = TrackerConfig(max_deliveries=order["max_deliveries"])
        if order["engine"] == "spark":
            from kafkamq.spark.tracker import SparkTracker

            checkpoint = (self._folder / "checkpoint").as_uri()
            spark_tracker = SparkTracker(
                config, settings, checkpoint=checkpoint, spark=self._session()
            )
            self._tracking.enter_context(spark_tracker)
            partitions = order["marker_partitions"]
            _wait_until(
                lambda: (
                    sum(status.is_live for status in spark_tracker.statuses().values())
                    == partitions
                )
            )
        else:
            from kafkamq.kafka.tracker import LocalTracker

            local_tracker = LocalTracker(config, settings)
            self._tracking.enter_context(local_tracker.in_thread())
            _wait_until(lambda: local_tracker.is_live)

    def _judge(self, histories: str) -> list[dict[str, Any]]:
        assert self._config is not None, "it tracked before"
        self._tracking.close()
        spark = self._session()
        _register_views(spark, self._config)
        spark.read.schema(HISTORY_SCHEMA).json(histories).createOrReplaceTempView("history")
        return verdict_rows(spark)


def _wait_until(is_live: Callable[[], bool]) -> None:
    """Until each partition has read the TICK of its start: before that it only reads (R17)."""
    deadline = time.monotonic() + LIVE_TIMEOUT_S
    while not is_live():
        if time.monotonic() > deadline:
            raise DeadlineExceededError(f"the tracker was not live after {LIVE_TIMEOUT_S:g} s")
        time.sleep(POLL_S)


def _register_views(spark: SparkSession, config: ServiceConfig) -> None:
    from kafkamq.spark.views import Views

    views = Views(spark, config)
    for name in ("messages", "markers", "dead_letters"):
        frame: DataFrame = getattr(views, name)()
        frame.createOrReplaceTempView(name)


if __name__ == "__main__":
    main()
