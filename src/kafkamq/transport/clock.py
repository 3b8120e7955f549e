"""The clock that leases and TICKs are judged by; it goes on while the machine is suspended."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

NS_PER_MS = 1_000_000


def _clock() -> Callable[[], int]:
    """Return the brokers' time goes on while a machine is suspended, and so must this one.

    On Linux that is CLOCK_BOOTTIME; on macOS it is CLOCK_MONOTONIC, which Python's own monotonic
    clock is not there.
    """
    for name in ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"):
        number = getattr(time, name, None)
        if number is not None:
            return partial(time.clock_gettime_ns, number)
    return time.monotonic_ns


now_ns = _clock()
"""Nanoseconds of that clock."""


def monotonic_ms() -> int:
    """Get milliseconds of a clock that never goes back or stops; never compared with log time."""
    return now_ns() // NS_PER_MS


def public_s(clock_ms: float) -> float:
    """That moment in seconds of ``time.monotonic()``, as long as the machine is not suspended."""
    return clock_ms / 1000 - (now_ns() - time.monotonic_ns()) / 1e9
