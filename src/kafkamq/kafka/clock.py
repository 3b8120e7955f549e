"""The process's monotonic clock, the one that leases are judged by."""

from __future__ import annotations

from time import monotonic_ns

__all__ = ["NS_PER_MS", "monotonic_ms"]

NS_PER_MS = 1_000_000


def monotonic_ms() -> int:
    """Milliseconds of the monotonic clock; never compared with log time."""
    return monotonic_ns() // NS_PER_MS
