"""SIGKILL of the Spark driver under load and while it fires: nothing lost, nothing twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from tests.spark.tracker_runs import PATIENCE_S, Logs, settled, tracking, verdict, wait_until

from kafkamq.types import MessageId, Outcome

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(580)]

KILLS = 3
BATCH = 2000

_PROGRAM = """
import sys
from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.spark.tracker import run_spark_tracker
config = ServiceConfig(bootstrap_servers=sys.argv[1], namespace=sys.argv[2])
tracker = TrackerConfig(max_offsets_per_commit=30, position_interval_ms=500)
run_spark_tracker(config, tracker, checkpoint=sys.argv[3], trigger_s=0.2)
"""


@contextmanager
def driver(logs: Logs, checkpoint: str) -> Iterator[subprocess.Popen[bytes]]:
    """A driver with its JVM, in a process group of their own; killed at the end."""
    config = logs.config
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, config.bootstrap_servers, config.namespace, checkpoint],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def test_a_driver_that_is_killed_while_it_fires(
    spark: SparkSession, bootstrap: str, namespace: str, checkpoint: str
) -> None:
    logs = Logs(bootstrap, namespace, marker_partitions=2)
    silent: set[MessageId] = set()
    rejected: set[MessageId] = set()
    cut_short = 0
    for turn in range(KILLS):
        with driver(logs, checkpoint) as process:
            ids = logs.send(BATCH, partition=turn % 2)
            logs.start(*ids, timeout_ms=1500)
            logs.end(*ids[::4])
            logs.end(*ids[1::4], outcome=Outcome.REJECT, reason="no")
            rejected.update(ids[1::4])
            silent.update(set(ids) - set(ids[::4]) - set(ids[1::4]))
            before = len(logs.copied())

            def fires(process: subprocess.Popen[bytes] = process, before: int = before) -> bool:
                assert process.poll() is None, "the driver ended by itself"
                return len(logs.copied()) > before + 20

            wait_until(fires, timeout_s=PATIENCE_S)
        cut_short += len(logs.copied()) < len(silent)
    with tracking(logs, spark, checkpoint) as running:
        wait_until(lambda: settled(logs, *silent, *rejected), timeout_s=PATIENCE_S)
        # At rest: all that it will ever write is in the logs.
        wait_until(
            lambda: all(status.entries == 0 for status in running.statuses().values()),
            timeout_s=PATIENCE_S,
        )
    assert cut_short >= KILLS - 1, "the kills came too late to show anything"
    assert Counter(logs.copied()) == Counter((one.partition, one.offset) for one in silent)
    assert Counter(logs.ends(Outcome.REDELIVERED)) == Counter(silent)
    assert Counter(logs.ends(Outcome.DEAD_LETTERED)) == Counter(rejected)
    result = verdict(logs)
    result.require_ok()
    assert result.lost == 0
