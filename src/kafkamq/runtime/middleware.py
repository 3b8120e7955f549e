"""What goes around handlers.

A middleware is a function of a message (of a batch handler: of the list) and of what calls the
rest: ``def`` around ``def`` handlers, ``async def`` around ``async def`` ones. A generator function
goes around both. It gets the message alone and yields once, where the handler is called: the yield
gives what the handler returned, or raises what it raised. What the generator returns is the
outcome; nothing: what came out of the handler, also an exception that the generator has caught.
One that ends before it yields keeps the handler from being called.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, TypeAlias

from kafkamq.errors import ConfigError, StateError

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
        except GeneratorExit:  # the loop was closed: the middleware has no say in that
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
