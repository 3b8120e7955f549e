"""What is called for a record: the handler, with what it wants, and middleware around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kafkamq.parallel.config import is_async_handler
from kafkamq.parallel.record import PlainRecord
from kafkamq.queue.arguments import Binder, wants_body
from kafkamq.runtime.batches import prepare
from kafkamq.runtime.middleware import Middleware, surrounded

__all__ = ["called", "from_fields"]


def called(
    handler: Callable[..., Any], middleware: Sequence[Middleware], *, takes_lists: bool = False
) -> Callable[[Any], Any]:
    """Takes a record, or a list; the handler itself, where there is nothing to add to it.

    Raises:
        ConfigError: The handler cannot be called, or the middleware is of another kind.
    """
    is_async = is_async_handler(handler)
    call = handler
    if wants_body(handler, of_lists=takes_lists):
        call = _bound(handler, Binder(handler, of_lists=takes_lists), is_async=is_async)
    if not middleware:
        return call
    name = getattr(handler, "__qualname__", repr(handler))
    return surrounded(call, middleware, is_async=is_async, name=name)


def _bound(handler: Callable[..., Any], binder: Binder, *, is_async: bool) -> Callable[[Any], Any]:
    def call(given: Any) -> Any:
        found = prepare(binder, given)
        return found.outcome(handler(*found.arguments) if found.is_called else None)

    async def call_async(given: Any) -> Any:
        found = prepare(binder, given)
        return found.outcome(await handler(*found.arguments) if found.is_called else None)

    return call_async if is_async else call


def from_fields(
    what: tuple[Callable[..., Any], Sequence[Middleware]],
) -> Callable[[tuple[Any, ...]], Any]:
    """In a process of handlers: the handler and its middleware, of ``ParallelRecord.fields``."""
    call = called(*what)
    return lambda fields: call(PlainRecord(*fields))
