"""How the asyncio twins call what blocks."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

__all__ = ["in_thread", "twin"]

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Runs it in a thread of the loop's pool; cancelling stops the wait, not the call."""
    return await asyncio.to_thread(function, *args, **kwargs)


def twin(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The coroutine of the same name and arguments; its class has ``_connected``.

    That is a coroutine, too, and gives what the method is called of, in a thread.
    """

    @functools.wraps(method)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        found = getattr(await self._connected(), method.__name__)
        return await in_thread(found, *args, **kwargs)

    return call
