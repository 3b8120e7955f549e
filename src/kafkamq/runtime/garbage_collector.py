"""Python's garbage collector, set for processes that hold many records and make no cycles."""

from __future__ import annotations

import gc

__all__ = ["calm_collector"]

_MANY_OBJECTS = 100_000


def calm_collector() -> None:
    """Let garbage collection pass over what this process has loaded by now, and be seldom after.

    Thousands of records are alive at once, or millions of leases for long: looking through them
    again and again finds nothing, and costs more than the work itself.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_MANY_OBJECTS, 20, 100)
