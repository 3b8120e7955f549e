"""How long a worker's Kafka client goes without a poll, whatever its application does.

A rebalance waits for the next poll of every member of the group. The clock is virtual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from confluent_kafka import KafkaError
from harness.simulation.scheduler import Scheduler
from harness.simulation.swapping import swapped

from kafkamq.errors import BrokerError
from kafkamq.markers.rules.leases import Leases
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.service import Queue, Service
from kafkamq.transport.clients import open_producer
from kafkamq.transport.memory.cluster import cluster_of, forget_cluster
from kafkamq.transport.memory.consumer import Consumer as KafkaConsumer
from kafkamq.transport.memory.state import Fault

CLUSTER = "polls"
SERVERS = f"memory://{CLUSTER}"
MAX_GAP_S = 1.0
SECONDS = 100.0

Application = Callable[["World", Service], None]


class World:
    """An application's life of so many seconds, and when the members of groups were polled."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.sleep = scheduler.sleep
        self.polls: dict[object, list[float]] = {}
        self.sizes: list[int] = []
        self.pauses = 0

    def polled(self, client: KafkaConsumer, size: int) -> None:
        if client in cluster_of(SERVERS).groups.clients:
            self.sizes.append(size)
            self.polls.setdefault(client, []).append(self.scheduler.now_s())

    @property
    def goes_on(self) -> bool:
        return self.scheduler.now_s() < SECONDS

    def longest_gap_s(self) -> float:
        assert self.polls
        return max(after - before for at in self.polls.values() for before, after in pairwise(at))

    def live(self, application: Application) -> None:
        with Service(SERVERS, "n") as service:
            service.create_topics(partitions=4, marker_partitions=1)
            application(self, service)
            for polled_s in self.polls.values():
                polled_s.append(self.scheduler.now_s())


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    scheduler = Scheduler(1)
    world = World(scheduler)
    consume, pause = KafkaConsumer.consume, KafkaConsumer.pause

    def noted(client: KafkaConsumer, size: int, timeout_s: float) -> Any:
        world.polled(client, size)
        return consume(client, size, timeout_s)

    def noted_pause(client: KafkaConsumer, partitions: Any) -> None:
        world.pauses += 1
        pause(client, partitions)

    monkeypatch.setattr(KafkaConsumer, "consume", noted)
    monkeypatch.setattr(KafkaConsumer, "pause", noted_pause)
    forget_cluster(CLUSTER)
    with swapped(scheduler):
        yield world
        scheduler.close()
    forget_cluster(CLUSTER)


def filled(service: Service, **options: Any) -> Queue:
    queue = service.queue("a", **options)
    with queue.producer() as producer:
        for _ in range(400):
            producer.send(b"x")
        producer.flush(30)
    return queue


def one_by_one(work_s: float, **options: Any) -> Application:
    def application(world: World, service: Service) -> None:
        with filled(service, **options).consumer() as consumer:
            while world.goes_on:
                message = consumer.receive(1.0)
                assert message is not None
                world.sleep(work_s)
                message.ack()

    return application


def many(world: World, service: Service) -> None:
    with filled(service).consumer() as consumer:
        while world.goes_on:
            for message in consumer.receive_many(5, 1.0):
                world.sleep(0.1)
                message.ack()


def iteration(world: World, service: Service) -> None:
    with filled(service).consumer() as consumer:
        for message in consumer:
            world.sleep(0.5)
            message.ack()
            if not world.goes_on:
                return


def with_no_room(timeout_s: float) -> Application:
    def application(world: World, service: Service) -> None:
        with filled(service, max_in_flight=2).consumer() as consumer:
            held = [consumer.receive(1.0) for _ in range(2)]
            assert all(held)
            while world.goes_on:
                assert consumer.receive(timeout_s) is None
                world.sleep(0.01)

    return application


def beside_a_last_delivery(world: World, service: Service) -> None:
    send_last(service)
    with service.queue("last").consumer() as holder, filled(service).consumer() as consumer:
        held = receive(holder)
        while world.goes_on:
            consumer.receive(0.5)
        held.ack()


def before_a_last_delivery(world: World, service: Service) -> None:
    """Its START is late."""
    send_last(service)
    with service.queue("last").consumer() as consumer:
        cluster_of(SERVERS).faults.offline.add(("n.markers", 0))
        with pytest.raises(Exception, match="START"):
            consumer.receive(60.0)
        cluster_of(SERVERS).faults.offline.clear()


def send_last(service: Service) -> None:
    writer = open_producer({"bootstrap.servers": SERVERS}, None)
    writer.produce("n.messages", b"x", b"last", 0, headers=[("kafkamq-delivery-count", b"5")])
    writer.flush(5)


def receive(consumer: Consumer) -> Any:
    message = None
    while message is None:
        message = consumer.receive(1.0)
    return message


APPLICATIONS = {
    "0.5 s each": one_by_one(0.5),
    "0.9 s each": one_by_one(0.9),
    "60 s each": one_by_one(60.0),
    "exactly once": one_by_one(0.5, exactly_once=True),
    "at most once": one_by_one(0.5, delivery="at-most-once"),
    "many": many,
    "iteration": iteration,
    "no room": with_no_room(0.5),
    "no room, for long": with_no_room(30.0),
    "no room, never waiting": with_no_room(0.0),
    "beside a last delivery": beside_a_last_delivery,
    "before a last delivery": before_a_last_delivery,
}


@pytest.mark.parametrize("name", APPLICATIONS)
def test_a_worker_is_polled_whatever_its_application_does(world: World, name: str) -> None:
    world.scheduler.run("main", lambda: world.live(APPLICATIONS[name]))
    assert not world.scheduler.failures
    assert world.longest_gap_s() <= MAX_GAP_S


def test_a_poll_that_nobody_wants_changes_nothing_for_the_next_one(world: World) -> None:
    """It takes one record, half of which are another queue's, and fetches nothing again."""

    def application(world: World, service: Service) -> None:
        with service.queue("other").producer() as other, service.queue("a").producer() as own:
            for number in range(2000):
                (other if number % 2 else own).send(b"x")
        with service.queue("a", receive_buffer=10).consumer() as consumer:
            while world.goes_on:
                receive(consumer).ack()
                world.sleep(0.2)

    world.scheduler.run("main", lambda: world.live(application))
    assert 1 in world.sizes
    assert not world.pauses
    assert max(world.sizes) < 500


def test_a_worker_that_wants_nothing_for_long_takes_no_more_records(world: World) -> None:
    world.scheduler.run("main", lambda: world.live(with_no_room(0.5)))
    assert world.pauses == 1
    assert world.sizes.count(1) > 90


def test_a_commit_that_is_refused_again_and_again_is_made_once_a_second(world: World) -> None:
    """And nothing is STARTed again meanwhile, for messages that nobody gets."""
    refused = Fault(error=KafkaError(KafkaError.REBALANCE_IN_PROGRESS))
    commits, starts = 0, 0

    def plan(kind: str, *_: object) -> Fault | None:
        nonlocal commits, starts
        commits += kind == "commit"
        starts += kind == "produce"
        return refused if kind == "commit" else None

    def application(world: World, service: Service) -> None:
        with filled(service).consumer() as consumer:
            cluster_of(SERVERS).faults.plan = plan
            while world.goes_on:
                assert consumer.receive(1.0) is None
            cluster_of(SERVERS).faults.plan = None

    world.scheduler.run("main", lambda: world.live(application))
    assert 50 < commits < 150
    assert starts < 10 * commits


def test_a_consumer_that_cannot_poll_is_closed_at_once(world: World) -> None:
    def failing(*_: object) -> int:
        raise BrokerError("authentication failed", code="_AUTHENTICATION")

    def application(world: World, service: Service) -> None:
        with filled(service).consumer() as consumer:
            message = receive(consumer)
            wait(world, lambda: consumer.in_flight > 1)
            consumer.intake.reader.poll = failing
            wait(world, lambda: consumer.intake.failures)
            message.ack(wait=True)
            began_s = world.scheduler.now_s()
            consumer.close(10.0)
            assert world.scheduler.now_s() - began_s < 2.0

    world.scheduler.run("main", lambda: world.live(application))


def wait(world: World, condition: Callable[[], bool]) -> None:
    while not condition():
        world.sleep(0.01)


def test_what_a_rebalance_takes_is_told_to_the_leases(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[int] = []
    monkeypatch.setattr(Leases, "lost_partition", lambda _, number, __: lost.append(number))

    def application(_: World, service: Service) -> None:
        queue = filled(service)
        with queue.consumer() as first:
            held = receive(first)
            with queue.consumer() as second:
                receive(second).ack()
                assert len(lost) == 2
            held.ack()

    world.scheduler.run("main", lambda: world.live(application))
