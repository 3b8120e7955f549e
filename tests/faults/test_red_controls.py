"""F17: what breaks the rules must be seen; each of these harnesses loses messages on purpose."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from harness.faults import KafkaCluster, Recorder, digest
from tests.faults.stage import Stage
from tests.waiting import within

from kafkamq.queue.names import group_of

pytestmark = [pytest.mark.faults, pytest.mark.timeout(200)]


def test_acks_1_under_a_partition_loses(
    kafka_cluster: KafkaCluster, namespace: str, tmp_path: Path
) -> None:
    """A sender that waits for one replica: the old leader confirms, the new one has nothing."""
    with Stage(kafka_cluster.bootstrap_servers, namespace, tmp_path, partitions=1) as stage:
        topic = stage.config.message_topic
        recorder = Recorder(tmp_path, "careless")
        producer = Producer({"bootstrap.servers": kafka_cluster.bootstrap_servers, "acks": "1"})

        def send(number: int) -> None:
            id_, value = f"careless-{number}", b"%d" % number

            def done(error: KafkaError | None, message: Message) -> None:
                if error is None:
                    place = {"partition": message.partition(), "offset": message.offset()}
                    recorder.record("sent", id=id_, topic=topic, **place)

            recorder.record("send", id=id_, sha=digest(value))
            headers = {"kafkamq-id": id_.encode()}
            producer.produce(topic, value, b"a", 0, headers=headers, on_delivery=done)
            producer.poll(0)
            time.sleep(0.002)

        for number in range(500):
            send(number)
        victim = kafka_cluster.leader_of(topic)
        stage.fault("cut leader from peers", victim)
        kafka_cluster.cut_from_peers(victim)
        end_s = time.monotonic() + 8.0
        number = 500
        while time.monotonic() < end_s:
            send(number)
            number += 1
        kafka_cluster.heal()
        stage.healed()
        producer.flush(within(30))
        report = stage.judge("F17 red: acks=1 under a partition", must_be_settled=False)
    assert report.violations["I1 lost"] > 100


def test_without_a_tracker_messages_stay_open(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    with Stage(bootstrap, namespace, tmp_path, work_s=0.01) as stage:
        worker = stage.start("worker")
        stage.start("sender", count=500, rate=500.0)
        stage.wait_until(lambda: stage.count("received") > 50)
        stage.replace(worker)
        stage.healed()
        stage.wait_for_senders()
        stage.wait_until(lambda: stage.count("received") > 300)
        time.sleep(8.0)
        report = stage.judge("F17 red: no tracker")
    assert report.violations["I1 lost"] > 0


def test_a_commit_before_its_starts_loses(bootstrap: str, namespace: str, tmp_path: Path) -> None:
    """A worker that commits what it polled, and dies before it has STARTed it."""
    with Stage(bootstrap, namespace, tmp_path, partitions=1) as stage:
        stage.start("tracker")
        stage.start("sender", count=300, rate=1000.0)
        stage.wait_for_senders()
        group = group_of(stage.config, "a")
        careless = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
        place = TopicPartition(stage.config.message_topic, 0, 100)
        careless.commit(offsets=[place], asynchronous=False)
        careless.close()
        stage.fault("commit before START", group)
        stage.healed()
        stage.start("worker")
        stage.wait_until(lambda: stage.count("verdict") >= 195)
        time.sleep(2.0)
        report = stage.judge("F17 red: commit before START")
    assert report.violations["I1 lost"] >= 100
    assert report.violations["I9 regress"] >= 100
