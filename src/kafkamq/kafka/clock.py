"""The process's monotonic clock, the one that leases are judged by."""

from __future__ import annotations

from time import monotonic_ns

__all__ = ["monotonic_ms"]


def monotonic_ms() -> int:
    """Milliseconds of the monotonic clock; never compared with log time."""
    return monotonic_ns() // 1_000_000
