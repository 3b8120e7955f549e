"""A ``WorkQueue`` of plain lists, which remembers what became of each record."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from tests.waiting import wait_until, within

from kafkamq.runtime.rules.hanging import Call
from kafkamq.runtime.work_queue import Executor, Slot, Waker


class Batch:
    """A run."""

    is_stale = False
    failed = None

    def __init__(self, records: list[Any], *, is_serial: bool = True) -> None:
        self.records = records
        self.is_serial = is_serial


class Shelf:
    """Hands out what it is given, a run at a time for each handler."""

    def __init__(self) -> None:
        self.is_stopped = False
        self.outcomes: list[tuple[Any, object]] = []
        self.done_count = 0
        self.back: list[Any] = []  # what came back untried
        self.abandoned: list[Any] = []
        self.failure: BaseException | None = None
        self._runs: deque[Batch] = deque()
        self._idle: list[Slot[Any]] = []
        self._slots: Sequence[Slot[Any]] = ()
        self._waker: Waker | None = None
        self._lock = threading.Lock()

    def add(self, *runs: Batch) -> None:
        with self._lock:
            self._runs.extend(runs)
            self._wake()

    def _wake(self) -> None:
        woken, self._idle = self._idle, []
        for slot in woken:
            slot.is_parked = False
        if self._waker is not None:
            self._waker.wake(woken)

    @property
    def limit(self) -> int:
        return len(self._slots)

    @property
    def has_backlog(self) -> bool:
        return bool(self._runs)

    def stop(self) -> None:
        with self._lock:
            self.is_stopped = True
            for slot in self._slots:
                if slot.give_back is not None:
                    slot.give_back()
            self._wake()

    def end(self, executor: Executor) -> None:
        self.stop()
        executor.cancel()
        assert executor.join(within(10))

    def wait(self, count: int) -> None:
        """Until so many are done, or have an outcome."""
        wait_until(lambda: self.done_count >= count or self.failure is not None, "the records")
        assert self.failure is None

    # WorkQueue.

    def make_slot(self) -> Slot[Any]:
        return Slot()

    def join(self, slots: Sequence[Slot[Any]], waker: Waker) -> None:
        self._slots, self._waker = slots, waker

    def take(self, slot: Slot[Any], limit: int = 0) -> list[Batch]:
        with self._lock:
            for run in slot.finished:
                self.done_count += len(run.records)
            slot.finished = []
            taken: list[Batch] = []
            while self._runs and not self.is_stopped and len(taken) < max(1, limit):
                taken.append(self._runs.popleft())
            if taken:
                slot.pending = iter(taken)
                if slot.is_parked:
                    slot.is_parked = False
                    self._idle.remove(slot)
            elif not slot.is_parked:
                slot.is_parked = True
                self._idle.append(slot)
            return taken

    def acknowledge(self, slot: Slot[Any], run: Batch, record: Any, outcome: object) -> bool:
        with self._lock:
            self.outcomes.append((record, outcome))
        return True

    async def acknowledge_async(
        self, slot: Slot[Any], run: Batch, record: Any, outcome: object
    ) -> bool:
        return self.acknowledge(slot, run, record, outcome)

    def done(self, slot: Slot[Any], run: Batch, processed: int | None = None) -> None:
        with self._lock:
            tried = len(run.records) if processed is None else processed
            self.done_count += tried
            rest = run.records[tried:]
            self.back += rest
            if rest:
                self._runs.appendleft(Batch(rest, is_serial=run.is_serial))
                self._wake()

    def publish(self, slot: Slot[Any]) -> None:
        pass

    async def publish_async(self, slot: Slot[Any]) -> None:
        pass

    def abandon(self, slot: Slot[Any], records: Sequence[Any]) -> None:
        self.abandoned += records

    def calls(self, slots: Sequence[Slot[Any]]) -> list[Call]:
        return []

    def fail(self, error: BaseException) -> None:
        self.failure = error
