"""Flow control of the parallel consumer says how much to hold, how far ahead, in what pieces;
pure.

Three limits, each per partition, so that one that is stuck does not hold the others up:

- *Records held*: a partition is fetched until ``max_open`` of its records are polled and not done,
  and again when they are down to half of that. One poll may go over it. Where records are large
  it is fewer, so that what is held takes about ``max_open_bytes`` at most.
- *Size of the map*: up to ``max_free_map_chars`` it may grow. Above, nothing beyond the highest
  that succeeded is handed out, so that holes are filled and the map shrinks; judge it again soon.
  Above ``max_map_chars`` it is not written whole, as the broker would refuse the commit, and the
  owner says so. What is below the ceiling goes on in both cases.
- *Time*: a record that holds the committed offset back for ``stall_after_ms`` is reported, once.

Source: Parallel Consumer, Offset Map; the limits are its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kafkamq.parallel.rules.offsets import Progress

_SIZE_WEIGHT = 1 / 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowLimits:
    max_open: int = 10_000
    # The bytes of their values, by the mean of the latest.
    max_open_bytes: int = 256 * 1024 * 1024
    max_free_map_chars: int = 3072
    # The broker's ``offset.metadata.max.bytes``, less the NUL that the client adds.
    max_map_chars: int = 4095


@dataclass(frozen=True, slots=True)
class MapVerdict:
    is_written: bool
    ceiling: int | None


class PartitionFlow:
    """Whether to fetch a partition, and how far ahead to work in it."""

    def __init__(self, limits: FlowLimits) -> None:
        self._limits = limits
        self._is_fetching = True
        # How many records may be polled and not done, as large as they are of late.
        self.max_open = limits.max_open
        self._record_bytes = 0.0

    @property
    def resume_open(self) -> int:
        """Down to how many they must be before a paused partition is fetched again."""
        return self.max_open // 2

    def observe(self, sizes: Sequence[int]) -> None:
        """Records of these sizes, in bytes, were polled; a sample of them is enough."""
        for size in sizes:
            self._record_bytes += (size - self._record_bytes) * _SIZE_WEIGHT
        fitting = self._limits.max_open_bytes / max(self._record_bytes, 1.0)
        self.max_open = max(1, min(self._limits.max_open, int(fitting)))

    def fetch(self, open_count: int) -> bool:
        if self._is_fetching:
            self._is_fetching = open_count < self.max_open
        else:
            self._is_fetching = open_count <= self.resume_open
        return self._is_fetching

    def judge_map(self, chars: int, progress: Progress) -> MapVerdict:
        """Return the map of that progress, of so many characters (0: none is needed)."""
        ceiling = progress.highest_succeeded if chars > self._limits.max_free_map_chars else None
        return MapVerdict(chars <= self._limits.max_map_chars, ceiling)


@dataclass(frozen=True, slots=True)
class Stall:
    """The record at ``offset`` has held the committed offset back for ``held_ms`` so far."""

    offset: int
    held_ms: int


class StallDetector:
    """Notices when the committable offset of a partition stands still for long."""

    def __init__(self, *, stall_after_ms: int) -> None:
        self._stall_after_ms = stall_after_ms
        self._offset: int | None = None
        self._since_ms = 0
        self._is_reported = False

    def observe(self, offset: int | None, monotonic_ms: int) -> Stall | None:
        """Give it ``OffsetTracker.first_open`` from time to time; a stall is told once."""
        if offset != self._offset:
            self._offset, self._since_ms, self._is_reported = offset, monotonic_ms, False
        held_ms = monotonic_ms - self._since_ms
        if offset is None or self._is_reported or held_ms < self._stall_after_ms:
            return None
        self._is_reported = True
        return Stall(offset, held_ms)
