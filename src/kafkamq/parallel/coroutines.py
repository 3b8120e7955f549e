"""Workers for ``async def`` handlers: coroutines on one event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import cast

from kafkamq.errors import StateError
from kafkamq.parallel.handling import UNTRIED, Handling, end_batch, outcomes_of, take_batch
from kafkamq.parallel.inside import enter
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.rules.lanes import LaneState, Run
from kafkamq.parallel.work_queue import Failed, Worker
from kafkamq.runtime.loop_beat import LoopBeat
from kafkamq.runtime.rules.hanging import Slots

__all__ = ["CoroutinePool", "CoroutineWorker", "new_loop"]

_POLL_S = 0.002
_NO_LOOP = "the event loop of the handlers ended before the consumer was closed"


class CoroutineWorker(Worker):
    """A worker with a future that it awaits while it is parked."""

    __slots__ = ("gate", "is_woken")

    def __init__(self) -> None:
        super().__init__()
        self.gate: asyncio.Future[None] | None = None
        self.is_woken = False


class CoroutinePool:
    """Awaits a handler for each record, in ``count`` coroutines.

    Args:
        handling: What to call, and what becomes of it.
        count: How many at once.
        loop: The running loop to work on; None: one of its own, in a thread (uvloop's if that is
            installed).
    """

    def __init__(
        self, handling: Handling, count: int, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._handling = handling
        self._desk = handling.desk
        self._settler = handling.settler
        self._handler = cast("Callable[..., Awaitable[object]]", handling.handler)
        self._takes_all = handling.takes_all
        self._workers = [CoroutineWorker() for _ in range(count)]
        self._is_own = loop is None
        self._loop = new_loop() if loop is None else loop
        self._beat = LoopBeat(self._loop)
        self._loop_thread = 0
        self._all: asyncio.Task[None] | None = None
        self._ended = threading.Event()
        self._is_cancelled = False

    def start(self) -> None:
        """Begin."""
        self._desk.join(self._workers, self)
        if self._is_own:
            threading.Thread(target=self._run, name="kafkamq-loop", daemon=True).start()
        else:
            self._loop.call_soon_threadsafe(self._begin)

    def _run(self) -> None:
        loop = self._loop
        try:
            self._all = loop.create_task(self._work_all())
            with suppress(asyncio.CancelledError):
                loop.run_until_complete(self._all)
            loop.run_until_complete(loop.shutdown_asyncgens())
        except BaseException as error:  # noqa: BLE001 - a pool less must not go unnoticed
            self._settler.fail(error)
        finally:
            self._ended.set()
            loop.close()

    def _begin(self) -> None:
        self._all = self._loop.create_task(self._work_all())
        self._all.add_done_callback(lambda _: self._ended.set())

    def wake(self, workers: Sequence[Worker]) -> None:
        """Complete their futures."""
        if threading.get_ident() == self._loop_thread:
            self._open(workers)
        else:
            self._call(self._open, workers)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """Let the loop do it, if there still is one."""
        if self._ended.is_set():
            return
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # closed
            if not self._ended.is_set():
                self._ended.set()
                self._settler.fail(StateError(_NO_LOOP))

    @staticmethod
    def _open(workers: Sequence[Worker]) -> None:
        for worker in workers:
            assert isinstance(worker, CoroutineWorker)
            gate = worker.gate
            if gate is None:
                worker.is_woken = True
            elif not gate.done():
                gate.set_result(None)

    def join(self, timeout_s: float) -> bool:
        """Wait until all have ended, after ``Desk.stop``; False: some are still at it."""
        return self._ended.wait(timeout_s)

    def cancel(self) -> None:
        """End handlers that are still at it, by cancelling them."""
        self._is_cancelled = True
        self._call(self._cancel_all)

    def _cancel_all(self) -> None:
        if self._all is not None:
            self._all.cancel()

    def slots(self) -> Slots:
        """What its coroutines are at, and when their loop turned last."""
        return Slots(len(self._workers), self._desk.calls(), self._beat.turned_s)

    async def _work_all(self) -> None:
        self._loop_thread = threading.get_ident()
        self._beat.start()
        enter(self._settler.config)
        tasks = [asyncio.ensure_future(self._work(worker)) for worker in self._workers]
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            if not self._is_cancelled:
                self._settler.fail(StateError(_NO_LOOP))
            raise
        except Exception as error:  # noqa: BLE001 - a worker less must not go unnoticed
            self._settler.fail(error)
        finally:
            self._beat.stop()
            for task in tasks:
                task.cancel()

    async def _park(self, worker: CoroutineWorker) -> None:
        if not worker.is_woken:
            worker.gate = self._loop.create_future()
            try:
                await worker.gate
            finally:
                worker.gate = None
        worker.is_woken = False

    async def _work(self, worker: CoroutineWorker) -> None:
        desk, publisher = self._desk, self._handling.publisher
        takes_lists = self._handling.takes_lists
        began_s = monotonic()
        while True:
            if not desk.exchange(worker):
                if desk.is_stopped:
                    return
                await self._park(worker)
                began_s = monotonic()
                continue
            if takes_lists:
                await self._process_list(worker)
            else:
                for run in worker.pending:
                    failed = await self._process(worker, run)
                    if failed is None:
                        worker.finished.append(run)
                    else:
                        desk.let_go(worker, run, failed)
            if publisher is not None:
                await publisher.publish_async(worker)
            if monotonic() - began_s > _POLL_S:  # handlers that never wait must not own the loop
                await asyncio.sleep(0)
                began_s = monotonic()

    async def _process(self, worker: Worker, run: Run[ParallelRecord]) -> Failed:
        """None: all of it is done. Otherwise what failed, and when it is tried again."""
        handler, shard = self._handler, run.shard
        lane, is_serial = shard.lane, shard.is_serial
        records = iter(run.records)
        worker.current, worker.failed = (run, records), None
        for record in records:
            if lane.state is LaneState.CLOSED:
                return worker.failed or []
            try:
                outcome = await handler(record)
            except asyncio.CancelledError as error:
                self._raise_if_ended()
                outcome = error
            except BaseException as error:  # noqa: BLE001 - the policy decides
                outcome = error
            if outcome is not None or self._takes_all:
                due_ms = await self._settle(worker, record, outcome)
                if due_ms is not None:
                    worker.failed = [*(worker.failed or ()), (record, due_ms)]
                    if is_serial:
                        break
        return worker.failed

    def _raise_if_ended(self) -> None:
        """In an ``except``: whether it was this task that was cancelled, or some other's result."""
        count = getattr(asyncio.current_task(), "cancelling", None)  # from Python 3.11 on
        if self._is_cancelled or count is None or count():
            raise  # noqa: PLE0704 - of the caller

    async def _settle(self, worker: Worker, record: ParallelRecord, outcome: object) -> int | None:
        if self._handling.is_result(outcome):
            worker.outputs.append((record, outcome))
            return None
        return await self._settler.settle_async(record, outcome)

    async def _process_list(self, worker: Worker) -> None:
        runs, records = take_batch(worker)
        if not records:  # taken back in the meantime
            return
        try:
            result: object = await self._handler(records)
        except asyncio.CancelledError as error:
            self._raise_if_ended()
            result = error
        except BaseException as error:  # noqa: BLE001 - the policy decides
            result = error
        due: dict[int, int] = {}
        untried: set[int] = set()
        for record, outcome in zip(records, outcomes_of(result, len(records)), strict=True):
            if outcome is UNTRIED:
                untried.add(id(record))
            elif outcome is not None or self._takes_all:
                due_ms = await self._settle(worker, record, outcome)
                if due_ms is not None:
                    due[id(record)] = due_ms
        end_batch(self._desk, worker, runs, due, untried)


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop for a thread of its own: uvloop's, if that is installed."""
    try:
        import uvloop  # type: ignore[import-not-found,unused-ignore]  # optional
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
