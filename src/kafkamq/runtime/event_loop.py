"""An event loop in a thread of its own, which all of a worker's ``async def`` handlers share."""

from __future__ import annotations

import asyncio
import contextlib
import threading

_JOIN_S = 10.0


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop for a thread of its own: uvloop's, if that is installed."""
    try:
        import uvloop  # type: ignore[import-not-found,unused-ignore]  # optional
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class LoopThread:
    """An event loop (uvloop's, if that is installed) and its thread; started when it is needed."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop; running."""
        if self._loop is None:
            self._loop = new_loop()
            self._thread = threading.Thread(target=self._run, name="kafkamq-loop", daemon=True)
            self._thread.start()
        return self._loop

    def _run(self) -> None:
        loop = self._loop
        assert loop is not None
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    def end_soon(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(self._loop.stop)

    def stop(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self.end_soon()
            self._thread.join(_JOIN_S)
