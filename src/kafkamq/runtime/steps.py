"""Code that waits, written once for threads and for event loops.

It is a generator: each yield says what is waited for and how long at the most, and gives whether
that has come. ``take`` runs it in a thread, ``take_async`` in a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from contextlib import closing
from time import monotonic
from typing import Any, TypeAlias, TypeVar

# The pause between two tries of what a loop must not block for.
_TURN_S = 0.002
T = TypeVar("T")

Attempt: TypeAlias = Callable[[float], bool]
"""Tries for so many s, 0: once; says whether it succeeded."""

Steps: TypeAlias = Generator[tuple[Future[Any] | Attempt, float], bool, T]
"""Yields a future or an attempt, and the longest wait in s."""


def take(steps: Steps[T]) -> T:
    try:
        what, timeout_s = next(steps)
        while True:
            if callable(what):
                has_come = what(timeout_s)
            else:
                has_come = bool(wait((what,), timeout_s).done)
            what, timeout_s = steps.send(has_come)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        # Also where the wait was broken off: the generator gives back what it holds.
        steps.close()


async def take_async(steps: Steps[T]) -> T:
    with closing(steps):
        try:
            what, timeout_s = next(steps)
            while True:
                what, timeout_s = steps.send(await _has_come(what, timeout_s))
        except StopIteration as end:
            result: T = end.value
            return result


async def _has_come(what: Future[Any] | Attempt, timeout_s: float) -> bool:
    if not callable(what):
        waiting = asyncio.wrap_future(what)
        # An outcome that nobody asks for counts as seen.
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
        done, _ = await asyncio.wait((waiting,), timeout=timeout_s)
        return bool(done)
    deadline_s = monotonic() + timeout_s
    while not what(0.0):
        if monotonic() >= deadline_s:
            return False
        await asyncio.sleep(_TURN_S)
    return True
