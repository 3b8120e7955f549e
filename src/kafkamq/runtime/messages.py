"""A worker's messages from hand-out to verdict: the ``WorkQueue`` of a queue with handlers.

It binds a message to its handler's parameters, calls the handler, and turns what it returned or
raised into the verdict. In processes a call is a run of one record, with an outcome of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

from kafkamq.errors import ConfigError, KafkaMQError, LeaseLostError, StateError
from kafkamq.queue.handler import Binder, HandlerSpec
from kafkamq.queue.json_values import BodyError
from kafkamq.queue.message import Message
from kafkamq.queue.rules.capabilities import Feature, has
from kafkamq.queue.rules.retry import Retry, backoff_delay_ms, backoff_on, judge
from kafkamq.queue.schemas.registry import BodyUnavailableError, Deserializer
from kafkamq.queue.wire.headers import clean, reason_of
from kafkamq.runtime.child import RemoteCall, pickled
from kafkamq.runtime.middleware import Middleware, bound, surrounded
from kafkamq.runtime.process_executor import Processes
from kafkamq.runtime.rules.hanging import Call
from kafkamq.runtime.telemetry import Telemetry
from kafkamq.runtime.verdicts import Verdict, is_verdict, outcomes_of, understood
from kafkamq.runtime.work_queue import HandlerFaultError, Inbox, Slot
from kafkamq.types import Ack, Headers, MessageId, Nack, Reject

_STUCK_S = 0.02
STOPPED = Nack(reason="the worker was stopped before its handler had ended")
_log = logging.getLogger(__name__)
_NOT_CALLED = Nack(reason="the handler was not called: see the log")


class Calls:
    """Calls one handler, for a message or for a list of them; thread-safe."""

    def __init__(
        self, spec: HandlerSpec, middleware: Sequence[Middleware], telemetry: Telemetry | None
    ) -> None:
        self.spec = spec
        self.spared: list[Message] = []
        self.is_async = spec.is_async
        self._telemetry = telemetry
        call = bound(spec.function, spec.binder, is_async=self.is_async)
        self._chain = surrounded(call, middleware, is_async=self.is_async, name=spec.name)

    def run(self, given: Any) -> object:
        outcome: object = _NOT_CALLED
        try:
            with self._delivery(given) as told:
                try:
                    outcome = self._chain(given)
                except BaseException as error:  # noqa: BLE001 - an exception is a nack
                    outcome = error
                told[0] = outcome
        except Exception:  # noqa: BLE001 - of what the application set for telemetry
            self._say_unrecorded()
        return outcome

    async def run_async(self, given: Any) -> object:
        """Await an ``async def`` handler; what it raises is returned, but for its own end."""
        outcome: object = _NOT_CALLED
        try:
            with self._delivery(given) as told:
                try:
                    awaitable: Awaitable[object] = self._chain(given)
                    outcome = await awaitable
                except (asyncio.CancelledError, GeneratorExit):
                    raise
                except BaseException as error:  # noqa: BLE001 - an exception is a nack
                    outcome = error
                told[0] = outcome
        except Exception:  # noqa: BLE001 - of what the application set for telemetry
            self._say_unrecorded()
        return outcome

    def record(self, given: Any, outcome: object, began_s: float) -> None:
        """Record a delivery that ends now, and was handled elsewhere."""
        try:
            with self._delivery(given, began_s) as told:
                told[0] = outcome
        except Exception:  # noqa: BLE001 - of what the application set for telemetry
            self._say_unrecorded()

    def _say_unrecorded(self) -> None:
        queue = self.spec.queue.queue_id
        _log.exception("a delivery could not be recorded", extra={"queue": queue})

    def _delivery(
        self, given: Any, began_s: float | None = None
    ) -> AbstractContextManager[list[object]]:
        """Records the delivery of each message; the caller says what came of the call."""
        if self._telemetry is None:
            return nullcontext([None])
        return self._recorded(self._telemetry, given, began_s)

    @contextmanager
    def _recorded(
        self, telemetry: Telemetry, given: Any, began_s: float | None
    ) -> Iterator[list[object]]:
        told: list[object] = [None]
        messages = given if isinstance(given, list) else [given]
        with ExitStack() as spans:
            kinds = [spans.enter_context(telemetry.delivery(each, began_s)) for each in messages]
            yield told
            outcomes = outcomes_of(told[0], len(kinds)) if given is messages else told
            for kind, outcome in zip(kinds, outcomes, strict=True):
                kind[0] = kind_of(outcome)

    def is_spent(self, message: Message) -> bool:
        most = self.spec.max_attempts
        return most is not None and message.delivery_count > most

    # Verdicts.

    def acknowledge(self, message: Message, outcome: object) -> None:
        """Give the verdict that an outcome means, or give the message back; never raises."""
        try:
            if outcome is None or isinstance(outcome, Ack):
                message.ack()
            elif outcome is STOPPED and self._is_last(message):
                self.spared.append(message)
            else:
                verdict, error = self._verdict_on(message, outcome)
                _give(message, verdict)
                self._tell(message, verdict, error)
        except LeaseLostError as error:
            _log.warning("a verdict came too late", extra={"error": str(error)})
        except StateError as error:
            # The handler has given it itself, or the consumer is closed.
            _log.debug("a message has its verdict already", extra={"error": str(error)})
        except Exception:  # noqa: BLE001 - a thread that ends here would take no more messages
            _log.exception("a verdict could not be given", extra={"queue": message.queue_id})
            # What its handler returned is no verdict that can be given: without one it is stuck.
            with contextlib.suppress(KafkaMQError):
                # It has its verdict, or its lease has ended.
                message.nack(reason="the handler's verdict could not be given: see the log")

    def _is_last(self, message: Message) -> bool:
        spec = self.spec
        return message.delivery_count >= min(
            spec.queue.max_deliveries, spec.max_attempts or spec.queue.max_deliveries
        )

    def _verdict_on(
        self, message: Message, outcome: object
    ) -> tuple[Verdict, BaseException | None]:
        """Return what follows by the handler's retry policy, and the handler's error."""
        spec, queue, count = self.spec, self.spec.queue, message.delivery_count
        verdict, error = understood(outcome, spec.retry_on)
        if queue.is_at_most_once and not isinstance(verdict, Ack):
            what = self._what(message)
            _log.error("%s failed, and does not come again (at most once)", what, exc_info=error)
            return Ack(), None
        if isinstance(verdict, Ack):
            if not is_verdict(outcome):
                _log.error(
                    "a handler returned something that is no verdict; its message counts as done",
                    extra={"queue": queue.queue_id, "type": type(outcome).__name__},
                )
            return verdict, None
        if error is not None and error is not outcome:
            _log.error(str(error), extra={"queue": queue.queue_id})
        reason = clean(verdict.reason)
        if isinstance(error, HandlerFaultError):
            error, reason = None, clean(str(error))
        elif error is not None and not reason:
            reason = reason_of(error)
        # At the queue's own limit the queue gives the message up.
        most = spec.max_attempts if count < queue.max_deliveries else None
        decision = judge(verdict, attempt=count, max_attempts=most)
        if not isinstance(decision, Retry):
            is_asked = isinstance(verdict, Reject)
            why = "rejected by its handler" if is_asked else f"attempt {most} of {most} failed"
            return Reject(reason or why), error
        delay_s = decision.delay_s
        if delay_s is None and has(queue.backend, Feature.RETRY_DELAY):
            backoff = backoff_on(error, spec.retry_on) or spec.retry or queue.backoff
            delay_s = backoff_delay_ms(backoff, count, random.random()) / 1000
        return Nack(delay_s, reason), error

    def _tell(self, message: Message, verdict: Verdict, error: BaseException | None) -> None:
        what = self._what(message)
        if isinstance(verdict, Reject):
            _log.warning("%s was rejected: it becomes a dead letter", what, exc_info=error)
        elif isinstance(verdict, Ack):
            return
        elif message.delivery_count >= self.spec.queue.max_deliveries:
            did = "a handler gave it back" if error is None else "a handler failed"
            text = "%s: %s was the last one: it becomes a dead letter"
            _log.error(text, did, what, exc_info=error)
        elif error is not None:
            when = "soon" if verdict.delay is None else f"in {verdict.delay:.1f} s"
            _log.warning("a handler failed: %s comes again %s", what, when, exc_info=error)

    def _what(self, message: Message) -> str:
        """Names a message for a line of log; never its payload."""
        place = message.message_id
        return (
            f"message {message.id or '(no id)'} at {place.partition}/{place.offset} of queue "
            f"{message.queue_id}, delivery {message.delivery_count} of "
            f"{self.spec.queue.max_deliveries},"
        )


def _give(message: Message, verdict: Verdict) -> None:
    if isinstance(verdict, Ack):
        message.ack()
    elif isinstance(verdict, Reject):
        message.reject(verdict.reason)
    else:
        try:
            message.nack(delay=verdict.delay, reason=verdict.reason)
        except ConfigError as error:
            # The backend does not have such a delay.
            _log.error("a nack goes without its delay", extra={"error": str(error)})
            message.nack(reason=verdict.reason)


def kind_of(outcome: object) -> str:
    if isinstance(outcome, Nack):
        return "nack"
    if isinstance(outcome, Reject | BodyError):
        return "reject"
    return "error" if understood(outcome)[1] is not None else "ack"


class _Run:
    """One message, or the list of one call; there is no order among them."""

    __slots__ = ("records",)
    is_serial = is_stale = False
    failed = None

    def __init__(self, records: list[Message]) -> None:
        self.records = records


class MessageQueue(Inbox[Message, Message]):
    """The messages between a feeder and its handlers, which get their verdicts here."""

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
        self._since_s = 0.0
        self.finished = 0
        self._waiting: list[tuple[float, Message]] = []

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
        """Return those of the next call, with the lock held; none: it is not time for one."""
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
        if not isinstance(outcome, BodyUnavailableError):
            self.handler_calls.acknowledge(message, outcome)
            return True
        # It is kept: its handler was not called, so this is no delivery that has failed.
        with self.lock:
            if self.is_stopped:
                self.handler_calls.spared.append(message)
            else:
                self._waiting.append((time.monotonic() + outcome.delay_s, message))
        return False

    def _look_again(self) -> None:
        now_s = time.monotonic()
        with self.lock:
            due = [message for due_s, message in self._waiting if due_s <= now_s]
            self._waiting = [each for each in self._waiting if each[0] > now_s]
        if due:
            self.add(due)

    def stop(self) -> list[Message]:
        found = super().stop()
        with self.lock:
            found += [message for _, message in self._waiting]
            self._waiting = []
        return found

    def abandon(self, slot: Slot[Message], records: Sequence[Message]) -> None:
        for message in records:
            self.handler_calls.acknowledge(message, STOPPED)
        with self.lock:
            self.finished += slot.taken
            slot.taken = 0

    def calls(self, slots: Sequence[Slot[Message]]) -> list[Call]:
        """Return the calls; the time is read last, as another call may begin in between."""
        running = [(claim, slot) for slot in slots for claim in slot.claim[:1]]
        first = [(each[0] if isinstance(each, list) else each, slot) for each, slot in running]
        return [Call(slot.claimed_s, place_of(each), slot.caller) for each, slot in first]


def place_of(message: Message) -> tuple[str, int, int]:
    place = message.message_id
    return message.topic, place.partition, place.offset


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
    # A handler's parameter of this type gets the message.
    is_kafkamq_message: ClassVar[bool] = True

    @property
    def headers(self) -> dict[str, bytes | None]:
        return dict(self.raw_headers)


_FACTS = attrgetter(*(each.name for each in fields(PlainMessage)))


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
    """Processes take messages by it, several calls at once; a call belongs to a port's thread."""

    def tend(self) -> None:
        """Tend the queue, and move calls that wait behind slow ones to other processes."""
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
        del slot
        for call in records:
            self._end(call, STOPPED)


def processes_for(
    spec: HandlerSpec, middleware: Sequence[Middleware], owner: object, *, is_ahead: bool
) -> Processes:
    """Get the processes of a queue's handler, which take ``RemoteMessages``."""
    is_list = bool(spec.batch_size)
    call = RemoteCall(
        function=pickled((spec.function, spec.deserializer, tuple(middleware))),
        prepare=partial(_called, of_lists=is_list, is_async=spec.is_async, name=spec.name),
        is_async=spec.is_async,
        slots=spec.threads,
        wants_all=is_list,
        timeout_ms=spec.timeout_ms,
    )
    return Processes(
        call=call,
        count=spec.processes,
        pack=lambda call: (
            [_plain(each) for each in call.messages] if is_list else _plain(call.messages[0])
        ),
        place=lambda call: place_of(call.messages[0]),
        timeout_ms=spec.timeout_ms,
        owner=owner,
        is_ahead=is_ahead,
    )


def _plain(message: Message) -> PlainMessage:
    return PlainMessage(*_FACTS(message))


def _called(
    what: tuple[Callable[..., Any], Deserializer | None, Sequence[Middleware]],
    *,
    of_lists: bool,
    is_async: bool,
    name: str,
) -> Callable[[Any], Any]:
    """Call in the process the handler, and its middleware around it."""
    function, deserializer, middleware = what
    binder = Binder(function, of_lists=of_lists, deserializer=deserializer)
    call = bound(function, binder, is_async=is_async)
    return surrounded(call, middleware, is_async=is_async, name=name)
