"""The asyncio twins on a real broker; above all, that cancelling loses nothing."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.integration.queue_logs import ends, tracked
from tests.waiting import within

from kafkamq.aio import Consumer, Message, Service
from kafkamq.config import Backoff
from kafkamq.errors import BrokerError, ConfigError, LeaseLostError, StateError
from kafkamq.types import Outcome, OutgoingMessage


@asynccontextmanager
async def make_service(bootstrap: str, namespace: str) -> AsyncIterator[Service]:
    async with Service(bootstrap, namespace) as service:
        await service.create_topics(partitions=2, marker_partitions=2)
        yield service


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, within(120)))


async def receive_all(consumer: Consumer, count: int) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < count:
        messages += await consumer.receive_many(count - len(messages), 0.5)
    return messages


def test_from_send_to_ack(bootstrap: str, namespace: str) -> None:
    async def main() -> None:
        async with make_service(bootstrap, namespace) as service:
            queue = service.queue("a")
            async with queue.producer() as producer:
                delivery = await producer.send(b"x", key="k", headers={"h": b"1"})
                sent = await delivery
                assert delivery.done()
                assert await delivery.result() == sent
                await producer.send_many([OutgoingMessage(payload=b"y")] * 3)
            async with queue.consumer() as consumer:
                messages = await receive_all(consumer, 4)
                one = next(m for m in messages if m.payload == b"x")
                assert (one.key, one.headers, one.id) == (b"k", {"h": b"1"}, sent.id)
                assert (one.queue_id, one.delivery_count) == ("a", 1)
                for message in messages:
                    await message.ack()
                with pytest.raises(StateError):
                    await one.ack()
                await consumer.flush()
                assert await consumer.receive(0.1) is None
            assert len(ends(service.config, Outcome.ACK)) == 4

    run(main())


def test_verdicts(bootstrap: str, namespace: str) -> None:
    async def main() -> None:
        async with make_service(bootstrap, namespace) as service:
            queue = service.queue("a", backoff=Backoff(first=0.05, max=0.05, jitter=0.0))
            producer = await queue.producer()
            await (await producer.send(b"x"))
            consumer = await queue.consumer()
            with tracked(service.config):
                (message,) = await receive_all(consumer, 1)
                with pytest.raises(ValueError, match="oops"):
                    async with message:
                        raise ValueError("oops")
                (message,) = await receive_all(consumer, 1)
                assert message.delivery_count == 2
                await message.extend(20)
                await message.nack(delay=0.05, wait=True)
                (message,) = await receive_all(consumer, 1)
                assert message.delivery_count == 3
                await message.reject("no", wait=True)
            sent = await (await producer.send(b"y", delay=60)).result()
            assert sent.schedule is not None
            await producer.cancel(sent.schedule)

    run(main())


def test_the_wait_of_a_cancelled_receive_is_over(bootstrap: str, namespace: str) -> None:
    """Found by review: the next receive waited out the cancelled one's timeout first."""

    async def main() -> None:
        async with (
            make_service(bootstrap, namespace) as service,
            service.queue("a").consumer() as consumer,
        ):
            waiting = asyncio.create_task(consumer.receive(timeout=within(60)))
            await asyncio.sleep(0.2)  # it runs
            waiting.cancel()
            assert await asyncio.wait_for(consumer.receive(timeout=0.1), within(20)) is None

    run(main())


def test_a_cancelled_receive_loses_no_message(bootstrap: str, namespace: str) -> None:
    async def main() -> None:
        total = 300
        async with make_service(bootstrap, namespace) as service:
            queue = service.queue("a", redelivery_timeout=60)
            producer = await queue.producer()
            consumer = await queue.consumer()
            got: Counter[bytes | None] = Counter()
            chance = random.Random(1)

            async def send() -> None:
                for number in range(total):
                    await producer.send(b"%d" % number)
                    if number % 10 == 0:
                        await asyncio.sleep(0.005)

            sending = asyncio.create_task(send())
            cancelled = 0
            while len(got) < total or cancelled <= 3:
                task = asyncio.create_task(consumer.receive_many(5, 0.3))
                await asyncio.sleep(chance.random() * 0.02)
                if chance.random() < 0.6:
                    task.cancel()
                try:
                    messages = await task
                except asyncio.CancelledError:
                    cancelled += 1
                    continue
                for message in messages:
                    got[message.payload] += 1
                    await message.ack()
            await sending
            assert set(got.values()) == {1}
            await consumer.flush()

    run(main())


def test_timeouts_around_a_receive_lose_no_message(bootstrap: str, namespace: str) -> None:
    async def main() -> None:
        async with make_service(bootstrap, namespace) as service:
            queue = service.queue("a", redelivery_timeout=60)
            consumer = await queue.consumer()
            producer = await queue.producer()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(consumer.receive(5.0), 0.2)
            await (await producer.send(b"x"))
            message = None
            while message is None:
                try:
                    message = await asyncio.wait_for(consumer.receive(5.0), 0.05)
                except asyncio.TimeoutError:  # noqa: PERF203
                    continue
            assert message.payload == b"x"
            await message.ack(wait=True)

    run(main())


def test_iterating_in_several_tasks(bootstrap: str, namespace: str) -> None:
    async def main() -> None:
        async with make_service(bootstrap, namespace) as service:
            queue = service.queue("a", next_message_timeout=0.2)
            producer = await queue.producer()
            await producer.send_many([OutgoingMessage(payload=b"%d" % n) for n in range(50)])
            consumer = queue.consumer()
            seen: Counter[bytes | None] = Counter()

            async def work() -> None:
                async for message in consumer:
                    async with message:
                        seen[message.payload] += 1
                    if len(seen) == 50:
                        await consumer.close()

            await asyncio.gather(work(), work())
            assert set(seen.values()) == {1}
            with pytest.raises(StateError, match="closed"):
                await consumer.receive(0.1)
            await consumer.close()

    run(main())


def test_lost_leases_are_told_in_the_loop(bootstrap: str, namespace: str) -> None:
    async def main() -> None:
        async with make_service(bootstrap, namespace) as service:
            told: asyncio.Queue[Message] = asyncio.Queue()
            queue = service.queue("a", redelivery_timeout=1.5, max_lease=2.5)
            await (await (await queue.producer()).send(b"x"))
            consumer = queue.consumer(on_lease_lost=told.put)
            (message,) = await receive_all(consumer, 1)
            assert await told.get() == message
            with pytest.raises(LeaseLostError):
                await message.ack()

    run(main())


def test_errors_are_the_same(bootstrap: str, namespace: str) -> None:
    async def main() -> None:
        async with Service(bootstrap, namespace) as service:
            with pytest.raises(BrokerError, match="kafkamq create"):
                await service.queue("a").consumer()
            with pytest.raises(BrokerError, match="kafkamq create"):
                await service.queue("a").producer().send(b"x")
            with pytest.raises(ConfigError):
                service.queue("")
            await service.create_topics(partitions=1, marker_partitions=1)
            with pytest.raises(ConfigError):
                await service.queue("a").producer().send(b"x", delay=-1)

    run(main())
