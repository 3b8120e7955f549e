"""A topic that anybody writes to is a queue (R37, R38): its records, copies, headers and ends."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytest
from confluent_kafka import Producer as PlainProducer
from confluent_kafka.admin import AdminClient, NewTopic
from tests.integration.queue_logs import (
    die,
    make_service,
    markers,
    read_topic,
    receive_all,
    tracked,
)
from tests.sure_producer import SureProducer
from tests.waiting import deadline_after, wait_until, within

from kafkamq import Message, Queue, Service
from kafkamq.errors import BrokerError, ConfigError
from kafkamq.queue.dead_letters import Selection, read_dead_letters, redrive
from kafkamq.types import MarkerType

BROKER_TIME = {"message.timestamp.type": "LogAppendTime"}
STAMP = "kafkamq-written-for"


def make_topic(bootstrap: str, name: str, partitions: int = 2, **settings: str) -> str:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    config = {key.replace("_", "."): value for key, value in settings.items()}
    (made,) = admin.create_topics([NewTopic(name, partitions, 1, config=config)]).values()
    made.result(within(30))
    wait_until(lambda: name in admin.list_topics(timeout=within(10)).topics)
    return name


def delete_topic(bootstrap: str, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    (gone,) = admin.delete_topics([name]).values()
    gone.result(within(30))
    wait_until(lambda: name not in admin.list_topics(timeout=within(10)).topics)


def write(bootstrap: str, topic: str, *records: Mapping[str, Any], **settings: str) -> None:
    """Write as somebody does who knows nothing of kafkamq."""
    producer = SureProducer({"bootstrap.servers": bootstrap, **settings})
    for record in records:
        producer.produce(topic, **record)
    producer.confirm()


def queue_of(service: Service, topic: str, queue_id: str = "orders", **more: object) -> Queue:
    more.setdefault("redelivery_timeout", 2.0)
    return service.queue(queue_id, topic=topic, **more)  # type: ignore[arg-type]


def receive_one(consumer: object, timeout_s: float = 60.0) -> Message:
    (message,) = receive_all(consumer, 1, timeout_s=timeout_s)  # type: ignore[arg-type]
    return message


@pytest.mark.parametrize("kind", ["LogAppendTime", "CreateTime"])
def test_a_redelivered_message_is_what_its_sender_wrote(
    bootstrap: str, namespace: str, kind: str
) -> None:
    with make_service(bootstrap, namespace) as service, tracked(service.config):
        topic = make_topic(bootstrap, f"{namespace}-orders", message_timestamp_type=kind)
        sent = [
            ("a", b"one"), ("a", None), ("a", b"two"),
        ]  # fmt: skip
        record = {"key": b"\0k\0", "value": b"paid", "headers": sent, "partition": 1}
        write(bootstrap, topic, record)
        with queue_of(service, topic).consumer() as consumer:
            first = receive_one(consumer)
            assert (first.key, first.payload, first.raw_headers) == (
                b"\0k\0", b"paid", tuple(sent),
            )  # fmt: skip
            assert (first.delivery_count, first.id) == (1, "")
            first.nack(delay=0.1)
            second = receive_one(consumer)
            assert (second.delivery_count, second.key, second.payload) == (2, b"\0k\0", b"paid")
            assert second.message_id.partition == 1
            second.ack(wait=True)
        original, copy = read_topic(bootstrap, topic)
    assert (copy.key(), copy.value(), copy.headers()[:3]) == (b"\0k\0", b"paid", sent)
    assert [name for name, _ in copy.headers()[3:]] == [
        STAMP, "kafkamq-origin", "kafkamq-delivery-count",
    ]  # fmt: skip
    origin = f"{topic}/1/0/{original.timestamp()[1]}".encode()
    assert dict(copy.headers())["kafkamq-origin"] == origin


def test_batches_tombstones_and_messages_without_keys(bootstrap: str, namespace: str) -> None:
    with make_service(bootstrap, namespace) as service, tracked(service.config):
        topic = make_topic(bootstrap, f"{namespace}-t", message_timestamp_type="LogAppendTime")
        count = 300
        records = [
            {
                "key": b"%d" % each if each % 3 else None,
                "value": b"%d" % each if each % 5 else None,
            }
            for each in range(count)
        ]
        write(bootstrap, topic, *records)
        with queue_of(service, topic).consumer() as consumer:
            messages = receive_all(consumer, count)
            expected = sorted((m.key or b"", m.payload or b"") for m in messages)
            for message in messages:
                message.nack(delay=0.1)
            again = receive_all(consumer, count)
            for message in again:
                assert message.delivery_count == 2
                message.ack()
            consumer.flush()
            assert any(message.payload is None for message in again)
            assert any(message.key is None for message in again)
            assert sorted((m.key or b"", m.payload or b"") for m in again) == expected
        found = [each.marker for each in markers(service.config)]
        named = [each for each in found if each.type is MarkerType.START]
        assert all(each.message_topic == topic for each in named)
        assert any(each.by_reference for each in named)  # R28: batches, once the time is known


def test_headers_of_our_names_are_their_senders(bootstrap: str, namespace: str) -> None:
    forged = [
        ("kafkamq-delivery-count", b"9"),
        ("kafkamq-ttl-ms", b"1"),
        (STAMP, b"00/elsewhere/orders"),
        ("kafkamq-origin", b"orders/0/0/1"),
        ("kafkamq-reason", b"rejected"),
    ]
    with make_service(bootstrap, namespace) as service, tracked(service.config):
        topic = make_topic(bootstrap, f"{namespace}-f", message_timestamp_type="LogAppendTime")
        write(bootstrap, topic, {"value": b"v", "headers": forged})
        queue = queue_of(service, topic, max_deliveries=2)
        with queue.consumer() as consumer:
            first = receive_one(consumer)
            assert first.delivery_count == 1
            assert tuple(first.headers.items()) == tuple(forged)
            first.nack(delay=0.1)
            second = receive_one(consumer)
            assert second.delivery_count == 2
            assert tuple(second.headers.items()) == tuple(forged)
            second.nack(delay=0.1, reason="enough")
            wait_until(lambda: len(list(read_dead_letters(service.config))) == 1)
            (letter,) = read_dead_letters(service.config)
            assert (letter.reason, letter.delivery_count) == ("max-deliveries", 2)
            assert letter.origin is not None and letter.origin.topic == topic
            assert letter.queue_id == "orders"
            assert redrive(service.config, Selection()).redriven == 1
            third = receive_one(consumer)
            assert (third.payload, third.delivery_count) == (b"v", 1)
            assert third.raw_headers[: len(forged)] == tuple(forged)
            third.ack(wait=True)


def test_what_a_transaction_aborted_is_no_message(bootstrap: str, namespace: str) -> None:
    with make_service(bootstrap, namespace) as service, tracked(service.config):
        topic = make_topic(bootstrap, f"{namespace}-x", 1, message_timestamp_type="LogAppendTime")
        producer = PlainProducer(
            {"bootstrap.servers": bootstrap, "transactional.id": f"{namespace}-plain"}
        )
        producer.init_transactions(30)
        for text, is_kept in ((b"kept-1", True), (b"gone", False), (b"kept-2", True)):
            producer.begin_transaction()
            producer.produce(topic, text)
            producer.flush(within(30))
            (producer.commit_transaction if is_kept else producer.abort_transaction)(30)
        queue = queue_of(service, topic)
        with queue.consumer() as consumer:
            messages = receive_all(consumer, 2)
            assert sorted(m.payload or b"" for m in messages) == [b"kept-1", b"kept-2"]
            for message in messages:
                message.nack(delay=0.1)
            again = receive_all(consumer, 2)
            assert sorted(m.payload or b"" for m in again) == [b"kept-1", b"kept-2"]
            for message in again:
                message.ack(wait=True)


def test_two_queues_of_one_topic_do_not_settle_each_others_messages(
    bootstrap: str, namespace: str
) -> None:
    with make_service(bootstrap, namespace) as service, tracked(service.config):
        topic = make_topic(bootstrap, f"{namespace}-2", 1, message_timestamp_type="LogAppendTime")
        write(bootstrap, topic, {"value": b"v", "key": b"k"})
        bills, parcels = (queue_of(service, topic, name) for name in ("bills", "parcels"))
        with bills.consumer() as biller, parcels.consumer() as packer:
            bill, parcel = receive_one(biller), receive_one(packer)
            bill.nack(delay=0.1)
            parcel.ack(wait=True)
            second = receive_one(biller)
            assert second.delivery_count == 2
            second.ack(wait=True)
            assert packer.receive(3) is None  # the copy is not for it


def test_a_killed_workers_messages_come_again(bootstrap: str, namespace: str) -> None:
    with make_service(bootstrap, namespace) as service, tracked(service.config):
        topic = make_topic(bootstrap, f"{namespace}-k", message_timestamp_type="LogAppendTime")
        producer = queue_of(service, topic).producer()
        for each in range(20):
            producer.send(b"%d" % each, id=f"m{each}", key=b"k")
        producer.flush()
        with Service(bootstrap, namespace) as other:
            doomed = queue_of(other, topic).consumer()
            assert len(receive_all(doomed, 20)) == 20
            die(doomed)
        with queue_of(service, topic).consumer() as consumer:
            again = receive_all(consumer, 20, timeout_s=90)
            assert {m.id for m in again} == {f"m{each}" for each in range(20)}
            assert {m.delivery_count for m in again} == {2}
            for message in again:
                message.ack()
            consumer.flush()


def test_what_a_topic_lacks_is_reported(bootstrap: str, namespace: str, caplog: object) -> None:
    with make_service(bootstrap, namespace) as service:
        compacted = make_topic(bootstrap, f"{namespace}-c", cleanup_policy="compact")
        with pytest.raises(ConfigError, match=r"kafka-configs\.sh .* cleanup\.policy=delete"):
            queue_of(service, compacted).consumer()
        with pytest.raises(ConfigError, match=r"kafka-topics\.sh .*--create"):
            queue_of(service, f"{namespace}-missing").producer()
        with pytest.raises(ConfigError, match="own topics"):
            queue_of(service, service.config.message_topic).consumer()
        topic = make_topic(bootstrap, f"{namespace}-create", message_timestamp_type="CreateTime")
        producer = queue_of(service, topic).producer()
        assert "message.timestamp.type=LogAppendTime" in caplog.text  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match="LogAppendTime"):
            producer.send(b"", ttl=5)
        with pytest.raises(ConfigError, match="delay"):
            producer.send(b"", delay=5)


@pytest.mark.slow
def test_its_options_on_the_command_line(bootstrap: str, namespace: str) -> None:
    with make_service(bootstrap, namespace):
        topic = make_topic(bootstrap, f"{namespace}-cli", message_timestamp_type="CreateTime")
        write(bootstrap, topic, {"value": b"by-others", "key": b"k"})
        run_cli("send", "orders", "by-us", "--topic", topic, at=(bootstrap, namespace))
        shown = run_cli("receive", "orders", "--topic", topic, "-c", "2", at=(bootstrap, namespace))
        assert "by-others" in shown
        assert "by-us" in shown
        found = run_cli("doctor", "--topic", topic, at=(bootstrap, namespace))
        assert "CreateTime" in found


def run_cli(*arguments: str, at: tuple[str, str]) -> str:
    command = [sys.executable, "-m", "kafkamq.cli", *arguments, "-b", at[0], "--namespace", at[1]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=within(120), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


WORKER = """
import sys, time
from kafkamq import Service
bootstrap, namespace, topic = sys.argv[1:]
with Service(bootstrap, namespace, kafka={"session.timeout.ms": "6000"}) as service:
    consumer = service.queue("orders", topic=topic, redelivery_timeout=2.0).consumer()
    held = []
    while len(held) < 20:
        held += consumer.receive_many(20 - len(held), 0.5)
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.faults
def test_a_worker_that_is_killed_loses_nothing(bootstrap: str, namespace: str) -> None:
    with make_service(bootstrap, namespace) as service, tracked(service.config):
        topic = make_topic(bootstrap, f"{namespace}-kill", message_timestamp_type="LogAppendTime")
        sent = [{"value": b"%d" % each, "key": b"%d" % each} for each in range(20)]
        write(bootstrap, topic, *sent)
        command = [sys.executable, "-c", WORKER, bootstrap, namespace, topic]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "held\n"
            worker.kill()
        with queue_of(service, topic).consumer() as consumer:
            again = receive_all(consumer, 20, timeout_s=90)
            for message in again:
                message.ack()
            consumer.flush()
        found = [(m.key, m.payload, m.delivery_count) for m in again]
        assert sorted(found) == sorted((one["key"], one["value"], 2) for one in sent)


@pytest.mark.faults
def test_r13_a_topic_that_is_recreated_has_other_messages(bootstrap: str, namespace: str) -> None:
    with make_service(bootstrap, namespace) as service, tracked(service.config):
        topic = make_topic(bootstrap, f"{namespace}-r", 1, message_timestamp_type="LogAppendTime")
        write(bootstrap, topic, *({"value": b"old-%d" % each} for each in range(3)))
        with queue_of(service, topic).consumer() as consumer:
            for message in receive_all(consumer, 3):
                message.ack()
            consumer.flush()
            delete_topic(bootstrap, topic)
            make_topic(bootstrap, topic, 1, message_timestamp_type="LogAppendTime")
            write(bootstrap, topic, *({"value": b"new-%d" % each} for each in range(3)))
            messages: list[Message] = []
            deadline_s = deadline_after(120)
            while len(messages) < 3 and time.monotonic() < deadline_s:
                try:
                    messages += consumer.receive_many(3, 0.5)
                except BrokerError:  # noqa: PERF203 - while the topic is not there
                    time.sleep(0.5)
            assert sorted(m.payload or b"" for m in messages) == [b"new-0", b"new-1", b"new-2"]
            assert {m.delivery_count for m in messages} == {1}


@pytest.mark.faults
def test_r37_a_topic_that_is_gone_holds_nobody_up_for_long(bootstrap: str, namespace: str) -> None:
    with make_service(bootstrap, namespace) as service, tracked(service.config):
        topic = make_topic(bootstrap, f"{namespace}-g", 1, message_timestamp_type="LogAppendTime")
        write(bootstrap, topic, *({"value": b"%d" % each} for each in range(200)))
        shared = service.queue("mail", redelivery_timeout=within(2.0))
        shared.producer().send(b"letter").result(within(30))
        with Service(bootstrap, namespace) as other:
            for queue, count in ((queue_of(other, topic), 200), (other.queue("mail"), 1)):
                doomed = queue.consumer()
                receive_all(doomed, count)
                die(doomed)
        delete_topic(bootstrap, topic)
        wait_until(lambda: len(list(read_dead_letters(service.config))) == 200, timeout_s=180)
        assert {each.reason for each in read_dead_letters(service.config)} == {"payload-lost"}
        with shared.consumer() as consumer:
            (letter,) = receive_all(consumer, 1, timeout_s=120)
            assert (letter.payload, letter.delivery_count) == (b"letter", 2)
            letter.ack(wait=True)
