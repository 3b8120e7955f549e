"""The clocks of a claimant's process: one that never stops, and what is known of the broker's."""

from __future__ import annotations

import time

from kafkamq.transport.clock import monotonic_ms as lease_clock_ms

__all__ = ["BrokerClock", "lease_clock_ms"]


class BrokerClock:
    """The broker's time as the last record tells it; before the first one, the wall clock.

    Nothing is decided by it that the log would not confirm: it only says when a claim is worth
    writing, and what goes into the records' time.
    """

    def __init__(self, latest_record_ms: int = -1) -> None:
        """``latest_record_ms``: the broker's time of the log's last record; -1: there is none."""
        self._now_ms = max(latest_record_ms, time.time_ns() // 1_000_000)
        self._seen_ms = lease_clock_ms()

    def saw(self, broker_ms: int) -> None:
        """A record was appended at ``broker_ms``, just now."""
        self._now_ms = broker_ms
        self._seen_ms = lease_clock_ms()

    def now_s(self) -> float:
        """The broker's time, late by what a record takes to arrive."""
        return (self._now_ms + lease_clock_ms() - self._seen_ms) / 1000
