"""This module receives and gives verdicts for asyncio: a thread of its own owns each consumer."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

import kafkamq as sync
from kafkamq.aio.threads import Entered, in_thread, shown
from kafkamq.errors import BrokerError, DeadlineExceededError, StateError
from kafkamq.transport.errors import is_retriable

__all__ = ["Consumer", "OnLeaseLost"]

_PAUSE_S = 0.25
_log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class Consumer(Entered):
    def __init__(
        self, queue: sync.Queue, on_lease_lost: OnLeaseLost | None, ordering: str | None = None
    ) -> None:
        self._queue = queue
        self._ordering = ordering
        self._lease_lost = None if on_lease_lost is None else LeaseLostHook(on_lease_lost)
        self._sync: sync.Consumer | None = None
        self._closed = threading.Event()
        self._owner = ThreadPoolExecutor(1, f"kafkamq-aio-{queue.queue_id}")

    async def _begin(self) -> None:
        await self._owned(self._connected)

    @property
    def queue_id(self) -> str:
        return self._queue.queue_id

    @property
    def in_flight(self) -> int:
        """Return messages held: STARTed ahead, or handed out and without verdict."""
        return 0 if self._sync is None else self._sync.in_flight

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    async def receive(self, timeout: float | timedelta = 1.0) -> Message | None:
        """Wait for a message; cancelling the call loses none."""

        def call() -> list[sync.Message]:
            message = self._connected().receive(timeout)
            return [] if message is None else [message]

        messages = await self._receive(call)
        return messages[0] if messages else None

    async def receive_many(self, n: int, timeout: float | timedelta = 1.0) -> list[Message]:
        """Wait for up to ``n`` messages; cancelling the call loses none."""
        return await self._receive(lambda: self._connected().receive_many(n, timeout))

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Yield messages until the consumer is closed; retriable errors are retried."""
        timeout_s = self._queue.config.next_message_timeout_ms / 1000
        while not self._closed.is_set():
            try:
                message = await self.receive(timeout_s)
            except (BrokerError, DeadlineExceededError) as error:
                if not is_retriable(error):
                    raise
                _log.warning("receiving failed and goes on", extra={"error": str(error)})
                await asyncio.sleep(_PAUSE_S)
                continue
            except StateError:
                if self._closed.is_set():
                    return
                raise
            if message is not None:
                yield message

    async def flush(self, timeout: float | timedelta = 30.0) -> None:
        if self._sync is not None:
            await in_thread(self._sync.flush, timeout)

    async def close(self, timeout: float | timedelta = 30.0) -> None:
        self._closed.set()
        if self._sync is not None:
            await asyncio.shield(in_thread(self._sync.close, timeout))
        self._owner.shutdown(wait=False)

    def _connected(self) -> sync.Consumer:
        if self._sync is None:
            self._sync = self._queue.consumer(
                on_lease_lost=self._lease_lost, ordering=self._ordering
            )
        return self._sync

    async def _receive(self, call: Callable[[], list[sync.Message]]) -> list[Message]:
        return [Message(message) for message in await self._owned(call, self._put_back)]

    async def _owned(
        self, call: Callable[[], T], on_cancelled: Callable[[Future[T]], None] | None = None
    ) -> T:
        """Run in the owner thread; if this is cancelled, ``on_cancelled`` gets the outcome."""
        if self._closed.is_set():
            raise StateError(f"the consumer of queue {self.queue_id!r} is closed")
        if self._lease_lost is not None:
            self._lease_lost.loop = asyncio.get_running_loop()
        future = self._owner.submit(call)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            # A call that runs, or is done, cannot be cancelled.
            if not future.cancel() and on_cancelled is not None:
                future.add_done_callback(on_cancelled)
                if self._sync is not None:
                    self._sync.cancel_receive()
            raise

    def _put_back(self, future: Future[list[sync.Message]]) -> None:
        """A cancelled receive got messages: the next one returns them."""
        error = future.exception()
        if error is not None:
            _log.warning("a cancelled receive failed", extra={"error": str(error)})
        elif self._sync is not None:
            self._sync.put_back(future.result())


def _verdict(
    method: Callable[Concatenate[Any, P], None],
) -> Callable[Concatenate[Message, P], Coroutine[Any, Any, None]]:
    @functools.wraps(method)
    async def give(self: Message, /, *args: P.args, **kwargs: P.kwargs) -> None:
        function = getattr(self._sync, method.__name__)
        if kwargs.get("wait") or self.is_shared:
            # Shielded: the verdict is written, whether or not its confirmation is waited for.
            await asyncio.shield(in_thread(function, *args, **kwargs))
        else:
            function(*args, **kwargs)

    return give


class Message:
    __slots__ = ("_sync",)
    # A handler's parameter of this type gets the message.
    is_kafkamq_message: ClassVar[bool] = True

    @classmethod
    def of_sync(cls, message: sync.Message) -> Message:
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

    ack = _verdict(sync.Message.ack)
    nack = _verdict(sync.Message.nack)
    reject = _verdict(sync.Message.reject)
    extend = _verdict(sync.Message.extend)

    async def hold(
        self, seconds: float | timedelta | None = None, *, until: datetime | None = None
    ) -> str:
        return await asyncio.shield(in_thread(self._sync.hold, seconds, until=until))

    async def __aenter__(self) -> Message:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sync.__exit__(kind, error, trace)


OnLeaseLost = Callable[[Message], "Awaitable[None] | None"]


class LeaseLostHook:
    """Called in a consumer's thread; calls a function, or a coroutine function, in ``loop``."""

    def __init__(self, hook: OnLeaseLost) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._hook = hook
        self._tasks: set[asyncio.Future[None]] = set()

    def __call__(self, message: sync.Message) -> None:
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._tell, Message(message))

    def _tell(self, message: Message) -> None:
        try:
            told = self._hook(message)
        except Exception:  # noqa: BLE001 - the user's code must not stop the loop's callback
            _log.exception("on_lease_lost failed")
            return
        if inspect.isawaitable(told):
            task = asyncio.ensure_future(told)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
