"""Code that waits, in a thread and in a task: the same answers, and its ``finally`` runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from kafkamq.runtime.steps import Steps, take, take_async

LONG_S = 60.0
Run = Callable[[Steps[Any]], Any]


def in_task(steps: Steps[Any]) -> Any:
    return asyncio.run(take_async(steps))


both = pytest.mark.parametrize("run", [take, in_task])


@both
def test_a_future_is_waited_for_until_it_has_come(run: Run) -> None:
    future: Future[str] = Future()
    threading.Thread(target=lambda: future.set_result("it")).start()

    def steps() -> Steps[str]:
        assert (yield future, LONG_S)
        return future.result()

    assert run(steps()) == "it"


@both
def test_a_future_that_failed_has_come_and_one_that_is_late_has_not(run: Run) -> None:
    failed: Future[None] = Future()
    failed.set_exception(ValueError("no"))

    def steps() -> Steps[list[bool]]:
        found = [(yield failed, LONG_S)]
        found.append((yield Future[None](), 0.01))
        return found

    assert run(steps()) == [True, False]


@both
def test_an_attempt_is_repeated_or_waits_by_itself(run: Run) -> None:
    lock = threading.Lock()
    lock.acquire()
    threading.Thread(target=lock.release).start()

    def steps() -> Steps[bool]:
        while not (yield (lambda timeout_s: lock.acquire(timeout=timeout_s)), LONG_S):
            pass
        return (yield (lambda timeout_s: lock.acquire(timeout=timeout_s)), 0.01)

    assert run(steps()) is False


def test_a_task_that_is_cancelled_ends_its_steps() -> None:
    ended: list[str] = []

    def steps() -> Steps[None]:
        try:
            yield Future[None](), LONG_S
        finally:
            ended.append("finally")

    async def main() -> None:
        task = asyncio.ensure_future(take_async(steps()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended == ["finally"]


@both
def test_an_attempt_that_raises_ends_its_steps(run: Run) -> None:
    """At once, also while somebody looks at the error."""
    ended: list[str] = []

    def attempt(_: float) -> bool:
        raise KeyboardInterrupt

    def steps() -> Steps[None]:
        try:
            yield attempt, LONG_S
        finally:
            ended.append("finally")

    with pytest.raises(KeyboardInterrupt) as raised:
        run(steps())
    assert ended == ["finally"], raised.value
