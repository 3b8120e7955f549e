"""A delivery and its verdicts, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, ClassVar

import kafkamq as sync
from kafkamq.aio.threads import in_thread, shown


class Message:
    """A delivery of a message, and the verdicts on it; see ``kafkamq.Message``."""

    __slots__ = ("_sync",)
    is_kafkamq_message: ClassVar[bool] = True  # a handler's parameter of this type gets it

    @classmethod
    def of_sync(cls, message: sync.Message) -> Message:
        """For a handler."""
        return cls(message)

    def __init__(self, message: sync.Message) -> None:
        self._sync = message

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and other._sync is self._sync

    def __hash__(self) -> int:
        return hash(self._sync)

    def __repr__(self) -> str:
        return repr(self._sync)

    payload = shown(sync.Message.payload)
    key = shown(sync.Message.key)
    headers = shown(sync.Message.headers)
    raw_headers = shown(sync.Message.raw_headers)
    id = shown(sync.Message.id)
    queue_id = shown(sync.Message.queue_id)
    delivery_count = shown(sync.Message.delivery_count)
    timestamp_ms = shown(sync.Message.timestamp_ms)
    message_id = shown(sync.Message.message_id)
    deadline = shown(sync.Message.deadline)
    token = shown(sync.Message.token)
    is_shared = shown(sync.Message.is_shared)

    async def ack(self, *, wait: bool = False) -> None:
        """As ``kafkamq.Message.ack``, without blocking the event loop."""
        await self._verdict(wait, self._sync.ack)

    async def nack(
        self, *, delay: float | timedelta | None = None, reason: str = "", wait: bool = False
    ) -> None:
        """As ``kafkamq.Message.nack``, without blocking the event loop."""
        await self._verdict(wait, self._sync.nack, delay=delay, reason=reason)

    async def reject(self, reason: str, *, wait: bool = False) -> None:
        """As ``kafkamq.Message.reject``, without blocking the event loop."""
        await self._verdict(wait, self._sync.reject, reason)

    async def extend(self, seconds: float | timedelta) -> None:
        """As ``kafkamq.Message.extend``, without blocking the event loop."""
        self._sync.extend(seconds)

    async def hold(
        self, seconds: float | timedelta | None = None, *, until: datetime | None = None
    ) -> str:
        """As ``kafkamq.Message.hold``, without blocking the event loop."""
        return await asyncio.shield(in_thread(self._sync.hold, seconds, until=until))

    async def _verdict(
        self, wait: bool, function: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        if wait or self.is_shared:
            # Shielded: the verdict is written, whether or not its confirmation is waited for.
            await asyncio.shield(in_thread(function, *args, wait=wait, **kwargs))
        else:
            function(*args, **kwargs)  # only queues it

    async def __aenter__(self) -> Message:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sync.__exit__(kind, error, trace)
