"""A ``WorkQueue`` of what comes one by one, in no order; what an outcome means is said above it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from kafkamq.runtime.rules.hanging import Call
from kafkamq.runtime.work_queue import ParkedSlots, Slot, Waker

R = TypeVar("R")  # what waits
T = TypeVar("T")  # the records of a run


class Inbox(Generic[R, T]):
    """Lines up, parks and wakes; ``take`` and ``acknowledge`` are its heirs'."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # around all of it
        self.ready: deque[R] = deque()  # what waits
        self.slots: Sequence[Slot[T]] = ()
        self.is_stopped = False
        self.parked = ParkedSlots()

    def make_slot(self) -> Slot[T]:
        return Slot()

    def join(self, slots: Sequence[Slot[T]], waker: Waker) -> None:
        self.slots = slots
        self.parked.join(len(slots), waker)

    @property
    def limit(self) -> int:
        return self.parked.limit

    @property
    def has_backlog(self) -> bool:
        return bool(self.ready)

    def set_limit(self, limit: int) -> None:
        """So many slots may be at work at once."""
        with self.lock:
            self.parked.set_limit(limit)
            self.parked.wake(len(self.ready))

    def stop(self) -> list[R]:
        """Hand out nothing any more; what was not handed out."""
        with self.lock:
            self.is_stopped = True
            found = list(self.ready)
            self.ready.clear()
            self.parked.wake_all()
        return found

    def acknowledge(self, slot: Slot[T], run: Any, record: T, outcome: object) -> bool:
        raise NotImplementedError

    async def acknowledge_async(self, slot: Slot[T], run: Any, record: T, outcome: object) -> bool:
        """As ``acknowledge``, which never waits."""
        return self.acknowledge(slot, run, record, outcome)

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
