"""Flow control of the parallel consumer: how much to hold, how far ahead, in what pieces; pure.

Three limits, each per partition, so that one that is stuck does not hold the others up:

- *Records held*: a partition is fetched until ``max_open`` of its records are polled and not done,
  and again when they are down to ``resume_open``. One poll may go over it.
- *Size of the map*: up to ``max_free_map_chars`` it may grow. Above, nothing beyond the highest
  that succeeded is handed out, so that holes are filled and the map shrinks; judge it again soon.
  Above ``max_map_chars`` it is not written either, as the broker would refuse the commit, and the
  owner says so. What is below the ceiling goes on in both cases.
- *Time*: a record that holds the committed offset back for ``stall_after_ms`` is reported, once.

``RunSize`` says how many records a worker takes at a time: one when each takes long, so that all
workers have something to do; many when they take microseconds, so that taking them costs nothing.

Source: Parallel Consumer, Offset Map; the limits are its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from kafkamq.core.offsets import Progress
from kafkamq.errors import ConfigError

__all__ = ["FlowLimits", "MapVerdict", "PartitionFlow", "RunSize", "Stall", "StallGuard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowLimits:
    """Limits of one partition."""

    max_open: int = 10_000  # records polled and not done
    resume_open: int = 5_000  # a paused partition is fetched again from here on down
    max_free_map_chars: int = 3072
    max_map_chars: int = 4096  # offset.metadata.max.bytes of the broker

    def __post_init__(self) -> None:
        if self.max_open < 1:
            raise ConfigError(f"max_open is {self.max_open}: it must be at least 1")
        if not 0 <= self.resume_open < self.max_open:
            raise ConfigError(
                f"resume_open is {self.resume_open}: it must be below max_open ({self.max_open})"
            )
        if not 0 < self.max_free_map_chars <= self.max_map_chars:
            raise ConfigError(
                f"max_free_map_chars is {self.max_free_map_chars}: it must be at least 1 and at"
                f" most max_map_chars ({self.max_map_chars})"
            )


@dataclass(frozen=True, slots=True)
class MapVerdict:
    """What the size of a map means for the commit and for what is handed out next."""

    is_written: bool  # False: commit the offset alone
    ceiling: int | None  # for ``Scheduler.set_ceiling``


class PartitionFlow:
    """Whether to fetch a partition, and how far ahead to work in it."""

    def __init__(self, limits: FlowLimits) -> None:
        self._limits = limits
        self._is_fetching = True

    @property
    def is_fetching(self) -> bool:
        """As ``fetch`` decided last."""
        return self._is_fetching

    def fetch(self, open_count: int) -> bool:
        """Whether to fetch on, with so many records polled and not done."""
        if self._is_fetching:
            self._is_fetching = open_count < self._limits.max_open
        else:
            self._is_fetching = open_count <= self._limits.resume_open
        return self._is_fetching

    def judge_map(self, chars: int, progress: Progress) -> MapVerdict:
        """The map of that progress, of so many characters (0: none is needed)."""
        ceiling = progress.highest_succeeded if chars > self._limits.max_free_map_chars else None
        return MapVerdict(chars <= self._limits.max_map_chars, ceiling)


@dataclass(frozen=True, slots=True)
class Stall:
    """The record at ``offset`` has held the committed offset back for ``held_ms`` so far."""

    offset: int
    held_ms: int


class StallGuard:
    """Notices when the committable offset of a partition stands still for long."""

    def __init__(self, *, stall_after_ms: int) -> None:
        if stall_after_ms < 1:
            raise ConfigError(f"stall_after_ms is {stall_after_ms}: it must be at least 1")
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


class RunSize:
    """How many records a worker takes at a time, by how long they took until now.

    Args:
        max_records: The most.
        target_us: How long a worker should be busy with what it takes.
    """

    def __init__(self, *, max_records: int = 64, target_us: int = 1_000) -> None:
        if max_records < 1:
            raise ConfigError(f"max_records is {max_records}: it must be at least 1")
        if target_us < 1:
            raise ConfigError(f"target_us is {target_us}: it must be at least 1")
        self._max_records = max_records
        self._target_us = target_us
        self._record_us = float(target_us)  # not known yet: one by one

    def observe(self, records: int, elapsed_us: float) -> None:
        """A worker was done with so many records in that time."""
        if records < 1:
            return
        record_us = elapsed_us / records
        if record_us > self._record_us:  # slower: at once, or the others wait behind it
            self._record_us = record_us
        else:
            self._record_us += (record_us - self._record_us) / 4

    def size(self, waiting_count: int, workers: int) -> int:
        """How many to take now; with little to do there is something for each worker."""
        share = -(-waiting_count // max(workers, 1))
        by_time = int(self._target_us / self._record_us) if self._record_us > 0 else share
        return max(1, min(self._max_records, share, by_time))
