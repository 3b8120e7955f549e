"""Handlers that take lists: what is in one, and the outcome of each of its records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kafkamq.errors import ConfigError
from kafkamq.queue.handler import Binder, BodyError
from kafkamq.queue.schemas.registry import BodyUnavailableError
from kafkamq.runtime.verdicts import is_verdict
from kafkamq.runtime.work_queue import Slot

R = TypeVar("R")


def take_list(slot: Slot[R]) -> tuple[list[Any], list[R]]:
    """All that the slot has taken, as one list; nobody relieves it of that any more."""
    runs = list(slot.pending)
    return runs, [record for run in runs for record in run.records]


def outcomes_of(result: object, count: int) -> Sequence[object]:
    """The outcome of each of ``count`` records of a list."""
    if result is None or is_verdict(result):
        return [result] * count
    if isinstance(result, Sequence) and not isinstance(result, str | bytes):
        if len(result) == count:
            return result
        error = ConfigError(f"the handler got {count} records and returned {len(result)} verdicts")
        return [error] * count
    error = ConfigError(
        f"the handler returned {type(result).__name__}: a list handler returns None, a verdict for"
        " all, or a list with one for each record"
    )
    return [error] * count


def bound(
    function: Callable[..., Any], binder: Binder, *, is_async: bool = False
) -> Callable[[Any], Any]:
    """Calls a handler with what it takes of a message, or of a list.

    A body that may have to be waited for is read in a thread, not on the event loop.

    Raises:
        BodyError: The one message's payload is not what the handler takes.
        BodyUnavailableError: Nobody can say now whether it is.
    """

    def call(given: Any) -> Any:
        if not isinstance(given, list):
            return function(*binder.arguments(given))
        arguments, whole = _of_list(binder, given)
        return whole(function(*arguments) if arguments else None)

    async def call_async(given: Any) -> Any:
        if not isinstance(given, list):
            if binder.is_ready(given):
                return await function(*binder.arguments(given))
            return await function(*await asyncio.to_thread(binder.arguments, given))
        if all(map(binder.is_ready, given)):
            arguments, whole = _of_list(binder, given)
        else:
            arguments, whole = await asyncio.to_thread(_of_list, binder, given)
        return whole(await function(*arguments) if arguments else None)

    return call_async if is_async else call


def _of_list(
    binder: Binder, messages: list[Any]
) -> tuple[list[list[Any]], Callable[[object], object]]:
    """The arguments, none if no body can be read; and what makes the whole list's outcome."""
    rows: list[list[Any]] = []
    refused: dict[int, Exception] = {}  # by their places in the list
    for at, message in enumerate(messages):
        try:
            rows.append(binder.arguments(message))
        except (BodyError, BodyUnavailableError) as error:  # noqa: PERF203 - its alone
            refused[at] = error

    def whole(result: object) -> object:
        if not refused:
            return result
        given = iter(outcomes_of(result, len(rows)))
        return [refused[at] if at in refused else next(given) for at in range(len(messages))]

    return [list(column) for column in zip(*rows, strict=True)], whole
