"""Behaviours that earlier systems test of their clients, by their numbers, and ours beside them.

T is the redelivery timeout. What must not happen is waited for longer than it could take.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError
from tests.integration.queue_logs import (
    MarkerRecord,
    dead_letters,
    die,
    drain,
    ends,
    make_service,
    markers,
    receive_all,
    set_topic,
    tracked,
)
from tests.integration.raw_producer import write_raw
from tests.waiting import deadline_after, wait_until, within

from kafkamq.config import Backoff
from kafkamq.errors import BrokerError, ConfigError, StateError
from kafkamq.queue.message import Message
from kafkamq.queue.service import Service
from kafkamq.transport.commits import PendingCommit
from kafkamq.types import MarkerType, Outcome

T = within(2.0)
QUICK = Backoff(first=0.05, max=0.05, jitter=0.0)


@pytest.fixture
def service(bootstrap: str, namespace: str) -> Iterator[Service]:
    with make_service(bootstrap, namespace) as service:
        yield service


@pytest.fixture
def tracked_service(service: Service) -> Iterator[Service]:
    with tracked(service.config):
        yield service


def send(service: Service, queue_id: str, *payloads: bytes) -> None:
    producer = service.queue(queue_id).producer()
    for delivery in [producer.send(payload) for payload in payloads]:
        delivery.result(within(30))


def test_01_receive_honours_the_deadline(service: Service) -> None:
    """1: an expired deadline gives no message and no error."""
    consumer = service.queue("a").consumer()
    assert consumer.receive(0) is None
    assert consumer.receive_many(10, 0) == []
    began_s = time.monotonic()
    assert consumer.receive(0.3) is None
    assert time.monotonic() - began_s >= 0.3


def test_02_ack_is_final(tracked_service: Service) -> None:
    """2: receive, ack, wait for longer than T: nothing."""
    send(tracked_service, "a", b"x")
    consumer = tracked_service.queue("a", redelivery_timeout=T).consumer()
    (message,) = receive_all(consumer, 1)
    message.ack(wait=True)
    assert consumer.receive(T + 1.5) is None
    assert ends(tracked_service.config, Outcome.ACK) == [message.message_id]
    assert not ends(tracked_service.config, Outcome.REDELIVERED)


def test_03_ack_nack_and_reject_are_three_things(tracked_service: Service) -> None:
    """3: nack comes back, reject goes to the dead letters, ack is done (R8)."""
    send(tracked_service, "a", b"ack", b"nack", b"reject")
    consumer = tracked_service.queue("a", redelivery_timeout=5).consumer()
    for message in receive_all(consumer, 3):
        if message.payload == b"ack":
            message.ack()
        elif message.payload == b"nack":
            message.nack(delay=0.1, reason="later")
        else:
            message.reject("broken")
    consumer.flush()
    (again,) = receive_all(consumer, 1)
    assert (again.payload, again.delivery_count) == (b"nack", 2)
    again.ack(wait=True)
    wait_until(lambda: dead_letters(tracked_service.config))
    (dead,) = dead_letters(tracked_service.config)
    headers = dict(dead.headers() or [])
    assert dead.value() == b"reject"
    assert headers["kafkamq-reason"] == b"rejected"
    assert headers["kafkamq-error"] == b"broken"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["nack", "crash", "release"])
def test_04_given_back_comes_back_once(tracked_service: Service, way: str) -> None:
    """4: nack, release or crash: the same payload again; then ack: nothing."""
    send(tracked_service, "a", b"x")
    queue = tracked_service.queue("a", redelivery_timeout=T, backoff=QUICK)
    first = queue.consumer()
    if way == "release":  # STARTed and committed, never handed out
        wait_until(lambda: first.in_flight or first.receive_many(1, 0))
        assert first.in_flight
        first.close()
    else:
        (message,) = receive_all(first, 1)
        assert message.payload == b"x"
        if way == "nack":
            message.nack(wait=True)
            first.close()
        else:
            die(first)
    second = queue.consumer()
    (again,) = receive_all(second, 1)
    assert again.payload == b"x"
    assert again.delivery_count == (1 if way == "release" else 2)
    again.ack(wait=True)
    assert second.receive(T + 1.5) is None


def test_05_two_consumers_share_a_queue(service: Service) -> None:
    """5: 500 messages, two consumers: 500 in all, both more than none."""
    queue = service.queue("a")
    consumers = [queue.consumer(), queue.consumer()]
    for consumer in consumers:  # both have joined before there is anything
        consumer.receive(0.1)
    wait_until(lambda: all(_joined(consumer) for consumer in consumers))
    send(service, "a", *(b"%d" % number for number in range(500)))
    got: list[list[bytes | None]] = [[], []]

    def work(index: int) -> None:
        deadline_s = deadline_after(60)
        while sum(map(len, got)) < 500 and time.monotonic() < deadline_s:
            for message in consumers[index].receive_many(20, 0.1):
                got[index].append(message.payload)
                message.ack()

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for consumer in consumers:
        consumer.flush()
    assert Counter(got[0] + got[1]) == Counter(b"%d" % number for number in range(500))
    assert all(got)
    assert len(ends(service.config, Outcome.ACK)) == 500


def _joined(consumer: object) -> bool:
    consumer.receive(0.05)  # type: ignore[attr-defined]
    return len(consumer.intake.reader.group.places) == 1  # type: ignore[attr-defined]


def test_06_queues_are_isolated(tracked_service: Service) -> None:
    """6: two queues on the same topics see their own, and verdicts of one are none of the other."""
    send(tracked_service, "b", b"b1", b"b2")
    send(tracked_service, "c", b"c1", b"c2", b"c3")
    send(tracked_service, "bc", b"bc1")  # a prefix is not enough
    settings = {"redelivery_timeout": T, "backoff": QUICK}
    b = tracked_service.queue("b", **settings).consumer()
    c = tracked_service.queue("c", **settings).consumer()
    from_b, from_c = receive_all(b, 2), receive_all(c, 3)
    assert {m.payload for m in from_b} == {b"b1", b"b2"}
    assert {m.payload for m in from_c} == {b"c1", b"c2", b"c3"}
    for message in from_b:
        message.ack()
    b.flush()
    for message in from_c:
        message.nack()
    again = receive_all(c, 3)
    assert {m.payload for m in again} == {b"c1", b"c2", b"c3"}
    for message in again:
        message.ack()
    c.flush()
    assert b.receive(T + 1.5) is None


def test_24_a_failed_start_is_an_error_and_the_next_receive_works(
    service: Service, bootstrap: str
) -> None:
    """24: START delivery error: told, sought back (R5); nothing is lost."""
    payloads = {os.urandom(20_000), os.urandom(20_000)}  # nothing that compression makes small
    send(service, "a", *payloads)
    consumer = service.queue("a").consumer()
    set_topic(bootstrap, service.config.marker_topic, "max.message.bytes", "1000")
    with pytest.raises(BrokerError) as raised:
        receive_all(consumer, 1)
    assert raised.value.code == "MSG_SIZE_TOO_LARGE"
    assert service.config.marker_topic in str(raised.value)
    with pytest.raises(BrokerError):
        receive_all(consumer, 1)
    set_topic(bootstrap, service.config.marker_topic, "max.message.bytes", "1200000")
    messages = receive_all(consumer, 2)
    assert {m.payload for m in messages} == payloads
    for message in messages:
        message.ack(wait=True)


def test_25_a_failed_commit_is_sought_back(service: Service) -> None:
    """25: a commit that fails loses nothing; what was STARTed is STARTed again, and handed out."""
    send(service, "a", b"x")
    consumer = service.queue("a", redelivery_timeout=30).consumer()
    reader = consumer.intake.reader
    begin, failures = reader.begin_commit, [KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)]

    def fail_once(offsets: dict[int, int]) -> PendingCommit:
        if not failures or not consumer.intake.pipeline.is_open:  # a new group's begins
            return begin(offsets)
        commit = PendingCommit([])
        commit.answer(failures.pop())
        return commit

    reader.begin_commit = fail_once
    with pytest.raises(BrokerError, match="TOPIC_AUTHORIZATION_FAILED"):
        receive_all(consumer, 1)
    (message,) = receive_all(consumer, 1)
    message.ack(wait=True)
    found = [r.marker for r in markers(service.config) if r.marker.type is MarkerType.START]
    assert [marker.message_id for marker in found] == [message.message_id] * 2
    assert found[0].consumer_id != found[1].consumer_id  # R7: fresh after a failure


def test_25_a_fatal_error_rebuilds_the_client(service: Service) -> None:
    """25: after a fatal error a new client reads on from what is committed."""
    send(service, "a", b"1")
    consumer = service.queue("a").consumer()
    receive_all(consumer, 1)[0].ack()
    reader = consumer.intake.reader
    client = reader.group

    def fatal(*_: object) -> None:
        raise BrokerError("injected", code="_FATAL", is_fatal=True)

    client.poll = fatal
    wait_until(lambda: reader.group is not client)
    send(service, "a", b"2")
    (message,) = receive_all(consumer, 1)
    assert message.payload == b"2"
    message.ack(wait=True)


def test_26_verdicts_still_go_through_after_a_failure(service: Service, bootstrap: str) -> None:
    """26: while receiving fails, verdicts and renewals work; after close they are errors."""
    queue = service.queue("a", redelivery_timeout=T, batch_markers=False)  # STARTs with payloads
    consumer = queue.consumer()
    send(service, "a", b"1", b"2")
    first, second = receive_all(consumer, 2)
    set_topic(bootstrap, service.config.marker_topic, "max.message.bytes", "1000")
    send(service, "a", os.urandom(20_000))
    with pytest.raises(BrokerError):
        receive_all(consumer, 1)
    first.ack(wait=True)

    def renewals() -> int:
        return sum(each.marker.message_id == second.message_id for each in _keepalives(service))

    wait_until(lambda: renewals() >= 4)  # longer than T, by message_id now (R7): else it were lost
    second.ack(wait=True)
    set_topic(bootstrap, service.config.marker_topic, "max.message.bytes", "1200000")
    (third,) = receive_all(consumer, 1)
    consumer.close()
    with pytest.raises(StateError, match="closed"):
        third.ack()


def test_27_closing_twice_is_fine_receiving_after_it_is_not(service: Service) -> None:
    """27: close twice: ok; receive after close: error."""
    consumer = service.queue("a").consumer()
    consumer.close()
    consumer.close()
    with pytest.raises(StateError, match="closed"):
        consumer.receive(0.1)
    with pytest.raises(StateError, match="closed"):
        consumer.flush()
    assert list(consumer) == []


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"redelivery_timeout": 0}, "redelivery_timeout"),
        ({"redelivery_timeout": -1}, "redelivery_timeout"),
        ({"redelivery_timeout": 12 * 3600 + 1}, "redelivery_timeout"),
        ({"redelivery_timeout": float("nan")}, "redelivery_timeout"),
        ({"max_deliveries": 0}, "max_deliveries"),
        ({"max_lease": 5}, "max_lease"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"receive_buffer": 0}, "receive_buffer"),
        ({"next_message_timeout": 0}, "next_message_timeout"),
        ({"max_messages_per_commit": 0}, "max_messages_per_commit"),
        ({"on_data_loss": "ignore"}, "on_data_loss"),
    ],
)
def test_28_settings_that_cannot_work_are_refused(settings: dict, named: str) -> None:
    """28: ConfigError names field, value and limit, before anything is asked of Kafka."""
    service = Service("127.0.0.1:1", "nowhere")
    with pytest.raises(ConfigError, match=named) as raised:
        service.queue("a", **settings)
    assert isinstance(raised.value, ValueError)


@pytest.mark.slow
def test_29_keepalives_hold_a_message_a_verdict_stops_them(tracked_service: Service) -> None:
    """29: at least one KEEPALIVE while it is held, none after the verdict (R7)."""
    send(tracked_service, "a", b"x")
    consumer = tracked_service.queue("a", redelivery_timeout=T).consumer()
    (message,) = receive_all(consumer, 1)
    wait_until(lambda: len(_keepalives(tracked_service)) >= 4)  # longer than T
    message.ack(wait=True)
    count = len(_keepalives(tracked_service))
    time.sleep(T / 2)  # in which one more would come
    assert len(_keepalives(tracked_service)) == count
    assert not ends(tracked_service.config, Outcome.REDELIVERED)


def _keepalives(service: Service) -> list[MarkerRecord]:
    return [r for r in markers(service.config) if r.marker.type is MarkerType.KEEPALIVE]


def test_30_a_fifth_never_ended(tracked_service: Service) -> None:
    """30: 21 messages, a fifth without verdict at first: all are processed."""
    send(tracked_service, "a", *(b"%d" % number for number in range(21)))
    queue = tracked_service.queue("a", redelivery_timeout=T)
    worker, heir = queue.consumer(), queue.consumer()
    done: Counter[bytes | None] = Counter()
    forgotten: set[bytes | None] = set()

    def handle(message: Message) -> None:
        if message.delivery_count == 1 and int(message.payload or b"0") % 5 == 0:
            forgotten.add(message.payload)
            return
        done[message.payload] += 1
        message.ack()

    deadline_s = deadline_after(90)
    while sum(map(len, (done, forgotten))) < 21 and time.monotonic() < deadline_s:
        for consumer in (worker, heir):
            for message in consumer.receive_many(10, 0.1):
                handle(message)
    assert len(forgotten) == 5
    worker.flush()
    heir.flush()
    die(worker)
    die(heir)
    last = queue.consumer()
    while len(done) < 21 and time.monotonic() < deadline_s:
        for message in last.receive_many(10, 0.2):
            handle(message)
    last.flush()
    assert set(done) == {b"%d" % number for number in range(21)}
    assert set(done.values()) == {1}  # what was acked never came back


def test_31_the_limit_of_deliveries(tracked_service: Service) -> None:
    """31: multiples of 3 always fail, max_deliveries=3: three deliveries, then a dead letter."""
    send(tracked_service, "a", *(b"%d" % number for number in range(7)))
    queue = tracked_service.queue("a", max_deliveries=3, backoff=QUICK)
    consumer = queue.consumer()
    seen: Counter[bytes | None] = Counter()

    def handle(message: Message) -> None:
        seen[message.payload] += 1
        assert message.delivery_count == seen[message.payload]
        if int(message.payload or b"1") % 3 == 0:
            message.nack(reason="again and again")
        else:
            message.ack()

    deadline_s = deadline_after(60)
    while len(dead_letters(tracked_service.config)) < 3:
        assert time.monotonic() < deadline_s, seen
        drain(consumer, 0.2, handle)
    assert drain(consumer, 1.0, handle) == 0
    assert dict(seen) == {b"%d" % number: 3 if number % 3 == 0 else 1 for number in range(7)}
    dead = dead_letters(tracked_service.config)
    assert Counter(record.value() for record in dead) == Counter([b"0", b"3", b"6"])
    for record in dead:
        headers = dict(record.headers() or [])
        assert headers["kafkamq-reason"] == b"max-deliveries"
        assert headers["kafkamq-error"] == b"again and again"
        assert headers["kafkamq-delivery-count"] == b"3"
        assert headers["kafkamq-queue-id"] == b"a"


def test_a_header_whose_name_is_no_text_costs_no_other_message_its_id(
    service: Service, bootstrap: str
) -> None:
    """Kafka allows any bytes as a name, and the client decodes all of a record's or none."""
    producer = service.queue("a").producer()
    topic = service.config.message_topic
    for number in range(3):  # of several partitions, the hostile one between two others
        producer.send(b"%d" % number, id=f"id-{number}", headers={"h": b"1"} if number else None)
        producer.flush()
        write_raw(bootstrap, topic, key=b"a", value=b"h", headers={b"\xff\xfe": b"1"})
        write_raw(bootstrap, topic, key=b"a", value=b"none", headers={})
        producer.send(b"%d" % number, id=f"id-{number}")
        producer.flush()
    with service.queue("a").consumer() as consumer:
        messages = receive_all(consumer, 12)
        for message in messages:
            message.ack()
    assert Counter(each.id for each in messages) == {"": 6, "id-0": 2, "id-1": 2, "id-2": 2}
    assert sum("h" in message.headers for message in messages) == 2
    for message in messages:
        assert message.id == dict(message.raw_headers).get("kafkamq-id", b"").decode()
