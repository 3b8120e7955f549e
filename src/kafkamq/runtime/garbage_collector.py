"""Python's garbage collector, set for processes that hold many records and make no cycles."""

from __future__ import annotations

import gc

_MANY_OBJECTS = 100_000


def calm_collector() -> None:
    """Collect seldom, and pass over what is loaded by now: looking through it finds nothing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_MANY_OBJECTS, 20, 100)
