"""A ``WorkQueue`` of what comes one by one, in no order; what an outcome means is said above it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from kafkamq.runtime.rules.hanging import Call
from kafkamq.runtime.work_queue import Slot, Waker

R = TypeVar("R")  # what waits
T = TypeVar("T")  # the records of a run


class Inbox(Generic[R, T]):
    """Lines up, parks and wakes; ``take`` and ``acknowledge`` are its heirs'."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # around all of it
        self.ready: deque[R] = deque()  # what waits
        self.slots: Sequence[Slot[T]] = ()
        self.is_stopped = False
        self._idle: list[Slot[T]] = []
        self._waker: Waker | None = None

    def make_slot(self) -> Slot[T]:
        return Slot()

    def join(self, slots: Sequence[Slot[T]], waker: Waker) -> None:
        self.slots, self._waker = slots, waker

    def park(self, slot: Slot[T]) -> None:
        """With the lock held: there is nothing for it."""
        if not slot.is_parked:
            slot.is_parked = True
            self._idle.append(slot)

    def wake(self, count: int) -> None:
        """With the lock held: so many slots may take; those that worked last, they are warm."""
        if not count or not self._idle:
            return
        woken = self._idle[-count:]
        del self._idle[-count:]
        for slot in woken:
            slot.is_parked = False
        if self._waker is not None:
            self._waker.wake(woken)

    def stop(self) -> list[R]:
        """Hand out nothing any more; what was not handed out."""
        with self.lock:
            self.is_stopped = True
            found = list(self.ready)
            self.ready.clear()
            self.wake(len(self._idle))
        return found

    def acknowledge(self, slot: Slot[T], record: T, outcome: object) -> bool:
        raise NotImplementedError

    async def acknowledge_async(self, slot: Slot[T], record: T, outcome: object) -> bool:
        """As ``acknowledge``, which never waits."""
        return self.acknowledge(slot, record, outcome)

    def done(self, slot: Slot[T], run: Any, processed: int | None = None) -> None:
        """See ``WorkQueue``; each record has had its outcome."""

    def publish(self, slot: Slot[T]) -> None:
        """There is nothing to publish."""

    async def publish_async(self, slot: Slot[T]) -> None:
        """The same."""

    def abandon(self, slot: Slot[T], records: Sequence[T]) -> None:
        """See ``WorkQueue``."""

    def calls(self, slots: Sequence[Slot[T]]) -> list[Call]:
        del slots
        return []
