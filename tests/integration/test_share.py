"""What only share groups have: settings of the group, the broker's count, locks that end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic
from tests.contract.worlds import World, receive, world_of
from tests.integration.parallel_tools import topic_settings
from tests.integration.queue_logs import read_topic
from tests.sure_producer import SureProducer
from tests.waiting import wait_until, within

from kafkamq import BrokerError, ConfigError, LeaseLostError, Nack, Reject, Worker
from kafkamq.dev import LocalKafka
from kafkamq.dev.environment import cache_dir_from, java_from
from kafkamq.queue.dead_letters import Selection, redrive
from kafkamq.transport.admin import Admin


@pytest.fixture
def world(bootstrap: str, namespace: str) -> Iterator[World]:
    with world_of("share", bootstrap, namespace) as made:
        yield made


def group_settings(bootstrap: str, group_id: str) -> dict[str, str]:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    resource = ConfigResource(ConfigResource.Type.GROUP, group_id)
    (future,) = admin.describe_configs([resource]).values()
    return {name: entry.value for name, entry in future.result().items()}


def test_a_message_that_nobody_gives_a_verdict_on_is_kept(world: World, bootstrap: str) -> None:
    """The broker would archive it after its fifth delivery; the fourth is the last one seen here.

    Each consumer ends without a verdict, as one does that is killed.
    """
    queue = world.service.queue("poison", backend="share", max_deliveries=5, group="poison-group")
    queue.create_topics(partitions=1)
    queue.producer().send(b"poison", key="k").result(within(30))
    for delivery in range(1, 5):
        with queue.consumer() as consumer:
            (message,) = receive(consumer, 1)
            assert message.delivery_count == delivery
    settings = group_settings(bootstrap, "poison-group")
    assert settings["share.auto.offset.reset"] == "earliest"
    assert settings["share.record.lock.duration.ms"] == "15000"
    assert settings["share.session.timeout.ms"] == "10000"  # this broker allows 3 s
    assert settings["share.isolation.level"] == "read_committed"
    with queue.consumer() as consumer:
        assert consumer.receive(1.0) is None
        wait_until(lambda: world.letters(queue), "the dead letter")
    (letter,) = world.letters(queue)
    assert (letter.payload, letter.key, letter.reason) == (b"poison", b"k", "max-deliveries")
    assert letter.delivery_count == 4
    assert "ended without a verdict" in letter.error


def test_slow_messages_of_a_partition_do_not_hold_back_the_next(world: World) -> None:
    """Two of the four members that there are at first are assigned to the partition."""
    queue = world.queue("slow", redelivery_timeout=30.0)
    with queue.producer() as producer, queue.consumer() as consumer:
        messages = []
        for number in range(4):
            producer.send(b"%d" % number, key="of one partition").result(within(30))
            messages += receive(consumer, 1)
        for message in messages:
            message.ack()
        consumer.flush()


def test_a_lease_longer_than_any_lock_is_refused(world: World) -> None:
    queue = world.service.queue("long", backend="share", redelivery_timeout=61.0)
    queue.create_topics(partitions=1)
    with pytest.raises(ConfigError, match=r"60 s at most; markers, offsets, claims hold"):
        queue.consumer()


def test_a_group_that_is_another_backends_is_told_apart(world: World) -> None:
    queue = world.service.queue("both", backend="offsets")
    queue.create_topics(partitions=1)
    queue.producer().send(b"x").result(within(30))
    with queue.consumer() as consumer:
        receive(consumer, 1)[0].ack()
    shared = world.service.queue("both", backend="share")
    with (
        pytest.raises(BrokerError, match=r"give the queue another one by group="),
        shared.consumer() as consumer,
    ):
        receive(consumer, 1)


@pytest.mark.faults
def test_a_lock_that_ends(world: World) -> None:
    """Its verdict is refused, the message comes again, and its neighbours' verdicts count."""
    queue = world.queue("late", redelivery_timeout=15.0)
    with queue.producer() as producer:
        for number in range(5):
            producer.send(b"%d" % number)
    lost: list[object] = []
    with queue.consumer(on_lease_lost=lost.append) as consumer:
        messages = receive(consumer, 5)
        for message in messages[1:]:
            message.ack()
        consumer.flush()
        wait_until(lambda: lost, "the end of the lock")
        assert lost == messages[:1]
        with pytest.raises(LeaseLostError):
            messages[0].ack()
        (again,) = receive(consumer, 1)
        assert (again.payload, again.delivery_count) == (messages[0].payload, 2)
        again.ack(wait=True)
        began_s = time.monotonic()
        while time.monotonic() - began_s < 2.0:
            assert consumer.receive_many(10, 0.5) == []


@pytest.mark.faults
@pytest.mark.timeout(200)
@pytest.mark.parametrize("is_paused", [False, True])
def test_an_outage_longer_than_locks_and_sessions(is_paused: bool) -> None:
    """Workers go on behind it, also those for whose members the group has no room."""
    properties = {"group.share.min.record.lock.duration.ms": "1000", "group.share.max.size": "6"}
    places = {"cache_dir": cache_dir_from(os.environ), "java": java_from(os.environ)}
    seen: set[bytes] = set()
    with (
        LocalKafka(properties=properties, **places) as broker,
        world_of("share", broker.bootstrap_servers, "outage") as world,
    ):
        queue = world.queue("work", redelivery_timeout=3.0, max_deliveries=4)
        queue.handler(concurrency=48)(lambda message: seen.add(message.payload))
        with (
            Worker(world.service) as first,
            Worker(world.service) as second,
            queue.producer() as producer,
        ):
            for number in range(100):
                producer.send(b"%d" % number)
            wait_until(lambda: len(seen) > 50, "some of them")
            broker.pause() if is_paused else broker.kill()
            first.wait(within(13.0))  # the outage: nothing can be seen from outside
            broker.resume() if is_paused else broker.restart()
            for number in range(100, 200):
                producer.send(b"%d" % number)
            wait_until(lambda: len(seen) == 200, "all of them")
            assert not first.wait(0.0)
            assert not second.wait(0.0)


def test_a_dead_letter_that_is_too_large_comes_back_whole(world: World, bootstrap: str) -> None:
    """It refers to its payload; a redrive has it all."""
    queue = world.queue("large")
    letters = world.service.config.dead_letter_topic
    headers = {"h": b"1"}
    queue.producer().send(b"x" * 100_000, key="k", headers=headers).result(within(30))
    topic_settings(bootstrap, letters, max_message_bytes="20000")
    with queue.consumer() as consumer:
        (message,) = receive(consumer, 1)
        message.reject("no good", wait=True)
    (letter,) = world.letters(queue)
    assert (letter.payload, letter.error, letter.delivery_count) == (None, "no good", 1)
    assert redrive(world.service.config, Selection(queue_id="large")).redriven == 1
    with queue.consumer() as consumer:
        (message,) = receive(consumer, 1)
        assert (message.payload, message.key, message.delivery_count) == (b"x" * 100_000, b"k", 1)
        assert message.headers["h"] == b"1"
        message.ack(wait=True)


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_dead_letters_that_are_refused_for_a_minute() -> None:
    """Nothing is given up without one, though the broker's deliveries take a quarter of it.

    Half of the messages are rejected, half have come to their last delivery; then they are good.
    """
    properties = {"group.share.min.record.lock.duration.ms": "1000"}
    places = {"cache_dir": cache_dir_from(os.environ), "java": java_from(os.environ)}
    seen: set[bytes] = set()
    with (
        LocalKafka(properties=properties, **places) as broker,
        world_of("share", broker.bootstrap_servers, "refused") as world,
    ):
        queue = world.queue("work", redelivery_timeout=3.0, max_deliveries=2)
        letters = world.service.config.dead_letter_topic

        @queue.handler(concurrency=8)
        def handle(body: bytes) -> object:
            number = int(body)
            if number < 100:
                return Reject("no good") if number % 2 else Nack(reason="again")
            seen.add(body)
            return None

        topic_settings(broker.bootstrap_servers, letters, max_message_bytes="100")
        sender = SureProducer({"bootstrap.servers": broker.bootstrap_servers})  # ours refuses now
        with Worker(world.service) as first, Worker(world.service):
            for number in range(100):
                sender.produce(queue.config.topic, b"%d" % number)
            sender.confirm(30)
            assert not first.wait(within(60.0))
            assert world.letters(queue) == []
            topic_settings(broker.bootstrap_servers, letters, max_message_bytes="2000000")
            for number in range(100, 150):
                sender.produce(queue.config.topic, b"%d" % number)
            sender.confirm(30)
            wait_until(lambda: len(seen) == 50, "the good ones", 120.0)
            found: set[bytes | None] = set()
            wanted = {b"%d" % number for number in range(100)}

            def all_found() -> bool:
                found.update(letter.payload for letter in world.letters(queue))
                return found == wanted

            wait_until(all_found, "a dead letter of each", 60.0)
        reasons = {letter.payload: letter.reason for letter in world.letters(queue)}
        assert {reasons[b"%d" % number] for number in range(1, 100, 2)} == {"rejected"}
        assert {reasons[b"%d" % number] for number in range(0, 100, 2)} == {"max-deliveries"}


@pytest.mark.faults
def test_the_limit_is_the_groups_on_kafka_4_4(namespace: str) -> None:
    """More deliveries than the brokers' default; and the group's own dead letters beside ours."""
    places = {"cache_dir": cache_dir_from(os.environ), "java": java_from(os.environ)}
    with (
        LocalKafka("4.4.0", **places) as broker,
        world_of("share", broker.bootstrap_servers, namespace) as world,
    ):
        servers = broker.bootstrap_servers
        queue = world.service.queue("poison", backend="share", max_deliveries=8, group="poisoned")
        queue.create_topics(partitions=1)
        admin = AdminClient({"bootstrap.servers": servers})
        allowed = {"errors.deadletterqueue.group.enable": "true"}
        admin.create_topics([NewTopic("dlq.poisoned", 1, 1, config=allowed)])[
            "dlq.poisoned"
        ].result()
        with Admin(world.service.config) as settings:
            settings.set_group(
                "poisoned",
                {
                    "errors.deadletterqueue.topic.name": "dlq.poisoned",
                    "errors.deadletterqueue.copy.record.enable": "true",
                },
            )
        queue.producer().send(b"poison", key="k", headers={"h": b"1"}).result(within(30))
        for delivery in range(1, 9):  # each by a worker that ends, so only the broker can count
            with queue.consumer() as consumer:
                (message,) = receive(consumer, 1)
                assert message.delivery_count == delivery
        assert group_settings(servers, "poisoned")["share.delivery.count.limit"] == "9"
        with queue.consumer() as consumer:
            assert consumer.receive(1.0) is None
            wait_until(lambda: world.letters(queue), "the dead letter")
        (letter,) = world.letters(queue)
        wait_until(lambda: read_topic(servers, "dlq.poisoned"), "the group's own")
        (theirs,) = read_topic(servers, "dlq.poisoned")
    assert (letter.payload, letter.headers["h"]) == (b"poison", b"1")
    assert (letter.reason, letter.delivery_count) == ("max-deliveries", 8)
    headers = dict(theirs.headers() or [])
    assert (theirs.key(), theirs.value()) == (b"k", b"poison")
    assert headers["__dlq.errors.message"] == b"Offset rejected by client."
    assert headers["__dlq.errors.delivery.count"] == b"9"
    assert "h" not in headers
