"""Who calls handlers: threads, coroutines on one loop, or threads that each own a process.

A pool is given messages by one thread, its feeder's. A message that a pool has begun gets its
verdict from it, whatever happens; what it has not begun is handed back at the end.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from kafkamq.queue.message import Message
from kafkamq.runtime.calls import Calls
from kafkamq.runtime.rules.hanging import Call, Slots
from kafkamq.types import Nack

__all__ = ["STOPPED", "HandlerPool", "ThreadPool", "call_of", "timed_out"]

STOPPED = Nack(reason="the worker was stopped before its handler had ended")
_WATCH_S = 0.05
_log = logging.getLogger(__name__)


def timed_out(calls: Calls) -> Nack:
    """The verdict on a message whose handler takes too long."""
    return Nack(reason=f"the handler took longer than {calls.spec.timeout_ms / 1000:g} s")


def call_of(message: Message, began_s: float) -> Call:
    """A call of a handler for a message."""
    place = message.message_id
    return Call(began_s, (message.topic, place.partition, place.offset))


class HandlerPool(Protocol):
    """Calls handlers for messages."""

    def start(self) -> None:
        """Begin."""

    def submit(self, messages: Sequence[Message]) -> None:
        """Handle these; from the feeder's thread."""

    def finished(self) -> int:
        """How many messages have their verdict, of those that were submitted."""

    def slots(self) -> Slots:
        """What its slots are at; from any thread."""

    def withdraw(self) -> list[Message]:
        """Begin no more; what was submitted and not begun."""

    def join(self, timeout_s: float) -> bool:
        """After ``withdraw``: whether all that was begun has ended."""

    def abandon(self) -> None:
        """Give ``STOPPED`` to what is still going on, and end."""


class _Slot:
    """One thread: ``current`` has its message; who takes it out gives the verdict."""

    __slots__ = ("began_s", "current", "finished")

    def __init__(self) -> None:
        self.current: list[Message] = []
        self.began_s = 0.0
        self.finished = 0

    def claim(self) -> Message | None:
        try:
            return self.current.pop()
        except IndexError:
            return None


class ThreadPool:
    """``concurrency`` threads. A thread whose handler takes too long is replaced.

    Args:
        calls: What to call.
        room: Set when a message has its verdict.
        watches: Whether handlers that take too long are its business.
    """

    def __init__(self, calls: Calls, room: threading.Event, *, watches: bool = True) -> None:
        self._calls = calls
        self._room = room
        self._watches = watches
        self._submitted = 0
        self._withdrawn = 0
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._slots = [_Slot() for _ in range(calls.spec.concurrency)]
        self._retired = 0  # messages of slots that were replaced
        self._lock = threading.Lock()
        self._is_over = threading.Event()

    def start(self) -> None:
        """Begin."""
        for slot in self._slots:
            self._begin(slot)
        if self._calls.spec.timeout_ms and self._watches:
            threading.Thread(target=self._watch, name="kafkamq-timeouts", daemon=True).start()

    def _begin(self, slot: _Slot) -> None:
        name = f"kafkamq-{self._calls.spec.queue.queue_id}"
        threading.Thread(target=self._work, args=(slot,), name=name, daemon=True).start()

    def submit(self, messages: Sequence[Message]) -> None:
        """Handle these."""
        self._submitted += len(messages)
        for message in messages:
            self._inbox.put(message)

    def finished(self) -> int:
        """How many have their verdict."""
        with self._lock:
            return self._retired + sum([slot.finished for slot in self._slots])

    def slots(self) -> Slots:
        """What its threads are at; the time last, as another call may begin in between."""
        slots = list(self._slots)
        running = [(message, slot) for slot in slots for message in slot.current[:1]]
        return Slots(len(slots), [call_of(message, slot.began_s) for message, slot in running])

    def withdraw(self) -> list[Message]:
        """Begin no more."""
        found = []
        try:
            while True:
                message = self._inbox.get_nowait()
                if message is not None:
                    found.append(message)
        except queue.Empty:
            pass
        self._withdrawn += len(found)
        for _ in self._slots:
            self._inbox.put(None)
        return found

    def join(self, timeout_s: float) -> bool:
        """Whether all that was begun has ended."""
        deadline_s = time.monotonic() + timeout_s
        while self.finished() + self._withdrawn < self._submitted:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._room.clear()
            self._room.wait(min(left_s, _WATCH_S))
        return True

    def abandon(self) -> None:
        """Give up what is still going on: a thread cannot be ended."""
        self._is_over.set()
        for slot in self._slots:
            message = slot.claim()
            if message is not None:
                self._calls.settle(message, STOPPED)

    def _work(self, slot: _Slot) -> None:
        calls, inbox, room = self._calls, self._inbox, self._room
        while True:
            message = inbox.get()
            if message is None:
                return
            slot.began_s = time.monotonic()
            slot.current.append(message)
            outcome = calls.run(message)
            if slot.claim() is None:  # it took too long: another thread has taken its place
                return
            calls.settle(message, outcome)
            slot.finished += 1
            if not room.is_set():
                room.set()

    def _watch(self) -> None:
        timeout_s = self._calls.spec.timeout_ms / 1000
        while not self._is_over.wait(_WATCH_S):
            now_s = time.monotonic()
            for number, slot in enumerate(self._slots):
                if slot.current and now_s - slot.began_s > timeout_s:
                    self._replace(number, slot)

    def _replace(self, number: int, slot: _Slot) -> None:
        message = slot.claim()
        if message is None:  # just in time
            return
        _log.warning(
            "a handler takes too long; its thread is left alone",
            extra={"queue": message.queue_id, "delivery": message.delivery_count},
        )
        fresh = _Slot()
        with self._lock:
            self._retired += slot.finished + 1
            self._slots[number] = fresh
        self._calls.settle(message, timed_out(self._calls))
        self._begin(fresh)
        self._room.set()
