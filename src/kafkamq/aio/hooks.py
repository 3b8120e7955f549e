"""Hooks of the application that run in its event loop."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable

import kafkamq as sync
from kafkamq.aio.message import Message

_log = logging.getLogger(__name__)
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
