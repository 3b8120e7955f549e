"""Clear errors, nothing lost: what users meet first when something is not as it should be."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewPartitions
from tests.integration.queue_logs import (
    ends,
    make_service,
    markers,
    receive_all,
    set_topic,
    tracked,
)
from tests.waiting import deadline_after, wait_until, within

from kafkamq.dev import LocalKafka
from kafkamq.dev.broker import server_properties
from kafkamq.errors import BrokerError, ConfigError, DeadlineExceededError, StateError
from kafkamq.queue.namespace import CONNECT_TIMEOUT_S
from kafkamq.queue.service import Service
from kafkamq.transport.admin import Admin
from kafkamq.types import Outcome

PASSWORD = "correct-horse-battery"


@pytest.fixture
def service(bootstrap: str, namespace: str) -> Iterator[Service]:
    with make_service(bootstrap, namespace) as service:
        yield service


@pytest.mark.parametrize("what", ["producer", "consumer"])
def test_unknown_topics_say_how_to_create_them(bootstrap: str, namespace: str, what: str) -> None:
    with Service(bootstrap, namespace) as service:
        with pytest.raises(BrokerError, match="kafkamq create") as raised:
            getattr(service.queue("a"), what)()
        assert raised.value.code == "UNKNOWN_TOPIC_OR_PART"
        assert f"{namespace}.messages" in str(raised.value)
        assert bootstrap in str(raised.value)
    topics = AdminClient({"bootstrap.servers": bootstrap}).list_topics(timeout=within(10)).topics
    assert not [name for name in topics if name.startswith(namespace)]  # nothing made by asking


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("message.timestamp.type", "CreateTime"),
        ("cleanup.policy", "compact"),
        ("retention.bytes", "1000000"),
        ("retention.ms", "3600000"),
    ],
)
def test_markers_that_cannot_work_are_refused(
    service: Service, bootstrap: str, setting: str, value: str
) -> None:
    """R23: the message names topic, setting and what to do."""
    topic = service.config.marker_topic
    set_topic(bootstrap, topic, setting, value)
    for make in (service.queue("a").producer, service.queue("a").consumer):
        with pytest.raises(ConfigError) as raised:
            make()
        assert topic in str(raised.value)
        assert setting in str(raised.value)


def test_a_message_over_the_limit_is_refused_before_it_is_sent(service: Service) -> None:
    """R11: what could not be copied; the largest that is taken reaches its worker."""
    producer = service.queue("a").producer()
    limit = 1_048_588 - 1024
    with pytest.raises(ConfigError, match=r"max.message.bytes") as raised:
        producer.send(b"x" * (limit + 1))
    assert str(limit) in str(raised.value)
    largest = os.urandom(limit - 200)
    producer.send(largest).result(within(30))
    (message,) = receive_all(service.queue("a").consumer(), 1)
    assert message.payload == largest
    message.ack(wait=True)
    (start, _) = markers(service.config)
    assert start.marker.by_reference  # over 64 KiB (R11)


def test_a_delayed_message_over_the_limit_is_refused(service: Service) -> None:
    producer = service.queue("a").producer()
    with pytest.raises(ConfigError, match="headers"):
        producer.send(b"x", headers={"h": b"y" * 1_200_000})
    sent = producer.send(b"x" * 1_000_000, delay=60).result(within(30))
    assert sent.schedule is not None


@pytest.mark.parametrize("queue_id", ["", "a\0b", "x" * 1025])
def test_queue_ids_that_cannot_be(service: Service, queue_id: str) -> None:
    with pytest.raises(ConfigError, match="queue_id"):
        service.queue(queue_id)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"delay": -1}, "delay"),
        ({"delay": float("inf")}, "delay"),
        ({"delay": 1e10}, "delay"),
        ({"ttl": -0.5}, "ttl"),
        ({"headers": {"kafkamq-id": b"x"}}, "kafkamq-id"),
        ({"headers": {"h": "text"}}, "header 'h'"),
        ({"headers": {"\ud800": b"v"}}, "header"),  # ended the process
        ({"id": ""}, "id"),
        ({"id": "x" * 2000}, "id"),
    ],
)
def test_sends_that_cannot_be(service: Service, arguments: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        service.queue("a").producer().send(b"x", **arguments)


def test_a_payload_is_bytes(service: Service) -> None:
    with pytest.raises(ConfigError, match="payload is a str"):
        service.queue("a").producer().send("text")  # type: ignore[arg-type]


def test_a_wrong_verdict_is_none(service: Service) -> None:
    """The message is held as before, and its one verdict can still be given."""
    service.queue("a").producer().send(b"x").result(within(30))
    (message,) = receive_all(service.queue("a").consumer(), 1)
    for arguments in ({"delay": -1}, {"delay": "1"}, {"reason": b"x"}, {"reason": None}):
        with pytest.raises(ConfigError, match=next(iter(arguments))):
            message.nack(**arguments)  # type: ignore[arg-type]
    for reason in (ValueError("boom"), "", None):
        with pytest.raises(ConfigError, match="reason is"):
            message.reject(reason)  # type: ignore[arg-type]
    message.ack(wait=True)


def test_an_error_that_cannot_say_itself_is_a_nack_all_the_same(service: Service) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    service.queue("a").producer().send(b"x").result(within(30))
    consumer = service.queue("a").consumer()
    (message,) = receive_all(consumer, 1)
    with pytest.raises(MuteError), message:
        raise MuteError
    consumer.flush()
    assert ends(service.config, Outcome.NACK) == [message.message_id]


@pytest.mark.parametrize("what", ["producer", "consumer"])
def test_a_broker_that_is_down_is_named_within_a_bound(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkamq.queue.namespace.CONNECT_TIMEOUT_S", 2.0)
    # Who looks for other workers beside it would wait for 30 s.
    monkeypatch.setattr("kafkamq.markers.membership.Admin", partial(Admin, timeout_s=2.0))
    with Service("127.0.0.1:9", "nowhere") as service:
        with pytest.raises(DeadlineExceededError, match=r"127\.0\.0\.1:9") as raised:
            getattr(service.queue("a"), what)()
        assert isinstance(raised.value, TimeoutError)


def test_a_broker_that_goes_down_loses_nothing() -> None:
    """Sends wait or say so; verdicts and receives go on when it is back."""
    with LocalKafka() as kafka, make_service(kafka.bootstrap_servers, "outage") as service:
        producer = service.queue("a").producer()
        producer.send(b"before").result(within(30))
        consumer = service.queue("a", redelivery_timeout=60).consumer()
        (message,) = receive_all(consumer, 1)
        kafka.pause()
        during = producer.send(b"during")
        with pytest.raises(DeadlineExceededError, match=kafka.bootstrap_servers):
            during.result(0.5)
        with pytest.raises(DeadlineExceededError, match=kafka.bootstrap_servers):
            producer.flush(0.5)
        message.ack()
        with pytest.raises(DeadlineExceededError, match=kafka.bootstrap_servers):
            consumer.flush(0.5)
        assert consumer.receive(0.2) is None
        kafka.resume()
        during.result(within(60))
        consumer.flush(within(60))
        (message,) = receive_all(consumer, 1)
        assert message.payload == b"during"
        message.ack(wait=True)


@pytest.mark.faults  # beside an outage of a worker's broker that make test has
def test_an_iteration_survives_a_broker_that_crashes() -> None:
    """Nothing is lost and nobody has to start anything again."""
    done: list[bytes | None] = []
    with (
        LocalKafka() as kafka,
        make_service(kafka.bootstrap_servers, "crash") as service,
        tracked(service.config),  # a group that lost its member gives back what it had fetched
    ):
        queue = service.queue("a", redelivery_timeout=60, next_message_timeout=0.2)
        producer = queue.producer()
        consumer = queue.consumer()
        failures: list[BaseException] = []

        def work() -> None:
            try:
                for message in consumer:
                    message.ack()
                    done.append(message.payload)
            except BaseException as error:  # noqa: BLE001 - the test raises it
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        deliveries = [producer.send(b"%d" % number) for number in range(100)]
        wait_until(lambda: done)
        kafka.kill()
        deliveries += [producer.send(b"%d" % number) for number in range(100, 200)]
        kafka.restart()
        for delivery in deliveries:
            delivery.result(within(60))
        wait_until(lambda: len(set(done)) == 200 or failures, timeout_s=150)
        assert not failures
        consumer.flush(within(60))
        consumer.close()
        thread.join(within(30))
        assert len(set(ends(service.config, Outcome.ACK))) == 200


@pytest.fixture(scope="module")
def secured() -> Iterator[LocalKafka]:
    """A broker that asks for a name and a password; LocalKafka makes open ones only."""
    plain = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    users = f'user_admin="{PASSWORD}" user_alice="{PASSWORD}"'
    more = {
        "listener.security.protocol.map": "PLAINTEXT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "listener.name.plaintext.plain.sasl.jaas.config": (
            f'{plain} username="admin" password="{PASSWORD}" {users};'
        ),
    }

    def properties(*args: object, **kwargs: object) -> dict[str, str]:
        return {**server_properties(*args, **kwargs), **more}  # type: ignore[arg-type]

    def answers(servers: str, *, timeout_s: float) -> bool:
        admin = AdminClient({"bootstrap.servers": servers, **sasl(PASSWORD)})
        try:
            return bool(admin.list_topics(timeout=timeout_s).brokers)
        except KafkaException:
            return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kafkamq.dev.broker.server_properties", properties)
        patch.setattr("kafkamq.dev.broker._answers", answers)
        with LocalKafka() as kafka:
            yield kafka


def sasl(password: str) -> dict[str, str]:
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "alice",
        "sasl.password": password,
    }


def test_credentials_reach_every_client_and_wrong_ones_are_reported_at_once(
    secured: LocalKafka, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with Service(secured.bootstrap_servers, "safe", kafka=sasl(PASSWORD)) as service:
        service.create_topics(partitions=1, marker_partitions=1)
        service.queue("a").producer().send(b"x").result(within(30))
        (message,) = receive_all(service.queue("a").consumer(), 1)
        message.ack(wait=True)
        shown = repr(service) + repr(service.config) + repr(service.queue("a"))
        assert PASSWORD not in shown
    wrong = "wrong-horse"
    with Service(secured.bootstrap_servers, "safe", kafka=sasl(wrong)) as service:
        for make in (service.queue("a").producer, service.queue("a").consumer):
            began_s = time.monotonic()
            with pytest.raises(BrokerError, match="password") as raised:
                make()
            assert time.monotonic() - began_s < CONNECT_TIMEOUT_S
            assert not raised.value.is_retriable
            assert wrong not in str(raised.value)
    assert PASSWORD not in caplog.text
    assert wrong not in caplog.text


@pytest.mark.parametrize(
    ("kafka", "named"),
    [
        ({"acks": "1"}, "acks"),
        ({"group.id": "mine"}, "group.id"),
        ({"enable.auto.commit": "true"}, "enable.auto.commit"),
        ({"no.such.property": "1"}, "no.such.property"),
        ({"sasl.jaas.config": "secret-of-mine"}, "sasl.username"),
    ],
)
def test_properties_that_belong_to_the_protocol_are_refused(
    bootstrap: str, namespace: str, kafka: dict[str, str], named: str
) -> None:
    with Service(bootstrap, namespace, kafka=kafka) as service:
        with pytest.raises(ConfigError, match=named) as raised:
            service.queue("a").consumer()
        assert "secret-of-mine" not in str(raised.value)


def test_a_second_verdict_is_refused(service: Service) -> None:
    service.queue("a").producer().send(b"x").result(within(30))
    (message,) = receive_all(service.queue("a").consumer(), 1)
    message.ack()
    for verdict in (message.ack, message.nack, lambda: message.reject("no")):
        with pytest.raises(StateError, match="verdict already"):
            verdict()
    with pytest.raises(StateError):
        message.extend(10)
    with message:  # a verdict was given: leaving gives none
        pass


def test_a_closed_service_says_so(service: Service) -> None:
    producer = service.queue("a").producer()
    consumer = service.queue("a").consumer()
    service.close()
    service.close()
    for call in (
        lambda: producer.send(b"x"),
        producer.flush,
        lambda: consumer.receive(0),
        lambda: service.queue("b"),
        service.create_topics,
    ):
        with pytest.raises(StateError, match="closed"):
            call()


def test_topic_names_are_checked(bootstrap: str) -> None:
    with pytest.raises(ConfigError, match="marker_topik"):
        Service(bootstrap, "x", marker_topik="y")
    with pytest.raises(ConfigError, match="namespace"):
        Service(bootstrap, "no spaces")


def _in_child(service: Service, send: object, receive: object, pipe: object) -> None:
    said = []
    for call in (send, receive, lambda: service.queue("b"), service.close):
        try:
            call()  # type: ignore[operator]
            said.append("ok")
        except StateError as error:  # noqa: PERF203
            said.append(str(error))
    pipe.send(said)  # type: ignore[attr-defined]


def test_a_forked_child_is_refused_and_the_parent_goes_on(service: Service) -> None:
    """R7: nothing of the parent's works in the child: no consumer_id is used twice."""
    producer = service.queue("a").producer()
    consumer = service.queue("a").consumer()
    producer.send(b"x").result(within(30))
    (message,) = receive_all(consumer, 1)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(
        target=_in_child,
        args=(service, lambda: producer.send(b"y"), lambda: consumer.receive(0), theirs),
    )
    child.start()
    assert ours.poll(within(60)), "the child hangs"
    said = ours.recv()
    child.join(within(60))
    assert child.exitcode == 0
    assert all("fork" in text for text in said[:3]), said
    assert said[3] == "ok"  # closing the parent's service there does nothing
    message.ack(wait=True)
    producer.send(b"z").result(within(30))
    assert receive_all(consumer, 1)[0].payload == b"z"


def test_more_partitions_are_used(service: Service, bootstrap: str) -> None:
    """R26: partitions may be added at any time; nobody has to restart for what is there."""
    producer = service.queue("a").producer()
    admin = AdminClient({"bootstrap.servers": bootstrap})
    topics = (service.config.message_topic, service.config.marker_topic)
    for future in admin.create_partitions([NewPartitions(t, 3) for t in topics]).values():
        future.result()
    sent = set()
    deadline_s = deadline_after(60)
    while len(sent) < 3 and time.monotonic() < deadline_s:
        service._connections.namespace._asked_s = (
            -1e9
        )  # as if five minutes had passed: the broker knows now
        sent.add(producer.send(b"x").result(within(30)).partition)
    assert sent == {0, 1, 2}
