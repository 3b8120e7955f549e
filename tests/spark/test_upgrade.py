"""Checkpoints of an earlier release, of its tracker and of streams, go on with this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.faults.test_spark_delta import Table
from tests.integration.tracker_logs import Logs
from tests.spark.queue_driver import open_messages, output
from tests.upgrade import streams
from tests.upgrade.left import judged, left_behind, take_over
from tests.upgrade.streams import BATCH, MESSAGES, STREAMS
from tests.waiting import wait_until, within

from kafkamq import Service
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.spark.tracker.tracker import SparkTracker

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.timeout(900)]


def test_a_checkpoint_goes_on_where_it_was(spark: SparkSession, tmp_path: Path) -> None:
    with (
        left_behind(tmp_path, "left-on-spark") as kafka,
        Service(kafka.bootstrap_servers, namespace="spark") as service,
    ):
        checkpoint = tmp_path / "checkpoint"
        newest = max(int(path.name) for path in (checkpoint / "commits").glob("[0-9]*"))
        with SparkTracker(
            service.config, checkpoint=f"file://{checkpoint}", spark=spark, trigger_s=0.2
        ) as tracker:
            take_over(service)
            assert min(status.batch for status in tracker.statuses().values()) > newest


def written(logs: Logs, folder: Path) -> Counter[bytes]:
    if logs.namespace.startswith("table"):
        return Counter(row[-1] for row in Table(folder / logs.namespace).rows().elements())
    return output(logs, f"{logs.namespace}-out")


@pytest.mark.parametrize(
    ("mode", "are_copied"), [("resumed", False), ("resumed", True), ("careless", False)]
)
def test_streams_that_were_killed_go_on(tmp_path: Path, mode: str, are_copied: bool) -> None:
    """At once; when what was held has come again as copies; and as a control without care."""
    with left_behind(tmp_path, "left-on-spark") as kafka, ExitStack() as trackers:
        namespaces = {name: Logs(kafka.bootstrap_servers, name) for name in STREAMS}
        left = {name: written(logs, tmp_path).total() for name, logs in namespaces.items()}
        assert left["topic_starts"] == left["table_starts"] == BATCH
        assert BATCH < left["topic_output"] < MESSAGES == left["table_output"]
        assert BATCH < left["sink_output"] < MESSAGES
        queues = {name: logs for name, logs in namespaces.items() if name != "sink_output"}
        held = {name: len(open_messages(logs)) for name, logs in queues.items()}
        assert held.pop("topic_output") == MESSAGES - left["topic_output"]
        assert set(held.values()) == {BATCH}
        if are_copied:
            for logs in queues.values():
                trackers.enter_context(LocalTracker(logs.config).in_thread())
            wait_until(lambda: not any(map(open_messages, queues.values())))

        program = [sys.executable, streams.__file__, mode, kafka.bootstrap_servers, tmp_path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        subprocess.run([*program, *STREAMS], env=environment, check=True, timeout=within(300))

        wanted = Counter(b"%d" % number for number in range(MESSAGES))
        found = {name: written(logs, tmp_path) for name, logs in namespaces.items()}
        if mode == "careless":
            twice = {name for name, rows in found.items() if rows > wanted}
            assert twice == {"topic_output", "table_output", "sink_output"}
            found |= dict.fromkeys(twice, wanted)
        assert found == dict.fromkeys(STREAMS, wanted)
        for logs in queues.values():
            verdict = judged(logs.config)
            assert (verdict.sent, verdict.acked) == (MESSAGES, MESSAGES)
