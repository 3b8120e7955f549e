"""Queues in memory: what goes by the clock that a test moves, and what a worker makes of it."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest

from kafkamq import Backoff, ConfigError, LeaseLostError, OutgoingMessage, StateError, Worker
from kafkamq.testing import Clock, MemoryService


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(clock: Clock) -> MemoryService:
    return MemoryService(clock=clock)


def test_delays_and_their_cancellation(service: MemoryService, clock: Clock) -> None:
    queue = service.queue("q")
    producer = queue.producer()
    late = producer.send(b"late", delay=5).result().schedule
    assert late is not None
    token = producer.send(b"never", delay=5).result().schedule
    assert token is not None
    with queue.consumer() as consumer:
        assert consumer.receive(0) is None
        producer.cancel(token)
        producer.cancel(token)
        clock.advance(5)
        message = consumer.receive(0)
        assert message is not None
        assert message.payload == b"late"
        message.ack()
        assert consumer.receive(0) is None
        with pytest.raises(StateError):
            producer.cancel(late)


def test_at_most_once_nothing_comes_again(service: MemoryService, clock: Clock) -> None:
    queue = service.queue("q", delivery="at-most-once", max_lease=60.0)
    queue.producer().send_many([OutgoingMessage(payload=b"%d" % number) for number in range(3)])
    with queue.consumer() as consumer:
        first, second = consumer.receive_many(2, 0)
        for refused in (first.nack, lambda: first.reject("no"), lambda: first.extend(9)):
            with pytest.raises(StateError, match="at-most-once"):
                refused()
        clock.advance(3600)
        first.ack()
        with pytest.raises(ZeroDivisionError), second:
            raise ZeroDivisionError
    clock.advance(3600)
    with queue.consumer() as consumer:
        assert [each.payload for each in consumer.receive_many(9, 0)] == [b"2"]
    assert not service.dead_letters()


def test_back_off_by_the_clock(service: MemoryService, clock: Clock) -> None:
    backoff = Backoff(first=1.0, max=4.0, jitter=0.0)
    queue = service.queue("q", backoff=backoff, max_deliveries=3)
    queue.producer().send(b"x")
    with queue.consumer() as consumer:
        for delivery, delay in ((1, 1.0), (2, 2.0)):
            message = consumer.receive(0)
            assert message is not None
            assert message.delivery_count == delivery
            message.nack(reason="busy")
            clock.advance(delay - 0.001)
            assert consumer.receive(0) is None
            clock.advance(0.001)
        message = consumer.receive(0)
        assert message is not None
        message.nack(reason="busy")
    clock.advance(3.999)  # a tracker looks at it when its delay is over
    assert service.dead_letters() == []
    clock.advance(0.001)
    (letter,) = service.dead_letters()
    assert (letter.reason, letter.error, letter.delivery_count) == ("max-deliveries", "busy", 3)


def test_a_ttl_that_has_passed(service: MemoryService, clock: Clock) -> None:
    queue = service.queue("q")
    queue.producer().send(b"x", ttl=10)
    clock.advance(10.001)
    with queue.consumer() as consumer:
        assert consumer.receive(0) is None
    assert [letter.reason for letter in service.dead_letters("q")] == ["expired"]


def test_a_lock_that_ends(service: MemoryService, clock: Clock) -> None:
    """On ``share`` nothing renews it."""
    queue = service.queue("q", backend="share", redelivery_timeout=15.0)
    queue.producer().send(b"x")
    lost = []
    with queue.consumer(on_lease_lost=lost.append) as consumer:
        first = consumer.receive(0)
        assert first is not None
        clock.advance(15.001)
        second = consumer.receive(0)
        assert second is not None
        assert (second.delivery_count, lost) == (2, [first])
        with pytest.raises(LeaseLostError):
            first.ack()
        second.ack()


def test_a_key_stays_in_order(service: MemoryService, clock: Clock) -> None:
    queue = service.queue("q", backend="offsets", backoff=Backoff(first=1.0, jitter=0.0))
    for payload in (b"a1", b"a2", b"b1"):
        queue.producer().send(payload, key=payload[:1])
    with queue.consumer() as consumer:
        first, other = consumer.receive_many(10, 0)
        assert (first.payload, other.payload) == (b"a1", b"b1")
        first.nack()
        assert consumer.receive(0) is None
        clock.advance(1)
        (again,) = consumer.receive_many(10, 0)
        assert again.payload == b"a1"
        again.ack()
        (second,) = consumer.receive_many(10, 0)
        assert second.payload == b"a2"


def test_claims_hand_out_a_partition_in_order() -> None:
    """They come one at a time, whatever their keys, as on Kafka."""
    queue = MemoryService().queue("q", backend="claims")
    for key in ("a", None, "b"):
        queue.producer().send(b"x", key=key)
    with queue.consumer() as consumer:
        (first,) = consumer.receive_many(3, 0)
        first.ack()
        (second,) = consumer.receive_many(3, 0)
        assert (first.key, second.key) == (b"a", None)


def test_a_message_that_is_held_as_its_consumer_ends(service: MemoryService, clock: Clock) -> None:
    """Its lease runs out: that is another delivery, and by a tracker another copy."""
    queue = service.queue("q", redelivery_timeout=10.0, max_deliveries=1)
    queue.producer().send(b"x")
    with queue.consumer() as consumer:
        assert consumer.receive(0) is not None
    clock.advance(9.999)
    assert service.dead_letters() == []
    clock.advance(0.001)
    assert [letter.reason for letter in service.dead_letters()] == ["max-deliveries"]


def test_the_longest_lease(service: MemoryService, clock: Clock) -> None:
    queue = service.queue("q", redelivery_timeout=10.0, max_lease=60.0, max_deliveries=1)
    queue.producer().send(b"x")
    lost = []
    with queue.consumer(on_lease_lost=lost.append) as consumer:
        message = consumer.receive(0)
        assert message is not None
        clock.advance(60.001)
        assert consumer.receive(0) is None
        assert lost == [message]
        with pytest.raises(LeaseLostError):
            message.ack()
    assert [letter.reason for letter in service.dead_letters()] == ["max-lease"]


def test_share_keeps_the_brokers_last_delivery_for_the_dead_letter(
    service: MemoryService, clock: Clock
) -> None:
    """The broker's five are four; a lock is 15 s at least."""
    queue = service.queue("q", backend="share", redelivery_timeout=1.0, max_deliveries=9)
    queue.producer().send(b"x")
    with queue.consumer() as consumer:
        for delivery in range(1, 5):
            message = consumer.receive(0)
            assert message is not None
            assert message.delivery_count == delivery
            clock.advance(14.999)
            assert consumer.receive(0) is None
            clock.advance(0.002)
        assert consumer.receive(0) is None
    (letter,) = service.dead_letters()
    assert (letter.reason, letter.delivery_count) == ("max-deliveries", 4)
    assert letter.error == "4 deliveries ended without a verdict, or were given back"


def test_what_a_process_counts_is_gone_with_its_consumer(service: MemoryService) -> None:
    """And with it the order in which it handed out."""
    queue = service.queue("q", backend="offsets", backoff=Backoff(first=60.0))
    for payload in (b"1", b"2"):
        queue.producer().send(payload, key="k")
    with queue.consumer() as consumer:
        (message,) = consumer.receive_many(2, 0)
        message.nack()
    with queue.consumer(ordering="unordered") as consumer:
        found = consumer.receive_many(2, 0)
        assert [(each.payload, each.delivery_count) for each in found] == [(b"1", 1), (b"2", 1)]


@pytest.mark.parametrize("time", [timedelta(seconds=5), 5, math.inf])
def test_times_to_wait_may_be_timedeltas(service: MemoryService, time: float | timedelta) -> None:
    queue = service.queue("q")
    queue.handler()(lambda message: None)
    producer = queue.producer()
    assert producer.send(b"x").result(time).queue_id == "q"
    producer.flush(time)
    with queue.consumer() as consumer:
        message = consumer.receive(time)
        assert message is not None
        message.ack()
        consumer.flush(time)
        consumer.close(time)
    with Worker(service, telemetry=False) as worker:
        worker.request_stop()
        assert worker.wait(time)


@pytest.mark.parametrize("time", [math.nan, "5"])
def test_what_is_no_time_is_refused(service: MemoryService, time: float) -> None:
    producer = service.queue("q").producer()
    service.queue("q").handler()(lambda message: None)
    with pytest.raises(ConfigError, match="timeout is"):
        producer.flush(time)
    with service.queue("q").consumer() as consumer:
        for call in (consumer.receive, consumer.flush, consumer.close):
            with pytest.raises(ConfigError, match="timeout is"):
                call(time)
    with Worker(service, telemetry=False) as worker, pytest.raises(ConfigError, match="timeout is"):
        worker.wait(time)
