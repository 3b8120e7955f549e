"""A policy says when to append a TICK to a silent marker partition (R4): pure, one for each.

A TICK carries nothing but the broker's time. It is wanted when the log is silent and its clock
would have passed, by the engine's estimate, a point that matters: a quarter of a timeout before a
lease ends (so that the step which passes the lease is a small one and R3 grants no grace to a dead
worker), and the moment itself; and once in ``max_silence_ms`` while something due is not settled.
One at a time: the next one when it was read. Before an engine that reads in batches there may be
two, an early one (for R3) and the one that passes all until the batch begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from kafkamq.markers.rules.hold import NEVER

_OFFSET_MEMORY_MS = 60_000
_MAX_UNREAD = 2


@dataclass(frozen=True, slots=True)
class Wake:
    """What the TICK rules (R4) need to know of a partition; times are of its log clock.

    ``deadline_ms`` is a lower bound of the next time at which something open falls due or has to
    be carried, ``warn_ms`` lies a quarter of the shortest timeout before it; None: nothing waits.
    """

    deadline_ms: int | None
    warn_ms: int | None
    has_due: bool


class TickPolicy:
    """Decides for one partition.

    Args:
        monotonic_ms: The engine's own clock, which only measures how long the log has been silent.
        max_silence_ms: While something is due.
        lead_ms: For engines that read in batches: how long before one ``is_read_soon`` is true.
    """

    def __init__(self, monotonic_ms: int, max_silence_ms: int = 1000, lead_ms: int = 0) -> None:
        self._max_silence_ms = max_silence_ms
        self._lead_ms = lead_ms
        self._read_ms = monotonic_ms
        self._next_offset = -1
        self._sent_ms: int | None = None
        self._unread: dict[int, int] = {}
        self._due_since_ms = monotonic_ms
        # From the engine's clock to the log's: the most that was seen.
        self._offset_ms = -NEVER
        self._offset_since_ms = monotonic_ms

    def on_read(self, monotonic_ms: int, next_offset: int, clock_ms: int | None = None) -> None:
        """The engine has read the partition up to ``next_offset`` at this moment.

        Args:
            clock_ms: The log clock there, from engines that read seldom: the last record may be
                old by then, and how far the log's clock is ahead is remembered for a minute.
        """
        if next_offset > self._next_offset:
            self._next_offset = next_offset
            # A TICK was written when it was sent.
            self._read_ms = min(monotonic_ms, self._unread.get(next_offset - 1, monotonic_ms))
            if clock_ms is not None:
                offset_ms = clock_ms - self._read_ms
                is_old = monotonic_ms - self._offset_since_ms > _OFFSET_MEMORY_MS
                if is_old or offset_ms >= self._offset_ms:
                    self._offset_ms, self._offset_since_ms = offset_ms, monotonic_ms
            self._unread = {at: ms for at, ms in self._unread.items() if at >= next_offset}

    def on_sent(self, monotonic_ms: int) -> None:
        self._sent_ms = self._due_since_ms = monotonic_ms

    def on_delivered(self, offset: int) -> None:
        if self._sent_ms is not None and offset >= self._next_offset:
            self._unread[offset] = self._sent_ms
        self._sent_ms = None

    def on_failed(self) -> None:
        self._sent_ms = None

    def wants_tick(
        self, monotonic_ms: int, clock_ms: int, wake: Wake, *, is_read_soon: bool = True
    ) -> bool:
        """Append a TICK now?

        Args:
            clock_ms: The partition's log clock after all that was read.
            wake: What the partition waits for.
            is_read_soon: The engine is about to read. If not, a TICK that can wait does so: one
                that is written just before it is read passes more.
        """
        if not wake.has_due:
            self._due_since_ms = max(self._due_since_ms, monotonic_ms - self._max_silence_ms)
        if self._sent_ms is not None:
            return False
        if self._unread and not (is_read_soon and self._are_early(monotonic_ms)):
            return False
        if wake.has_due and monotonic_ms - self._due_since_ms >= self._max_silence_ms:
            return is_read_soon
        if wake.deadline_ms is None or wake.warn_ms is None:
            return False
        estimate_ms = self._estimate_ms(monotonic_ms, clock_ms)
        point_ms = wake.warn_ms if clock_ms <= wake.warn_ms else wake.deadline_ms
        if not estimate_ms > point_ms >= clock_ms:
            return False
        # R3: behind a gap of a third of the timeout live and dead workers get a grace.
        return is_read_soon or estimate_ms - clock_ms >= wake.deadline_ms - wake.warn_ms

    def has_passed(self, monotonic_ms: int, clock_ms: int, wake: Wake) -> bool:
        """Say whether the log's clock has passed, by the engine's estimate, what is waited for."""
        deadline_ms = wake.deadline_ms
        return deadline_ms is not None and self._estimate_ms(monotonic_ms, clock_ms) > deadline_ms

    def _estimate_ms(self, monotonic_ms: int, clock_ms: int) -> int:
        return monotonic_ms + max(clock_ms - self._read_ms, self._offset_ms)

    def _are_early(self, monotonic_ms: int) -> bool:
        """Unread TICKs were not written for the batch that begins now: they pass less than that."""
        if not 0 < self._lead_ms < monotonic_ms - max(self._unread.values()):
            return False
        # Otherwise they would pile up in front of a slow reader.
        return len(self._unread) < _MAX_UNREAD
