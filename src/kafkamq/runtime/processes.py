"""Handlers of queues in processes: each thread of the worker waits for the answer to one call."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from kafkamq.errors import ConfigError
from kafkamq.queue.arguments import Binder
from kafkamq.queue.handler import HandlerSpec
from kafkamq.queue.message import Message
from kafkamq.queue.schemas.deserializer import Deserializer
from kafkamq.runtime.batches import bound
from kafkamq.runtime.calls import STOPPED
from kafkamq.runtime.child import RemoteCall
from kafkamq.runtime.inbox import Inbox
from kafkamq.runtime.process_executor import Processes, ProcessExecutor
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


class _RemoteCall:
    """A call that a thread waits for."""

    __slots__ = ("_ended", "given", "is_serial", "is_stale", "outcome", "records")
    failed = None

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


class RemoteCalls(Inbox[_RemoteCall, _RemoteCall]):
    """Calls a handler in processes; a ``WorkQueue`` of the calls that threads wait for.

    A process that cannot start says nothing about a message, which is held until one can.
    """

    def __init__(self, spec: HandlerSpec, fail: Callable[[BaseException], None]) -> None:
        try:
            function = pickle.dumps((spec.function, spec.deserializer))
        except Exception as error:
            raise ConfigError(
                f"handler of queue {spec.queue.queue_id!r}: processes= needs a function that can "
                f"be imported, as a module's, and such a deserializer ({error})"
            ) from error
        super().__init__()
        self._name = spec.queue.queue_id
        self.fail = fail
        self._open: set[_RemoteCall] = set()
        is_one_by_one = spec.threads == 1 and not spec.is_async
        call = RemoteCall(
            function=function,
            prepare=partial(_bound, of_lists=bool(spec.batch_size), is_async=spec.is_async),
            is_async=spec.is_async,
            slots=spec.threads,
            wants_all=bool(spec.batch_size),
            timeout_ms=0 if is_one_by_one else spec.timeout_ms,
        )
        processes = Processes(
            call=call, count=spec.processes, pack=_given, place=_place, timeout_ms=spec.timeout_ms
        )
        self._executor = ProcessExecutor(self, processes)

    def start(self) -> None:
        """Start the first process, which says whether one can, and then the others."""
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
        with self.lock:
            if self.is_stopped:
                return STOPPED
            self._open.add(call)
            self.ready.append(call)
            self.parked.wake(1)
        outcome = call.wait()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self) -> None:
        """End all processes; calls that are open have the outcome ``STOPPED``."""
        self.stop()
        self._executor.cancel()
        for call in list(self._open):
            self._end(call, STOPPED)

    def _end(self, call: _RemoteCall, outcome: object) -> None:
        """The first outcome counts."""
        with self.lock:
            is_open = call in self._open
            self._open.discard(call)
        if is_open:
            call.end(outcome)

    def take(self, slot: Slot[_RemoteCall], limit: int = 0) -> list[_RemoteCall]:
        finished, slot.finished = slot.finished, []
        for call in finished:
            self._end(call, None)
        with self.lock:
            count = min(max(1, limit), len(self.ready))
            taken = [self.ready.popleft() for _ in range(count)]
            if not taken:
                self.parked.park(slot)
        return taken

    def acknowledge(
        self, slot: Slot[_RemoteCall], run: _RemoteCall, record: _RemoteCall, outcome: object
    ) -> bool:
        del slot, run
        self._end(record, outcome)
        return True

    def done(self, slot: Slot[_RemoteCall], run: _RemoteCall, processed: int | None = None) -> None:
        """A call that was not begun is made again."""
        del slot
        if processed == 0:
            with self.lock:
                self.ready.appendleft(run)
                self.parked.wake(1)


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


def _bound(
    what: tuple[Callable[..., Any], Deserializer | None], *, of_lists: bool, is_async: bool
) -> Callable[[Any], Any]:
    function, deserializer = what
    binder = Binder(function, of_lists=of_lists, deserializer=deserializer)
    return bound(function, binder, is_async=is_async)
