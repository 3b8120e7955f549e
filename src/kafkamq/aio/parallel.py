"""The parallel consumer runs here on the caller's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta

from kafkamq.errors import ConfigError, DeadlineExceededError
from kafkamq.parallel.config import is_async_handler
from kafkamq.parallel.consumer import MakePublisher, ParallelBase, ending
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.results import OnProduced, Produced, ProducedStream, ResultStream, taken_async
from kafkamq.queue.handler import refuse_generator
from kafkamq.runtime.signals import ENDING, stopped_by
from kafkamq.runtime.work_queue import is_inside

_POLL_S = 0.05


class ParallelConsumer(ParallelBase):
    """``kafkamq.ParallelConsumer`` for asyncio: handlers are awaited on the running loop.

    A thread of its own reads and commits; nothing here blocks the loop.
    """

    async def __aenter__(self) -> ParallelConsumer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def poll(self, handler: Callable[[ParallelRecord], Awaitable[object]]) -> None:
        """Await ``handler`` for each record, in the background; returns when it is a member.

        Raises:
            ConfigError: The handler is no ``async def``.
            StateError, BrokerError: As ``kafkamq.ParallelConsumer.poll``.
        """
        await self._begin_here(handler, self._polling)

    async def poll_and_produce(
        self, handler: Callable[..., Awaitable[object]], on_produced: OnProduced | None = None
    ) -> None:
        """Call the handler for each record as ``poll`` does, and produce what it returns."""
        await self._begin_here(handler, self._producing(on_produced))

    async def stream(
        self, handler: Callable[..., Awaitable[object]]
    ) -> AsyncIterator[tuple[ParallelRecord, object]]:
        """Call the handler as ``poll`` does, and iterate over records and what it returned.

        A record is done when the next one is asked for. The iteration begins with the first, and
        ends when the consumer is closed; it raises what made the consumer stop.

        Raises:
            ConfigError, StateError, BrokerError: As ``poll``.
        """
        self._check_stream()
        engine = self._engine
        stream = ResultStream(engine.work_queue)
        await self._begin_here(handler, lambda *_: stream, takes_all=True)
        async for found in taken_async(stream.results(engine.has_stopped, 0.0)):
            yield found
        if engine.failure is not None:
            raise engine.failure

    async def produce_and_stream(
        self, handler: Callable[..., Awaitable[object]]
    ) -> AsyncIterator[Produced]:
        """Produce what the handler returns, and iterate over results with their places in Kafka.

        See ``kafkamq.ParallelConsumer.produce_and_stream``; the iteration begins with the first.

        Raises:
            ConfigError, StateError, BrokerError: As ``poll``.
        """
        engine = self._engine
        stream = ProducedStream(engine.is_ending)
        await self._begin_here(handler, self._producing(stream.put, stream.await_room))
        async for produced in taken_async(stream.results(engine.ended.is_set, 0.0)):
            yield produced
        if engine.failure is not None:
            raise engine.failure

    async def _begin_here(
        self,
        handler: Callable[..., Awaitable[object]],
        publisher: MakePublisher,
        *,
        takes_all: bool = False,
    ) -> None:
        """Begin in a thread; the handler is awaited on the running loop."""
        is_async = is_async_handler(handler)
        refuse_generator(handler)
        if not is_async:
            raise ConfigError("the handler is no async def; kafkamq.ParallelConsumer takes a def")
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._begin, handler, publisher, takes_all=takes_all, loop=loop)

    async def wait(self) -> None:
        """Wait until it has ended, by ``close`` or by a failure.

        Raises:
            KafkaMQError: What made it stop.
        """
        while not self._engine.ended.is_set():
            await asyncio.sleep(_POLL_S)
        if self._engine.failure is not None:
            raise self._engine.failure

    async def run(
        self,
        handler: Callable[[ParallelRecord], Awaitable[object]],
        *,
        timeout: float | timedelta = 30.0,
    ) -> None:
        """``poll``, and wait for the end; being cancelled closes, in the main thread SIGTERM too.

        ``timeout`` is what handlers have to end then.

        Raises:
            KafkaMQError: As ``poll`` and ``close``, and what made it stop.
        """
        ending(timeout)
        with stopped_by(ENDING) as stopping:
            try:
                await self.poll(handler)
                while not stopping.is_set() and not self._engine.ended.is_set():
                    await asyncio.sleep(_POLL_S)
                if self._engine.failure is not None:
                    raise self._engine.failure
            finally:
                await self.close(timeout)

    async def drain(self, timeout: float | timedelta = 60.0) -> None:
        """Poll no more, process what was polled (up to ``timeout`` s), and close."""
        await self.close(drain=timeout)

    async def close(
        self, timeout: float | timedelta = 30.0, *, drain: float | timedelta = 0.0
    ) -> None:
        """Close the consumer; handlers that outlast ``timeout`` are cancelled.

        Raises:
            ConfigError: ``timeout`` or ``drain`` is no time; nothing has ended.
            DeadlineExceededError: Leaving the group takes longer, and goes on.
        """
        timeout_s, drain_s = ending(timeout, drain)
        if self._fork_check.is_forked:
            return
        engine = self._engine
        # Of one that connects yet, this ends a client in the middle of a question.
        await asyncio.to_thread(engine.end, timeout_s=timeout_s, drain_s=drain_s)
        if is_inside(self._config):
            return
        if not await asyncio.to_thread(engine.ended.wait, timeout_s + drain_s + self._slack_s):
            raise DeadlineExceededError("leaving the group takes long, and goes on behind this")
