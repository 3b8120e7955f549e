"""What a send leaves in the logs: keys, partitions, headers, delays, cancellations, ttl."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
from tests.integration.queue_logs import (
    dead_letters,
    ends,
    make_service,
    markers,
    read_topic,
    receive_all,
    set_topic,
    tracked,
)
from tests.waiting import wait_until, within

from kafkamq.config import Backoff
from kafkamq.errors import ConfigError, StateError
from kafkamq.queue.producer import Delivery
from kafkamq.queue.service import Service
from kafkamq.queue.wire.keys import key_partition
from kafkamq.types import MarkerType, Outcome, OutgoingMessage, ScheduleToken


@pytest.fixture
def service(bootstrap: str, namespace: str) -> Iterator[Service]:
    with make_service(bootstrap, namespace) as service:
        yield service


def test_the_record_is_what_the_protocol_says(service: Service) -> None:
    producer = service.queue("a").producer()
    sent = producer.send(b"x", key="user", headers={"h": b"1"}, ttl=timedelta(seconds=90)).result()
    bare = producer.send(b"", id="mine").result()
    null = producer.send(None).result()
    records = {
        (r.partition(), r.offset()): r
        for r in read_topic(service.config.bootstrap_servers, service.config.message_topic)
    }
    record = records[sent.partition, sent.offset]
    assert (record.key(), record.value()) == (b"a\0user", b"x")
    assert record.headers() == [
        ("h", b"1"),
        ("kafkamq-id", sent.id.encode()),
        ("kafkamq-ttl-ms", b"90000"),
    ]
    assert record.timestamp()[1] == sent.timestamp_ms
    assert sent.partition == key_partition(b"a\0user", 2)
    assert uuid.UUID(sent.id).version == 7
    record = records[bare.partition, bare.offset]
    assert (record.key(), record.value()) == (b"a", b"")
    assert record.headers() == [("kafkamq-id", b"mine")]
    assert records[null.partition, null.offset].value() is None


def test_a_message_is_what_was_sent(service: Service) -> None:
    producer = service.queue("a").producer()
    producer.send(None, key=b"k\0k", headers={"h": b"1", "n": b""}, id="label").result()
    (message,) = receive_all(service.queue("a").consumer(), 1)
    assert message.payload is None
    assert message.key == b"k\0k"
    assert message.headers == {"h": b"1", "n": b""}
    assert (message.id, message.queue_id, message.delivery_count) == ("label", "a", 1)
    assert message.deadline > time.monotonic()
    message.ack(wait=True)


def test_without_a_key_all_partitions_are_used(service: Service) -> None:
    producer = service.queue("a").producer()
    sent = [delivery.result() for delivery in [producer.send(b"x") for _ in range(60)]]
    assert {each.partition for each in sent} == {0, 1}
    assert len({each.id for each in sent}) == 60


def test_deliveries_are_futures(service: Service) -> None:
    producer = service.queue("a").producer()
    called = threading.Event()
    told: list[Delivery] = []

    def call(delivery: Delivery) -> None:
        told.append(delivery)
        called.set()

    delivery = producer.send(b"x")
    delivery.add_done_callback(call)
    assert called.wait(within(60))
    assert told == [delivery]
    assert delivery.done()
    delivery.add_done_callback(call)  # done already: at once
    assert told == [delivery, delivery]
    assert delivery.result(0) == delivery.result(0)


def test_many_threads_share_a_producer(service: Service) -> None:
    producer = service.queue("a").producer()
    sent: list[Delivery] = []

    def work() -> None:
        sent.extend(producer.send_many([OutgoingMessage(payload=b"x")] * 500))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    producer.flush()
    assert all(delivery.done() for delivery in sent)
    places = {(d.result().partition, d.result().offset) for d in sent}
    assert len(places) == 2000


def test_a_delayed_message_comes_when_its_time_has_come(service: Service) -> None:
    with tracked(service.config):
        producer = service.queue("a").producer()
        sent = producer.send(b"late", key="k", headers={"h": b"1"}, delay=0.8).result()
        assert sent.schedule == ScheduleToken("a", sent.partition, sent.offset)
        assert sent.topic == service.config.marker_topic
        (message,) = receive_all(service.queue("a").consumer(), 1)
    assert message.timestamp_ms - sent.timestamp_ms > 800
    assert (message.payload, message.key, message.delivery_count) == (b"late", b"k", 1)
    assert (message.headers, message.id) == ({"h": b"1"}, sent.id)


def test_a_cancelled_message_never_comes(service: Service) -> None:
    with tracked(service.config):
        producer = service.queue("a").producer()
        doomed = producer.send(b"never", delay=4.0).result()
        kept = producer.send(b"kept", delay=4.0).result()
        assert doomed.schedule is not None
        producer.cancel(doomed.schedule)
        consumer = service.queue("a").consumer()
        (message,) = receive_all(consumer, 1)
        assert message.id == kept.id
        message.ack(wait=True)
        assert consumer.receive(1.5) is None
    (end,) = [
        r
        for r in markers(service.config)
        if r.marker.type is MarkerType.END
        and r.marker.outcome is Outcome.ACK
        and r.marker.of_schedule
    ]
    assert (end.partition, end.marker.message_id.offset) == (  # type: ignore[union-attr]
        doomed.schedule.partition,
        doomed.schedule.offset,
    )


def test_cancelling_too_late_says_so(service: Service) -> None:
    with tracked(service.config):
        producer = service.queue("a").producer()
        sent = producer.send(b"x", delay=0.1).result()
        (message,) = receive_all(service.queue("a").consumer(), 1)
        message.ack(wait=True)
        assert sent.schedule is not None
        with pytest.raises(StateError, match="was due"):
            producer.cancel(sent.schedule)


def test_a_token_of_something_else_is_refused(service: Service) -> None:
    producer = service.queue("a").producer()
    other = service.queue("b").producer().send(b"x", delay=60).result()
    assert other.schedule is not None
    with pytest.raises(StateError, match="no delayed message"):
        producer.cancel(other.schedule)
    producer.cancel(producer.send(b"x", delay=60).result().schedule)  # type: ignore[arg-type]


def test_only_a_token_of_a_place_in_the_log_cancels(service: Service) -> None:
    """A sent message's own offset would name another one, among the markers."""
    producer = service.queue("a").producer()
    first = producer.send(b"x", delay=60).result()
    assert first.schedule is not None
    for wrong in (first, None, (first.partition, first.offset)):
        with pytest.raises(ConfigError, match="token is a"):
            producer.cancel(wrong)  # type: ignore[arg-type]
    token = first.schedule
    beyond = replace(token, offset=token.offset + 1000)
    for place in (beyond, replace(token, offset=-1), replace(token, partition=99)):
        with pytest.raises(StateError, match="no delayed message"):
            producer.cancel(place)
    assert [r.marker.type for r in markers(service.config)] == [MarkerType.SCHEDULE]


def test_expired_messages_are_not_handed_out(service: Service) -> None:
    """R10: too old when it is STARTed: a dead letter, by the broker's clock."""
    producer = service.queue("a").producer()
    old = producer.send(b"old", ttl=0.05).result()
    consumer = service.queue("a").consumer()
    time.sleep(0.2)
    producer.send(b"new", ttl=60).result()
    with tracked(service.config):
        (message,) = receive_all(consumer, 1)
        assert message.payload == b"new"
        message.ack(wait=True)
        # The old one may be in the other partition, and not be polled yet.
        wait_until(lambda: consumer.receive(0.1) is None and dead_letters(service.config))
    (dead,) = dead_letters(service.config)
    headers = dict(dead.headers() or [])
    assert (dead.value(), headers["kafkamq-reason"]) == (b"old", b"expired")
    assert headers["kafkamq-id"] == old.id.encode()
    assert len(ends(service.config, Outcome.REJECT)) == 1


def test_what_was_not_flushed_is_sent_when_the_service_closes(
    bootstrap: str, namespace: str
) -> None:
    with make_service(bootstrap, namespace) as service:
        deliveries = [service.queue("a").producer().send(b"x") for _ in range(1000)]
    assert all(delivery.done() for delivery in deliveries)
    assert len(read_topic(bootstrap, f"{namespace}.messages")) == 1000


def test_a_key_and_headers_that_no_start_can_hold_do_not_stall_the_queue(
    service: Service, bootstrap: str
) -> None:
    """R11: who wrote it does not matter. They come back whole, and stand in the dead letter."""
    config = service.config
    set_topic(bootstrap, config.marker_topic, "max.message.bytes", "20000")
    headers = {"large": b"h" * 30_000, "small": b"s"}
    producer = service.queue("a").producer()
    for key in ("k" * 30_000, "k"):
        producer.send(b"payload", key=key, headers=headers).result(within(30))
    with tracked(config):
        consumer = service.queue("a", backoff=Backoff(first=0.05), max_deliveries=3).consumer()
        for message in receive_all(consumer, 2):
            message.nack()
        for message in receive_all(consumer, 2):
            assert (message.payload, message.headers) == (b"payload", headers)
            assert message.delivery_count == 2
            message.reject("seen")
        wait_until(lambda: len(dead_letters(config)) == 2)
    keys = sorted(letter.key() or b"" for letter in dead_letters(config))
    assert keys == [b"a\0k", b"a\0" + b"k" * 30_000]
    for letter in dead_letters(config):
        assert letter.value() == b"payload"
        assert headers.items() <= dict(letter.headers() or ()).items()
    found = [r.marker for r in markers(config) if r.marker.type is MarkerType.START]
    assert [(each.key, each.headers) for each in found] == [(b"a", ())] * 4
