"""What time it is for the brokers, as the ages of messages are judged by it (R28); pure."""

from __future__ import annotations


class BrokerClock:
    """What time it is for the brokers, never too early; unknown before the first report."""

    def __init__(self) -> None:
        self._ahead_ms: int | None = None  # of the monotonic clock

    def reported(self, log_ms: int, written_ms: int) -> None:
        """A record that was written at a monotonic time, or later, has this broker time."""
        if log_ms >= 0:
            self._ahead_ms = log_ms - written_ms

    def now_ms(self, wall_ms: int, monotonic_ms: int) -> int | None:
        """The later of the wall clock and the last report with the time since; None: unknown."""
        if self._ahead_ms is None:
            return None
        return max(wall_ms, self._ahead_ms + monotonic_ms)
