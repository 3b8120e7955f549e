"""SIGKILL of the Spark driver under load and while it fires: nothing lost, nothing twice."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.spark.tracker_driver import tracker_driver
from tests.spark.tracker_runs import PATIENCE_S, Logs, settled, tracking, verdict
from tests.waiting import wait_until

from kafkamq.types import MessageId, Outcome

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(1500)]

KILLS = 3
BATCH = 2000


@pytest.mark.faults
def test_a_driver_that_is_killed_while_it_fires(
    spark: SparkSession, bootstrap: str, namespace: str, checkpoint: str
) -> None:
    logs = Logs(bootstrap, namespace, marker_partitions=2)
    silent: set[MessageId] = set()
    rejected: set[MessageId] = set()
    cut_short = 0
    for turn in range(KILLS):
        # Small transactions: on a busy machine, too, it is seen to fire long before it is done.
        with tracker_driver(logs, Path(checkpoint), max_actions=10) as process:
            ids = logs.send(BATCH, partition=turn % 2)
            logs.start(*ids, timeout_ms=1500)
            logs.end(*ids[::4])
            logs.end(*ids[1::4], outcome=Outcome.REJECT, reason="no")
            rejected.update(ids[1::4])
            silent.update(set(ids) - set(ids[::4]) - set(ids[1::4]))
            own = {(one.partition, one.offset) for one in ids}

            def fires(
                process: subprocess.Popen[bytes] = process, own: set[tuple[int, int]] = own
            ) -> bool:
                assert process.poll() is None, "the driver ended by itself"
                return len(own.intersection(logs.copied())) > 20

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
