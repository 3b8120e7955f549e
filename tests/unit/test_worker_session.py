"""How soon a group notices that a worker is dead: before what it held may be copied.

And what becomes of messages where it did not.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError
from tests.waiting import wait_until, within

from kafkamq import Consumer, Message, Service
from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.markers import membership
from kafkamq.markers import reader as reader_module
from kafkamq.markers.membership import (
    broker_session_problems,
    session_problem,
    shorten_session,
)
from kafkamq.markers.positions import Positions
from kafkamq.markers.rules.leases import Overtaken
from kafkamq.markers.state import ConsumerState
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.names import group_of
from kafkamq.transport.clients import open_producer
from kafkamq.transport.commits import GroupOffsets
from kafkamq.transport.memory.cluster import cluster_of, forget_cluster
from kafkamq.transport.memory.state import Fault
from kafkamq.types import Marker, MarkerType, Outcome, expand


@pytest.fixture
def name() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield name
    forget_cluster(name)


def sessions(service: Service, queue_id: str) -> list[float]:
    """Of the members of a queue's group, in seconds."""
    groups = cluster_of(service.config.bootstrap_servers).groups.groups
    group_id = group_of(service.config, queue_id)
    wait_until(lambda: group_id in groups and groups[group_id].members)
    return [member.client.session_s for member in groups[group_id].members.values()]


@pytest.mark.parametrize(
    ("redelivery_timeout_s", "session_s"),
    [(2.0, 6.0), (10.0, 6.0), (12.0, 7.2), (20.0, 10.0), (3600.0, 10.0)],
)
def test_the_session_follows_the_redelivery_timeout(
    name: str, redelivery_timeout_s: float, session_s: float
) -> None:
    with Service(f"memory://{name}", "n") as service:
        service.create_topics(partitions=1, marker_partitions=1)
        queue = service.queue("q", redelivery_timeout=redelivery_timeout_s)
        with queue.consumer() as consumer:
            consumer.receive(timeout=0)
            assert sessions(service, "q") == [session_s]


def test_each_queue_of_a_service_has_a_session_of_its_own(name: str) -> None:
    with Service(f"memory://{name}", "n") as service:
        service.create_topics(partitions=1, marker_partitions=1)
        with (
            service.queue("short").consumer() as first,
            service.queue("long", redelivery_timeout=60.0).consumer() as second,
        ):
            first.receive(timeout=0)
            second.receive(timeout=0)
            assert sessions(service, "short") == [6.0]
            assert sessions(service, "long") == [10.0]


@pytest.mark.parametrize(
    ("session", "options", "is_told"),
    [
        ("10000", {}, True),
        ("6000", {}, False),
        ("6000", {"redelivery_timeout": 2.0}, False),  # brokers allow no shorter one
        ("7000", {"redelivery_timeout": 2.0}, True),
        ("10000", {"redelivery_timeout": 17.0}, False),
        ("10000", {"exactly_once": True}, False),  # no START without its commit
        ("10000", {"delivery": "at-most-once"}, False),
    ],
)
def test_a_session_that_is_too_long_is_told_at_the_start(
    name: str,
    caplog: pytest.LogCaptureFixture,
    session: str,
    options: dict[str, object],
    *,
    is_told: bool,
) -> None:
    with Service(f"memory://{name}", "n", kafka={"session.timeout.ms": session}) as service:
        service.create_topics(partitions=1, marker_partitions=1)
        with service.queue("q", **options).consumer() as consumer:
            consumer.receive(timeout=0)
            assert sessions(service, "q") == [int(session) / 1000]  # it is the user's all the same
    said = [text for text in caplog.messages if "more than 0.6 of redelivery_timeout" in text]
    assert len(said) == is_told


def config(**kafka: str) -> ServiceConfig:
    named = {name.replace("_", "."): value for name, value in kafka.items()}
    return ServiceConfig(bootstrap_servers="x:1", namespace="n", kafka=named)


def test_a_problem_names_what_to_write() -> None:
    problem = session_problem(config(session_timeout_ms="30000"), 20_000)
    assert "session.timeout.ms is 30000" in problem
    assert "redelivery_timeout to 50 or more" in problem
    assert "session.timeout.ms to 12000 or leave it out" in problem
    assert session_problem(config(), 10_000) == ""


@pytest.mark.parametrize(
    ("kafka", "broker", "said"),
    [
        ({}, {}, ""),
        ({}, {"group.min.session.timeout.ms": "8000"}, "brokers refuse workers"),
        ({"session_timeout_ms": "8000"}, {"group.min.session.timeout.ms": "8000"}, ""),
        ({"group_protocol": "consumer"}, {}, "group.consumer.min.session.timeout.ms is 45000"),
        (
            {"group_protocol": "consumer"},
            {"group.consumer.min.session.timeout.ms": "6000"},
            "3 x group.consumer.min.heartbeat.interval.ms is 15000",
        ),
        (
            {"group_protocol": "consumer"},
            {
                "group.consumer.min.session.timeout.ms": "6000",
                "group.consumer.min.heartbeat.interval.ms": "2000",
            },
            "",
        ),
    ],
)
def test_what_brokers_allow_is_judged(
    kafka: dict[str, str], broker: dict[str, str], said: str
) -> None:
    problems = broker_session_problems(config(**kafka), broker, 10_000)
    assert [said in problem for problem in problems] == ([True] if said else [])


@pytest.mark.parametrize(
    ("least_beat_ms", "changes"),
    [
        ("5000", {"consumer.session.timeout.ms": "15000"}),
        (
            "500",
            {"consumer.session.timeout.ms": "6000", "consumer.heartbeat.interval.ms": "2000"},
        ),
    ],
)
def test_a_group_of_kafka_4_has_three_heartbeats_in_a_session(
    monkeypatch: pytest.MonkeyPatch, least_beat_ms: str, changes: dict[str, str]
) -> None:
    """One that is late must not cost a worker its partitions."""
    least = "group.consumer.min.session.timeout.ms", "group.consumer.min.heartbeat.interval.ms"
    settings = dict(zip(least, ("6000", least_beat_ms), strict=True))
    admin = Mock()
    admin.cluster.return_value.settings = settings
    admin.group_settings.return_value = {
        "consumer.session.timeout.ms": "45000",
        "consumer.heartbeat.interval.ms": "5000",
    }
    monkeypatch.setattr(membership, "Admin", lambda *_: nullcontext(admin))
    shorten_session(config(group_protocol="consumer"), QueueConfig(queue_id="q"))
    assert admin.set_group.call_args.args[1] == changes


def markers(service: Service) -> list[Marker]:
    """Of each message one, in the order of the only partition."""
    cluster = cluster_of(service.config.bootstrap_servers)
    (partition,) = cluster.topics[service.config.marker_topic].partitions
    found = [decode_marker(each.value or b"") for each in partition.records if each]
    return [marker for each in found for marker in expand(each)]


def receive(consumer: Consumer) -> Message:
    messages: list[Message] = []
    wait_until(lambda: messages.extend(consumer.receive_many(1, 0.1)) or messages)
    return messages[0]


def started(service: Service) -> int:
    starts = [each for each in markers(service) if each.type is MarkerType.START]
    return len({each.message_id for each in starts})


def redelivered(service: Service) -> int:
    ends = [each for each in markers(service) if each.type is MarkerType.END]
    return sum(each.outcome is Outcome.REDELIVERED for each in ends)


def test_what_a_dead_worker_had_started_is_not_handed_out_beside_its_copy(name: str) -> None:
    """It was killed before its commit, and nobody had its partition before the lease had ended."""
    refused = Fault(error=KafkaError(KafkaError.REBALANCE_IN_PROGRESS))
    with Service(f"memory://{name}", "n") as service:
        service.create_topics(partitions=1, marker_partitions=1)
        faults = cluster_of(service.config.bootstrap_servers).faults
        queue = service.queue("q", redelivery_timeout=0.5)
        producer = queue.producer()
        producer.send(b"first").result(within(30))
        dying = queue.consumer()
        receive(dying).ack(wait=True)
        faults.plan = lambda kind, *_: refused if kind == "commit" else None
        for payload in (b"0", b"1", b"2"):
            producer.send(payload).result(within(30))
        wait_until(lambda: dying.receive(0.1) or started(service) == 4)
        dying.close()
        faults.plan = None
        with LocalTracker(service.config).in_thread():
            wait_until(lambda: redelivered(service) == 3)
            with queue.consumer() as successor:
                messages: list[Message] = []
                wait_until(
                    lambda: messages.extend(successor.receive_many(9, 0.1)) or len(messages) >= 3
                )
                for message in messages:
                    message.ack()
                successor.flush()
        assert {(each.payload, each.delivery_count) for each in messages} == {
            (b"0", 2),
            (b"1", 2),
            (b"2", 2),
        }


def test_a_dead_workers_message_that_the_next_one_starts_too_late_is_not_handed_out_twice(
    name: str,
) -> None:
    """It got the partition in time, and was busy with other messages until the leases had ended."""
    lease_s = within(2.0)  # the successor renews its own in time
    refused = Fault(error=KafkaError(KafkaError.REBALANCE_IN_PROGRESS))
    with Service(f"memory://{name}", "n") as service:
        service.create_topics(partitions=1, marker_partitions=1)
        faults = cluster_of(service.config.bootstrap_servers).faults
        producer = service.queue("q").producer()
        producer.send(b"first").result(within(30))
        dying = service.queue("q", redelivery_timeout=lease_s).consumer()
        receive(dying).ack(wait=True)
        faults.plan = lambda kind, *_: refused if kind == "commit" else None
        for number in range(4):
            producer.send(b"%d" % number).result(within(30))
        wait_until(lambda: dying.receive(0.1) or started(service) == 5)
        dying.close()
        faults.plan = None
        queue = service.queue("q", redelivery_timeout=lease_s, receive_buffer=1)
        with LocalTracker(service.config).in_thread(), queue.consumer() as successor:
            messages = [receive(successor)]
            wait_until(lambda: redelivered(service) >= 2)
            while len({each.payload for each in messages}) < 4:
                messages[-1].ack(wait=True)
                messages.append(receive(successor))
            messages[-1].ack(wait=True)
            wait_until(lambda: MarkerType.START not in latest(service))
            assert successor.receive(0.1) is None
        assert len(messages) == 4


def latest(service: Service) -> set[MarkerType]:
    """Of each message the last marker's type."""
    last = {each.message_id: each.type for each in markers(service) if each.message_id}
    return set(last.values())


def test_a_look_that_failed_is_not_repeated_at_once_and_what_is_polled_is_handed_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []
    monkeypatch.setattr(Positions, "overtaken", lambda *of: looks.append(of) or Overtaken())
    with Service(f"memory://{name}", "n") as service:
        service.create_topics(partitions=1, marker_partitions=1)
        producer = service.queue("q").producer()
        with service.queue("q").consumer() as consumer:
            for number in range(3):
                producer.send(b"%d" % number).result(within(30))
                receive(consumer).ack()
    assert len(looks) == 1


def test_looks_that_fail_are_given_up_in_the_end(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A namespace may write more than is read in the time for a look: it costs that a few times."""
    late_s = 0.0
    monkeypatch.setattr(reader_module, "monotonic", lambda: time.monotonic() + late_s)
    monkeypatch.setattr(ConsumerState, "broker_ms", lambda _: None)  # nobody knows how old they are
    looks: list[float] = []
    monkeypatch.setattr(Positions, "overtaken", lambda *_: looks.append(late_s) or Overtaken())
    with Service(f"memory://{name}", "n") as service:
        service.create_topics(partitions=1, marker_partitions=1)
        producer = service.queue("q").producer()
        for _ in range(1000):
            producer.send(b"x").result(within(30))
        with service.queue("q", max_in_flight=100).consumer() as consumer:
            for _ in range(10):
                wait_until(lambda: [each.ack() for each in consumer.receive_many(100, 0.1)])
                late_s += 3.0
    assert 1 < len(looks) <= 4


def test_a_look_that_takes_long_holds_back_its_partition_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its messages come behind the answer, those of another partition do not wait for it."""
    may_end = threading.Event()

    def slow(_: Positions, first: dict[int, int], since_ms: int) -> Overtaken:
        assert 0 not in first or may_end.wait(within(120))
        return Overtaken(is_whole=True)

    monkeypatch.setattr(Positions, "overtaken", slow)
    monkeypatch.setattr(ConsumerState, "broker_ms", lambda _: None)  # nobody knows how old they are
    with Service(f"memory://{name}", "n") as service:
        service.create_topics(partitions=2, marker_partitions=1)
        with service.queue("q").consumer() as consumer:
            send_to(service, 1, b"looked at")
            assert receive(consumer).payload == b"looked at"
            send_to(service, 0, b"held back")
            wait_until(lambda: 0 in consumer.intake.pipeline.waiting)
            for number in range(3):
                send_to(service, 1, b"%d" % number)
                assert receive(consumer).payload == b"%d" % number
            assert set(consumer.intake.pipeline.waiting) == {0}
            assert consumer.receive(0) is None
            may_end.set()
            assert receive(consumer).payload == b"held back"


def send_to(service: Service, partition: int, value: bytes) -> None:
    writer = open_producer({"bootstrap.servers": service.config.bootstrap_servers}, None)
    writer.produce(service.config.message_topic, value, b"q", partition)
    assert not writer.flush(10)


def test_a_recreated_topic_is_read_from_its_start_though_nobody_receives(name: str) -> None:
    """What a poll of a member that only stays one gets does not change where it is to be read."""
    with Service(f"memory://{name}", "n") as service:
        service.create_topics(partitions=1, marker_partitions=1)
        other = service.queue("other").producer()
        for _ in range(200):
            other.send(b"x").result(within(30))
        place = service.config.message_topic, 0
        group = GroupOffsets(service.config, group_of(service.config, "q"))
        group.commit({place: 50})
        with service.queue("q").consumer() as consumer:
            intake = consumer.intake
            wait_until(lambda: intake.pipeline.positions().get(0, 0) > 50)
            assert consumer.receive(0) is None
            intake.reader.reread_topic(time.monotonic() + 60)
            intake.pipeline.revoked([0])
            wait_until(lambda: group.committed([place])[place] == 0)
            wait_until(lambda: consumer.receive(0.1) or intake.pipeline.positions().get(0) == 200)
