"""A delivery and its verdicts, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, ClassVar

import kafkamq as sync
from kafkamq.aio.threads import in_thread
from kafkamq.types import Headers, MessageId

__all__ = ["Message"]


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

    @property
    def payload(self) -> bytes | None:
        """What the sender gave; None is a null payload."""
        return self._sync.payload

    @property
    def key(self) -> bytes | None:
        """The sender's key; None: it gave none."""
        return self._sync.key

    @property
    def headers(self) -> Mapping[str, bytes | None]:
        """The sender's headers; the last of a name counts."""
        return self._sync.headers

    @property
    def raw_headers(self) -> Headers:
        """All headers of the record in their order."""
        return self._sync.raw_headers

    @property
    def id(self) -> str:
        """The label that travels with every copy."""
        return self._sync.id

    @property
    def queue_id(self) -> str:
        """Its queue."""
        return self._sync.queue_id

    @property
    def delivery_count(self) -> int:
        """Deliveries so far, this one included."""
        return self._sync.delivery_count

    @property
    def timestamp_ms(self) -> int:
        """The broker's time when this copy was appended."""
        return self._sync.timestamp_ms

    @property
    def message_id(self) -> MessageId:
        """Where this copy stands."""
        return self._sync.message_id

    @property
    def deadline(self) -> float:
        """When the lease ends unless renewed, in seconds of ``time.monotonic()``."""
        return self._sync.deadline

    async def ack(self, *, wait: bool = False) -> None:
        """See ``kafkamq.Message.ack``."""
        await self._verdict(wait, self._sync.ack)

    async def nack(
        self, *, delay: float | timedelta | None = None, reason: str = "", wait: bool = False
    ) -> None:
        """See ``kafkamq.Message.nack``."""
        await self._verdict(wait, self._sync.nack, delay=delay, reason=reason)

    async def reject(self, reason: str, *, wait: bool = False) -> None:
        """See ``kafkamq.Message.reject``."""
        await self._verdict(wait, self._sync.reject, reason)

    async def extend(self, seconds: float | timedelta) -> None:
        """See ``kafkamq.Message.extend``."""
        self._sync.extend(seconds)

    async def _verdict(
        self, wait: bool, function: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        if wait:
            # Shielded: the verdict is written, whether or not its confirmation is waited for.
            await asyncio.shield(in_thread(function, *args, wait=True, **kwargs))
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
