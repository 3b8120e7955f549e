"""The topic of statuses has no leader while the last START of a silent partition is read."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    NewTopic,
)
from harness.faults import KafkaCluster
from tests.integration.tracker_logs import Logs, tracker_process
from tests.spark.tracker_driver import tracker_driver
from tests.waiting import wait_until, within

from kafkamq.markers.tracker.records import StatusReader

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.timeout(400)]

T_MS = 6_000
Engine = Callable[[Logs, Path], AbstractContextManager[subprocess.Popen[bytes]]]


@contextmanager
def local(logs: Logs, _folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with tracker_process(logs.config) as process:
        yield process


@contextmanager
def spark(logs: Logs, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with tracker_driver(logs, folder / "checkpoint") as process:
        yield process


def keep_statuses_apart(cluster: KafkaCluster, logs: Logs) -> int:
    """Give the topic of statuses one replica, on a broker that leads nothing else here."""
    topic = logs.config.tracker_topic
    busy = {cluster.leader_of(logs.config.message_topic)}
    busy.add(cluster.leader_of(logs.config.marker_topic))
    (number, *_) = set(cluster.brokers) - busy
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    for future in admin.delete_topics([topic]).values():
        future.result(within(30))

    def is_gone() -> bool:
        return topic not in admin.list_topics(timeout=within(10)).topics

    wait_until(is_gone)
    settings = {"cleanup.policy": "compact", "min.insync.replicas": "1"}
    made = NewTopic(topic, 1, replica_assignment=[[number]], config=settings)
    for future in admin.create_topics([made]).values():
        future.result(within(30))

    assert cluster.leader_of(topic) == number
    return number


@pytest.mark.parametrize("engine", [local, spark])
def test_a_silent_partition_without_statuses_is_not_forgotten(
    kafka_cluster: KafkaCluster, namespace: str, tmp_path: Path, engine: Engine
) -> None:
    logs = Logs(kafka_cluster.bootstrap_servers, namespace, marker_partitions=1, partitions=1)
    victim = keep_statuses_apart(kafka_cluster, logs)
    with engine(logs, tmp_path):

        def is_live() -> bool:
            reader = StatusReader(logs.config)
            try:
                return any(status.is_live for status in reader.read_to_end().values())
            finally:
                reader.close()

        wait_until(is_live, timeout_s=150.0)
        kafka_cluster.kill(victim)
        ids = logs.send(1)
        logs.start(*ids, timeout_ms=T_MS)
        # The broker is down for as long as it takes: what is due may not wait for it.
        wait_until(lambda: logs.copied() == [(ids[0].partition, ids[0].offset)], timeout_s=90.0)
        kafka_cluster.heal()
        later = logs.send(1)
        logs.start(*later, timeout_ms=T_MS)
        wait_until(lambda: len(logs.copied()) == 2, timeout_s=90.0)
        reader = StatusReader(logs.config)

        def is_told() -> bool:
            reader.poll(0.2)
            return [each.redelivered for each in reader.latest.values()] == [2]

        wait_until(is_told)
        reader.close()
