"""A marker partition without a leader: what does not go there goes on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    NewTopic,
)
from harness.faults import KafkaCluster
from tests.sure_producer import SureProducer
from tests.waiting import deadline_after, wait_until, within

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.message import Message
from kafkamq.queue.names import group_of
from kafkamq.queue.service import Service
from kafkamq.queue.wire.keys import marker_partition

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

PARTITIONS, MANY = 8, 20
DEAD = {p for p in range(PARTITIONS) if marker_partition(p, 0, 2) == 0}
LIVE = set(range(PARTITIONS)) - DEAD

ALONE = {  # of a topic without copies: a partition dies with its broker
    "message.timestamp.type": "LogAppendTime",
    "min.insync.replicas": "1",
    "retention.bytes": "-1",
    "unclean.leader.election.enable": "false",
}


def make_markers(cluster: KafkaCluster, config: ServiceConfig, victim: int, other: int) -> None:
    """Two marker partitions of one replica each: the first dies with the victim."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    topic = NewTopic(config.marker_topic, 2, replica_assignment=[[victim], [other]], config=ALONE)
    for future in admin.create_topics([topic]).values():
        future.result(within(30))


def send(cluster: KafkaCluster, config: ServiceConfig, count: int) -> None:
    """So many to each partition of the queue."""
    producer = SureProducer({"bootstrap.servers": cluster.bootstrap_servers, "acks": "all"})
    for partition in range(PARTITIONS):
        for number in range(count):
            producer.produce(
                config.message_topic, b"%d/%d" % (partition, number), b"a", partition=partition
            )
    producer.confirm(60)


def received(consumer: Consumer, *, timeout_s: float = 150.0) -> Iterator[Message]:
    """Acked ones, for as long as the test asks; failures that pass are waited out."""
    deadline_s = deadline_after(timeout_s)
    while time.monotonic() < deadline_s:
        try:
            messages = consumer.receive_many(50, 0.5)
        except BrokerError as error:
            if not error.is_retriable:
                raise
            continue
        for message in messages:
            message.ack()
            yield message
    pytest.fail("the rest did not come")


def committed(cluster: KafkaCluster, config: ServiceConfig) -> dict[int, int]:
    from confluent_kafka import Consumer as KafkaConsumer

    reader = KafkaConsumer(
        {"bootstrap.servers": cluster.bootstrap_servers, "group.id": group_of(config, "a")}
    )
    try:
        asked = [TopicPartition(config.message_topic, each) for each in range(PARTITIONS)]
        return {each.partition: each.offset for each in reader.committed(asked, timeout=within(30))}
    finally:
        reader.close()


def test_messages_of_other_marker_partitions_go_on(
    kafka_cluster: KafkaCluster, namespace: str
) -> None:
    assert DEAD
    assert LIVE
    with Service(kafka_cluster.bootstrap_servers, namespace) as service:
        config = service.config
        coordinator = kafka_cluster.coordinator_of(group_of(config, "a"))
        (victim, other) = set(kafka_cluster.brokers) - {coordinator}
        make_markers(kafka_cluster, config, victim, other)
        service.create_topics(partitions=PARTITIONS)
        consumer = service.queue("a", redelivery_timeout=120.0).consumer()
        send(kafka_cluster, config, 1)
        counts: Counter[int] = Counter()
        for message in received(consumer):
            counts[message.message_id.partition] += 1
            if counts.total() == PARTITIONS:
                break
        consumer.flush()
        kafka_cluster.kill(victim)
        admin = AdminClient({"bootstrap.servers": kafka_cluster.bootstrap_servers, "log_level": 0})

        def has_no_leader() -> bool:
            topics = admin.list_topics(config.marker_topic, timeout=within(10)).topics
            return topics[config.marker_topic].partitions[0].leader < 0

        wait_until(has_no_leader)
        for round_ in range(1, 4):  # what came later goes on, too
            send(kafka_cluster, config, MANY)
            wanted = len(LIVE) * round_ * MANY + PARTITIONS
            for message in received(consumer):
                counts[message.message_id.partition] += 1
                if counts.total() == wanted:
                    break
            assert counts == {p: 1 + (round_ * MANY if p in LIVE else 0) for p in counts}
        places = committed(kafka_cluster, config)
        assert {p: places[p] for p in DEAD} == dict.fromkeys(DEAD, 1)  # R5: none is passed over

        kafka_cluster.heal()
        for message in received(consumer):
            counts[message.message_id.partition] += 1
            if counts.total() == PARTITIONS * (1 + 3 * MANY):
                break
        assert set(counts.values()) == {1 + 3 * MANY}
        consumer.flush()
        consumer.close()
        assert set(committed(kafka_cluster, config).values()) == {1 + 3 * MANY}
