"""What a backend does its own way, and its double in memory in the same way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.contract.worlds import World, receive
from tests.waiting import wait_until, within

from kafkamq import Backoff, ConfigError, LeaseLostError, Message, StateError
from kafkamq.queue.rules.capabilities import Feature


def test_deliveries_of_a_consumer_that_is_gone(world: World) -> None:
    """Nacked, or held without a verdict as its consumer ended."""
    # Where a lease has to end, a short one; a claim's would end in a pause of the machine.
    queue = world.queue("gone", redelivery_timeout=1.0 if world.backend == "markers" else 15.0)
    with queue.producer() as producer:
        for payload in (b"nacked", b"held", b"acked"):  # claims know one position a partition
            producer.send(payload, key=b"one partition")
    told: list[Message] = []
    with queue.consumer(ordering="unordered", on_lease_lost=told.append) as consumer:
        places = {}
        for message in receive(consumer, 3):
            places[message.payload] = message.message_id
            if message.payload == b"nacked":
                message.nack(reason="not yet")
            elif message.payload == b"acked":
                message.ack()
        consumer.flush()
    with queue.consumer(ordering="unordered") as consumer:
        again = receive(consumer, 2)
        assert {each.payload for each in again} == {b"nacked", b"held"}
        for each in again:
            if world.backend == "share":  # a member may have fetched it once more, unseen
                assert each.delivery_count in (2, 3)
            else:
                assert each.delivery_count == (2 if world.backend == "markers" else 1)
        for each in again:
            is_a_copy = each.message_id != places[each.payload]
            assert is_a_copy == (world.backend == "markers")
            names = {name for name, _ in each.raw_headers}
            assert ("kafkamq-origin" in names) == is_a_copy
            each.ack()
        consumer.flush()
    if world.backend == "offsets":  # leaving the group is a revocation
        assert [each.payload for each in told] == [b"held"]
    else:
        assert told == []
    assert world.letters(queue) == []


def test_a_nack_with_a_delay(world: World) -> None:
    queue = world.queue("delayed", max_deliveries=2)
    queue.producer().send(b"x").result(within(30))
    with queue.consumer() as consumer:
        (message,) = receive(consumer, 1)
        if not world.has(Feature.RETRY_DELAY):
            with pytest.raises(ConfigError, match="markers, offsets and claims have it"):
                message.nack(delay=1.0)
            message.ack(wait=True)
            return
        message.nack(delay=1.0)
        nacked_s = time.monotonic()
        (again,) = receive(consumer, 1)
        assert time.monotonic() - nacked_s > 0.9
        assert again.delivery_count == 2
        again.nack(delay=2.0, reason="enough")  # its last one
        consumer.flush()
        time.sleep(0.7)
        if world.backend == "markers":  # the tracker looks at it when the delay is over
            assert world.letters(queue) == []
        wait_until(lambda: world.letters(queue), "the dead letter")
    (letter,) = world.letters(queue)
    assert (letter.reason, letter.error, letter.delivery_count) == ("max-deliveries", "enough", 2)


def test_delayed_sends(world: World) -> None:
    queue = world.queue("later")
    producer = queue.producer()
    if not world.has(Feature.DELAYED_SEND):
        with pytest.raises(ConfigError, match="markers has it"):
            producer.send(b"x", delay=1.0)
        with pytest.raises(ConfigError, match="markers has it"):
            producer.cancel(None)  # type: ignore[arg-type]
        return
    sent_s = time.monotonic()
    late = producer.send(b"late", delay=1.0).result(within(30))
    never = producer.send(b"never", delay=2.0).result(within(30))
    assert never.schedule is not None
    assert late.schedule is not None
    assert never.topic == world.service.config.marker_topic
    producer.cancel(never.schedule)
    producer.cancel(never.schedule)
    with pytest.raises(ConfigError, match="schedule"):
        producer.cancel(late)  # type: ignore[arg-type]
    with queue.consumer() as consumer:
        (message,) = receive(consumer, 1)
        assert time.monotonic() - sent_s > 0.9
        assert (message.payload, message.topic) == (b"late", world.service.config.message_topic)
        message.ack()
        with pytest.raises(StateError, match="due"):
            producer.cancel(late.schedule)
        assert consumer.receive(2.0) is None
        consumer.flush()


def test_a_time_to_live(world: World) -> None:
    if not world.has(Feature.TTL):
        with pytest.raises(ConfigError, match="markers has it"):
            world.queue("short").producer().send(b"x", ttl=1.0)
        return
    queue = world.queue("short")
    with queue.producer() as producer:
        producer.send(b"unseen", ttl=0.3)
    time.sleep(0.6)
    with queue.producer() as producer:
        producer.send(b"nacked", ttl=4.0)
    with queue.consumer() as consumer:
        (message,) = receive(consumer, 1)
        assert message.payload == b"nacked"
        message.nack(delay=5.0, reason="not now")

        def have_died() -> bool:
            assert consumer.receive(0.2) is None  # reads on
            return len(world.letters(queue)) == 2

        wait_until(have_died, "the dead letters")
    found = {
        letter.payload: (letter.reason, letter.error, letter.delivery_count)
        for letter in world.letters(queue)
    }
    assert found == {b"unseen": ("expired", "expired", 1), b"nacked": ("expired", "not now", 1)}


def test_a_lease_that_nothing_renews(world: World) -> None:
    """By ``max_lease`` on markers, by their lock on share; the others' end with the consumer."""
    lease = 1.0 if world.backend == "markers" else 20.0
    queue = world.queue("long", redelivery_timeout=lease, max_lease=lease, max_deliveries=1)
    queue.producer().send(b"x").result(within(30))
    told: list[Message] = []
    with queue.consumer(on_lease_lost=told.append) as consumer:
        (message,) = receive(consumer, 1)
        if world.has(Feature.EXTEND):
            message.extend(20.0)
        time.sleep(1.3)
        if world.backend == "markers":
            wait_until(lambda: told == [message] or consumer.receive(0.1), "its loss")
            with pytest.raises(LeaseLostError):
                message.ack()
            wait_until(lambda: world.letters(queue), "the dead letter")
            assert [letter.reason for letter in world.letters(queue)] == ["max-lease"]
        else:
            message.ack(wait=True)
            assert told == []


@pytest.mark.parametrize("null_keys", ["parallel", "serial"])
def test_order_by_key(world: World, null_keys: str) -> None:
    if not world.has(Feature.KEY_ORDER):
        with pytest.raises(ConfigError, match="offsets has it"):
            world.queue("keys").consumer(ordering="key")
        if null_keys == "serial":
            with pytest.raises(ConfigError, match="offsets has it"):
                world.queue("keys", null_keys=null_keys)
        return
    queue = world.queue(f"keys-{null_keys}", null_keys=null_keys)
    with queue.producer() as producer:
        for key in (b"a", b"b"):
            for number in range(3):
                producer.send(key + b"%d" % number, key=key)
        for number in range(10):
            producer.send(b"%d" % number)
    with queue.consumer() as consumer, _held(consumer, 2) as held:
        keyed = [message for message in held if message.key is not None]
        assert sorted(each.payload or b"" for each in keyed) == [b"a0", b"b0"]
        keyless = [message for message in held if message.key is None]
        if null_keys == "parallel":
            assert len(keyless) == 10
        else:  # of each partition the first one
            assert 1 <= len(keyless) <= 2
            assert len({each.message_id.partition for each in keyless}) == len(keyless)
        keyed[0].nack()
        first = (keyed[0].payload or b"")[:1]
        keyed[1].ack()
        nexts = {each.payload: each.delivery_count for each in receive(consumer, 2)}
        other = b"b" if first == b"a" else b"a"
        assert nexts == {first + b"0": 2, other + b"1": 1}


@contextmanager
def _held(consumer, at_least: int) -> Iterator[list[Message]]:
    """What comes until nothing more does."""
    held = receive(consumer, at_least)
    while more := consumer.receive_many(100, 2.0):
        held += more
    yield held


def test_order_by_partition(world: World) -> None:
    queue = world.queue("lines")
    if not world.has(Feature.PARTITION_ORDER):
        with pytest.raises(ConfigError, match="offsets and claims have it"):
            queue.consumer(ordering="partition")
        return
    with queue.producer() as producer:
        for number in range(10):
            producer.send(b"%d" % number, key=b"%d" % number)
    with queue.consumer(ordering="partition") as consumer, _held(consumer, 2) as held:
        assert sorted(each.message_id.partition for each in held) == [0, 1]
        assert [each.message_id.offset for each in held] == [0, 0]
        held[0].ack()
        (second,) = receive(consumer, 1)
        assert second.message_id.partition == held[0].message_id.partition
        assert second.message_id.offset == 1


def test_refusals(world: World) -> None:
    """Of what no backend takes, and of what this one lacks."""
    service, backend = world.service, world.backend
    queue = world.queue("refusals")
    producer = queue.producer()
    with pytest.raises(ConfigError, match=r"max\.message\.bytes"):
        producer.send(b"x" * 2_000_000)
    with pytest.raises(ConfigError, match="kafkamq-"):
        producer.send(b"x", headers={"kafkamq-id": b"1"})
    with pytest.raises(ConfigError):
        producer.send("text")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        producer.send(b"x", key=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ordering"):
        queue.consumer(ordering="reverse")
    with pytest.raises(ConfigError, match="partitions"):
        queue.create_topics(partitions=0)
    if not world.has(Feature.EXACTLY_ONCE):
        with pytest.raises(ConfigError, match="markers has it"):
            service.queue("refusals", backend=backend, exactly_once=True)
    if backend == "share":
        with pytest.raises(ConfigError, match="locks for 60 s at most"):
            service.queue("refusals", backend=backend, redelivery_timeout=61.0).consumer()
        with pytest.raises(ConfigError, match="backoff"):
            service.queue("refusals", backend=backend, backoff=Backoff(first=2.0))
    with queue.consumer() as consumer:
        with pytest.raises(ConfigError, match="n is 0"):
            consumer.receive_many(0)
        producer.send(b"x").result(within(30))
        (message,) = receive(consumer, 1)
        with pytest.raises(ConfigError, match="reason"):
            message.reject("")
        with pytest.raises(ConfigError):
            message.nack(delay=-1.0)
        message.ack()
        consumer.flush()
    with pytest.raises(StateError, match="closed"):
        consumer.receive(0.0)


def test_what_a_message_says_of_itself(world: World) -> None:
    queue = world.queue("facts", max_deliveries=1)
    sent = queue.producer().send(b"x", key="k", headers={"a": b"1"}, id="n1").result(within(30))
    topic = queue.config.topic or world.service.config.message_topic
    assert (sent.topic, sent.queue_id, sent.id, sent.schedule) == (topic, "facts", "n1", None)
    with queue.consumer() as consumer:
        (message,) = receive(consumer, 1)
        assert message.topic == topic
        assert (message.message_id.partition, message.message_id.offset) == (
            sent.partition,
            sent.offset,
        )
        assert message.timestamp_ms == sent.timestamp_ms
        assert dict(message.raw_headers) == {"a": b"1", "kafkamq-id": b"n1"}
        left_s = message.deadline - time.monotonic()
        if world.backend in ("markers", "share"):
            assert 0 < left_s <= 20.1
        else:
            assert left_s == float("inf")
        assert repr(message) == (f"<Message {sent.partition}/{sent.offset} of 'facts', delivery 1>")
        message.reject("no good")
        wait_until(lambda: world.letters(queue), "the dead letter")
    (letter,) = world.letters(queue)
    origin = f"{topic}/{sent.partition}/{sent.offset}/{sent.timestamp_ms}"
    assert (letter.origin, letter.headers["a"]) == (origin, b"1")
    assert (letter.key, letter.payload, letter.reason) == (b"k", b"x", "rejected")
