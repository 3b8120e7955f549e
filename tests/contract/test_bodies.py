"""What a deserializer means for the messages of a worker, on every backend and in memory."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from tests.contract.handlers import take_upper
from tests.contract.worlds import World
from tests.waiting import wait_until

from kafkamq import Message, SchemaRegistryError, Worker
from kafkamq.queue.json_values import BodyError


@pytest.fixture(autouse=True)
def no_handlers(world: World) -> None:
    world.service.handlers.clear()


class Slow:
    """Reads a payload at the third time it is asked; never, while it is shut."""

    def __init__(self) -> None:
        self.asked: Counter[bytes] = Counter()
        self.threads: set[str] = set()
        self.is_shut = False

    def deserialize(self, payload: bytes, headers: Sequence[object] = ()) -> dict[str, Any]:
        del headers
        self.threads.add(threading.current_thread().name)
        self.asked[payload] += 1
        if self.is_shut or self.asked[payload] < 3:
            raise SchemaRegistryError("nobody is there", delay_s=0.05)
        if payload == b"bad":
            raise BodyError("bad")
        return {"text": payload.decode()}

    def is_ready(self, payload: bytes, headers: Sequence[object] = ()) -> bool:
        del payload, headers
        return False


def test_a_body_that_cannot_be_read_yet_is_no_delivery_that_failed(world: World) -> None:
    """Each message would be a dead letter after one."""
    queue = world.queue("waiting", max_deliveries=1)
    slow, seen = Slow(), Counter[tuple[str, int]]()

    @queue.handler(deserializer=slow, concurrency=4)
    def handle(body: dict[str, str], message: Message) -> None:
        seen[body["text"], message.delivery_count] += 1

    with Worker(world.service, queues=["waiting"]) as worker:
        with queue.producer() as producer:
            for number in range(20):
                producer.send(b"%d" % number)
        wait_until(lambda: worker.handled == 20, "all handled")
    assert seen == {(str(number), 1): 1 for number in range(20)}
    assert set(slow.asked.values()) == {3}
    assert not world.letters(queue)


def test_lists_and_coroutines_wait_too(world: World) -> None:
    """A list is handled without what waits; a coroutine's body is read beside its loop."""
    queue, slow = world.queue("lists", max_deliveries=2), Slow()
    seen: list[str] = []

    @queue.handler(deserializer=slow, batch_size=10)
    async def handle(bodies: list[dict[str, str]]) -> None:
        seen.extend(body["text"] for body in bodies)

    with Worker(world.service, queues=["lists"]) as worker:
        with queue.producer() as producer:
            for body in (b"a", b"b", b"bad"):
                producer.send(body)
        wait_until(lambda: worker.handled == 3, "all of them")
        wait_until(lambda: world.letters(queue), "the dead letter")
    assert [letter.error for letter in world.letters(queue)] == ["the body cannot be read: bad"]
    assert sorted(seen) == ["a", "b"]
    assert not any("loop" in name for name in slow.threads), slow.threads


def test_what_waits_at_the_end_is_released(world: World) -> None:
    queue, slow = world.queue("left", max_deliveries=1), Slow()
    slow.is_shut = True
    seen: list[int] = []

    @queue.handler(deserializer=slow)
    def handle(body: dict[str, str], message: Message) -> None:
        seen.append(message.delivery_count)

    with Worker(world.service, queues=["left"]), queue.producer() as producer:
        producer.send(b"x")
        wait_until(lambda: slow.asked[b"x"] >= 2, "a second question")
    slow.is_shut = False
    with Worker(world.service, queues=["left"]):
        wait_until(lambda: seen or world.letters(queue), "another worker's call")
    assert seen == [1]


def test_a_function_of_the_payload_is_a_deserializer(world: World) -> None:
    """What it raises rejects the message at once, with no word of its payload."""
    queue = world.queue("functions", max_deliveries=5)
    seen: list[str] = []

    @queue.handler(deserializer=bytes.decode)
    def handle(body: str, message: Message) -> None:
        seen.append(f"{body} {message.delivery_count}")

    with Worker(world.service, queues=["functions"]), queue.producer() as producer:
        producer.send(b"\xffsecret")
        producer.send(b"fine")
        producer.send(None)
        wait_until(lambda: len(world.letters(queue)) == 2, "the dead letters")
        wait_until(lambda: seen, "the call")
    assert seen == ["fine 1"]
    letters = world.letters(queue)
    assert {letter.reason for letter in letters} == {"rejected"}
    assert {letter.error for letter in letters} == {
        "the body cannot be read: the deserializer refused it: UnicodeDecodeError",
        "the body cannot be read: the payload is null",
    }


def test_processes_get_the_deserializer(world: World) -> None:
    queue = world.queue("apart")
    queue.handler(deserializer=bytes.upper, processes=1)(take_upper)
    with Worker(world.service, queues=["apart"]), queue.producer() as producer:
        producer.send(b"shout")
        wait_until(lambda: world.letters(queue), "the dead letter")
    assert [letter.error for letter in world.letters(queue)] == ["SHOUT"]
