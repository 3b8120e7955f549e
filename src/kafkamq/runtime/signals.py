"""SIGINT, SIGTERM and SIGHUP are wishes to stop; a second SIGINT is one to stop at once.

Python runs a signal's handler in the main thread, between any two of its steps. If that holds the
lock of an Event for which it waits, a handler that sets the Event waits for the lock forever: so
what a handler calls runs in a thread of its own, started without any of ``threading``'s locks.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Of supervisors and terminals that go; what Ctrl-C means is at times another's to say."""

STOPS = (signal.SIGINT, *ENDING)
# Within this a second signal is the first: a parent may pass on what the terminal sent to both.
_SAME_S = 0.5


def apart(call: Callable[[], object]) -> None:
    """Call it soon, from another thread; may itself be called by a signal's handler."""
    _thread.start_new_thread(call, ())


def stop_on_signals(
    stop: Callable[[], object],
    numbers: tuple[int, ...] = STOPS,
    *,
    at_once: Callable[[], object] | None = None,
) -> Callable[[], None]:
    """Call ``stop`` apart at each of these signals; from the main thread.

    A SIGINT behind the first signal calls ``at_once`` apart; the next one, or where there is none
    to call, raises KeyboardInterrupt. A SIGHUP that is ignored, as by ``nohup``, stays so.
    """
    hurries = [] if at_once is None else [at_once]
    began_s: list[float] = []

    def take(number: int, _: object) -> None:
        now_s = time.monotonic()
        began_s.append(now_s)
        if number != signal.SIGINT or now_s - began_s[0] < _SAME_S:
            apart(stop)
        elif hurries:
            apart(hurries.pop())
        else:
            raise KeyboardInterrupt

    before: dict[int, Any] = {
        number: signal.signal(number, take)
        for number in numbers
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    }

    def undo() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return undo


@contextmanager
def keeping_interrupts() -> Iterator[None]:
    """Keep the handler of SIGINT that the program has set, whatever the block sets.

    A starting SparkContext sets one that asks the JVM, which fails in the middle of another
    question. Where there is none but Python's own, Spark's stays: it cancels the jobs.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        is_set = before not in (signal.default_int_handler, signal.SIG_DFL, None)
        if is_set and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


@contextmanager
def holding_interrupts() -> Iterator[None]:
    """Raise the ``KeyboardInterrupt`` of a Ctrl-C behind the block, which must not end halfway."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[KeyboardInterrupt] = []

    def hold(number: int, frame: FrameType | None) -> None:
        try:
            before(number, frame)
        except KeyboardInterrupt as interrupt:
            held.append(interrupt)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            raise held[0]


@contextmanager
def python_interrupts() -> Iterator[None]:
    """While the block waits, Ctrl-C raises ``KeyboardInterrupt`` and does nothing else.

    A handler of the program's stays. Spark's, which ``keeping_interrupts`` leaves, would cancel
    the jobs of queries that are to be stopped.
    """
    before = signal.getsignal(signal.SIGINT)
    is_sparks = getattr(before, "__module__", "") == "pyspark.core.context"
    if not is_sparks or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def stop_event(
    numbers: tuple[int, ...] = STOPS, *, at_once: Callable[[], object] | None = None
) -> Iterator[threading.Event]:
    stopping = threading.Event()
    undo = stop_on_signals(stopping.set, numbers, at_once=at_once)
    try:
        yield stopping
    finally:
        undo()


def stopped_by(
    numbers: tuple[int, ...], *, at_once: Callable[[], object] | None = None
) -> AbstractContextManager[threading.Event]:
    """Set at each of these signals; never, where this is not the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return nullcontext(threading.Event())
    return stop_event(numbers, at_once=at_once)
