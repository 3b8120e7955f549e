"""Handlers of queues in processes: a ``Worker``'s messages, as processes take and answer them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from kafkamq.queue.arguments import Binder
from kafkamq.queue.handler import HandlerSpec
from kafkamq.queue.message import Message
from kafkamq.queue.schemas.deserializer import Deserializer
from kafkamq.runtime.batches import bound, outcomes_of
from kafkamq.runtime.calls import STOPPED
from kafkamq.runtime.child import remote_call
from kafkamq.runtime.messages import MessageQueue, place_of
from kafkamq.runtime.middleware import Middleware, surrounded
from kafkamq.runtime.process_executor import Processes
from kafkamq.runtime.work_queue import Slot
from kafkamq.types import Headers, MessageId


@dataclass(frozen=True, slots=True)
class PlainMessage:
    """What a handler in another process gets for a ``Message``: its facts, without verdicts."""

    payload: bytes | None
    key: bytes | None
    raw_headers: Headers
    id: str
    queue_id: str
    delivery_count: int
    timestamp_ms: int
    message_id: MessageId
    is_kafkamq_message: ClassVar[bool] = True  # a handler's parameter of this type gets it

    @property
    def headers(self) -> dict[str, bytes | None]:
        return dict(self.raw_headers)


_STUCK_S = 0.02  # a process that is at it for so long gives back what it has not begun


class _Call:
    """A call in a process: a run of one record, which is one message, or the list of a batch."""

    __slots__ = ("has_outcome", "messages", "records", "taken_s")
    is_serial = is_stale = False
    failed = None

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages
        self.records = [self]
        self.taken_s = time.monotonic()
        self.has_outcome = False


class RemoteMessages(MessageQueue):
    """As processes take them, several calls at once. Each call belongs to one port's thread."""

    def tend(self) -> None:
        """As that of all; and calls that wait behind slow ones go to other processes."""
        super().tend()
        now_s = time.monotonic()
        with self.lock:
            self.parked.wake(len(self.ready))
            for slot in self.slots:
                if slot.taken > slot.width and now_s - slot.began_s > _STUCK_S:
                    self._relieve(slot)

    @staticmethod
    def _relieve(slot: Slot[Any]) -> None:
        if slot.give_back is not None:
            slot.give_back()

    def take(self, slot: Slot[Any], limit: int = 0) -> list[Any]:
        calls: list[_Call] = []
        with self.lock:
            while len(calls) < max(1, limit) and (messages := self.next_messages()):
                calls.append(_Call(messages))
            if calls:
                self.parked.unpark(slot)
                slot.taken += len(calls)
                slot.began_s = calls[0].taken_s
            else:
                self.parked.park(slot)
        return calls

    def acknowledge(self, slot: Slot[Any], run: Any, record: Any, outcome: object) -> bool:
        del slot, record
        self._end(run, outcome)
        return True

    def done(self, slot: Slot[Any], run: Any, processed: int | None = None) -> None:
        """A call that was not begun, or not to its end by no fault of it, is made again."""
        del processed
        with self.lock:
            slot.taken -= 1
            if run.has_outcome:
                return
            if not self.is_stopped:
                self.ready.extendleft(reversed(run.messages))
                self.parked.wake(1)
                return
        self.handler_calls.spared += run.messages

    def publish(self, slot: Slot[Any]) -> None:
        """Those that are finished and have no outcome have returned nothing."""
        finished, slot.finished = slot.finished, []
        with self.lock:
            slot.taken -= len(finished)
        for call in finished:
            if not call.has_outcome:
                self._end(call, None)
        self.room.set()

    def _end(self, call: _Call, outcome: object) -> None:
        call.has_outcome = True
        messages, calls = call.messages, self.handler_calls
        is_list = bool(calls.spec.batch_size)
        calls.record(messages if is_list else messages[0], outcome, call.taken_s)
        outcomes = outcomes_of(outcome, len(messages)) if is_list else [outcome]
        count = sum(map(self.settle, messages, outcomes))
        with self.lock:
            self.finished += count

    def stop(self) -> list[Message]:
        found = super().stop()
        for slot in self.slots:
            self._relieve(slot)
        return found

    def abandon(self, slot: Slot[Any], records: Sequence[Any]) -> None:
        """The worker ends: give them back."""
        del slot
        for call in records:
            self._end(call, STOPPED)


def processes_for(
    spec: HandlerSpec, middleware: Sequence[Middleware], owner: object, *, is_ahead: bool
) -> Processes:
    """The processes of a queue's handler, which take ``RemoteMessages``; as ``remote_call``."""
    is_list = bool(spec.batch_size)
    call = remote_call(
        (spec.function, spec.deserializer, tuple(middleware)),
        partial(_called, of_lists=is_list, is_async=spec.is_async, name=spec.name),
        is_async=spec.is_async,
        slots=spec.threads,
        wants_all=is_list,
        timeout_ms=spec.timeout_ms,
    )
    return Processes(
        call=call,
        count=spec.processes,
        pack=_given if is_list else _plain_one,
        place=_place,
        timeout_ms=spec.timeout_ms,
        owner=owner,
        is_ahead=is_ahead,
    )


def _given(call: _Call) -> object:
    return [_plain(message) for message in call.messages]


def _plain_one(call: _Call) -> object:
    return _plain(call.messages[0])


def _place(call: _Call) -> tuple[str, int, int]:
    return place_of(call.messages[0])


def _plain(message: Message) -> PlainMessage:
    return PlainMessage(
        message.payload,
        message.key,
        message.raw_headers,
        message.id,
        message.queue_id,
        message.delivery_count,
        message.timestamp_ms,
        message.message_id,
    )


def _called(
    what: tuple[Callable[..., Any], Deserializer | None, Sequence[Middleware]],
    *,
    of_lists: bool,
    is_async: bool,
    name: str,
) -> Callable[[Any], Any]:
    """In the process: the handler, and its middleware around it."""
    function, deserializer, middleware = what
    binder = Binder(function, of_lists=of_lists, deserializer=deserializer)
    call = bound(function, binder, is_async=is_async)
    return surrounded(call, middleware, is_async=is_async, name=name)
