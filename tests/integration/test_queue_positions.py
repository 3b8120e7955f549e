"""Where a queue's workers read on, when the group or the topic's id says less than it did."""

from __future__ import annotations

from dataclasses import replace

import pytest
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import Producer, TopicPartition
from tests.integration.queue_logs import (
    delete_group,
    die,
    make_service,
    receive_all,
    starts,
    tracked,
)
from tests.integration.test_holes import recreate
from tests.integration.tracker_logs import read_topic
from tests.sure_producer import SureProducer
from tests.waiting import wait_until, within

from kafkamq.config import ServiceConfig
from kafkamq.markers.wire.records import encode_group_position, position_prefix
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.names import group_of
from kafkamq.queue.service import Service
from kafkamq.transport.admin import Admin
from kafkamq.transport.log_reader import scan


def send(service: Service, queue_id: str, *payloads: bytes) -> None:
    producer = service.queue(queue_id).producer()
    for delivery in [producer.send(payload) for payload in payloads]:
        delivery.result(within(30))


def ack_all(consumer: Consumer, count: int) -> list[bytes | None]:
    messages = receive_all(consumer, count)
    for message in messages:
        message.ack()
    consumer.flush()
    return [message.payload for message in messages]


def test_a_topic_whose_id_becomes_known_is_the_same_topic(
    bootstrap: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brokers that are upgraded begin to tell ids, and some of them do before the others."""
    monkeypatch.setattr("kafkamq.markers.ack_writer.IDENTITY_AGE_S", 0.2)
    ask, asked = Admin.topics, list[bool]()
    tells = [False]  # whether the broker that answers tells ids

    def topics(self: Admin, names: object) -> object:
        asked.append(tells[0])
        found = ask(self, names)  # type: ignore[arg-type]
        if tells[0]:
            return found
        return {name: replace(topic, topic_id=b"") for name, topic in found.items()}

    monkeypatch.setattr(Admin, "topics", topics)
    with make_service(bootstrap, namespace, partitions=1) as service:
        send(service, "a", b"1", b"2", b"3")
        with service.queue("a").consumer() as consumer:
            assert ack_all(consumer, 3) == [b"1", b"2", b"3"]
            for says in (True, False, True):
                tells[0] = says
                count = len(asked)
                wait_until(lambda: len(asked) > count + 3)  # noqa: B023 - at once
                send(service, "a", b"%d" % len(asked))
                (got,) = ack_all(consumer, 1)
                assert got not in (b"1", b"2", b"3")


def payloads(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


@pytest.mark.parametrize("exactly_once", [False, True])
def test_what_was_acked_does_not_come_again_when_the_group_expired(
    bootstrap: str, namespace: str, exactly_once: bool
) -> None:
    with make_service(bootstrap, namespace) as service:
        queue = service.queue("a", exactly_once=exactly_once)
        send(service, "a", *payloads(0, 100))
        send(service, "b", *payloads(100, 150))
        with queue.consumer() as consumer:
            ack_all(consumer, 100)
        delete_group(bootstrap, group_of(service.config, "a"))
        send(service, "a", *payloads(150, 160))
        with queue.consumer() as consumer:
            assert sorted(ack_all(consumer, 10)) == payloads(150, 160)  # type: ignore[type-var]
            assert consumer.receive(1.0) is None
        with service.queue("b").consumer() as consumer:  # a new queue begins at the log's start
            assert len(ack_all(consumer, 50)) == 50


def kept_positions(service: Service) -> set[bytes | None]:
    """Whose positions are in the ledger: that they were sent there does not mean that they came."""
    config = service.config
    return {record.key() for record in read_topic(config.bootstrap_servers, config.ledger_topic)}


def test_what_a_killed_worker_had_begun_is_the_tracker_s_alone(
    bootstrap: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last positions are not in the ledger, but its STARTs are in the log."""
    with make_service(bootstrap, namespace) as service:
        queue = service.queue("a", redelivery_timeout=within(2.0))
        send(service, "a", *payloads(0, 50))
        worker = queue.consumer()
        first = receive_all(worker, 20)
        for message in first:
            message.ack()
        worker.flush()
        partitions = {message.message_id.partition for message in first}
        wait_until(lambda: len(kept_positions(service)) >= len(partitions))
        monkeypatch.setattr(worker.keeper, "each_second", lambda: None)
        messages = receive_all(worker, 20)
        for message in messages[:15]:
            message.ack()
        worker.flush()
        die(worker)
        done = {message.payload for message in (*first, *messages[:15])}
        # What it had not handed out may be STARTed ahead.
        begun = {(one.partition, one.offset) for one in starts(service.config)}
        left = {
            record.value(): 2 if (record.partition(), record.offset()) in begun else 1
            for record in read_topic(bootstrap, service.config.message_topic)
            if record.value() not in done
        }
        assert {left[message.payload] for message in messages[15:]} == {2}
        delete_group(bootstrap, group_of(service.config, "a"))
        with tracked(service.config), queue.consumer() as consumer:
            came: dict[bytes | None, int] = {}
            while len(came) < 15:
                (message,) = receive_all(consumer, 1)
                message.ack()
                assert message.payload not in came
                came[message.payload] = message.delivery_count
            consumer.flush()
            assert came == left
            assert consumer.receive(1.0) is None


def test_what_a_killed_worker_began_after_a_quiet_hour_does_not_come_again(
    bootstrap: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last position is of before that hour, and other queues were busy meanwhile."""
    with make_service(bootstrap, namespace, partitions=1) as service:
        queue = service.queue("a")
        send(service, "a", *payloads(0, 10))
        worker = queue.consumer()
        for message in receive_all(worker, 10):
            message.ack()
        positions = worker.intake.reader.positions
        wait_until(lambda: positions._known and not positions._pending)
        monkeypatch.setattr(worker.keeper, "each_second", lambda: None)
        (position,) = positions._known.values()
        quiet = replace(position, at_ms=position.at_ms - 3_600_000)
        producer = SureProducer({"bootstrap.servers": bootstrap, "partitioner": "murmur2_random"})
        key = position_prefix(group_of(service.config, "a")) + b"0"
        producer.produce(service.config.ledger_topic, encode_group_position(quiet), key)
        producer.confirm(30)
        send(service, "a", *payloads(10, 20))
        ack_all(worker, 10)
        die(worker)
        delete_group(bootstrap, group_of(service.config, "a"))
        send(service, "a", b"new")
        with queue.consumer() as consumer:
            assert ack_all(consumer, 1) == [b"new"]


def test_a_group_of_the_version_before_is_kept_as_soon_as_it_is_known(
    bootstrap: str, namespace: str
) -> None:
    """It has committed offsets, nothing is in the ledger, and its queue stays empty."""
    with make_service(bootstrap, namespace) as service:
        send(service, "a", *payloads(0, 10))
        topic = service.config.message_topic
        member = KafkaConsumer(
            {"bootstrap.servers": bootstrap, "group.id": group_of(service.config, "a")}
        )
        with Admin(service.config) as admin:
            ends = admin.log_bounds(topic, [0, 1])
        offsets = [TopicPartition(topic, number, end) for number, (_, end) in ends.items()]
        member.commit(offsets=offsets, asynchronous=False)
        member.close()
        with service.queue("a").consumer() as consumer:
            wait_until(lambda: all(consumer.intake.reader.positions.is_known(n) for n in (0, 1)))
        delete_group(bootstrap, group_of(service.config, "a"))
        send(service, "a", b"new")
        with service.queue("a").consumer() as consumer:
            assert ack_all(consumer, 1) == [b"new"]


def test_a_kept_position_is_not_one_of_a_topic_recreated(bootstrap: str, namespace: str) -> None:
    with make_service(bootstrap, namespace, partitions=1) as service:
        send(service, "a", *payloads(0, 10))
        with service.queue("a").consumer() as consumer:
            ack_all(consumer, 10)
        recreate(bootstrap, service.config.message_topic)
        delete_group(bootstrap, group_of(service.config, "a"))
    with Service(bootstrap, namespace) as service:
        send(service, "a", *payloads(10, 30))
        with service.queue("a").consumer() as consumer:
            assert ack_all(consumer, 20) == payloads(10, 30)


def test_a_new_queue_reads_no_more_of_the_ledger_than_may_be_its_own(
    bootstrap: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sinks and redriven dead letters have millions of records there."""
    seen = list[tuple[int | None, bool]]()

    def counted(config: ServiceConfig, topic: str, *args: object, **more: str) -> object:
        for record in scan(config, topic, *args, **more):  # type: ignore[arg-type]
            seen.append((record.partition(), record.key() == b"another's"))
            yield record

    monkeypatch.setattr("kafkamq.markers.positions.scan", counted)
    with make_service(bootstrap, namespace, partitions=2, ledger_partitions=32) as service:
        ledger = service.config.ledger_topic
        send(service, "a", *payloads(0, 20))
        with service.queue("a").consumer() as consumer:
            ack_all(consumer, 20)
        producer = SureProducer({"bootstrap.servers": bootstrap})
        for number in range(32):
            producer.produce(ledger, b"x", b"another's", partition=number)
        producer.confirm(30)
        delete_group(bootstrap, group_of(service.config, "a"))
        seen.clear()
        send(service, "a", b"new")
        with service.queue("a").consumer() as consumer:
            assert ack_all(consumer, 1) == [b"new"]
    places = {number for number, is_forked in seen if is_forked}
    assert 1 <= len(places) <= 2, "a partition of the ledger for one of the messages topic"


@pytest.mark.parametrize("writes_in_transactions", [False, True])
def test_a_quiet_queue_outlives_the_messages_of_others(
    bootstrap: str, namespace: str, monkeypatch: pytest.MonkeyPatch, writes_in_transactions: bool
) -> None:
    """Its worker's position passes these, and the control record of a transaction."""
    monkeypatch.setattr("kafkamq.markers.intake.COMMIT_INTERVAL_MS", 100)
    settings: dict[str, str | int | float | bool] = {"bootstrap.servers": bootstrap}
    if writes_in_transactions:
        settings["transactional.id"] = namespace
    with (
        make_service(bootstrap, namespace, partitions=1) as service,
        Admin(service.config) as admin,
    ):
        topic, group = service.config.message_topic, group_of(service.config, "quiet")
        send(service, "quiet", b"one")
        with service.queue("quiet").consumer() as consumer:
            assert ack_all(consumer, 1) == [b"one"]
            others = Producer(settings)
            if writes_in_transactions:
                others.init_transactions(30)
                others.begin_transaction()
            for _ in range(10):
                others.produce(topic, b"x", b"others")
            if writes_in_transactions:
                others.commit_transaction(30)
            others.flush(within(30))

            def has_passed() -> bool:
                consumer.receive(timeout=0.1)
                (found,) = admin.committed([(group, (topic, 0))])
                return found.offset == 1 + 10 + writes_in_transactions

            wait_until(has_passed, "the position behind all that was written")
        everything = TopicPartition(topic, 0, -1)
        admin.wait(admin.client.delete_records([everything])[everything], "deleting")
        send(service, "quiet", b"two")
        with service.queue("quiet").consumer() as consumer:
            assert ack_all(consumer, 1) == [b"two"]
