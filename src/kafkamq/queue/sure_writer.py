"""Writes single records until they are kept, whatever refuses them meanwhile.

Rules:

- A record that is too large is asked for in a smaller form. Every other refusal (no rights, too few
  replicas, no topic, no broker) is met by waiting.
- Behind a refusal all records wait in a *lane*: one asks whether it still holds, again after a
  pause that grows up to 2 s. When that one is kept, twice as many go as went before, and so on.
  Those that were not refused yet go first.
- What is refused for itself has a lane of its own, and holds up no other record.
- A record is written only if it is wanted still; that is asked just before each try.
- What becomes of a try is known within its outlet's ``report_s``; then it counts as refused.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from kafkamq.errors import BrokerError, KafkaMQError, StateError
from kafkamq.queue.wire.headers import reason_of
from kafkamq.transport.errors import KafkaError, Meaning, broker_error, meaning
from kafkamq.transport.producer import ThreadedProducer
from kafkamq.transport.record import Record
from kafkamq.types import Headers

# Forms of a record, each smaller than the one before; then the first is tried again.
FORMS = 3
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
_OF_ITSELF = (Meaning.TOO_LARGE, Meaning.INVALID_RECORD)
_log = logging.getLogger(__name__)

Told = Callable[[KafkaMQError | None], None]
"""It gets why a record is not kept, or None when it is."""


@dataclass(frozen=True, slots=True)
class Form:
    """A record is to be written like this; partition -1 means any."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    source: object = None


class Outlet(Protocol):
    """Records go here; one thread uses it.

    Attributes:
        report_s: How long ``told`` may take.
    """

    report_s: float

    def send(self, form: Form, told: Told) -> None:
        """Begin to write: ``told`` is called once, in any thread, or this raises a refusal."""

    def close(self, timeout_s: float) -> None:
        """End; what is not kept when this returns has failed."""


class KafkaOutlet:
    """It writes to Kafka; what is written is known from its own report."""

    def __init__(self, producer: ThreadedProducer, what: str) -> None:
        self._producer = producer
        self._what = what
        self.report_s = producer.report_s
        self.close = producer.close

    def send(self, form: Form, told: Told) -> None:
        def reported(error: KafkaError | None, _: Record) -> None:
            try:
                if error is None:
                    told(None)
                else:
                    cause = self._producer.failed(error)
                    told(broker_error(cause, f"{self._what}: {form.topic}"))
            finally:
                self._producer.reported += 1

        self._producer.produce(
            form.topic, form.value, form.key, form.partition, form.headers, reported
        )


def always() -> bool:
    """Say that a record is wanted, whatever happens."""
    return True


class Written:
    """It tells what becomes of a record.

    Attributes:
        last: Done when it is kept; fails at ``close`` only. Cancelled when it is not wanted any
            more; cancel it to give the record up.
        first: Done at the first answer: fails if it is a refusal, of it or of those before it, or
            if it is not wanted any more.
    """

    def __init__(self, is_wanted: Callable[[], bool] = always) -> None:
        self.last: Future[None] = Future()
        self.first: Future[None] = Future()
        self._is_wanted = is_wanted

    def end(self, error: KafkaMQError | None) -> None:
        for future in (self.last, self.first):
            with suppress(InvalidStateError):
                future.set_result(None) if error is None else future.set_exception(error)

    def refuse(self, error: KafkaMQError) -> None:
        with suppress(InvalidStateError):
            self.first.set_exception(error)

    def drop_if_unwanted(self) -> bool:
        """Give it up if nobody wants it any more, and say whether that is so."""
        if not self.last.done() and self._is_wanted():
            return False
        self.refuse(StateError("it is not wanted any more"))
        self.last.cancel()
        return True


@dataclass(slots=True, eq=False)
class _Write:
    form: Callable[[int], Form]
    written: Written
    refusals: int = 0
    # When its report is due; 0: it is not under way.
    due_s: float = 0.0
    tries: int = 0
    last_error: KafkaMQError | None = None


class _Lane:
    """It holds records behind a refusal; it is used with the writer's lock held."""

    def __init__(self) -> None:
        self.untried: deque[_Write] = deque()
        self.tried: deque[_Write] = deque()
        self._out: set[_Write] = set()
        self._room = 1
        self._kept = 0
        self._pause_s = FIRST_PAUSE_S
        self._due_s = 0.0
        self.error: KafkaMQError | None = None

    def wait_s(self, now_s: float) -> float:
        """Say how long it is until something of it may go."""
        is_waiting = self._room > 0 and (self.untried or self.tried)
        return self._due_s - now_s if is_waiting else MAX_PAUSE_S

    def take(self) -> _Write:
        """Take what goes now; ``ended`` or ``dropped`` follows."""
        write = (self.untried or self.tried).popleft()
        self._out.add(write)
        self._room -= 1
        return write

    def add(self, write: _Write, error: KafkaMQError) -> None:
        """Keep a record that was refused."""
        if self.error is None:
            self._due_s = time.monotonic() + self._pause_s
        self.error = error
        self.tried.append(write)

    def ended(self, write: _Write, *, is_kept: bool) -> None:
        """Note what became of a record, if it is one that went from here."""
        if write not in self._out:
            return
        self._out.discard(write)
        self._kept += is_kept
        if self._out:
            return
        if self._kept:
            # Something passes, so what is refused now is refused for a moment at least.
            self._pause_s = FIRST_PAUSE_S
            wait_s = 0.0 if is_kept else FIRST_PAUSE_S
        else:
            wait_s = self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self._due_s = time.monotonic() + wait_s
        self._room, self._kept = max(1, 2 * self._kept), 0
        self._rest()

    def dropped(self, write: _Write) -> None:
        """Let another record go in the place of one that nobody wants any more."""
        if write in self._out:
            self._out.discard(write)
            self._room += 1
        self._rest()

    def drop(self, gone: Collection[_Write]) -> None:
        self.untried = deque(each for each in self.untried if each not in gone)
        self.tried = deque(each for each in self.tried if each not in gone)
        self._rest()

    def _rest(self) -> None:
        if not (self._out or self.untried or self.tried):
            self._room, self._pause_s, self.error = 1, FIRST_PAUSE_S, None


class SureWriter:
    """It has one outlet and one thread, made when something is to be written; thread-safe.

    One whose report did not come in time may be written twice.
    """

    def __init__(self, make: Callable[[], Outlet], what: str) -> None:
        """``make`` opens the outlet; ``what`` is for people."""
        self._make = make
        self._what = what
        self._changed = threading.Condition()
        self._new: deque[_Write] = deque()
        self._refused, self._misfits = self._lanes = _Lane(), _Lane()
        self._open: dict[_Write, None] = {}
        self._outlet: Outlet | None = None
        self._thread: threading.Thread | None = None
        self._look_s = 0.0
        self._is_closed = False

    def write(self, form: Callable[[int], Form], is_wanted: Callable[[], bool] = always) -> Written:
        """Write a record; ``form`` says what, given how often it was refused for its size.

        ``is_wanted`` is asked before each try, by the writer's thread, and where it is pruned.
        """
        write = _Write(form, Written(is_wanted))
        with self._changed:
            if self._is_closed:
                write.written.end(BrokerError(f"{self._what} ends", code="_DESTROY"))
                return write.written
            self._open[write] = None
            write.last_error = self._refused.error
            waiting = self._new if write.last_error is None else self._refused.untried
            waiting.append(write)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kafkamq-sure", daemon=True)
                self._thread.start()
        if write.last_error is not None:
            write.written.refuse(write.last_error)
        return write.written

    def prune(self) -> None:
        """Forget what waits and nobody wants any more."""
        with self._changed:
            waiting = [each for lane in self._lanes for each in (*lane.untried, *lane.tried)]
        gone = set()
        for write in waiting:
            try:
                if write.written.drop_if_unwanted():
                    gone.add(write)
            except Exception:  # noqa: BLE001, PERF203 - the next try tells what is wrong
                _log.debug("whether a record is wanted is not known", exc_info=True)
        with self._changed:
            for lane in self._lanes:
                lane.drop(gone)
            for write in gone:
                self._open.pop(write, None)

    def give_up_refused(self) -> None:
        with self._changed:
            refused = [write for write in self._open if write.written.first.done()]
        for write in refused:
            write.written.last.cancel()

    def close(self, timeout_s: float) -> None:
        """Wait for what is under way, give up the rest, and end; idempotent."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while any(not write.written.last.cancelled() for write in self._open):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self._is_closed:
                    break
                self._changed.wait(min(left_s, MAX_PAUSE_S))
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(max(1.0, deadline_s - time.monotonic()))
        with self._changed:
            left, self._open = list(self._open), {}
        for write in left:
            last_error = write.last_error or BrokerError(
                f"{self._what}: no answer", code="_TIMED_OUT"
            )
            write.written.end(last_error)
        if self._outlet is not None:
            self._outlet.close(max(1.0, deadline_s - time.monotonic()))

    def _run(self) -> None:
        while True:
            following = self._await_next()
            if following is None:
                return
            write, late_try = following
            if late_try:
                error = BrokerError(f"{self._what}: no report", code="_TIMED_OUT")
                self._told(write, late_try, error)
                continue
            self._try(write)

    def _await_next(self) -> tuple[_Write, int] | None:
        """Wait for what is to be written, or what has no report; None means the end.

        A number other than 0 is that of the try whose report is overdue.
        """
        with self._changed:
            while not self._is_closed:
                now_s = time.monotonic()
                if now_s >= self._look_s:
                    late = next((each for each in self._open if 0 < each.due_s <= now_s), None)
                    if late is not None:
                        return late, late.tries
                    self._look_s = now_s + MAX_PAUSE_S
                if self._new:
                    return self._new.popleft(), 0
                lane = min(self._lanes, key=lambda each: each.wait_s(now_s))
                if lane.wait_s(now_s) <= 0:
                    return lane.take(), 0
                self._changed.wait(lane.wait_s(now_s))
        return None

    def _try(self, write: _Write) -> None:
        try:
            if write.written.drop_if_unwanted():
                with self._changed:
                    self._open.pop(write, None)
                    for lane in self._lanes:
                        lane.dropped(write)
                    self._changed.notify_all()
                return
            form = write.form(write.refusals)
        except Exception as error:  # noqa: BLE001 - of one record: the others must be written
            self._refuse(write, self._as_ours(error), self._misfits)
            return
        write.due_s = math.inf
        write.tries = number = write.tries + 1
        try:
            if self._outlet is None:
                self._outlet = self._make()
            write.due_s = time.monotonic() + self._outlet.report_s
            self._outlet.send(form, lambda error: self._told(write, number, error))
        except BaseException as error:  # noqa: BLE001 - also what the user's own outlet raises
            self._told(write, number, self._as_ours(error))

    def _as_ours(self, error: BaseException) -> KafkaMQError:
        if isinstance(error, KafkaMQError):
            return error
        return KafkaMQError(f"{self._what}: {reason_of(error)}")

    def _told(self, write: _Write, number: int, error: KafkaMQError | None) -> None:
        """Take the outlet's answer to a try, in any thread."""
        with self._changed:
            if error is not None and (number != write.tries or not write.due_s):
                return
            # It came late: another try has been made, or will be.
            write.due_s = 0.0
        if error is None:
            with self._changed:
                self._open.pop(write, None)
                for lane in self._lanes:
                    lane.ended(write, is_kept=True)
                self._changed.notify_all()
            write.written.end(None)
            return
        if meaning(error) is Meaning.TOO_LARGE:
            write.refusals = (write.refusals + 1) % FORMS
            if write.refusals:
                with self._changed:
                    write.last_error = error
                    self._new.appendleft(write)
                    self._changed.notify_all()
                return
        is_of_itself = meaning(error) in _OF_ITSELF
        self._refuse(write, error, self._misfits if is_of_itself else self._refused)

    def _refuse(self, write: _Write, error: KafkaMQError, into: _Lane) -> None:
        with self._changed:
            is_first = into.error is None
            write.last_error = error
            into.add(write, error)
            for lane in self._lanes:
                lane.ended(write, is_kept=lane is not into)
            self._changed.notify_all()
        if is_first:
            _log.warning(
                "%s was refused; it is tried again", self._what, extra={"error": str(error)}
            )
        write.written.refuse(error)
