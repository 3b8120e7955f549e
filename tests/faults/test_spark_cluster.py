"""F4 on a cluster: two executors with a core each; one is killed while the tracker fires."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from harness.faults import read_namespace
from harness.spark_cluster import EXECUTOR_SETTINGS, LocalSpark
from tests.integration.tracker_logs import Logs
from tests.spark.tracker_driver import tracker_driver
from tests.waiting import wait_until

from kafkamq.testing.checker import check_logs
from kafkamq.types import MessageId, Outcome

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.timeout(600)]

PATIENCE_S = 200.0


def test_an_executor_is_killed_while_the_tracker_fires(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    logs = Logs(bootstrap, namespace, marker_partitions=4)
    silent: list[MessageId] = []

    def load(count: int) -> None:
        for partition in (0, 1):
            ids = logs.send(count, partition=partition)
            logs.start(*ids, timeout_ms=1500)
            silent.extend(ids)

    with (
        LocalSpark(tmp_path / "cluster", workers=2) as cluster,
        tracker_driver(
            logs, tmp_path / "checkpoint", master=cluster.master, settings=EXECUTOR_SETTINGS
        ) as process,
    ):

        def are_settled() -> bool:
            assert process.poll() is None, "the driver has ended"
            return set(silent) <= set(logs.ends(Outcome.REDELIVERED))

        load(300)
        wait_until(are_settled, timeout_s=PATIENCE_S)
        wait_until(lambda: len(cluster.executors()) == 2, timeout_s=PATIENCE_S)
        before = len(logs.copied())
        load(3000)
        wait_until(lambda: len(logs.copied()) > before, timeout_s=PATIENCE_S)
        os.kill(cluster.executors()[0], signal.SIGKILL)
        load(300)
        wait_until(are_settled, timeout_s=PATIENCE_S)
    found = read_namespace(logs.config)
    verdict = check_logs(
        messages=found.messages,
        markers=found.markers,
        dead_letters=found.dead_letters,
        must_be_settled=False,
    )
    verdict.require_ok("an executor was killed: ")
    assert Counter(logs.copied()) == Counter((one.partition, one.offset) for one in silent)
