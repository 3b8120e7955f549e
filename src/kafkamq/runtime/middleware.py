"""What is called for a message: the handler with its arguments, and what goes around it.

A middleware is a function of a message (of a batch handler: of the list) and of what calls the
rest: ``def`` around ``def`` handlers, ``async def`` around ``async def`` ones. A generator function
goes around both. It gets the message alone and yields once, where the handler is called: the yield
gives what the handler returned, or raises what it raised. What the generator returns is the
outcome; nothing: what came out of the handler, also an exception that the generator has caught.
One that ends before it yields keeps the handler from being called.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, TypeAlias

from kafkamq.errors import ConfigError, StateError
from kafkamq.queue.handler import Binder
from kafkamq.queue.json_values import BodyError
from kafkamq.queue.schemas.registry import BodyUnavailableError
from kafkamq.runtime.verdicts import outcomes_of

Middleware: TypeAlias = Callable[..., Any]
"""Gets a message and what calls the handler; or is a generator function of a message."""

_Call: TypeAlias = Callable[[Any], Any]
_TWICE = "a middleware yields once, where the handler is called"


def surrounded(
    call: _Call, middleware: Sequence[Middleware], *, is_async: bool, name: str
) -> _Call:
    """``call`` with all of them around it, the first one outermost."""
    for each in reversed(middleware):
        if inspect.isgeneratorfunction(each):
            call = _around_async(each, call) if is_async else _around(each, call)
            continue
        if inspect.isasyncgenfunction(each):
            raise ConfigError(f"middleware {each.__qualname__} yields: make it def, without async")
        if inspect.iscoroutinefunction(each) is not is_async:
            kind = "async def" if is_async else "def"
            raise ConfigError(
                f"middleware {getattr(each, '__qualname__', each)}: handler {name} is {kind}, and "
                "so must its middleware be, or a generator function, which serves both"
            )
        call = _wrapped(each, call)
    return call


def _wrapped(middleware: Middleware, call: _Call) -> _Call:
    return lambda message: middleware(message, call)


def _around(middleware: Middleware, call: _Call) -> _Call:
    def surround(message: Any) -> Any:
        steps = middleware(message)
        is_over, outcome = _begin(steps)
        if is_over:
            return outcome
        try:
            outcome = call(message)
        except BaseException as error:  # noqa: BLE001 - it is the middleware's now
            return _end_with(steps, error)
        return _end(steps, outcome)

    return surround


def _around_async(middleware: Middleware, call: _Call) -> _Call:
    async def surround(message: Any) -> Any:
        steps = middleware(message)
        is_over, outcome = _begin(steps)
        if is_over:
            return outcome
        awaitable: Awaitable[Any] = call(message)
        try:
            outcome = await awaitable
        except GeneratorExit:
            # The loop was closed: the middleware has no say in that.
            steps.close()
            raise
        except BaseException as error:  # noqa: BLE001 - it is the middleware's now
            return _end_with(steps, error)
        return _end(steps, outcome)

    return surround


_Steps: TypeAlias = Generator[None, Any, Any]


def _begin(steps: _Steps) -> tuple[bool, Any]:
    try:
        next(steps)
    except StopIteration as end:
        return True, end.value
    return False, None


def _end(steps: _Steps, outcome: Any) -> Any:
    try:
        steps.send(outcome)
    except StopIteration as end:
        return outcome if end.value is None else end.value
    steps.close()
    raise StateError(_TWICE)


def _end_with(steps: _Steps, error: BaseException) -> Any:
    """The middleware may pass the error on, raise another one, or return an outcome instead.

    One that catches it and returns nothing has only looked at it, as one that counts failures does:
    the handler has failed all the same.
    """
    try:
        steps.throw(error)
    except StopIteration as end:
        outcome = end.value
    else:
        steps.close()
        raise StateError(_TWICE)
    if outcome is None:
        raise error
    return outcome


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
    """Get the arguments, none if no body can be read; and what makes the whole list's outcome."""
    rows: list[list[Any]] = []
    refused: dict[int, Exception] = {}
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
