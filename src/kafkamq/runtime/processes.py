"""Handlers of queues in processes: each thread of the worker waits for the answer to one call."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kafkamq.errors import ConfigError
from kafkamq.queue.arguments import Binder
from kafkamq.queue.handler import HandlerSpec
from kafkamq.queue.message import Message
from kafkamq.runtime.batches import prepare
from kafkamq.runtime.child import RemoteCall
from kafkamq.runtime.messages import STOPPED
from kafkamq.runtime.process_executor import Processes, ProcessExecutor
from kafkamq.runtime.rules.hanging import Call
from kafkamq.runtime.work_queue import Slot, Waker
from kafkamq.types import Headers, MessageId

__all__ = ["PlainMessage", "RemoteCalls"]


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
        """The headers; the last of a name counts."""
        return dict(self.raw_headers)


class _RemoteCall:
    """A call that a thread waits for."""

    __slots__ = ("_ended", "given", "is_serial", "is_stale", "outcome", "records")

    def __init__(self, given: PlainMessage | list[PlainMessage]) -> None:
        self.given = given
        self.outcome: object = None
        self.records = [self]
        self.is_serial = self.is_stale = False
        self._ended = threading.Event()

    def end(self, outcome: object) -> None:
        self.outcome = outcome
        self._ended.set()

    def wait(self) -> object:
        self._ended.wait()
        return self.outcome


class RemoteCalls:
    """Calls a handler in processes; a ``WorkQueue`` of the calls that threads wait for.

    A process that cannot start says nothing about a message, which is held until one can.
    """

    def __init__(self, spec: HandlerSpec, fail: Callable[[BaseException], None]) -> None:
        """Starts nothing.

        Raises:
            ConfigError: The handler cannot be called in another process.
        """
        try:
            function = pickle.dumps(spec.function)
        except Exception as error:
            raise ConfigError(
                f"handler of queue {spec.queue.queue_id!r}: processes= needs a function that can "
                f"be imported, as a module's ({error})"
            ) from error
        self._name = spec.queue.queue_id
        self.fail = fail
        self.is_stopped = False
        self._lock = threading.Lock()
        self._ready: deque[_RemoteCall] = deque()
        self._open: set[_RemoteCall] = set()
        self._idle: list[Slot[_RemoteCall]] = []
        self._waker: Waker | None = None
        is_one_by_one = spec.threads == 1 and not spec.is_async
        call = RemoteCall(
            function=function,
            prepare=_for_lists if spec.batch_size else _for_messages,
            is_async=spec.is_async,
            slots=spec.threads,
            wants_all=bool(spec.batch_size),
            timeout_ms=0 if is_one_by_one else spec.timeout_ms,
        )
        processes = Processes(
            call=call,
            count=spec.processes,
            pack=_given,
            place=_place,
            timeout_ms=spec.timeout_ms,
        )
        self._executor = ProcessExecutor(self, processes)

    def start(self) -> None:
        """Start the first process, which says whether one can, and then the others.

        Raises:
            ConfigError: The handler cannot be loaded there; says why.
        """
        try:
            self._executor.check()
        except ConfigError as error:
            raise ConfigError(
                f"handler of queue {self._name!r}: processes= needs a function that another "
                f"process can load: {error}"
            ) from error
        self._executor.start()

    def __call__(self, given: Message | list[Message]) -> object:
        """Call the handler; what it raised is raised here."""
        plain = [_plain(each) for each in given] if isinstance(given, list) else _plain(given)
        call = _RemoteCall(plain)
        with self._lock:
            if self.is_stopped:
                return STOPPED
            self._open.add(call)
            self._ready.append(call)
            self._wake()
        outcome = call.wait()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self) -> None:
        """End all processes; calls that are open have the outcome ``STOPPED``."""
        with self._lock:
            self.is_stopped = True
            still_open = list(self._open)
            self._wake()
        self._executor.cancel()
        for call in still_open:
            self._end(call, STOPPED)

    def _end(self, call: _RemoteCall, outcome: object) -> None:
        """The first outcome counts."""
        with self._lock:
            is_open = call in self._open
            self._open.discard(call)
        if is_open:
            call.end(outcome)

    def _wake(self) -> None:
        woken, self._idle = self._idle, []
        for slot in woken:
            slot.is_parked = False
        if self._waker is not None:
            self._waker.wake(woken)

    # WorkQueue.

    def make_slot(self) -> Slot[_RemoteCall]:
        """See ``WorkQueue``."""
        return Slot()

    def join(self, slots: Sequence[Slot[_RemoteCall]], waker: Waker) -> None:
        """See ``WorkQueue``."""
        del slots
        self._waker = waker

    def take(self, slot: Slot[_RemoteCall], limit: int = 0) -> list[_RemoteCall]:
        """See ``WorkQueue``."""
        finished, slot.finished = slot.finished, []
        for call in finished:
            self._end(call, None)
        with self._lock:
            count = 0 if self.is_stopped else min(max(1, limit), len(self._ready))
            taken = [self._ready.popleft() for _ in range(count)]
            if not taken and not slot.is_parked:
                slot.is_parked = True
                self._idle.append(slot)
        return taken

    def settle(self, slot: Slot[_RemoteCall], record: _RemoteCall, outcome: object) -> bool:
        """The call has ended."""
        del slot
        self._end(record, outcome)
        return True

    async def settle_async(
        self, slot: Slot[_RemoteCall], record: _RemoteCall, outcome: object
    ) -> bool:
        """The same."""
        return self.settle(slot, record, outcome)

    def done(self, slot: Slot[_RemoteCall], run: _RemoteCall, processed: int | None = None) -> None:
        """A call that was not begun is made again."""
        del slot
        if processed == 0:
            with self._lock:
                self._ready.appendleft(run)
                self._wake()

    def publish(self, slot: Slot[_RemoteCall]) -> None:
        """There is nothing to publish."""

    async def publish_async(self, slot: Slot[_RemoteCall]) -> None:
        """The same."""

    def abandon(self, slot: Slot[_RemoteCall], records: Sequence[_RemoteCall]) -> None:
        """Threads that wait are told by ``close``."""

    def calls(self, slots: Sequence[Slot[_RemoteCall]]) -> list[Call]:
        """The threads know better."""
        del slots
        return []


def _given(call: _RemoteCall) -> object:
    return call.given


def _place(call: _RemoteCall) -> tuple[str, int, int]:
    given = call.given[0] if isinstance(call.given, list) else call.given
    return given.queue_id, given.message_id.partition, given.message_id.offset


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


def _for_messages(function: Callable[..., Any]) -> Callable[[PlainMessage], Any]:
    binder = Binder(function)
    return lambda message: function(*binder.arguments(message))


def _for_lists(function: Callable[..., Any]) -> Callable[[list[PlainMessage]], Any]:
    binder = Binder(function, of_lists=True)

    def call(messages: list[PlainMessage]) -> object:
        found = prepare(binder, messages)
        return found.outcome(function(*found.arguments) if found.is_called else None)

    return call
