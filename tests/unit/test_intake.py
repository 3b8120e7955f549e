"""A worker's intake on Kafka in memory: it polls whatever the application and the brokers do."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import KafkaError
from confluent_kafka import Message as Record
from tests.unit.worker_parts import InMemory
from tests.waiting import wait_until, within

from kafkamq import BrokerError, Message
from kafkamq.markers import intake
from kafkamq.markers.message import MarkersMessage
from kafkamq.markers.rules.pipeline import Pipeline
from kafkamq.queue.names import group_of
from kafkamq.queue.wire.keys import marker_partition
from kafkamq.transport.clients import open_producer
from kafkamq.transport.memory.state import Fault
from kafkamq.types import Outcome

PARTITIONS, MARKER_PARTITIONS = 4, 4
# Partitions of the messages whose markers go to partitions of their own.
ONE = 0
OTHER = next(
    number
    for number in range(1, PARTITIONS)
    if marker_partition(number, 0, MARKER_PARTITIONS) != marker_partition(ONE, 0, MARKER_PARTITIONS)
)


class Kafka(InMemory):
    def __init__(self) -> None:
        super().__init__(partitions=PARTITIONS, marker_partitions=MARKER_PARTITIONS)
        self.sent = 0

    def send(self, partition: int, count: int = 1) -> None:
        writer = open_producer({"bootstrap.servers": self.address}, None)
        for _ in range(count):
            writer.produce(self.service.config.message_topic, b"%d" % self.sent, b"q", partition)
            self.sent += 1
        assert not writer.flush(within(10))

    def consumer(self, **queue: Any) -> Any:
        return self.service.queue("q", **queue).consumer()

    def committed(self, partition: int) -> int:
        place = self.service.config.message_topic, partition
        found = self.cluster.groups.committed(group_of(self.service.config, "q"), place)
        return -1 if found is None else found[0]


@pytest.fixture
def kafka() -> Iterator[Kafka]:
    with closing(Kafka()) as made:
        yield made


def receive(consumer: Any, count: int) -> list[Message]:
    found: list[Message] = []
    wait_until(lambda: found.extend(consumer.receive_many(count, 0.1)) or len(found) >= count)
    return found


def receive_one(consumer: Any) -> Message:
    """The next one; others are STARTed ahead."""
    found: list[Message | None] = [None]

    def has_come() -> bool:
        found[0] = consumer.receive(0.1)
        return found[0] is not None

    wait_until(has_come)
    assert found[0] is not None
    return found[0]


def partitions(consumer: Any) -> int:
    return len(consumer.intake.reader.group.places)


def test_a_commit_that_took_long_makes_no_later_one_long() -> None:
    taken_s = 0.001
    after_s = intake.usual_s(taken_s, 10.0)
    assert taken_s < after_s < 0.006
    assert intake.usual_s(after_s, taken_s) == taken_s


@pytest.mark.parametrize("way", ["works", "is full", "asks for one", "never asked"])
def test_the_group_waits_for_no_application(kafka: Kafka, way: str) -> None:
    """Another worker gets its share while this one works, or has as many as it may hold."""
    kafka.send(ONE, 5)
    with kafka.consumer(max_in_flight=2) as busy:
        wait_until(lambda: partitions(busy) == PARTITIONS)
        held = [] if way == "never asked" else receive(busy, 1 if way == "asks for one" else 2)
        with kafka.consumer() as other:
            if way == "is full":
                wait_until(lambda: busy.receive_many(1, 0.05) or partitions(other) == 2)
            wait_until(lambda: partitions(other) == 2 and partitions(busy) == 2, timeout_s=10)
        for message in held:
            message.ack()


def test_polls_go_on_while_a_broker_does_not_answer(kafka: Kafka) -> None:
    """Neither STARTs, nor a commit, nor a question where to read, keeps the intake waiting."""
    kafka.send(ONE)
    with kafka.consumer() as consumer:
        receive(consumer, 1)[0].ack(wait=True)
        reader = consumer.intake.reader
        poll, polls = reader.poll, list[object]()

        def counted(*of: Any) -> int:
            polls.append(of)
            return int(poll(*of))

        reader.poll = counted
        for kind in ("produce", "commit", "list_offsets"):
            kafka.faults.plan = lambda what, *_: (
                Fault(latency_s=1.0) if what == kind else None  # noqa: B023 - asked at once
            )
            kafka.send(ONE)
            polls.clear()
            wait_until(lambda: consumer.receive(0.0) or len(polls) > 3)
            kafka.faults.plan = None
            consumer.receive(0.5)


def test_a_commit_that_is_refused_is_told_once_and_nothing_is_lost(kafka: Kafka) -> None:
    kafka.send(ONE, 4)
    refusals = [Fault(error=KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED))]
    with kafka.consumer(receive_buffer=2) as consumer:
        first = receive(consumer, 1)
        kafka.faults.plan = lambda kind, *_: (
            refusals.pop() if kind == "commit" and refusals else None
        )
        found = [*first]
        told: list[str] = []

        def receive_more() -> bool:
            try:
                found.extend(consumer.receive_many(2, 0.1))
            except BrokerError as error:
                told.append(error.code)
            return len(found) == 4

        wait_until(receive_more)
        assert told == ["GROUP_AUTHORIZATION_FAILED"]
        assert [message.offset for message in found] == [0, 1, 2, 3]
        for message in found:
            message.ack()


def test_a_start_that_waits_for_a_leader_holds_back_its_own_partition_alone(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkamq.markers.intake.PATIENCE_MS", 0)
    offline = "n.markers", marker_partition(OTHER, 0, MARKER_PARTITIONS)
    kafka.faults.offline.add(offline)
    kafka.send(ONE, 3)
    kafka.send(OTHER, 3)
    with kafka.consumer() as consumer:
        found = receive(consumer, 3)
        kafka.send(ONE, 2)
        found += receive(consumer, 2)
        assert {message.message_id.partition for message in found} == {ONE}
        wait_until(lambda: kafka.committed(ONE) == 5)
        assert kafka.committed(OTHER) <= 0
        kafka.send(OTHER, 2)
        for _ in range(5):  # nothing more is STARTed there
            assert consumer.receive(0.1) is None
        assert consumer.in_flight == 5 + 3
        kafka.faults.offline.discard(offline)
        late = receive(consumer, 5)
        places = [(each.message_id.partition, each.offset) for each in late]
        assert places == [(OTHER, offset) for offset in range(5)]
        wait_until(lambda: kafka.committed(OTHER) == 5)
        for message in (*found, *late):
            message.ack()


def test_what_nobody_takes_is_released_before_its_longest_lease_is_over(kafka: Kafka) -> None:
    """It was STARTed ahead: it goes to others, and no delivery is counted."""
    kafka.send(ONE, 5)
    with kafka.consumer(redelivery_timeout=within(0.5), max_lease=within(1.0)) as consumer:
        receive_one(consumer).ack()
        rest = {(ONE, offset) for offset in range(1, 5)}
        wait_until(lambda: set(kafka.ends(Outcome.RELEASE)) == rest, timeout_s=10)
        assert consumer.in_flight == 0


def test_who_asks_for_nothing_for_long_leaves_and_joins_again(kafka: Kafka) -> None:
    """What it had STARTed goes to others at once; what it holds stays (R5)."""
    kafka.send(ONE, 3)
    with kafka.consumer() as consumer:
        message = receive_one(consumer)
        wait_until(lambda: consumer.in_flight == 3)
        consumer.intake.reader.max_idle_ms = 0
        wait_until(lambda: not partitions(consumer), timeout_s=10)
        assert set(kafka.ends(Outcome.RELEASE)) == {(ONE, 1), (ONE, 2)}
        message.ack(wait=True)
        consumer.intake.reader.max_idle_ms = 300_000
        kafka.send(ONE)
        assert receive(consumer, 1)[0].offset == 3


def test_records_of_a_partition_that_went_within_the_poll_are_another_members(
    kafka: Kafka,
) -> None:
    """A poll makes several calls of the client, and a rebalance may come in each."""
    kafka.send(ONE)
    with kafka.consumer() as consumer:
        receive(consumer, 1)[0].ack(wait=True)
        reader = consumer.intake.reader
        poll, gone = reader.group.poll, PARTITIONS + 1
        record = Record(topic="n.messages", partition=gone, offset=7, key=b"q", value=b"x")
        polled = []

        def with_another(*of: Any) -> Any:
            records = list(poll(*of))
            polled.append(of)
            return [*records, record]

        reader.group.poll = with_another
        wait_until(lambda: consumer.receive(0.05) is None and len(polled) > 2)
        assert gone not in consumer.intake.pipeline.positions()
        assert not len(consumer.intake.pipeline)


@pytest.mark.parametrize("exactly_once", [False, True])
def test_what_was_settled_is_freed_at_once(kafka: Kafka, exactly_once: bool) -> None:
    """A cycle of references would keep thousands of messages until the collector runs."""

    def count() -> int:
        return sum(isinstance(each, MarkersMessage) for each in gc.get_objects())

    kafka.send(ONE, 20)
    gc.collect()
    before = count()
    gc.disable()
    try:
        with kafka.consumer(exactly_once=exactly_once) as consumer:
            for message in receive(consumer, 20):
                message.ack()
            del message
            consumer.flush()
            kafka.send(ONE)  # what comes next takes the place of what was committed last
            receive_one(consumer).ack(wait=True)
            wait_until(lambda: count() <= before + 1)
    finally:
        gc.enable()


def test_an_intake_that_may_poll_nothing_waits(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is polled waits for a look at what a former owner had begun."""
    looks, turns = threading.Event(), itertools.count()

    def startable_count(pipeline: Pipeline[Any]) -> int:
        next(turns)
        return sum(len(run.offsets) for run in pipeline.upcoming())

    kafka.send(ONE, 300)
    with kafka.consumer() as consumer:
        reader = consumer.intake.reader
        overtaken = reader.positions.overtaken

        def slow(*asked: Any) -> Any:
            looks.wait(within(30))
            return overtaken(*asked)

        monkeypatch.setattr(reader.positions, "overtaken", slow)
        monkeypatch.setattr(Pipeline, "startable_count", property(startable_count))
        assert not consumer.receive_many(1, 1.0)
        poll, polls = reader.poll, list[object]()
        monkeypatch.setattr(reader, "poll", lambda *how: (polls.append(how), poll(*how))[1])
        begin = next(turns)
        wait_until(lambda: consumer.receive_many(1, 0.05) or len(polls) > 2)
        assert next(turns) - begin < 1000 * len(polls)
        looks.set()
        receive_one(consumer).ack()


def test_starts_that_fail_at_once_are_written_again_after_a_pause(
    kafka: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "RETRY_S", 3600.0)
    monkeypatch.setattr(intake, "MAX_RETRY_S", 3600.0)
    refused = Fault(error=KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    tries: list[object] = []

    def plan(kind: str, _: object, place: Any) -> Fault | None:
        if kind != "produce" or not place or place[0] != kafka.service.config.marker_topic:
            return None
        tries.append(place)
        return refused

    kafka.send(ONE)
    with kafka.consumer() as consumer:
        kafka.faults.plan = plan
        with pytest.raises(BrokerError):
            wait_until(lambda: consumer.receive(0.1))
        assert consumer.receive(0.5) is None
        assert len(tries) == 1
        kafka.faults.plan = None
