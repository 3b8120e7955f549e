"""A partition of the messages topic without a leader, while what a START holds there falls due."""

from __future__ import annotations

import time

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from harness.faults import KafkaCluster
from tests.faults.test_late_starts import ALONE
from tests.integration.queue_logs import die, make_service, receive_all, tracked
from tests.integration.test_batch_holds import Stage, impatient, places
from tests.sure_producer import SureProducer
from tests.waiting import wait_until, within

from kafkamq.config import ServiceConfig
from kafkamq.queue.names import group_of
from kafkamq.queue.wire.keys import marker_partition
from kafkamq.types import Outcome

__all__ = ["impatient"]

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

PARTITIONS, MANY = 4, 300
OFFLINE = 0
ELSEWHERE = next(
    p for p in range(PARTITIONS) if marker_partition(p, 0, 2) != marker_partition(0, 0, 2)
)
OUTAGE_S = 8.0  # longer than what is gone is looked for


def make_messages(cluster: KafkaCluster, admin: AdminClient, config: ServiceConfig) -> int:
    """Partitions of one replica each; returns the broker with which the one goes offline."""
    coordinator = cluster.coordinator_of(group_of(config, "b"))
    (victim, *others) = sorted(cluster.brokers, key=lambda number: number == coordinator)
    replicas = [[victim], *[[others[n % 2]] for n in range(1, PARTITIONS)]]
    topic = config.message_topic
    new = NewTopic(topic, PARTITIONS, replica_assignment=replicas, config=ALONE)
    admin.create_topics([new])[topic].result(within(30))
    return victim


@pytest.mark.usefixtures("impatient")
def test_it_holds_up_what_it_has_and_nothing_else_and_loses_nothing(
    kafka_cluster: KafkaCluster, namespace: str
) -> None:
    servers = kafka_cluster.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    config = ServiceConfig(bootstrap_servers=servers, namespace=namespace)
    topic = config.message_topic
    victim = make_messages(kafka_cluster, admin, config)

    def has_leader() -> bool:
        found = admin.list_topics(topic, timeout=within(10)).topics[topic].partitions
        return found[OFFLINE].leader >= 0

    with make_service(servers, namespace) as service, tracked(service.config) as tracker:
        stage = Stage(service, timeout_s=15.0)  # longer than elections take
        other = service.queue("b").consumer()
        held = stage.hold(MANY)
        bad = next(one for one in held if one.message_id.partition == ELSEWHERE)
        assert any(one.message_id.partition == OFFLINE for one in held)
        kafka_cluster.kill(victim)
        wait_until(lambda: not has_leader())
        # Other partitions go on: what their workers do, and what a tracker writes of them.
        producer = SureProducer({"bootstrap.servers": servers, "acks": "all"})
        for number in range(50):
            producer.produce(topic, b"%d" % number, b"b", partition=1 + number % (PARTITIONS - 1))
        producer.confirm(60)
        for message in receive_all(other, 50):
            message.ack()
        bad.reject("no good", wait=True)
        other.flush()
        wait_until(lambda: stage.letters() == {(b"rejected", b"a"): 1})

        die(stage.worker)
        others = [one for one in held if one.message_id.partition != OFFLINE and one is not bad]
        wait_until(lambda: stage.ends(Outcome.REDELIVERED).total() == len(others), timeout_s=60)
        time.sleep(OUTAGE_S)
        assert not has_leader()
        assert sum(one.due for one in tracker.statuses()) > 0
        assert stage.letters() == {(b"rejected", b"a"): 1}, "it is not gone"
        kafka_cluster.heal()
        wait_until(lambda: stage.ends(Outcome.REDELIVERED).total() == MANY - 1, timeout_s=120)
        wait_until(lambda: sum(one.entries for one in tracker.statuses()) == 0)
        stage.settle(MANY - 1)
        other.close()
    assert set(stage.copies()) == places(held) - places([bad])
    assert set(stage.copies().values()) == {1}
    assert stage.letters() == {(b"rejected", b"a"): 1}
    stage.judge()
