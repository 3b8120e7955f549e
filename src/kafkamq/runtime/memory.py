"""Python's collector and glibc's malloc are set here for processes that hold much for a moment."""

from __future__ import annotations

import gc
from contextlib import suppress

_MANY_OBJECTS = 100_000


def calm_collector() -> None:
    """Collect seldom, and pass over what is loaded by now: looking through it finds nothing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_MANY_OBJECTS, 20, 100)


_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_MMAP_BYTES = 131_072
_ARENAS = 2


def calm_allocator() -> None:
    """Keep less of what is free; before other threads begin. Without glibc it does nothing.

    Threads of librdkafka would have an arena each, up to eight for a core, and what is free in one
    serves no other. Large buffers are given back when they are freed: by itself malloc takes them
    from the arenas, too, once one was freed.

    For programs of ours alone: it is for the whole process.
    """
    import ctypes

    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, _ARENAS)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
