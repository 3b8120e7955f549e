"""Sending, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable, Mapping
from datetime import timedelta
from typing import Any

import kafkamq as sync
from kafkamq.aio.threads import Entered, in_thread, same, twin
from kafkamq.types import OutgoingMessage, SentMessage


class Delivery:
    """What becomes of one send; awaiting it gives the ``SentMessage``."""

    __slots__ = ("_sync",)

    def __init__(self, delivery: sync.Delivery) -> None:
        self._sync = delivery

    done = same(sync.Delivery.done)

    async def result(self, timeout: float | timedelta | None = None) -> SentMessage:
        """As ``kafkamq.Delivery.result``, without blocking the event loop."""
        if self._sync.done():
            return self._sync.result(0)
        return await in_thread(self._sync.result, timeout)

    def __await__(self) -> Generator[Any, None, SentMessage]:
        return self.result().__await__()


class Producer(Entered):
    """Sends to one queue; see ``kafkamq.Producer``."""

    def __init__(self, queue: sync.Queue) -> None:
        self._queue = queue
        self._sync: sync.Producer | None = None
        self._connecting = asyncio.Lock()

    async def _connected(self) -> sync.Producer:
        if self._sync is None:
            async with self._connecting:
                if self._sync is None:
                    self._sync = await in_thread(self._queue.producer)
        return self._sync

    async def _begin(self) -> None:
        await self._connected()

    async def __aexit__(self, *_: object) -> None:
        await self.flush()

    @property
    def queue_id(self) -> str:
        """The queue that it sends to."""
        return self._queue.queue_id

    async def send(
        self,
        payload: bytes | None,
        *,
        key: bytes | str | None = None,
        headers: Mapping[str, bytes] | None = None,
        delay: float | timedelta = 0.0,
        ttl: float | timedelta | None = None,
        id: str | None = None,
    ) -> Delivery:
        """Queue one message; see ``kafkamq.Producer.send``. Await the delivery to confirm it."""
        producer = await self._connected()
        while producer.is_full:  # the thread that serves reports makes room
            await asyncio.sleep(0.005)
        return Delivery(
            producer.send(payload, key=key, headers=headers, delay=delay, ttl=ttl, id=id)
        )

    async def send_many(self, messages: Iterable[OutgoingMessage]) -> list[Delivery]:
        """Queue many messages; see ``kafkamq.Producer.send_many``."""
        producer = await self._connected()
        return [Delivery(each) for each in await in_thread(producer.send_many, messages)]

    cancel = twin(sync.Producer.cancel)
    flush = twin(sync.Producer.flush)
