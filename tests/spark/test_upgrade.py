"""A checkpoint of an earlier release's tracker goes on with this one."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.upgrade.left import left_behind, take_over

from kafkamq import Service
from kafkamq.spark.tracker.tracker import SparkTracker


@pytest.mark.faults
def test_a_checkpoint_goes_on_where_it_was(spark: SparkSession, tmp_path: Path) -> None:
    with (
        left_behind(tmp_path) as kafka,
        Service(kafka.bootstrap_servers, namespace="spark") as service,
    ):
        checkpoint = tmp_path / "checkpoint"
        newest = max(int(path.name) for path in (checkpoint / "commits").glob("[0-9]*"))
        with SparkTracker(
            service.config, checkpoint=f"file://{checkpoint}", spark=spark, trigger_s=0.2
        ) as tracker:
            take_over(service)
            assert min(status.batch for status in tracker.statuses().values()) > newest
