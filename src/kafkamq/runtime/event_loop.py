"""``async def`` handlers: coroutines on an event loop that all of a worker's handlers share."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from kafkamq.queue.message import Message
from kafkamq.runtime.calls import Calls
from kafkamq.runtime.loop_beat import LoopBeat
from kafkamq.runtime.rules.hanging import Slots
from kafkamq.runtime.threads import STOPPED, call_of, timed_out

__all__ = ["CoroutinePool", "LoopThread"]

_JOIN_S = 10.0
_CANCEL_S = 1.0  # what a handler that is cancelled has to end; then it is left alone
_WATCH_S = 0.05
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
    """An event loop (uvloop's, if that is installed) and its thread; started when it is needed."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.beat: LoopBeat | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop; running."""
        if self._loop is None:
            loop = self._loop = new_loop()
            self.beat = LoopBeat(loop)
            self._thread = threading.Thread(target=self._run, name="kafkamq-loop", daemon=True)
            self._thread.start()
            return loop
        return self._loop

    def _run(self) -> None:
        loop, beat = self._loop, self.beat
        assert loop is not None
        assert beat is not None
        asyncio.set_event_loop(loop)
        try:
            beat.start()
            loop.run_forever()
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    def end_soon(self) -> None:
        """End it, and wait for nothing; idempotent."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(self._loop.stop)

    def stop(self) -> None:
        """End it; idempotent."""
        if self._loop is not None and self._thread is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_JOIN_S)


class CoroutinePool:
    """``concurrency`` coroutines of one handler.

    Args:
        calls: What to await.
        room: Set when messages have their verdicts.
        thread: The loop that they run on.
    """

    def __init__(self, calls: Calls, room: threading.Event, thread: LoopThread) -> None:
        self._calls = calls
        self._room = room
        self._thread = thread
        self._ready: deque[Message] = deque()
        self._parked: deque[asyncio.Future[None]] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._open: dict[int, tuple[Message, float]] = {}  # with the time at which it was begun;
        # who takes a message out gives its verdict
        self._left_alone: set[asyncio.Task[object]] = set()
        self._running = 0
        self._finished = 0
        self._is_withdrawn = False
        self._is_abandoned = False

    def start(self) -> None:
        """Begin."""
        asyncio.run_coroutine_threadsafe(self._begin(), self._thread.loop()).result()

    async def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._work()) for _ in range(self._calls.spec.concurrency)]

    def submit(self, messages: Sequence[Message]) -> None:
        """Handle these."""
        self._ready.extend(messages)
        self._thread.loop().call_soon_threadsafe(self._wake, len(messages))

    def _wake(self, count: int) -> None:
        for _ in range(count):
            if not self._parked:
                break
            gate = self._parked.popleft()
            if not gate.done():
                gate.set_result(None)

    def finished(self) -> int:
        """How many have their verdict."""
        return self._finished

    def slots(self) -> Slots:
        """What its coroutines are at, and when their loop turned last."""
        beat = self._thread.beat
        running = list(self._open.values())
        return Slots(
            self._calls.spec.concurrency,
            [call_of(message, began_s) for message, began_s in running],
            None if beat is None else beat.turned_s,
        )

    def withdraw(self) -> list[Message]:
        """Begin no more. Waits for nothing: a handler may be blocking the loop."""
        self._is_withdrawn = True
        found: list[Message] = []
        try:
            while True:
                found.append(self._ready.popleft())
        except IndexError:
            return found

    def join(self, timeout_s: float) -> bool:
        """Whether all that was begun has ended."""
        deadline_s = time.monotonic() + timeout_s
        while self._running:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._room.clear()
            self._room.wait(min(left_s, _WATCH_S))
        return True

    def abandon(self) -> None:
        """Cancel what is still going on, and end."""
        ending = asyncio.run_coroutine_threadsafe(self._cancel(), self._thread.loop())
        try:
            ending.result(_JOIN_S)
        except (TimeoutError, concurrent.futures.TimeoutError):
            _log.warning("a handler blocks the event loop; its message is given back")
        for key in list(self._open):
            self._settle(key, STOPPED)

    def _settle(self, key: int, outcome: object) -> None:
        found = self._open.pop(key, None)
        if found is not None:
            self._calls.settle(found[0], outcome)

    async def _cancel(self) -> None:
        self._is_abandoned = True
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=_CANCEL_S)

    async def _work(self) -> None:
        ready = self._ready
        loop = asyncio.get_running_loop()
        while True:
            if not ready or self._is_withdrawn:
                gate = loop.create_future()
                self._parked.append(gate)
                await gate
                continue
            self._running += 1
            try:
                message = ready.popleft()
            except IndexError:  # withdrawn just now
                self._running -= 1
                continue
            key = id(message)
            self._open[key] = message, time.monotonic()
            try:
                self._settle(key, await self._handle(message))
            except asyncio.CancelledError:
                self._settle(key, STOPPED)
                if self._is_abandoned:  # else the handler's own doing
                    raise
            finally:
                self._running -= 1
                self._finished += 1
                if not self._room.is_set():
                    self._room.set()

    async def _handle(self, message: Message) -> object:
        timeout_ms = self._calls.spec.timeout_ms
        if not timeout_ms:
            return await self._calls.run_async(message)
        task = asyncio.ensure_future(self._calls.run_async(message))
        try:
            await asyncio.wait((task,), timeout=timeout_ms / 1000)
            if task.done():
                return task.result()
            task.cancel()
            await asyncio.wait((task,), timeout=_CANCEL_S)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            _log.warning(
                "a handler goes on although it was cancelled; it is left alone",
                extra={"queue": message.queue_id, "delivery": message.delivery_count},
            )
            self._left_alone.add(task)  # a loop holds its tasks weakly
            task.add_done_callback(self._left_alone.discard)
        return timed_out(self._calls)
