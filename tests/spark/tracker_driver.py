"""A Spark tracker in a process of its own, for tests that kill it or what belongs to it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.integration.tracker_logs import Logs
from tests.spark.processes import driver

__all__ = ["tracker_driver"]

_PROGRAM = """
import json, sys
from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.spark.tracker.tracker import run_spark_tracker
service, tracker, spark = map(json.loads, sys.argv[1:])
run_spark_tracker(ServiceConfig(**service), TrackerConfig(**tracker), **spark)
"""


@contextmanager
def tracker_driver(
    logs: Logs,
    checkpoint: Path,
    *,
    launcher: Sequence[str] = (),
    output: Path | None = None,
    master: str = "local[2]",
    max_actions: int = 100,
    settings: Mapping[str, str] | None = None,
    standby: bool = False,
) -> Iterator[subprocess.Popen[bytes]]:
    """A driver with its JVM, in a process group of their own; killed at the end.

    Args:
        logs: The namespace that it serves.
        checkpoint: A folder of this machine.
        launcher: A command to run it behind.
        output: Gets what it says; None: what this process says goes there too.
        master: Where Spark runs.
        max_actions: The most that it settles in one transaction.
        settings: Spark properties.
        standby: Whether it waits while another one is active.
    """
    config = logs.config
    service = {"bootstrap_servers": config.bootstrap_servers, "namespace": config.namespace}
    tracker = {"max_offsets_per_commit": max_actions, "position_interval_ms": 500}
    spark = {"master": master, "trigger_s": 0.2, "checkpoint": f"file://{checkpoint}"}
    values = (service, tracker, {**spark, "settings": settings, "standby": standby})
    with driver(_PROGRAM, *map(json.dumps, values), launcher=launcher, output=output) as process:
        yield process
