"""Whether an event loop turns: it notes the time once a second."""

from __future__ import annotations

import asyncio
from time import monotonic

BEAT_S = 1.0


class LoopBeat:
    """Made anywhere; ``start`` and ``stop`` are called in the loop, or before it runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._next: asyncio.TimerHandle | None = None
        # When the loop turned last; before that, when this was made. None: it is over.
        self.turned_s: float | None = monotonic()

    def start(self) -> None:
        self.turned_s = monotonic()
        self._next = self._loop.call_later(BEAT_S, self.start)

    def stop(self) -> None:
        self.turned_s = None
        if self._next is not None:
            self._next.cancel()
