"""``async def`` handlers: coroutines on one event loop, which is given or has its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Any, Generic, TypeVar

from kafkamq.errors import StateError
from kafkamq.runtime.rules.hanging import Slots, max_left
from kafkamq.runtime.verdicts import outcomes_of
from kafkamq.runtime.work_queue import HandlerCall, Slot, WorkQueue, enter, take_list

# The longest turn of handlers that never wait: they must not own the loop.
_TURN_S = 0.002
_BLOCKED_S = 10.0
# What a cancelled handler has to end; then it is left alone.
_CANCEL_S = 1.0
_NO_LOOP = "the event loop of the handlers ended before their consumer was closed"
_log = logging.getLogger(__name__)
R = TypeVar("R")
_JOIN_S = 10.0
_BEAT_S = 1.0


class LoopExecutor(Generic[R]):
    """``count`` coroutines.

    Args:
        queue: What they work on.
        call: The handler.
        count: How many at once.
        loop: The running loop to work on, or a thread with one that others use as well; None: a
            thread of its own.
    """

    def __init__(
        self,
        queue: WorkQueue[R],
        call: HandlerCall,
        count: int,
        loop: asyncio.AbstractEventLoop | LoopThread | None = None,
    ) -> None:
        self._queue = queue
        self._call = call
        self._slots: list[Slot[R]] = [queue.make_slot() for _ in range(count)]
        self._own = LoopThread() if loop is None else None
        thread = loop if isinstance(loop, LoopThread) else self._own
        self._thread = thread
        self._given = None if isinstance(loop, LoopThread) else loop
        self._beat: LoopBeat | None = None
        self._loop_thread = 0
        self._all: asyncio.Task[None] | None = None
        self._latest: Slot[R] | None = None
        self._left_alone: set[asyncio.Task[object]] = set()
        self._ended = threading.Event()
        self._cancelling = threading.Event()
        self._is_cancelled = False
        self._has_lost_loop = False

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        if self._given is None:
            assert self._thread is not None
            self._given = self._thread.loop()
        return self._given

    def start(self) -> None:
        self._queue.join(self._slots, self)
        if self._thread is not None:
            self._thread.tell_of_end(self._lose_loop)
        self._beat = LoopBeat(self._loop)
        self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._all = self._loop.create_task(self._work_all())
        self._all.add_done_callback(self._end)

    def _end(self, _: object) -> None:
        self._ended.set()
        if self._own is not None:
            self._own.end_soon()

    def wake(self, slots: Sequence[Slot[R]]) -> None:
        if threading.get_ident() == self._loop_thread:
            self._open(slots)
        else:
            self._do(self._open, slots)

    def _do(self, function: Callable[..., None], *arguments: object) -> None:
        if self._ended.is_set():
            return
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            self._lose_loop()

    def _lose_loop(self) -> None:
        """The loop has ended: if its coroutines have not, they never will."""
        if not self._ended.is_set():
            self._has_lost_loop = True
            self._ended.set()
            self._queue.fail(StateError(_NO_LOOP))

    @staticmethod
    def _open(slots: Sequence[Slot[R]]) -> None:
        for slot in slots:
            gate = slot.gate
            if gate is None:
                # The slot is about to wait, and need not.
                slot.gate = True
            elif gate is not True and not gate.done():
                gate.set_result(None)

    def join(self, timeout_s: float) -> bool:
        return self._ended.wait(timeout_s)

    def cancel(self) -> None:
        self._is_cancelled = True
        self._do(self._cancel_all)
        if not self._call.is_claimed or (self._ended.is_set() and not self._has_lost_loop):
            return
        if self._has_lost_loop:
            _log.warning("what the handlers on the event loop that ended were at is given back")
        elif self._cancelling.wait(_BLOCKED_S):
            self._ended.wait(_CANCEL_S)
        else:
            _log.warning("a handler blocks the event loop; its message is given back")
        for slot in self._slots:
            self._abandon(slot, slot.claim)

    def _abandon(self, slot: Slot[R], claim: list[Any]) -> None:
        try:
            records = claim.pop()
        except IndexError:
            return
        self._queue.abandon(slot, records if self._call.takes_lists else [records])

    def _cancel_all(self) -> None:
        self._cancelling.set()
        if self._all is not None:
            self._all.cancel()

    def slots(self) -> Slots:
        turned_s = None if self._beat is None else self._beat.turned_s
        return Slots(self._queue.limit, self._queue.calls(self._slots), turned_s)

    # On the loop.

    async def _work_all(self) -> None:
        self._loop_thread = threading.get_ident()
        assert self._beat is not None
        self._beat.start()
        enter(self._call.owner)
        tasks = [asyncio.ensure_future(self._work(slot)) for slot in self._slots]
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            if not self._is_cancelled:
                self._queue.fail(StateError(_NO_LOOP))
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - as in threads
            self._queue.fail(error)
        finally:
            self._beat.stop()
            with contextlib.suppress(RuntimeError):
                for task in tasks:
                    task.cancel()

    async def _work(self, slot: Slot[R]) -> None:
        queue, takes_lists, publishes = self._queue, self._call.takes_lists, self._call.publishes
        call = self._claimed_call(slot) if self._call.keeps_claims else self._call.function
        slot.caller = asyncio.current_task()
        began_s = time.monotonic()
        while True:
            if not queue.take(slot):
                if queue.is_stopped:
                    return
                if slot.gate is not True:
                    slot.gate = self._loop.create_future()
                    await slot.gate
                slot.gate = None
                began_s = time.monotonic()
                continue
            if takes_lists:
                await self._process_list(slot, call)
            else:
                await self._process(slot, call)
            if publishes:
                await queue.publish_async(slot)
            if self._latest is not slot:
                self._latest, began_s = slot, time.monotonic()
            elif time.monotonic() - began_s > _TURN_S:
                await asyncio.sleep(0)
                began_s = time.monotonic()

    async def _process(self, slot: Slot[R], call: Callable[[R], Awaitable[object]]) -> None:
        queue, wants_all = self._queue, self._call.wants_all
        for run in slot.pending:
            records = iter(run.records)
            slot.current = run, records
            processed: int | None = 0 if run.is_stale else None
            if processed is None:
                for record in records:
                    try:
                        outcome = await call(record)
                    except asyncio.CancelledError as error:
                        self._raise_if_ended()
                        outcome = error
                    except GeneratorExit as error:
                        # The loop was closed, and this coroutine is collected.
                        if not self._loop.is_running():
                            raise
                        outcome = error
                    except BaseException as error:  # noqa: BLE001 - the queue decides
                        outcome = error
                    if (outcome is not None or wants_all) and not await queue.acknowledge_async(
                        slot, run, record, outcome
                    ):
                        processed = 1 + run.records.index(record)
                        break
            if processed is None and run.failed is None:
                slot.finished.append(run)
            else:
                queue.done(slot, run, processed)

    async def _process_list(self, slot: Slot[R], call: Callable[[Any], Awaitable[object]]) -> None:
        runs, records = take_list(slot)
        if not records:
            return
        try:
            result: object = await call(records)
        except asyncio.CancelledError as error:
            self._raise_if_ended()
            result = error
        except GeneratorExit as error:
            if not self._loop.is_running():
                raise
            result = error
        except BaseException as error:  # noqa: BLE001 - the queue decides
            result = error
        queue, wants_all = self._queue, self._call.wants_all
        outcomes = iter(outcomes_of(result, len(records)))
        for run in runs:
            for record, outcome in zip(run.records, outcomes, strict=False):
                if outcome is not None or wants_all:
                    await queue.acknowledge_async(slot, run, record, outcome)
            queue.done(slot, run)

    def _raise_if_ended(self) -> None:
        """Raise, in an ``except``, if it was this task that was cancelled, not another's result."""
        # Tasks have it from Python 3.11 on.
        count = getattr(asyncio.current_task(), "cancelling", None)
        if self._is_cancelled or (count is not None and count()):
            raise  # noqa: PLE0704 - of the caller

    # Handlers that take too long.

    def _claimed_call(self, slot: Slot[R]) -> Callable[[Any], Awaitable[object]]:
        """The handler; the end, or its time, may take what it is at."""

        async def call(record: Any) -> object:
            slot.claimed_s = time.monotonic()
            claim = slot.claim = [record]
            try:
                outcome: object = await self._within_time(slot, record)
            except asyncio.CancelledError:
                if self._is_cancelled:
                    self._abandon(slot, claim)
                claim.clear()
                raise
            if not claim:
                # The end did not wait for it.
                raise asyncio.CancelledError
            claim.clear()
            return outcome

        return call

    async def _caught(self, record: Any) -> object:
        """What it raises is returned: some errors would end the loop that a task runs on."""
        try:
            outcome: object = await self._call.function(record)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - the queue decides
            return error
        return outcome

    async def _within_time(self, slot: Slot[R], record: Any) -> object:
        timeout_ms = self._call.timeout_ms
        if not timeout_ms:
            return await self._call.function(record)
        own, task = slot.caller, asyncio.ensure_future(self._caught(record))
        slot.caller = task
        try:
            await asyncio.wait((task,), timeout=timeout_ms / 1000)
            if task.done():
                return task.result()
            task.cancel()
            await asyncio.wait((task,), timeout=_CANCEL_S)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait((task,), timeout=_CANCEL_S)
            raise
        finally:
            # A slot that waits must hold no message.
            slot.caller = own
        if not task.done():
            _log.warning(
                "a handler goes on although it was cancelled; it is left alone: %s", self._call.name
            )
            # A loop holds its tasks weakly.
            self._left_alone.add(task)
            task.add_done_callback(self._left_alone.discard)
            if len(self._left_alone) > max_left(len(self._slots)):
                self._queue.fail(self._call.abandoning_error(len(self._left_alone)))
        return self._call.timeout_error()


def new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # type: ignore[import-not-found,unused-ignore]  # optional
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class LoopThread:
    """An event loop (uvloop's, if that is installed) and its thread; started when it is needed.

    A task that raises ``SystemExit`` or ``KeyboardInterrupt`` ends ``run_forever``, wherever it was
    made, and so does a call of the loop's ``stop``. The loop is others' as well, so it goes on,
    and who awaits the task gets its exception.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_ending = False
        self._on_end: list[Callable[[], None]] = []

    def loop(self) -> asyncio.AbstractEventLoop:
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
            with contextlib.suppress(RuntimeError):
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
