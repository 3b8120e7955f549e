"""Writes single records until Kafka has them, whatever refuses them meanwhile."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from kafkamq.errors import BrokerError, KafkaMQError
from kafkamq.transport.errors import KafkaError, Meaning, broker_error, meaning
from kafkamq.transport.producer import ThreadedProducer
from kafkamq.transport.record import Record
from kafkamq.types import Headers

FORMS = 3  # of a record, each smaller than the one before; then the first one is tried again
FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 2.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Form:
    """A record as it is to be written; partition -1: any."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: Headers


class Written:
    """What becomes of a record.

    Attributes:
        last: Done when Kafka has it; fails at ``close`` only. Cancel it to give the record up.
        first: Done at the first answer: fails if it is a refusal.
    """

    def __init__(self) -> None:
        self.last: Future[None] = Future()
        self.first: Future[None] = Future()

    def end(self, error: KafkaMQError | None) -> None:
        for future in (self.last, self.first):
            with suppress(InvalidStateError):  # it was given up, or has its answer
                future.set_result(None) if error is None else future.set_exception(error)


@dataclass(slots=True, eq=False)
class _Write:
    form: Callable[[int], Form]
    written: Written = field(default_factory=Written)
    refusals: int = 0  # for its size
    pause_s: float = 0.0
    last_error: KafkaMQError | None = None


class SureWriter:
    """One producer and one thread, both made when there is something to write; thread-safe.

    A record that is too large is asked for in a smaller form. Every other refusal (no rights, too
    few replicas, no topic, no broker) is met by waiting. What is written is known from its own
    report; one whose report did not come in time may be written twice.
    """

    def __init__(self, make: Callable[[], ThreadedProducer], what: str) -> None:
        """``make`` opens the producer; ``what`` is for people."""
        self._make = make
        self._what = what
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, _Write]] = []  # a heap, by monotonic s
        self._open: dict[_Write, None] = {}
        self._number = count()
        self._producer: ThreadedProducer | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def write(self, form: Callable[[int], Form]) -> Written:
        """Write a record; ``form`` says what, given how often it was refused for its size."""
        write = _Write(form)
        with self._changed:
            if self._is_closed:
                write.written.end(BrokerError(f"{self._what} ends", code="_DESTROY"))
                return write.written
            self._open[write] = None
            self._push(write, 0.0)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kafkamq-sure", daemon=True)
                self._thread.start()
        return write.written

    def close(self, timeout_s: float) -> None:
        """Wait for what is under way, give up the rest, and end; idempotent."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while any(not write.written.last.cancelled() for write in self._open):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self._is_closed:
                    break
                self._changed.wait(min(left_s, _MAX_PAUSE_S))
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
        if self._producer is not None:
            self._producer.close(max(1.0, deadline_s - time.monotonic()))

    def _push(self, write: _Write, pause_s: float) -> None:
        heapq.heappush(self._due, (time.monotonic() + pause_s, next(self._number), write))
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_closed:
                    wait_s = self._due[0][0] - time.monotonic() if self._due else _MAX_PAUSE_S
                    if self._due and wait_s <= 0:
                        break
                    self._changed.wait(min(wait_s, _MAX_PAUSE_S))
                if self._is_closed:
                    return
                write = heapq.heappop(self._due)[2]
                if write.written.last.cancelled():
                    self._open.pop(write, None)
                    continue
            self._produce(write)

    def _produce(self, write: _Write) -> None:
        def reported(error: KafkaError | None, _: Record) -> None:
            assert self._producer is not None
            try:
                if error is None:
                    self._end(write)
                else:
                    cause = self._producer.failed(error)
                    self._refused(write, broker_error(cause, f"{self._what}: {form.topic}"))
            finally:
                self._producer.reported += 1

        try:
            form = write.form(write.refusals)
            if self._producer is None:
                self._producer = self._make()
            self._producer.produce(
                form.topic, form.value, form.key, form.partition, form.headers, reported
            )
        except KafkaMQError as error:
            self._refused(write, error)
        except Exception as error:  # noqa: BLE001 - of one record: the others must be written
            self._refused(write, KafkaMQError(f"{self._what}: {type(error).__name__}: {error}"))

    def _end(self, write: _Write) -> None:
        with self._changed:
            self._open.pop(write, None)
            self._changed.notify_all()
        write.written.end(None)

    def _refused(self, write: _Write, error: KafkaMQError) -> None:
        is_smaller = False  # and not refused for good
        if meaning(error) is Meaning.TOO_LARGE:
            write.refusals = (write.refusals + 1) % FORMS
            is_smaller = write.refusals > 0
        if not is_smaller:
            with suppress(InvalidStateError):  # it has its answer, or was given up
                write.written.first.set_exception(error)
        pause_s = 0.0 if is_smaller else write.pause_s
        if write.last_error is None:
            _log.warning(
                "%s was refused; it is tried again", self._what, extra={"error": str(error)}
            )
        with self._changed:
            write.last_error = error
            self._push(write, pause_s)
            write.pause_s = min(max(FIRST_PAUSE_S, 2 * write.pause_s), _MAX_PAUSE_S)
