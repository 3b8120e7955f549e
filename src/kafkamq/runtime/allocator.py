"""glibc's malloc, set for a process of many threads that hold much for a moment."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # of malloc.h
_MMAP_BYTES = 131_072
_ARENAS = 2


def calm_allocator() -> None:
    """Keep less of what is free; before other threads begin. Without glibc it does nothing.

    Threads of librdkafka would have an arena each, up to eight for a core, and what is free in one
    serves no other. Large buffers are given back when they are freed: by itself malloc takes them
    from the arenas, too, once one was freed.

    For programs of ours alone: it is for the whole process.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, _ARENAS)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
