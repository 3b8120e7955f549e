"""The options of handlers on a real broker, all of them at once: for workers and in parallel."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from tests.integration.parallel_tools import committed, fill, make, make_topic, read_all
from tests.waiting import wait_until

from kafkamq import Backoff, Message, ParallelRecord, Reject, aio


def counted(message: Message) -> Iterator[None]:
    """Middleware for both kinds."""
    counts.append(message)
    yield


counts: list[object] = []


def test_an_asyncio_worker_with_everything(bootstrap: str, namespace: str) -> None:
    counts.clear()
    lists: list[list[bytes | None]] = []

    async def main() -> list[bytes | None]:
        async with aio.Service(bootstrap, namespace) as service:
            soon = Backoff(first=0.1, max=0.1)
            single = service.queue("single", max_deliveries=5, backoff=soon, backend="offsets")
            lists_of = service.queue("lists", backend="offsets")
            await single.create_topics(partitions=1)
            await lists_of.create_topics(partitions=1)

            @single.handler(max_attempts=2, retry_on=OSError, timeout=30.0, max_rate=1000.0)
            async def handle(body: str, message: aio.Message) -> object:
                if body == "again":
                    raise OSError("not now")
                if body == "never":
                    raise ValueError("no use")
                return Reject("no") if body == "reject" else None

            @lists_of.handler(batch_size=4, batch_linger=5.0, concurrency=1)
            def handle_list(messages: list[Message]) -> None:
                lists.append([message.payload for message in messages])

            for queue, bodies in (
                (single, (b"fine", b"again", b"never", b"reject")),
                (lists_of, (b"a", b"b", b"c", b"d")),
            ):
                async with queue.producer() as producer:
                    for body in bodies:
                        await producer.send(body)
            async with aio.Worker(service, middleware=[counted]) as worker:
                while worker.handled < 9:
                    assert not await worker.wait(0.05)
            topic = service.config.dead_letter_topic
        found = await asyncio.to_thread(read_all, bootstrap, topic, 3)
        return [letter.value() for letter in found]

    assert sorted(asyncio.run(main())) == [b"again", b"never", b"reject"]
    assert sorted(body for each in lists for body in each) == [b"a", b"b", b"c", b"d"]
    assert len(counts) == 5 + len(lists)


def test_a_parallel_consumer_with_everything(bootstrap: str, namespace: str) -> None:
    counts.clear()
    topic, letters = make_topic(bootstrap, namespace), make_topic(bootstrap, f"{namespace}-dead")
    fill(bootstrap, topic, ["hang", "never", "again", "fine"])
    seen: list[bytes | None] = []

    async def handle(record: ParallelRecord) -> None:
        seen.append(record.key)
        if record.key == b"hang" and record.attempt == 1:
            await asyncio.sleep(60)
        if record.key == b"never":
            raise ValueError("no use")
        if record.key == b"again" and record.attempt == 1:
            raise OSError("not now")

    with make(
        bootstrap,
        topic,
        namespace,
        backoff=Backoff(first=0.05, max=0.05),
        dead_letter_topic=letters,
        middleware=[counted],
        retry_on=OSError,
        timeout=0.5,
        max_rate=1000.0,
    ) as consumer:
        consumer.poll(handle)
        wait_until(lambda: committed(bootstrap, namespace, topic) == (4, ""), what="the commit")
    assert sorted(seen) == sorted([b"hang"] * 2 + [b"never"] + [b"again"] * 2 + [b"fine"])
    assert len(counts) == 6
