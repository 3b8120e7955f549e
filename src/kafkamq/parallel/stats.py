"""What a parallel consumer counts; written under one lock or by one thread, read by any."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """Totals since the consumer was made."""

    polled: int = 0
    processed: int = 0
    failed: int = 0  # attempts
    dead_lettered: int = 0
    skipped: int = 0  # given up without a dead letter
    stalls: int = 0
    commits: int = 0
    commit_failures: int = 0
    maps_cut: int = 0  # commits with a part of the map, as it was too long
    maps_ignored: int = 0  # foreign or damaged metadata
    last_commit_s: float = 0.0  # monotonic
    last_poll_s: float = 0.0  # monotonic
    map_chars: int = 0  # the longest map of the last commit
