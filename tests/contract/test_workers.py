"""What a worker promises, on every backend and in memory."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass

import pytest
from tests.contract.handlers import die_or_hang
from tests.contract.worlds import World, receive
from tests.waiting import wait_until, within

from kafkamq import Ack, ConfigError, Message, Nack, Reject, Worker
from kafkamq.metrics.health import health
from kafkamq.queue.rules.capabilities import Feature
from kafkamq.testing import MemoryService


@pytest.fixture(autouse=True)
def no_handlers(world: World) -> None:
    world.service.handlers.clear()


@dataclass
class Order:
    id: int
    note: str = ""


def test_bodies_and_verdicts(world: World) -> None:
    queue = world.queue("orders", max_deliveries=2)
    seen: list[tuple[int, int]] = []

    @queue.handler(concurrency=4)
    def handle(order: Order, message: Message) -> object:
        seen.append((order.id, message.delivery_count))
        if order.note == "reject":
            return Reject("not wanted")
        if order.note == "raise":
            raise RuntimeError("broken")
        if order.note == "once" and message.delivery_count == 1:
            return Nack(reason="not yet")
        return Ack() if order.id % 2 else None

    bodies = [b'{"id": 1}', b'{"id": 2, "note": "reject"}', b'{"id": 3, "note": "raise"}']
    bodies += [b'{"id": 4, "note": "once"}', b'{"id": "5"}', b"no json", b'{"id": 6}']
    with Worker(world.service, queues=["orders"]) as worker:
        assert "receiving of orders" in {state.name for state in health.states() if state.is_live}
        with queue.producer() as producer:
            for body in bodies:
                producer.send(body)
        wait_until(lambda: worker.handled == 9, "all handled")
    assert "receiving of orders" not in {state.name for state in health.states()}
    assert sorted(seen) == [(1, 1), (2, 1), (3, 1), (3, 2), (4, 1), (4, 2), (6, 1)]
    wait_until(lambda: len(world.letters(queue)) == 4, "the dead letters")
    letters = {letter.payload: letter for letter in world.letters(queue)}
    assert letters[bodies[1]].error == "not wanted"
    assert letters[bodies[2]].error == "RuntimeError: broken"
    assert letters[bodies[2]].delivery_count == 2
    assert "the body.id is a string: it must be int" in letters[bodies[4]].error
    assert "the payload is no JSON" in letters[bodies[5]].error
    assert letters[bodies[5]].reason == "rejected"


def test_a_handler_of_twice_the_lease_runs_once(world: World) -> None:
    """Or it is refused at once, where leases are not renewed."""
    lease_s = within(0.4 if isinstance(world.service, MemoryService) else 1.0)
    queue = world.queue("long", redelivery_timeout=15.0 if world.backend == "share" else lease_s)
    runs = []

    def handle(body: bytes) -> None:
        runs.append(body)
        time.sleep(2 * lease_s)

    if not world.has(Feature.LONG_HANDLERS):
        with pytest.raises(ConfigError, match="markers, offsets and claims have it"):
            queue.handler(timeout=30.0)(handle)
        return
    queue.handler(concurrency=2)(handle)
    with Worker(world.service, queues=["long"]) as worker:
        for number in range(2):
            queue.producer().send(b"%d" % number, key=b"%d" % number)
        wait_until(lambda: worker.handled == 2, "all handled")
    with queue.consumer() as consumer:  # a copy would be there for a lease by now
        assert consumer.receive(1.0) is None
    assert sorted(runs) == [b"0", b"1"]


def test_two_queues_one_slow(world: World) -> None:
    """A queue whose handlers are all busy takes nothing from another one."""
    slow, quick = world.queue("slow"), world.queue("quick")
    gate, done = threading.Event(), []

    @slow.handler(concurrency=2)
    def wait(body: bytes) -> None:
        gate.wait(within(60))

    @quick.handler(concurrency=2)
    async def note(body: str) -> None:
        await asyncio.sleep(0)
        done.append(body)

    with Worker(world.service, queues=["slow", "quick"]) as worker:
        for number in range(10):
            slow.producer().send(b"%d" % number)
            quick.producer().send(b"%d" % number)
        wait_until(lambda: len(done) == 10, "the quick ones")
        gate.set()
        wait_until(lambda: worker.handled == 20, "the slow ones")


def test_a_stop_in_the_middle_loses_nothing(world: World) -> None:
    """What was begun and does not end is nacked; what was not begun is not counted."""
    queue = world.queue("stopped")
    begun = threading.Event()

    @queue.handler(concurrency=2)
    async def hang(body: str) -> None:
        begun.set()
        await asyncio.sleep(3600)  # nobody waits for it

    worker = Worker(world.service, queues=["stopped"], drain=0.2)
    worker.start()
    with queue.producer() as producer:
        for number in range(8):
            producer.send(b"%d" % number, key=b"%d" % number)
    assert begun.wait(within(60))
    worker.stop()
    with queue.consumer() as consumer:
        counts = {}
        while len(counts) < 8:
            for message in receive(consumer, 1):
                assert message.payload not in counts
                counts[message.payload] = message.delivery_count
                message.ack()
        consumer.flush()
    again = [count for count in counts.values() if count > 1]
    if world.backend == "markers":
        assert 1 <= len(again) <= 2
    assert world.letters(queue) == []


@pytest.mark.parametrize("limits", [{}, {"max_attempts": 1}], ids=["deliveries", "attempts"])
def test_a_stop_in_the_last_attempt_makes_no_dead_letter(
    world: World, limits: dict[str, int]
) -> None:
    if limits and world.backend == "share":
        pytest.skip("the broker counts each delivery, so this attempt is spent (docs/worker.md)")
    queue = world.queue("spared", max_deliveries=5 if limits else 2)
    begun = threading.Event()

    @queue.handler(concurrency=1, **limits)
    async def hang(message: Message) -> object:
        if message.delivery_count == 1 and not limits:
            return Nack(reason="not yet")
        begun.set()
        await asyncio.sleep(600)
        return None

    worker = Worker(world.service, queues=["spared"], drain=0.2)
    worker.start()
    with queue.producer() as producer:
        producer.send(b"x")
    assert begun.wait(within(60))
    worker.stop()
    with queue.consumer() as consumer:
        (message,) = receive(consumer, 1)
        message.ack(wait=True)
    if world.backend in ("markers", "share"):  # the others count in the process
        assert message.delivery_count == (1 if limits else 2)
    assert world.letters(queue) == []


def test_handlers_that_hang_or_kill_their_process(world: World) -> None:
    queue = world.queue("processes", max_deliveries=1)
    queue.handler(processes=1, timeout=1.5)(die_or_hang)
    with Worker(world.service, queues=["processes"]) as worker:
        with queue.producer() as producer:
            for body in (b"die", b"hang", b"fine"):
                producer.send(body)
        wait_until(lambda: worker.handled == 3, "all handled")
    wait_until(lambda: len(world.letters(queue)) == 2, "the dead letters")
    letters = {letter.payload: letter for letter in world.letters(queue)}
    assert "has died (exit code 7)" in letters[b"die"].error
    assert "took longer than 1.5 s" in letters[b"hang"].error
    assert {letter.delivery_count for letter in letters.values()} == {1}


def test_no_message_and_timeouts_in_threads(world: World) -> None:
    queue = world.queue("hanging", max_deliveries=1)
    gate = threading.Event()

    @queue.handler(concurrency=1, timeout=0.2)
    def hang(body: bytes) -> None:
        gate.wait(within(60))

    try:
        with Worker(world.service, queues=["hanging"]) as worker:
            assert worker.handled == 0
            queue.producer().send(b"x").result(within(30))
            wait_until(lambda: len(world.letters(queue)) == 1, "the dead letter")
        (letter,) = world.letters(queue)
        assert "took longer than 0.2 s" in letter.error
    finally:
        gate.set()


def test_pause(world: World) -> None:
    queue = world.queue("paused")
    seen = []
    queue.handler()(lambda message: seen.append(message.payload))
    with Worker(world.service, queues=["paused"]) as worker:
        if not world.has(Feature.PAUSE):
            with pytest.raises(ConfigError, match="markers, offsets and claims have it"):
                worker.pause("paused")
            return
        worker.pause("paused")
        worker.resume("paused")
        queue.producer().send(b"x").result(within(30))
        wait_until(lambda: seen == [b"x"], "the message")
