"""Tasks that share an asyncio consumer of claims: each result goes to one of them."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest

from kafkamq.aio.claims import Consumer
from kafkamq.errors import StateError


class Sync:
    """In the place of a consumer: numbered messages and batches."""

    is_stopped = False

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self._number = itertools.count()

    def receive(self, timeout: float) -> str:
        assert self.gate.wait(30)
        return f"message {next(self._number)}"

    def next_batch(self, timeout: float) -> str:
        return f"batch {next(self._number)}"

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
        with pytest.deprecated_call(match="receive"):
            assert str(await consumer.poll(1)) == "message 0"
        await consumer.close()
        with pytest.raises(StateError):
            await consumer.receive(1)

    asyncio.run(run())
