"""Log time (R1) is the only clock that decides anything about a message.

The clock of a marker partition is the sum of the positive differences between the broker
timestamps of consecutive records. A broker whose clock steps back costs nothing; one that steps
forward hurts only what is open at that moment; two trackers that started at different offsets
agree on every difference, though not on the absolute value. Beside it, what time it is for the
brokers (``BrokerClock``), by which the ages of messages are judged (R28).
"""

from __future__ import annotations

NO_TIMESTAMP = -1
"""Timestamp of a record that is not LogAppendTime; it does not move the clock (R1)."""


_STARTED = -2
"""``last_ms`` when records were read and none of them had a time."""


class LogClock:
    """One marker partition's clock. ``now_ms`` starts at the first record's timestamp.

    When that record has none, it starts at 0 and stays there until two times can be compared: the
    first timestamp is no difference, and must not pass what began before it.
    """

    __slots__ = ("last_ms", "now_ms")

    def __init__(self, now_ms: int = 0, last_ms: int = NO_TIMESTAMP) -> None:
        self.now_ms = now_ms
        self.last_ms = last_ms

    def advance(self, timestamp_ms: int) -> int:
        """Move to the next record; returns the step in ms, 0 when the clock stood."""
        last_ms = self.last_ms
        if timestamp_ms < 0:
            if last_ms < 0:
                self.last_ms = _STARTED
            return 0
        self.last_ms = timestamp_ms
        if last_ms < 0:
            if last_ms != _STARTED:
                self.now_ms = timestamp_ms
            return 0
        step = timestamp_ms - last_ms
        if step <= 0:
            return 0
        self.now_ms += step
        return step

    def at(self, broker_s: float) -> int:
        """Return what this clock shows at a broker's time, in s; never before the last record."""
        broker_ms = round(broker_s * 1000)
        return broker_ms if self.last_ms < 0 else self.now_ms + max(0, broker_ms - self.last_ms)


class BrokerClock:
    """What time it is for the brokers, never too early; unknown before the first report."""

    def __init__(self) -> None:
        # How far the brokers are ahead of the monotonic clock; None: unknown.
        self._ahead_ms: int | None = None

    def reported(self, log_ms: int, written_ms: int) -> None:
        """A record that was written at a monotonic time, or later, has this broker time."""
        if log_ms >= 0:
            self._ahead_ms = log_ms - written_ms

    def now_ms(self, wall_ms: int, monotonic_ms: int) -> int | None:
        """Return the later of the wall clock and the last report with the time since, if known."""
        if self._ahead_ms is None:
            return None
        return max(wall_ms, self._ahead_ms + monotonic_ms)
