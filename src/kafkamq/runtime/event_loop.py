"""An event loop in a thread of its own, which all of a worker's ``async def`` handlers share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from time import monotonic

_JOIN_S = 10.0
_BEAT_S = 1.0
_log = logging.getLogger(__name__)


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop for a thread of its own: uvloop's, if that is installed."""
    try:
        import uvloop  # type: ignore[import-not-found,unused-ignore]  # optional
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class LoopThread:
    """An event loop (uvloop's, if that is installed) and its thread; started when it is needed.

    A task that raises ``SystemExit`` or ``KeyboardInterrupt`` ends ``run_forever``, wherever it was
    made, and so does whoever calls the loop's ``stop``. The loop is others' as well, so it goes on,
    and who awaits the task gets its exception.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_ending = False
        self._on_end: list[Callable[[], None]] = []

    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop; running."""
        if self._loop is None:
            self._loop = new_loop()
            self._thread = threading.Thread(target=self._run, name="kafkamq-loop", daemon=True)
            self._thread.start()
        return self._loop

    def tell_of_end(self, told: Callable[[], None]) -> None:
        """Have it called in the loop's thread behind the loop, whatever has ended that."""
        self._on_end.append(told)

    def _run(self) -> None:
        loop = self._loop
        assert loop is not None
        asyncio.set_event_loop(loop)
        try:
            while not self._is_ending:
                try:
                    loop.run_forever()
                except (SystemExit, KeyboardInterrupt) as error:  # noqa: PERF203 - they are rare
                    _log.error(
                        "a task raised %s in the event loop of the handlers, which goes on",
                        type(error).__name__,
                        exc_info=error,
                    )
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            for told in self._on_end:
                told()
            loop.close()

    def end_soon(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        assert self._loop is not None
        self._is_ending = True
        self._loop.stop()

    def stop(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self.end_soon()
            self._thread.join(_JOIN_S)


class LoopBeat:
    """Whether an event loop turns: it notes the time once a second.

    Made anywhere; ``start`` and ``stop`` are called in the loop, or before it runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._next: asyncio.TimerHandle | None = None
        # When the loop turned last; before that, when this was made. None: it is over.
        self.turned_s: float | None = monotonic()

    def start(self) -> None:
        self.turned_s = monotonic()
        self._next = self._loop.call_later(_BEAT_S, self.start)

    def stop(self) -> None:
        self.turned_s = None
        if self._next is not None:
            self._next.cancel()
