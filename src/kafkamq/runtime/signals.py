"""SIGINT and SIGTERM as the wish to stop.

Python runs a signal's handler in the main thread, between any two of its steps. If that holds the
lock of an Event for which it waits, a handler that sets the Event waits for the lock forever: so
what a handler calls runs in a thread of its own, started without any of ``threading``'s locks.
"""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

_STOPS = (signal.SIGINT, signal.SIGTERM)


def apart(call: Callable[[], object]) -> None:
    """Call it soon, from another thread; may itself be called by a signal's handler."""
    _thread.start_new_thread(call, ())


def stop_on_signals(
    stop: Callable[[], object], numbers: tuple[int, ...] = _STOPS
) -> Callable[[], None]:
    """Call ``stop`` apart at each of these signals; from the main thread."""
    before: dict[int, Any] = {
        number: signal.signal(number, lambda *_: apart(stop)) for number in numbers
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
def stop_event(numbers: tuple[int, ...] = _STOPS) -> Iterator[threading.Event]:
    """Set at each of these signals; from the main thread."""
    stopping = threading.Event()
    undo = stop_on_signals(stopping.set, numbers)
    try:
        yield stopping
    finally:
        undo()


def stopped_by(*numbers: int) -> AbstractContextManager[threading.Event]:
    """Set at each of these signals; never, where this is not the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return nullcontext(threading.Event())
    return stop_event(numbers)
