"""How the asyncio twins call what is behind them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Generator
from operator import attrgetter
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from kafkamq.errors import StateError

P = ParamSpec("P")
T = TypeVar("T")
Self = TypeVar("Self", bound="Entered")


class Entered:
    """Begins when it is entered or awaited; leaving closes."""

    close: Any

    async def _begin(self) -> None:
        """Connect, unless it is connected."""

    async def __aenter__(self: Self) -> Self:
        await self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __await__(self: Self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()


class Twin(Generic[T]):
    """Stands for what is ``_sync``."""

    _sync: T

    def __repr__(self) -> str:
        return repr(self._sync)

    async def _connected(self) -> T:
        return self._sync


class MadeTwin(Entered, Generic[T]):
    """Stands for what is made, in a thread, when this is entered or awaited."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: T | None = None

    async def _begin(self) -> None:
        if self._made is None:
            self._made = await in_thread(self._make)

    async def _connected(self) -> T:
        return self._sync

    @property
    def _sync(self) -> T:
        if self._made is None:
            raise StateError("enter or await it first")
        return self._made


async def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Runs it in a thread of the loop's pool; cancelling stops the wait, not the call."""
    return await asyncio.to_thread(function, *args, **kwargs)


def twin(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return the coroutine of the same name and arguments; its class has ``_connected``.

    That is a coroutine, too, and gives what the method is called of, in a thread.
    """

    @functools.wraps(method)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        found = getattr(await self._connected(), method.__name__)
        return await in_thread(found, *args, **kwargs)

    return call


def same(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return the method of the same name of what is ``_sync``: it waits for nothing."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        found: T = getattr(self._sync, method.__name__)(*args, **kwargs)
        return found

    return call


def shown(get: Callable[[Any], T]) -> T:
    """Return the property of the same name of what is ``_sync``."""
    named = cast("property", get)
    assert named.fget is not None, "it can be read"
    return cast("T", attribute(named.fget.__name__, doc=named.__doc__))


def attribute(name: str, *, doc: str | None) -> Any:
    return property(attrgetter(f"_sync.{name}"), doc=doc)
