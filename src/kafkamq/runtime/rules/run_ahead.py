"""How many messages a worker takes before a handler is free for them; pure.

None, when handlers are slow: what waits behind a slow one could be handled elsewhere. When they are
quick, as many as they finish within the time that fetching takes.
"""

from __future__ import annotations

_AHEAD_MS = 30  # about what a batch takes from the log to the handlers
_WINDOW_MS = 20


class RunAhead:
    """One handler's."""

    def __init__(self, *, concurrency: int, maximum: int, is_ahead: bool = True) -> None:
        self.concurrency = concurrency  # it may change
        self._maximum = max(1, maximum)
        self._is_ahead = is_ahead
        self._ahead = 0
        self._since_ms = 0
        self._finished = 0

    def wanted(self, held: int, finished: int, now_ms: int) -> int:
        """How many to receive now."""
        passed_ms = now_ms - self._since_ms
        if passed_ms >= _WINDOW_MS:
            self._ahead = (finished - self._finished) * _AHEAD_MS // passed_ms
            self._since_ms, self._finished = now_ms, finished
        ahead = self._ahead if self._is_ahead else 0
        return min(self.concurrency + ahead, self._maximum) - held
