"""F5, F6, F7: brokers that die, are cut off, stand still; 3 brokers, replication 3, min ISR 2."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.stage import Stage

from kafkamq.kafka.reader import group_of
from kafkamq.testing.faults import KafkaCluster

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

COUNT, RATE = 6000, 400.0


def play(
    cluster: KafkaCluster, namespace: str, folder: Path, title: str, act: Callable[[Stage], None]
) -> None:
    """Two trackers, three workers, a sender; ``act`` among them; then everything must settle."""
    with Stage(cluster.bootstrap_servers, namespace, folder) as stage:
        for role in ("tracker", "tracker", "worker", "worker", "worker"):
            stage.start(role)
        stage.start("sender", count=COUNT, rate=RATE, delayed=0.01)
        stage.wait_until(lambda: stage.count("received") > 300)
        act(stage)
        cluster.heal()
        stage.healed()
        stage.wait_for_senders()
        stage.drain()
        report = stage.judge(title)
    report.require_ok(f"seed {stage.seed}: ")
    assert report.sent == COUNT
    assert sum(report.faults.values())


def of_messages(cluster: KafkaCluster, stage: Stage) -> int:
    return cluster.leader_of(stage.config.message_topic)


def of_markers(cluster: KafkaCluster, stage: Stage) -> int:
    return cluster.leader_of(stage.config.marker_topic)


def of_group(cluster: KafkaCluster, stage: Stage) -> int:
    return cluster.coordinator_of(group_of(stage.config, "a"))


def of_metadata(cluster: KafkaCluster, stage: Stage) -> int:
    return cluster.controller()


Who = Callable[[KafkaCluster, Stage], int]


@pytest.mark.parametrize("who", [of_messages, of_markers, of_group, of_metadata])
def test_leaders_that_are_killed(
    kafka_cluster: KafkaCluster, namespace: str, tmp_path: Path, who: Who
) -> None:
    def act(stage: Stage) -> None:
        victim = who(kafka_cluster, stage)
        stage.fault(f"kill leader {who.__name__}", victim)
        kafka_cluster.kill(victim)
        time.sleep(6.0)

    play(kafka_cluster, namespace, tmp_path, f"F5 kill leader {who.__name__}", act)


def test_a_rolling_restart(kafka_cluster: KafkaCluster, namespace: str, tmp_path: Path) -> None:
    def act(stage: Stage) -> None:
        for number in kafka_cluster.brokers:
            stage.fault("restart broker", number)
            kafka_cluster.restart(number)
            kafka_cluster.wait_until_whole()

    play(kafka_cluster, namespace, tmp_path, "F5 rolling restart", act)


@pytest.mark.parametrize("who", [of_messages, of_markers, of_group])
def test_leaders_that_are_cut_from_their_peers(
    kafka_cluster: KafkaCluster, namespace: str, tmp_path: Path, who: Who
) -> None:
    """Clients still reach the old leader."""

    def act(stage: Stage) -> None:
        victim = who(kafka_cluster, stage)
        stage.fault(f"cut leader {who.__name__} from peers", victim)
        kafka_cluster.cut_from_peers(victim)
        time.sleep(8.0)

    play(kafka_cluster, namespace, tmp_path, f"F6 cut leader {who.__name__} from peers", act)


def test_a_broker_that_clients_do_not_reach(
    kafka_cluster: KafkaCluster, namespace: str, tmp_path: Path
) -> None:
    """It leads on, for its peers see it: what it leads stands still for longer than a lease."""

    def act(stage: Stage) -> None:
        victim = of_markers(kafka_cluster, stage)
        stage.fault("cut broker from clients", victim)
        kafka_cluster.cut_from_clients(victim)
        time.sleep(8.0)

    play(kafka_cluster, namespace, tmp_path, "F6 broker cut from clients", act)


@pytest.mark.parametrize("who", [of_messages, of_markers])
def test_leaders_that_stand_still(
    kafka_cluster: KafkaCluster, namespace: str, tmp_path: Path, who: Who
) -> None:
    """SIGSTOP for longer than its session and than a lease."""

    def act(stage: Stage) -> None:
        victim = who(kafka_cluster, stage)
        stage.fault(f"pause leader {who.__name__}", victim)
        kafka_cluster.pause(victim)
        time.sleep(8.0)

    play(kafka_cluster, namespace, tmp_path, f"F7 pause leader {who.__name__}", act)
