"""The short form of the fault tests, which `make test` runs: a kill and a partition, judged."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from harness.faults import KafkaCluster
from tests.faults.stage import Stage


@pytest.mark.slow
def test_a_kill_and_a_partition_lose_and_repeat_nothing(
    kafka_cluster: KafkaCluster, namespace: str, tmp_path: Path
) -> None:
    """2,000 messages; the leader of markers killed, that of messages cut off, a worker killed."""
    with Stage(
        kafka_cluster.bootstrap_servers, namespace, tmp_path, redelivery_timeout=5.0
    ) as stage:
        stage.start("tracker")
        workers = [stage.start("worker"), stage.start("worker")]
        stage.start("sender", count=2000, rate=250.0)
        stage.wait_until(lambda: stage.count("received") > 100)
        victim = kafka_cluster.leader_of(stage.config.marker_topic)
        stage.fault("kill broker", victim)
        kafka_cluster.kill(victim)
        stage.replace(workers[0])
        time.sleep(3.0)
        kafka_cluster.heal()
        victim = kafka_cluster.leader_of(stage.config.message_topic)
        stage.fault("cut broker from peers", victim)
        kafka_cluster.cut_from_peers(victim)
        time.sleep(5.0)
        kafka_cluster.heal()
        stage.healed()
        stage.wait_for_senders()
        stage.drain()
        report = stage.judge("short: kill and partition")
    report.require_ok(f"seed {stage.seed}: ")
    assert report.sent == 2000
    assert report.verdict.redelivered > 0
