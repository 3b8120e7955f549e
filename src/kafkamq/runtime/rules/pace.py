"""How many records a worker takes at a time, and how many may start at all; pure.

``RunSize``: one when each takes long, so that all workers have something to do; many when they take
microseconds, so that taking them costs nothing. ``RateLimit``: so many a second.
"""

from __future__ import annotations

from kafkamq.errors import ConfigError

_LIGHT_US = 50.0  # also while a dozen workers share one interpreter that others slow down
_MEMORY_RECORDS = 1024.0


class RunSize:
    """How many records a worker takes at a time, by how long they took until now.

    The average goes by time spent, so that a single slow record counts at once, and the moments in
    which a worker only waited for others to let go of the interpreter count as what they are.
    """

    def __init__(self, *, max_records: int = 512, target_us: int = 10_000) -> None:
        if max_records < 1:
            raise ConfigError(f"max_records is {max_records}: it must be at least 1")
        if target_us < 1:
            raise ConfigError(f"target_us is {target_us}: it must be at least 1")
        self._max_records = max_records
        self._target_us = target_us
        self._spent_us = float(target_us)  # not known yet: one by one
        self._records = 1.0

    @property
    def is_light(self) -> bool:
        """Records take so little that spreading them over workers costs more than it brings."""
        return self._spent_us < _LIGHT_US * self._records

    def observe(self, records: int, elapsed_us: float) -> None:
        """A worker was done with so many records in that time."""
        if records < 1:
            return
        self._spent_us += max(elapsed_us, 0.0)
        self._records += records
        if self._records > _MEMORY_RECORDS:  # what was long ago counts less and less
            self._spent_us *= _MEMORY_RECORDS / self._records
            self._records = _MEMORY_RECORDS

    def size(self, waiting_count: int, workers: int) -> int:
        """How many to take now; of records that are not light there is something for each."""
        by_time = int(self._target_us * self._records / max(self._spent_us, 1e-3))
        if by_time <= 1:  # most of the time where ten thousand wait at once
            return 1
        limit = min(self._max_records, by_time)
        if not self.is_light:
            # Half of a share: who is through early finds something, and all end together.
            limit = min(limit, waiting_count // max(2 * workers, 1))
        return max(1, limit)


class RateLimit:
    """At most so many records a second; what was not used in a moment is made up in the next."""

    def __init__(self, per_second: float, *, burst_ms: int = 100) -> None:
        if not 0 < per_second < 1e12:
            raise ConfigError(f"max_rate is {per_second}: it must be records a second, above 0")
        self._per_ms = per_second / 1000
        self._burst = max(1.0, self._per_ms * burst_ms)
        self._allowance = 1.0
        self._at_ms: float | None = None

    def available(self, monotonic_ms: float) -> int:
        if self._at_ms is not None:
            grown = (monotonic_ms - self._at_ms) * self._per_ms
            self._allowance = min(self._burst, self._allowance + grown)
        self._at_ms = monotonic_ms
        return int(self._allowance)

    def spend(self, records: int) -> None:
        self._allowance -= records
