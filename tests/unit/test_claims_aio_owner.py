"""Tasks that share an asyncio consumer of claims: each result goes to one of them."""

from __future__ import annotations

import asyncio
import itertools
import threading
import uuid
from collections.abc import Iterator

import pytest
from tests.waiting import within

from kafkamq.aio.claims import Admin, Cluster, Consumer
from kafkamq.claims import init_topic
from kafkamq.claims.engine import Engine
from kafkamq.errors import BrokerError, StateError
from kafkamq.transport.clients import open_producer
from kafkamq.transport.memory.cluster import cluster_of, forget_cluster
from kafkamq.transport.memory.state import UNKNOWN, Fault
from kafkamq.transport.producer import IdempotentProducer


class Sync:
    """In the place of a consumer: numbered messages and batches."""

    is_stopped = False

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self._number = itertools.count()

    def receive(self, timeout: float) -> str:
        assert self.gate.wait(within(30))
        return f"message {next(self._number)}"

    def find_batch(self, timeout: float) -> str:
        return f"batch {next(self._number)}"

    def take(self, batch: str) -> bool:
        return True

    def stop(self) -> None: ...

    def close(self, **_: object) -> None: ...


def test_tasks_get_messages_of_their_own() -> None:
    async def run() -> None:
        consumer = Consumer(Sync)  # type: ignore[arg-type]
        await consumer
        found = await asyncio.gather(*(consumer.receive(1) for _ in range(3)))
        found += await asyncio.gather(*(consumer.next_batch(1) for _ in range(3)))
        assert len(set(map(str, found))) == 6

    asyncio.run(run())


def test_what_comes_while_a_task_is_cancelled_is_for_the_next() -> None:
    """Also when it is there already, and the task was not told yet."""

    async def run() -> None:
        made = Sync()
        consumer = Consumer(lambda: made)  # type: ignore[arg-type,return-value]
        await consumer
        made.gate.clear()
        waiting = asyncio.create_task(consumer.receive(1))
        await asyncio.sleep(0.01)
        (pending,) = consumer._owner._pending.values()
        pending.add_done_callback(lambda _: waiting.cancel())  # before the task goes on
        made.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert str(await consumer.receive(1)) == "message 0"
        await consumer.close()
        with pytest.raises(StateError):
            await consumer.receive(1)

    asyncio.run(run())


@pytest.fixture
def servers() -> Iterator[str]:
    """A cluster with the topic "orders" of one partition, and a coordination topic."""
    name = uuid.uuid4().hex
    servers = f"memory://{name}"
    cluster_of(servers).create_topic("orders", 1)
    init_topic(servers, heartbeat_interval=1)
    yield servers
    forget_cluster(name)


def test_a_pause_whose_record_was_not_written_is_written_again(servers: str) -> None:
    refusals = [Fault(error=UNKNOWN)]
    faults = cluster_of(servers).faults

    async def run() -> None:
        async with Cluster(servers, heartbeat_interval=1) as cluster:
            admin = Admin(cluster, "billing")
            faults.plan = lambda kind, *_: (
                refusals.pop() if kind == "produce" and refusals else None
            )
            until = await admin.pause(60.0)
            assert not refusals
            assert await admin.paused_until() == until

    asyncio.run(run())


def test_a_pause_that_could_not_even_be_sent_is_sent_again(
    servers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals: list[int] = []
    open_writer = Engine.open_writer

    def refuse(engine: Engine) -> IdempotentProducer:
        if len(refusals) < engine.topic.partitions:
            refusals.append(1)
            raise BrokerError("the queue of what is to be sent is full")
        return open_writer(engine)

    monkeypatch.setattr(Engine, "open_writer", refuse)

    async def run() -> None:
        async with Cluster(servers, heartbeat_interval=1) as cluster:
            admin = Admin(cluster, "billing")
            until = await admin.pause(60.0)
            assert await admin.paused_until() == until

    asyncio.run(run())


@pytest.mark.parametrize("is_paused", [False, True])
def test_at_most_once_loses_no_batch_that_nobody_was_given(servers: str, is_paused: bool) -> None:
    """It came after the task was cancelled, and its claim ended without a crash."""
    producer = open_producer({"bootstrap.servers": servers})

    def send(*numbers: int) -> None:
        for number in numbers:
            producer.produce("orders", b"%d" % number)
        producer.flush(within(30))

    async def run() -> None:
        async with Cluster(servers, heartbeat_interval=1) as cluster:
            admin = Admin(cluster, "billing")
            member = await cluster.member("a", "billing")
            async with member.consumer("orders", delivery="at-most-once") as consumer:
                await consumer.wait_for_claims(1)
                send(0, 1)
                first = await consumer.next_batch(30)
                assert first is not None
                seen = [message.payload for message in first.messages]
                waiting = asyncio.create_task(consumer.next_batch(30))
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                end = first.messages[-1].offset + 1
                send(2, 3, 4)
                while consumer.positions()["orders", 0] == end:
                    await asyncio.sleep(0.01)
                if is_paused:
                    await admin.pause(60)
                    while consumer.claims:
                        await asyncio.sleep(0.01)
                    await admin.resume()
            member = await cluster.member("b", "billing")
            async with member.consumer("orders", delivery="at-most-once") as consumer:
                while len(seen) < 5 and (batch := await consumer.next_batch(30)) is not None:
                    seen += [message.payload for message in batch.messages]
            assert seen == [b"0", b"1", b"2", b"3", b"4"]

    asyncio.run(asyncio.wait_for(run(), 120))
    producer.close()


def test_a_close_that_is_cancelled_while_another_task_waits_goes_on(servers: str) -> None:
    async def run() -> None:
        async with Cluster(servers, heartbeat_interval=1) as cluster:
            member = await cluster.member("a", "billing")
            consumer = await member.consumer("orders", delivery="at-most-once")
            await consumer.wait_for_claims(1)
            waiting = asyncio.create_task(consumer.next_batch(30))
            await asyncio.sleep(0)
            closing = asyncio.create_task(consumer.close())
            await asyncio.sleep(0)
            closing.cancel()
            assert await waiting is None
            while consumer.claims:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), within(10)))
