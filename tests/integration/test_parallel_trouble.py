"""The parallel consumer while Kafka is in trouble: frozen, forbidding, amid a commit."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from tests.integration.parallel_tools import (
    Seen,
    committed,
    fill,
    make,
    make_topic,
    read_all,
)
from tests.waiting import wait_until, within

from kafkamq import BrokerError, OutgoingRecord, ParallelRecord
from kafkamq.config import ServiceConfig
from kafkamq.dev import LocalKafka, cache_dir_from, java_from
from kafkamq.transport.commits import CommitTurns, GroupOffsets, OffsetCommit
from kafkamq.transport.transactions import TransactionalProducer

RULES = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
}


@pytest.fixture(scope="module")
def broker() -> Iterator[LocalKafka]:
    """One that may be frozen."""
    with LocalKafka(cache_dir=cache_dir_from(os.environ), java=java_from(os.environ)) as broker:
        yield broker


@pytest.mark.faults
def test_closing_while_no_broker_answers_is_bounded_and_loses_nothing(
    broker: LocalKafka, namespace: str
) -> None:
    bootstrap = broker.bootstrap_servers
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n}" for n in range(50)])
    seen = Seen(lambda record: time.sleep(0.02))
    kafka = {"socket.timeout.ms": "3000"}
    consumer = make(bootstrap, topic, namespace, kafka=kafka, commit_timeout=1, concurrency=2)
    consumer.poll(seen)
    wait_until(lambda: len(seen) > 10, what="some records")
    broker.pause()
    try:
        wait_until(lambda: len(seen) == 50, what="the others, which were read already")
        assert consumer.health().uncommitted == 1
        consumer.close(timeout=1)
    finally:
        broker.resume()
    again = Seen()
    fill(bootstrap, topic, ["a"])
    with make(bootstrap, topic, namespace) as consumer:
        consumer.poll(again)
        wait_until(lambda: committed(bootstrap, namespace, topic) == (51, ""), "the rest", 60)
    assert {offset for _, offset in [*seen.places, *again.places]} == set(range(51))


def test_a_broker_that_is_frozen_for_a_while_delays_and_nothing_else(
    broker: LocalKafka, namespace: str
) -> None:
    """Commits have no answer for longer than they wait for one."""
    bootstrap = broker.bootstrap_servers
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n % 5}" for n in range(200)])
    seen = Seen(lambda record: time.sleep(0.005))
    kafka = {"socket.timeout.ms": "2000"}
    with make(bootstrap, topic, namespace, kafka=kafka, commit_mode="synchronous") as consumer:
        consumer.poll(seen)
        wait_until(lambda: len(seen) > 20)
        broker.pause()
        time.sleep(4)  # longer than a request waits
        broker.resume()
        wait_until(lambda: committed(bootstrap, namespace, topic) == (200, ""), "the commit", 60)
        assert consumer.health().is_alive
    assert seen.is_in_order()
    assert set(seen.places) == {(0, offset) for offset in range(200)}


def test_a_group_that_becomes_forbidden_is_an_error_that_names_it(
    namespace: str,
) -> None:
    with LocalKafka(
        properties=RULES, cache_dir=cache_dir_from(os.environ), java=java_from(os.environ)
    ) as broker:
        bootstrap = broker.bootstrap_servers
        topic = make_topic(bootstrap, namespace)
        fill(bootstrap, topic, [f"k{n}" for n in range(200)])
        seen = Seen(lambda record: time.sleep(0.01))
        consumer = make(bootstrap, topic, namespace, concurrency=2)
        consumer.poll(seen)
        wait_until(lambda: committed(bootstrap, namespace, topic)[0] > 0, what="a commit")
        forbid(bootstrap, namespace)
        with pytest.raises(BrokerError, match=namespace) as caught:
            consumer.wait(within(60))
        assert "AUTHORIZATION" in caught.value.code
        assert consumer.health().state == "failed"
        consumer.close()


def test_a_broker_that_takes_no_maps(namespace: str) -> None:
    """Commits go without them; transactions do not, as results would come twice."""
    properties = {"offset.metadata.max.bytes": "4"}
    with LocalKafka(
        properties=properties, cache_dir=cache_dir_from(os.environ), java=java_from(os.environ)
    ) as broker:
        bootstrap = broker.bootstrap_servers
        topic = make_topic(bootstrap, namespace)
        fill(bootstrap, topic, [f"k{n}" for n in range(100)])

        def handle(record: ParallelRecord) -> None:
            if record.offset == 3 and not gate.is_set():
                raise OSError("not yet")

        gate, options = threading.Event(), {"backoff": lambda record: 0.05}
        with make(bootstrap, topic, namespace, **options) as consumer:
            consumer.poll_and_produce(handle)
            wait_until(lambda: committed(bootstrap, namespace, topic) == (3, ""))
            gate.set()
            wait_until(lambda: committed(bootstrap, namespace, topic) == (100, ""))
        gate.clear()
        options["commit_mode"] = "transactional"
        consumer = make(bootstrap, topic, f"{namespace}-transactional", **options)
        consumer.poll_and_produce(handle)
        with pytest.raises(BrokerError, match=r"raise offset\.metadata\.max\.bytes"):
            consumer.wait(within(60))
        assert consumer.health().state == "failed"


def forbid(bootstrap: str, group: str) -> None:
    binding = AclBinding(
        ResourceType.GROUP, group, ResourcePatternType.LITERAL, "User:ANONYMOUS", "*",
        AclOperation.READ, AclPermissionType.DENY,
    )  # fmt: skip
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.create_acls([binding]).values():
        future.result(within(20))


def test_revoked_in_the_middle_of_a_transaction(
    bootstrap: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No deadlock, and whoever reads committed data sees each result once."""
    topic, results = make_topic(bootstrap, namespace, 2), make_topic(bootstrap, f"{namespace}-out")
    fill(bootstrap, topic, [f"k{n}" for n in range(400)])

    def handle(record: ParallelRecord) -> OutgoingRecord:
        if record.offset > 50:  # so that there is work left when the other one joins
            joining.wait(within(60))
        return OutgoingRecord(topic=results, value=b"%d %d" % (record.partition, record.offset))

    joining = threading.Event()
    options = {"commit_mode": "transactional", "concurrency": 4, "revoke_timeout": 0.2}
    first = make(bootstrap, topic, namespace, **options)
    send_offsets = TransactionalProducer.send_offsets
    is_inside, revoked = threading.Event(), threading.Event()
    revoke = first._engine.revoked

    def slow(*args: Any, **more: Any) -> None:
        if joining.is_set() and not revoked.is_set():
            is_inside.set()
            assert revoked.wait(within(60))
        send_offsets(*args, **more)

    def told(partitions: object) -> None:
        revoked.set()
        revoke(partitions)

    monkeypatch.setattr(TransactionalProducer, "send_offsets", slow)
    monkeypatch.setattr(first._engine, "revoked", told)
    first.poll_and_produce(handle)
    wait_until(
        lambda: any(committed(bootstrap, namespace, topic, p)[0] > 0 for p in range(2)),
        what="a transaction",
    )
    second = make(bootstrap, topic, namespace, **options)
    joining.set()
    assert is_inside.wait(within(60))
    second.poll_and_produce(handle)
    wait_until(lambda: len(second.health().partitions) == 1, "a partition each", 40)
    ends = log_ends(bootstrap, topic, 2)
    wait_until(
        lambda: (
            [committed(bootstrap, namespace, topic, p) for p in range(2)]
            == [(end, "") for end in ends]
        ),
        "all of it",
        60,
    )
    first.close()
    second.close()
    values = Counter(bytes(record.value()) for record in read_all(bootstrap, results, 400))
    assert len(values) == sum(values.values()) == 400


def log_ends(bootstrap: str, topic: str, partitions: int) -> list[int]:
    reader = Consumer({"bootstrap.servers": bootstrap, "group.id": "ends"})
    places = [TopicPartition(topic, number) for number in range(partitions)]
    ends = [reader.get_watermark_offsets(place, timeout=within(20))[1] for place in places]
    reader.close()
    return ends


def test_results_without_their_offsets_are_never_committed(bootstrap: str, namespace: str) -> None:
    """A handler outlasts the budget and sends its result when its partition is about to go."""
    topic, results = make_topic(bootstrap, namespace), make_topic(bootstrap, f"{namespace}-out")
    fill(bootstrap, topic, ["a", "b"])
    options = {"commit_mode": "transactional", "commit_interval": 60}
    sent, gone = threading.Event(), threading.Event()

    def handle(record: ParallelRecord) -> OutgoingRecord:
        return OutgoingRecord(topic=results, value=b"%d" % record.offset)

    with make(bootstrap, topic, namespace, **options) as consumer:
        engine = consumer._engine
        send = engine.committer.send

        def told(worker: Any) -> Iterator[None]:
            yield from send(worker)
            if not gone.is_set():
                sent.set()

        engine.committer.send = told
        consumer.poll_and_produce(handle)
        assert sent.wait(within(60))
        wait_until(lambda: engine.work_queue.open_count() == 0, what="all results")
        with engine.work_queue.lock:  # as if the partition had gone with no commit in time
            (assignment,) = engine.assignments()
            engine.work_queue.scheduler.close(assignment.partition)
        gone.set()
        consumer.commit_soon()
        wait_until(lambda: engine.stats.commit_failures == 1, what="the abort")
        consumer.commit_soon()
        wait_until(lambda: engine.work_queue.open_count() == 0 and engine.stats.processed >= 4)
    # A transaction's offsets are seen a moment after its commit.
    wait_until(lambda: committed(bootstrap, namespace, topic) == (2, ""), what="the commit")
    values = Counter(record.value() for record in read_all(bootstrap, results, 2))
    assert values == {b"0": 1, b"1": 1}


def test_commits_do_not_wait_for_the_thread_that_polls(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, ["a"] * 100)
    group = GroupOffsets(ServiceConfig(bootstrap_servers=bootstrap), namespace)
    commits = CommitTurns(group)
    is_assigned, is_over = threading.Event(), threading.Event()

    def assigned(*_: object) -> None:
        group.place({(topic, 0): 0})
        is_assigned.set()

    group.client.subscribe([topic], on_assign=assigned)

    def poll() -> None:
        while not is_over.is_set():
            commits.serve()
            with commits.inside():
                group.poll(1000, 0.01)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        assert is_assigned.wait(within(60))
        for offset in range(1, 21):
            commits.commit([OffsetCommit(topic, 0, offset, "x" * 100)])
            assert committed(bootstrap, namespace, topic) == (offset, "x" * 100 + "\0")
        commits.commit([OffsetCommit(topic, 0, 60, "x" * 4095)])
        with pytest.raises(KafkaException):  # too long for the broker, with its NUL
            commits.commit([OffsetCommit(topic, 0, 60, "x" * 4096)])
    finally:
        is_over.set()
        thread.join(within(30))
        with commits.inside():
            group.close()
