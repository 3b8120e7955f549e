"""When the handlers of a pool are taken for hung; pure.

A slot is one of those who call a handler: a thread, a coroutine, a process. A pool hangs while
every slot is at the call that it is at: since the youngest of these calls began. One slot that ends
its call, or has none, shows that the pool works. Coroutines hang, too, while their event loop does
not turn, whatever number of them is at a call.

Times are s of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MIN_LEFT, _LEFT = 64, 4
READY_S = 300.0
"""A pool that hangs for so long is not ready any more."""
# An event loop notes once a second that it turns.
_BLOCKED_S = 3.0


@dataclass(frozen=True, slots=True)
class Call:
    began_s: float
    place: tuple[str, int, int]
    # In what it runs: a thread's number, a task, or a text that says it.
    caller: object = None

    def __str__(self) -> str:
        topic, partition, offset = self.place
        return f"{topic}-{partition}@{offset}"


@dataclass(frozen=True, slots=True)
class Slots:
    count: int
    calls: Sequence[Call]
    # When its event loop turned last; None: it has none.
    turned_s: float | None = None

    @property
    def oldest(self) -> Call | None:
        return min(self.calls, key=_began_s, default=None)

    def hung_s(self, now_s: float) -> float:
        """Return for how long nothing has ended although every slot is at it; 0: it works."""
        hung_s = self._blocked_s(now_s)
        if self.count and len(self.calls) >= self.count:
            hung_s = max(hung_s, now_s - max(self.calls, key=_began_s).began_s)
        return hung_s

    def _blocked_s(self, now_s: float) -> float:
        """Return for how long its event loop has been blocked; 0: it is not."""
        silent_s = 0.0 if self.turned_s is None else now_s - self.turned_s
        return silent_s if silent_s >= _BLOCKED_S else 0.0

    def is_ready(self, now_s: float) -> bool:
        return self.hung_s(now_s) < READY_S

    def describe(self, now_s: float) -> str:
        """Say the same for people; empty while there is nothing to say."""
        oldest, blocked_s = self.oldest, self._blocked_s(now_s)
        parts = []
        if oldest is not None:
            parts = [
                f"{len(self.calls)} of {self.count} handlers at work, the oldest for "
                f"{max(0.0, now_s - oldest.began_s):.0f} s at {oldest}"
            ]
        if blocked_s:
            parts.append(f"the event loop is blocked for {blocked_s:.0f} s")
        return "; ".join(parts)


def max_left(count: int) -> int:
    """Return how many calls that took too long may go on behind a pool of so many slots.

    They cannot be ended: neither a thread, nor a coroutine that swallows its cancellation.
    """
    return max(_MIN_LEFT, _LEFT * count)


def _began_s(call: Call) -> float:
    return call.began_s
