"""The demo's tracker process: Spark, or with ``--engine local`` the in-process one."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.dev.children import Orders, serve, tell
from kafkamq.dev.demo.session import demo_session
from kafkamq.errors import DeadlineExceededError
from kafkamq.markers.tracker.local import LocalTracker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LIVE_TIMEOUT_S = 300.0  # on a machine that has much else to do
POLL_S = 0.1


def main() -> None:
    """Tracks when told to, until told to stop or until the demo is gone."""
    serve(_run)


def _run(orders: Orders) -> None:
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    orders.follow(inbox.put)
    first = orders.first
    folder = Path(first["folder"])
    with ThreadPoolExecutor(1) as pool, ExitStack() as tracking:
        session = None
        if first["engine"] == "spark":  # beside the broker, before there is something to track
            session = pool.submit(demo_session, "tracker", folder, messages=first["messages"])
        order = inbox.get()
        config = ServiceConfig(
            bootstrap_servers=order["bootstrap_servers"], namespace=order["namespace"]
        )
        settings = TrackerConfig(max_deliveries=order["max_deliveries"])
        if session is None:
            _track_here(config, settings, tracking)
        else:
            checkpoint = (folder / "checkpoint").as_uri()
            _track_on_spark(
                config, settings, tracking, session, checkpoint, order["marker_partitions"]
            )
        tell("tracking")
        inbox.get()
        tracking.close()
        tell("stopped")


def _track_here(config: ServiceConfig, settings: TrackerConfig, tracking: ExitStack) -> None:
    tracker = LocalTracker(config, settings)
    tracking.enter_context(tracker.in_thread())
    _wait_until(lambda: tracker.is_live)


def _track_on_spark(
    config: ServiceConfig,
    settings: TrackerConfig,
    tracking: ExitStack,
    session: Future[SparkSession],
    checkpoint: str,
    partitions: int,
) -> None:
    from kafkamq.spark.tracker.tracker import SparkTracker

    tracker = SparkTracker(config, settings, checkpoint=checkpoint, spark=session.result())
    tracking.enter_context(tracker)
    _wait_until(lambda: sum(seen.is_live for seen in tracker.statuses().values()) == partitions)


def _wait_until(is_live: Callable[[], bool]) -> None:
    """Until each partition has read the TICK of its start: before that it only reads (R17)."""
    deadline = time.monotonic() + LIVE_TIMEOUT_S
    while not is_live():
        if time.monotonic() > deadline:
            raise DeadlineExceededError(f"the tracker was not live after {LIVE_TIMEOUT_S:g} s")
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
