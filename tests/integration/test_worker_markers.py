"""R5-R9 and R11 as a worker writes them, read from the logs of a real broker."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import Producer as KafkaProducer
from confluent_kafka import TopicPartition
from tests.integration.queue_logs import (
    dead_letters,
    die,
    ends,
    make_service,
    markers,
    receive_all,
    starts,
    tracked,
)
from tests.waiting import deadline_after, wait_until, within

from kafkamq.config import Backoff, ServiceConfig
from kafkamq.errors import ConfigError, LeaseLostError, StateError
from kafkamq.markers.ack_writer import EndRecord
from kafkamq.metrics import catalog
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.dead_letters import Selection, redrive
from kafkamq.queue.message import Message
from kafkamq.queue.names import group_of
from kafkamq.queue.service import Service
from kafkamq.queue.topics import create_topics
from kafkamq.queue.wire.keys import marker_partition
from kafkamq.types import MarkerType, MessageId, Outcome

QUICK = Backoff(first=0.05, max=0.05, jitter=0.0)


@pytest.fixture
def service(bootstrap: str, namespace: str) -> Iterator[Service]:
    with make_service(bootstrap, namespace) as service:
        yield service


def send(service: Service, queue_id: str, *payloads: bytes) -> None:
    producer = service.queue(queue_id).producer()
    for delivery in [producer.send(payload) for payload in payloads]:
        delivery.result(within(30))


def committed(service: Service, queue_id: str) -> dict[int, int]:
    config = service.config
    reader = KafkaConsumer(
        {
            "bootstrap.servers": config.bootstrap_servers,
            "group.id": group_of(config, queue_id),
        }
    )
    try:
        asked = [TopicPartition(config.message_topic, number) for number in (0, 1)]
        found = reader.committed(asked, timeout=within(30))
    finally:
        reader.close()
    return {each.partition: each.offset for each in found if each.offset >= 0}


def test_a_start_says_everything_that_a_tracker_needs(service: Service) -> None:
    producer = service.queue("a").producer()
    sent = producer.send(b"x", key="k", headers={"h": b"1"}, ttl=100).result()
    queue = service.queue("a", redelivery_timeout=7, max_deliveries=3, max_lease=70)
    consumer = queue.consumer()
    (message,) = receive_all(consumer, 1)
    message.ack(wait=True)
    start, end = markers(service.config)
    marker = start.marker
    assert marker.message_id == message.message_id
    assert message.message_id == MessageId(
        sent.partition, sent.offset, service._connections.namespace.facts().message_topic_id, 1
    )
    assert len(message.message_id.topic_id) == 16  # R13
    assert (marker.key, marker.value) == (b"a\0k", b"x")
    assert dict(marker.headers)["h"] == b"1"
    assert (marker.redeliver_after_ms, marker.max_deliveries) == (7000, 3)
    assert (marker.max_lease_ms, marker.delivery_count) == (70_000, 1)
    assert marker.message_timestamp_ms == sent.timestamp_ms
    assert marker.expires_at_ms == sent.timestamp_ms + 100_000
    route = marker_partition(sent.partition, sent.offset, 2)
    assert start.partition == end.partition == route  # R26
    assert end.marker.outcome is Outcome.ACK
    assert end.marker.consumer_id == marker.consumer_id


def test_large_payloads_are_started_by_reference(service: Service) -> None:
    """R11: up to 64 KiB inline, where a START is of one message."""
    send(service, "a", b"i" * 65_536, b"r" * 65_537)
    for message in receive_all(service.queue("a", batch_markers=False).consumer(), 2):
        message.ack(wait=True)
    found = [r.marker for r in markers(service.config) if r.marker.type is MarkerType.START]
    assert sorted((m.by_reference, len(m.value or b"")) for m in found) == [
        (False, 65_536),
        (True, 0),
    ]


def test_a_large_message_comes_back_whole(service: Service) -> None:
    payload = os.urandom(300_000)
    send(service, "a", payload)
    with tracked(service.config):
        consumer = service.queue("a", backoff=QUICK).consumer()
        receive_all(consumer, 1)[0].nack()
        (again,) = receive_all(consumer, 1)
        assert (again.payload, again.delivery_count) == (payload, 2)
        again.ack(wait=True)


def test_messages_are_as_large_as_their_topics_take(bootstrap: str, namespace: str) -> None:
    """R11: larger than 20 MiB, a bound that clients had of their own."""
    config = ServiceConfig(bootstrap_servers=bootstrap, namespace=namespace)
    create_topics(config, partitions=1, marker_partitions=1, max_message_bytes=24 * 2**20)
    payload = bytes(21 * 2**20)
    with Service(bootstrap, namespace) as service, tracked(config):
        send(service, "a", payload)
        consumer = service.queue("a", backoff=QUICK).consumer()
        receive_all(consumer, 1)[0].nack()
        (again,) = receive_all(consumer, 1)
        assert (again.payload, again.delivery_count) == (payload, 2)
        again.reject("large")
        wait_until(lambda: dead_letters(config), "the dead letter")
        assert redrive(config, Selection()).redriven == 1
        (redriven,) = receive_all(consumer, 1)
        assert (redriven.payload, redriven.delivery_count) == (payload, 1)
        redriven.ack(wait=True)
        with pytest.raises(ConfigError, match="is too large: 17825792 at most; send a reference"):
            service.queue("a").producer().send(payload, delay=1)


def test_a_consumer_takes_timedeltas_and_refuses_what_is_no_time(service: Service) -> None:
    with service.queue("a").consumer() as consumer:
        assert consumer.receive(timedelta()) is None
        consumer.flush(timedelta(seconds=30))
        for call in (consumer.receive, consumer.flush, consumer.close):
            with pytest.raises(ConfigError, match="timeout is nan"):
                call(math.nan)
        consumer.close(timedelta(seconds=30))


def test_offsets_are_committed_before_anything_is_handed_out(service: Service) -> None:
    """R5: up to the last START, other queues' messages along."""
    send(service, "a", *[b"a"] * 10)
    send(service, "b", *[b"b"] * 10)
    send(service, "a", *[b"a"] * 10)
    consumer = service.queue("a").consumer()
    messages = receive_all(consumer, 5)
    held = {message.message_id.partition: [] for message in messages}
    for message in messages:
        held[message.message_id.partition].append(message.message_id.offset)
    after = committed(service, "a")
    for partition, offsets in held.items():
        assert after[partition] > max(offsets)
    assert len(starts(service.config)) == 5  # receive_many(n) STARTs n, not more
    receive_all(consumer, 15)
    assert sum(committed(service, "a").values()) == 30
    assert len(starts(service.config)) == 20


def test_max_in_flight_is_back_pressure(service: Service) -> None:
    send(service, "a", *[b"x"] * 30)
    consumer = service.queue("a", max_in_flight=10).consumer()
    messages = receive_all(consumer, 10)
    assert consumer.receive_many(10, 0.3) == []
    assert consumer.in_flight == 10
    for message in messages[:4]:
        message.ack()
    assert len(receive_all(consumer, 4)) == 4
    assert consumer.receive(0.2) is None


def test_the_last_delivery_is_alone_in_the_process(service: Service) -> None:
    """R6: nothing else is held beside it, in no consumer of this process."""
    with tracked(service.config):
        poison = service.queue("a", max_deliveries=2, backoff=QUICK)
        send(service, "a", b"poison")
        first = poison.consumer()
        receive_all(first, 1)[0].nack(wait=True)
        wait_until(lambda: ends(service.config, Outcome.REDELIVERED))
        send(service, "b", b"b1", b"b2")
        other = service.queue("b").consumer()
        (held,) = receive_all(other, 1)
        # It has polled its copy, and waits for what the other consumer holds.
        wait_until(lambda: first.receive(0.1) is None and len(first.intake.pipeline))
        assert first.receive(0.5) is None
        assert other.receive_many(1, 0.1) == []  # which STARTs no more meanwhile
        held.ack()
        (last,) = receive_all(first, 1)
        assert last.delivery_count == 2
        assert other.receive_many(1, 0.3) == []
        last.reject("poison")
        assert len(receive_all(other, 1)) == 1


@pytest.mark.slow
def test_a_worker_that_dies_of_it_takes_nothing_else_along(service: Service) -> None:
    """R6 and max_deliveries: the crash is the failure, and only of what was handled alone."""
    with tracked(service.config):
        send(service, "a", b"poison", b"innocent")
        queue = service.queue("a", redelivery_timeout=within(1.5), max_deliveries=2)
        worker = queue.consumer()
        assert {message.delivery_count for message in receive_all(worker, 2)} == {1}
        die(worker)
        wait_until(lambda: len(ends(service.config, Outcome.REDELIVERED)) == 2)
        left = {b"poison", b"innocent"}
        while left:
            worker = queue.consumer()
            (message,) = receive_all(worker, 1)
            assert message.delivery_count == 2
            assert worker.receive_many(10, 0.3) == []
            assert message.payload
            left.remove(message.payload)
            if message.payload == b"poison":
                die(worker)
            else:
                message.ack(wait=True)
                worker.close()
        wait_until(lambda: dead_letters(service.config))
    (dead,) = dead_letters(service.config)
    assert dead.value() == b"poison"
    assert dict(dead.headers() or [])["kafkamq-reason"] == b"max-deliveries"


def test_max_lease_ends_what_is_renewed_without_end(service: Service) -> None:
    """R7, R14: a hung handler does not hold a message forever; the worker is told."""
    lost: list[Message] = []
    send(service, "a", b"x")
    with tracked(service.config):
        queue = service.queue("a", redelivery_timeout=1.5, max_lease=2.5)
        consumer = queue.consumer(on_lease_lost=lost.append)
        (message,) = receive_all(consumer, 1)
        wait_until(lambda: lost)
        assert lost == [message]
        with pytest.raises(LeaseLostError) as raised:
            message.ack()
        assert raised.value.messages == (message.message_id,)
        (again,) = receive_all(consumer, 1)
        assert (again.payload, again.delivery_count) == (b"x", 2)
        again.ack(wait=True)
    assert not [e for e in ends(service.config, Outcome.ACK) if e == message.message_id]


@pytest.mark.slow
def test_extend_holds_longer_than_a_paused_process_renews(service: Service) -> None:
    send(service, "a", b"x")
    with tracked(service.config):
        consumer = service.queue("a", redelivery_timeout=within(1.5)).consumer()
        (message,) = receive_all(consumer, 1)
        message.extend(30)
        wait_until(lambda: message.deadline > time.monotonic() + 20)
        consumer.keeper.stop()  # the process is stopped, so nothing is renewed
        time.sleep(within(2.5))
        message.ack(wait=True)
    assert not ends(service.config, Outcome.REDELIVERED)


def test_late_verdicts_are_told_by_the_broker_s_clock(service: Service) -> None:
    """R9: an END that is appended after the lease's end is late, whatever the worker believed."""
    lost: list[Message] = []
    send(service, "a", b"1", b"2", b"3")
    counted = sum(catalog.LATE_VERDICTS.values().values())
    queue = service.queue("a", redelivery_timeout=1.5, batch_markers=False)  # a lease each
    consumer = queue.consumer(on_lease_lost=lost.append)
    first, second, third = receive_all(consumer, 3)
    consumer.keeper.stop()
    time.sleep(2.0)
    for message in (first, second):  # a worker whose own clock was stopped, too
        message._lease.deadline_ms += 60_000
    with pytest.raises(LeaseLostError, match="after the end"):
        first.ack(wait=True)
    second.nack()
    with pytest.raises(LeaseLostError) as raised:
        consumer.flush()
    assert raised.value.messages == (second.message_id,)
    consumer.flush()  # told once
    with pytest.raises(LeaseLostError, match="before the verdict"):
        third.ack()
    consumer.close()
    assert lost == [first, second]
    assert sum(catalog.LATE_VERDICTS.values().values()) == counted + 2


def test_on_lease_lost_may_take_long_raise_and_close_the_consumer(service: Service) -> None:
    """One thread tells, nothing waits for it, and close() from inside of it ends."""
    send(service, "a", *[b"%d" % number for number in range(4)])
    told: list[Message] = []
    go_on, has_closed = threading.Event(), threading.Event()

    def lost(message: Message) -> None:
        told.append(message)
        if len(told) == 1:
            assert go_on.wait(within(60))
        elif len(told) == 2:
            raise SystemExit("as sys.exit() does")
        elif len(told) == 3:
            consumer.close(20)
            has_closed.set()

    consumer = service.queue("a", redelivery_timeout=1.5, max_lease=2.0).consumer(
        on_lease_lost=lost
    )
    messages = receive_all(consumer, 4)
    wait_until(lambda: told and consumer.in_flight == 0)
    for _ in range(20):  # beats of the keeper, as each verdict makes one
        consumer._state.keeper.ring()
        time.sleep(0.005)
    assert sum(thread.name == "kafkamq-lease-lost" for thread in threading.enumerate()) == 1
    go_on.set()
    assert has_closed.wait(within(60))
    assert consumer.is_closed
    wait_until(lambda: len(told) == 4)
    assert {each.message_id for each in told} == {each.message_id for each in messages}
    with pytest.raises(StateError):
        consumer.receive()


def test_on_lease_lost_and_another_thread_close_at_the_same_time(service: Service) -> None:
    send(service, "a", b"x")
    is_told, is_closing, has_closed = threading.Event(), threading.Event(), threading.Event()

    def lost(message: Message) -> None:
        del message
        is_told.set()
        assert is_closing.wait(within(60))
        consumer.close(20)
        has_closed.set()

    consumer = service.queue("a", redelivery_timeout=1.5, max_lease=2.0).consumer(
        on_lease_lost=lost
    )
    receive_all(consumer, 1)
    assert is_told.wait(within(60))
    release = consumer._ack_writer.close

    def close_verdicts(timeout_s: float) -> object:
        is_closing.set()  # in the midst of the other close, which holds the consumer
        return release(timeout_s)

    consumer._ack_writer.close = close_verdicts  # type: ignore[method-assign,assignment]
    consumer.close(20)
    assert has_closed.is_set()  # close() has waited for the call-back, not the other way round


@pytest.mark.slow
def test_leaving_with_is_a_verdict(service: Service) -> None:
    with tracked(service.config):
        send(service, "a", b"fine")
        consumer = service.queue("a", backoff=QUICK).consumer()
        (message,) = receive_all(consumer, 1)
        with message:
            pass
        with pytest.raises(StateError):
            message.ack()
        send(service, "a", b"broken")
        (message,) = receive_all(consumer, 1)
        with pytest.raises(ZeroDivisionError), message:
            1 / 0  # noqa: B018
        (again,) = receive_all(consumer, 1)
        assert again.delivery_count == 2
        with again:
            again.reject("enough")  # a verdict given inside stands
        consumer.flush()
    nacks = [
        r.marker.reason
        for r in markers(service.config)
        if r.marker.type is MarkerType.END and r.marker.outcome is Outcome.NACK
    ]
    assert nacks == ["ZeroDivisionError: division by zero"]


def test_iterating(service: Service) -> None:
    send(service, "a", *(b"%d" % number for number in range(5)))
    consumer = service.queue("a", next_message_timeout=0.2).consumer()
    seen = []
    for message in consumer:
        with message:
            seen.append(message.payload)
        if len(seen) == 5:
            consumer.close()
    assert len(set(seen)) == 5


def test_foreign_messages_are_committed_by_count_and_by_time(service: Service) -> None:
    """R5: a queue without messages does not read the others' again and again."""
    send(service, "other", *[b"x"] * 300)
    consumer = service.queue("mine", max_messages_per_commit=100).consumer()
    deadline_s = deadline_after(60)
    while sum(committed(service, "mine").values()) < 300:
        assert consumer.receive(0.2) is None
        assert time.monotonic() < deadline_s
    assert not starts(service.config)


def test_kafka_mq_go_messages_are_served(service: Service) -> None:
    """R25: records without headers, keyed by the queue id alone."""
    raw = KafkaProducer({"bootstrap.servers": service.config.bootstrap_servers})
    raw.produce(service.config.message_topic, b"theirs", b"a")
    raw.produce(service.config.message_topic, b"nobody's", None)
    raw.flush()
    consumer = service.queue("a").consumer()
    (message,) = receive_all(consumer, 1)
    assert (message.payload, message.id, message.headers) == (b"theirs", "", {})
    message.ack(wait=True)
    assert consumer.receive(0.3) is None


def test_verdicts_from_many_threads(service: Service) -> None:
    send(service, "a", *[b"x"] * 200)
    consumer = service.queue("a").consumer()
    with ThreadPoolExecutor(8) as pool:
        for message in receive_all(consumer, 200):
            pool.submit(message.ack)
    consumer.flush()
    assert len(ends(service.config, Outcome.ACK)) == 200


def test_flush_waits_for_an_end_that_another_thread_writes_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed END that the keeper has taken and not yet written is not confirmed."""
    send(service, "a", b"x")
    consumer = service.queue("a").consumer()
    (message,) = receive_all(consumer, 1)
    message.ack(wait=True)
    writer, taken, go_on = consumer._state.writer, threading.Event(), threading.Event()
    write = writer.write

    def slow(*arguments: Any) -> None:
        taken.set()
        assert go_on.wait(within(60))
        write(*arguments)

    monkeypatch.setattr(writer, "write", slow)
    consumer._ack_writer.end_failed(
        EndRecord(consumer._ack_writer, [message._lease])
    )  # as its delivery report would say
    assert taken.wait(within(60))
    flushing = threading.Thread(target=consumer.flush)
    flushing.start()
    flushing.join(0.5)
    assert flushing.is_alive()
    go_on.set()
    flushing.join(within(60))
    assert len(ends(service.config, Outcome.ACK)) == 2


def test_a_batch_that_waits_for_kafka_is_not_lost(service: Service) -> None:
    """A receive whose time is over leaves its batch to the next one."""
    send(service, "a", *[b"x"] * 10)
    consumer = service.queue("a").consumer()
    got: list[Message] = []
    deadline_s = deadline_after(60)
    while len(got) < 10 and time.monotonic() < deadline_s:
        got += consumer.receive_many(10, 0)
    assert len(got) == 10
    assert len(starts(service.config)) == 10


def test_keepalives_of_a_consumer_are_one_record_per_partition(service: Service) -> None:
    """R7: however many messages it holds."""
    send(service, "a", *[b"x"] * 100)
    consumer = service.queue("a", redelivery_timeout=within(1.5)).consumer()
    receive_all(consumer, 1)
    with consumer._state.lock:
        consumer._state.leases._new_partitions.clear()  # as if 60 s had passed
    messages: list[Message] = []
    while len(messages) < 99:
        messages += consumer.receive_many(200, 1.0)
    routes = {message._lease.marker_partition for message in messages}
    wait_until(lambda: len(_keepalives(service)) >= 2 * len(routes))
    found = _keepalives(service)
    assert all(r.marker.message_id is None for r in found)
    assert {r.partition for r in found} == routes
    assert {r.marker.consumer_id for r in found} == {consumer._state.leases.consumer_id}
    assert len(found) < 30


def _keepalives(service: Service) -> list:
    return [r for r in markers(service.config) if r.marker.type is MarkerType.KEEPALIVE]


def test_new_owners_renew_by_message_id_at_first(service: Service) -> None:
    """R7: for 60 s after getting a partition."""
    send(service, "a", b"x")
    consumer: Consumer = service.queue("a", redelivery_timeout=within(1.5)).consumer()
    (message,) = receive_all(consumer, 1)
    wait_until(lambda: _keepalives(service))
    assert {r.marker.message_id for r in _keepalives(service)} == {message.message_id}
    message.ack(wait=True)
