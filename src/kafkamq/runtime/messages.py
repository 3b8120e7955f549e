"""The messages that a worker has received as a ``WorkQueue``: each has its own verdict."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kafkamq.queue.message import Message
from kafkamq.queue.schemas.deserializer import BodyUnavailableError
from kafkamq.runtime.calls import STOPPED, Calls
from kafkamq.runtime.inbox import Inbox
from kafkamq.runtime.rules.hanging import Call
from kafkamq.runtime.work_queue import Slot


class _Run:
    """One message, or the list of one call; there is no order among them."""

    __slots__ = ("records",)
    is_serial = is_stale = False
    failed = None

    def __init__(self, records: list[Message]) -> None:
        self.records = records


class MessageQueue(Inbox[Message, Message]):
    """Between a feeder and its handlers. A message that was handed out gets its verdict here."""

    def __init__(
        self,
        calls: Calls,
        room: threading.Event,
        fail: Callable[[BaseException], None],
        stopping: threading.Event,
    ) -> None:
        super().__init__()
        self.handler_calls = calls
        self.room = room
        self.fail = fail
        self._stopping = stopping
        self._size = max(1, calls.spec.batch_size)
        self._linger_s = calls.spec.batch_linger_ms / 1000
        self._since_s = 0.0  # when the first of a list that is not full came
        self.finished = 0  # messages that have their verdicts
        self._waiting: list[tuple[float, Message]] = []  # for their bodies; and until when

    def add(self, messages: Sequence[Message]) -> None:
        with self.lock:
            if not self.ready:
                self._since_s = time.monotonic()
            self.ready.extend(messages)
            self.parked.wake(-(-len(messages) // self._size))

    def tend(self) -> None:
        """A list has perhaps waited long enough, and so may have messages without bodies."""
        if self._waiting:
            self._look_again()
        if self._linger_s and self.ready:
            with self.lock:
                self.parked.wake(1)

    def take(self, slot: Slot[Message], limit: int = 0) -> list[_Run]:
        del limit
        had = slot.taken
        with self.lock:
            self.finished += had
            slot.taken = 0
            slot.finished = []
            messages = self.next_messages()
            runs = [_Run(messages)] if messages else []
            if runs:
                slot.pending = iter(runs)
                slot.taken = len(messages)
            else:
                self.parked.park(slot)
                slot.forget()
        if had and not self.room.is_set():
            self.room.set()
        return runs

    def next_messages(self) -> list[Message]:
        """Those of the next call, with the lock held; none: it is not time for one."""
        ready = self.ready
        if not ready or self.is_stopped or self._stopping.is_set():
            return []
        if self._size == 1:
            return [ready.popleft()]
        now_s = time.monotonic()
        if len(ready) < self._size and now_s - self._since_s < self._linger_s:
            return []
        self._since_s = now_s
        return [ready.popleft() for _ in range(min(self._size, len(ready)))]

    def acknowledge(
        self, slot: Slot[Message], run: _Run, message: Message, outcome: object
    ) -> bool:
        del run
        if not self.settle(message, outcome):
            with self.lock:
                slot.taken -= 1
        return True

    def settle(self, message: Message, outcome: object) -> bool:
        """Give it its verdict; False: it is not finished."""
        if isinstance(outcome, BodyUnavailableError):
            self._wait_for_body(message, outcome.delay_s)
            return False
        self.handler_calls.acknowledge(message, outcome)
        return True

    def _wait_for_body(self, message: Message, delay_s: float) -> None:
        """Keep it: its handler was not called, so this is no delivery that has failed."""
        with self.lock:
            if not self.is_stopped:
                self._waiting.append((time.monotonic() + delay_s, message))
                return
        self.handler_calls.spared.append(message)

    def _look_again(self) -> None:
        now_s = time.monotonic()
        with self.lock:
            due = [message for due_s, message in self._waiting if due_s <= now_s]
            self._waiting = [each for each in self._waiting if each[0] > now_s]
        if due:
            self.add(due)

    def stop(self) -> list[Message]:
        """See ``Inbox.stop``; also what waits for its body."""
        found = super().stop()
        with self.lock:
            found += [message for _, message in self._waiting]
            self._waiting = []
        return found

    def abandon(self, slot: Slot[Message], records: Sequence[Message]) -> None:
        """The worker ends: give them back."""
        for message in records:
            self.handler_calls.acknowledge(message, STOPPED)
        with self.lock:
            self.finished += slot.taken
            slot.taken = 0

    def calls(self, slots: Sequence[Slot[Message]]) -> list[Call]:
        """See ``WorkQueue``; the time last, as another call may begin in between."""
        running = [(claim, slot) for slot in slots for claim in slot.claim[:1]]
        return [_call_of(claim, slot.claimed_s) for claim, slot in running]


def _call_of(claim: Message | list[Message], began_s: float) -> Call:
    return Call(began_s, place_of(claim[0] if isinstance(claim, list) else claim))


def place_of(message: Message) -> tuple[str, int, int]:
    """Topic, partition and offset."""
    place = message.message_id
    return message.topic, place.partition, place.offset
