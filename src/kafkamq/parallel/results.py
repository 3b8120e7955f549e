"""What becomes of what handlers return before their records count as done.

``Handling`` gives each outcome to the retry policy or to a publisher: one that produces results
(``ProducePublisher``; in transactions ``transactions``), or one that hands them to an iterator.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, Full, Queue
from types import NoneType
from typing import Protocol, TypeAlias, TypeVar

from kafkamq.errors import BrokerError, ConfigError, DeadlineExceededError, KafkaMQError, StateError
from kafkamq.parallel.config import ParallelConfig, tell
from kafkamq.parallel.failure_policy import FailurePolicy, Unwritten
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.work_queue import ParallelWorkQueue, PoolRun, PoolWorker
from kafkamq.runtime.steps import Attempt, Steps, take, take_async
from kafkamq.runtime.verdicts import is_verdict
from kafkamq.runtime.work_queue import enter
from kafkamq.transport.errors import (
    REFUSALS,
    KafkaError,
    Meaning,
    broker_error,
    is_retriable,
    meaning,
)
from kafkamq.transport.producer import ThreadedProducer
from kafkamq.transport.record import Record
from kafkamq.transport.settings import producer_settings
from kafkamq.types import Headers

_SLICE_S = 0.1
_HEADERS = "they must be str names with values of bytes or None"
_FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    "topic": ((str,), "it must be a str"),
    "value": ((bytes, NoneType), "it must be bytes, or None: a tombstone"),
    "key": ((bytes, NoneType), "it must be bytes, or None"),
    "partition": ((int,), "it must be an int"),
    "headers": ((Mapping, Sequence), _HEADERS),
}

_Result: TypeAlias = tuple[PoolRun, ParallelRecord, object]
"""A record and its run, and what its handler returned."""

_RESULTS = "poll_and_produce takes OutgoingRecord, several of them, None, or a verdict"
Delivered = Callable[["KafkaError | KafkaMQError | None", Record], None]
_Record: TypeAlias = "tuple[str, bytes | None, bytes | None, int, Headers | None]"
T = TypeVar("T")
MAX_WAITING = 1024
_ASYNC_SLICE_S = 0.002
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingRecord:
    """A record that a handler of ``poll_and_produce`` returns.

    Raises:
        ConfigError: A field has a type that Kafka does not take.
    """

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: Mapping[str, bytes | None] | Sequence[tuple[str, bytes | None]] = ()
    # -1: the partition follows from the key's murmur2 hash, as in Java; without a key, from chance.
    partition: int = -1

    def __post_init__(self) -> None:
        for name, (kinds, wanted) in _FIELDS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds):
                raise ConfigError(f"{name} of a result is {type(value).__name__}: {wanted}")
        try:
            well_formed = all(map(_is_header, self.header_list()))
        except (TypeError, ValueError):
            well_formed = False
        if not well_formed:
            raise ConfigError(f"headers of a result: {_HEADERS}")

    def header_list(self) -> list[tuple[str, bytes | None]]:
        given = self.headers
        return list(given.items()) if isinstance(given, Mapping) else list(given)


OnProduced: TypeAlias = Callable[[ParallelRecord, OutgoingRecord, int, int], object]
"""Gets the record that came in, the one that went out, its partition and offset (-1: Kafka has it
from an earlier try, and does not say where)."""


@dataclass(frozen=True, slots=True)
class Produced:
    """A result that Kafka has: of a transaction, that was committed.

    Attributes:
        record: The record that came in.
        result: The one that went out.
        partition: Where it is, in the topic of ``result``.
        offset: The same; -1: Kafka has it from an earlier try, and does not say where.
    """

    record: ParallelRecord
    result: OutgoingRecord
    partition: int
    offset: int

    @property
    def topic(self) -> str:
        return self.result.topic


def _is_header(header: Sequence[object]) -> bool:
    name, value = header
    return isinstance(name, str) and isinstance(value, bytes | None)


def place_of(report: Record) -> tuple[int, int]:
    partition, offset = report.partition(), report.offset()
    return -1 if partition is None else partition, -1 if offset is None else offset


def outgoing(result: object) -> Iterable[OutgoingRecord]:
    found = [result] if isinstance(result, OutgoingRecord) else result
    # A future of asyncio can be iterated over, and gives nothing.
    if inspect.isawaitable(found) or not isinstance(found, Iterable):
        raise ConfigError(f"the handler returned {type(result).__name__}: {_RESULTS}")
    records = list(found)
    for record in records:
        if not isinstance(record, OutgoingRecord):
            raise ConfigError(
                f"the handler returned a list with {type(record).__name__}: {_RESULTS}"
            )
    return records


def granted(what: Attempt | Future[None] | None) -> Steps[None]:
    while what is not None and not (yield what, _SLICE_S):
        pass


class Publisher(Protocol):
    """Decides when what workers finished counts as done.

    It empties the ``outputs`` of the runs that the worker has finished, and puts off what could not
    be published.
    """

    def publish(self, worker: PoolWorker) -> Steps[None]:
        """Run after a worker's runs, before it takes more."""


class Handling:
    """The shards of a parallel consumer as a ``WorkQueue``: what executors work on."""

    def __init__(
        self,
        work_queue: ParallelWorkQueue,
        policy: FailurePolicy,
        publisher: Publisher | None = None,
        *,
        takes_all: bool = False,
    ) -> None:
        self._work_queue = work_queue
        self._policy = policy
        self._takes_all = takes_all
        self._publisher = publisher
        work_queue.is_deferred = publisher is not None
        self.make_slot, self.join = work_queue.make_slot, work_queue.join
        self.take, self.done, self.calls = work_queue.take, work_queue.done, work_queue.calls
        self.fail = policy.fail

    @property
    def is_stopped(self) -> bool:
        return self._work_queue.is_stopped

    @property
    def limit(self) -> int:
        return self._work_queue.limit

    @property
    def has_backlog(self) -> bool:
        return self._work_queue.has_backlog

    def acknowledge(
        self, worker: PoolWorker, run: PoolRun, record: ParallelRecord, outcome: object
    ) -> bool:
        del worker
        return take(self._acknowledge(run, record, outcome))

    async def acknowledge_async(
        self, worker: PoolWorker, run: PoolRun, record: ParallelRecord, outcome: object
    ) -> bool:
        del worker
        return await take_async(self._acknowledge(run, record, outcome))

    def _acknowledge(self, run: PoolRun, record: ParallelRecord, outcome: object) -> Steps[bool]:
        """Return a result for the publisher, or what the retry policy makes of it.

        Says whether the run goes on behind the record.
        """
        if run.is_stale:
            # Another member processes it, and decides what becomes of it.
            return True
        is_result = self._takes_all or outcome is not None
        if self._publisher is not None and is_result and not is_verdict(outcome):
            if run.outputs is None:
                run.outputs = []
            run.outputs.append((record, outcome))
            return True
        due_ms = yield from self._policy.apply(record, outcome)
        if due_ms is None:
            return True
        run.failed = [*(run.failed or ()), (record, due_ms)]
        return not run.is_serial

    def publish(self, worker: PoolWorker) -> None:
        if self._publisher is not None:
            take(self._publisher.publish(worker))

    async def publish_async(self, worker: PoolWorker) -> None:
        if self._publisher is not None:
            await take_async(self._publisher.publish(worker))

    def abandon(self, worker: PoolWorker, records: Sequence[ParallelRecord]) -> None:
        """They are not done, and come again elsewhere."""


class _Outstanding:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 1
        self.ended: Future[None] = Future()
        self.failed: dict[ParallelRecord, BaseException | Unwritten] = {}

    def add(self) -> None:
        with self._lock:
            self._count += 1

    def done(
        self, record: ParallelRecord | None = None, error: BaseException | Unwritten | None = None
    ) -> None:
        with self._lock:
            self._count -= 1
            if record is not None and error is not None:
                self.failed[record] = error
            is_last = self._count == 0
        if is_last:
            self.ended.set_result(None)


@dataclass(frozen=True, slots=True)
class ProducePublisher:
    """Sends results; a record is done when Kafka has confirmed all of its results."""

    work_queue: ParallelWorkQueue
    policy: FailurePolicy
    producer: ResultProducer
    timeout_s: float
    on_produced: OnProduced | None
    await_room: Attempt | None = None

    def publish(self, worker: PoolWorker) -> Steps[None]:
        runs = [run for run in worker.finished if run.outputs]
        if runs:
            yield from granted(self.await_room)
        for outputs in _waves(runs):
            sent = yield from self._send(outputs)
            in_time = yield sent.ended, self.timeout_s
            for run, record, outcome in self._failures(outputs, sent, in_time=in_time):
                if not (run.is_stale or run.is_behind(record)):
                    due_ms = yield from self.policy.apply(record, outcome)
                    if due_ms is not None:
                        run.put_off(record, due_ms)
        for run in runs:
            run.outputs = None
        self.work_queue.collect(worker)

    def _send(self, outputs: list[_Result]) -> Steps[_Outstanding]:
        sent = _Outstanding()
        for run, record, result in outputs:
            if run.is_stale:
                # Another member processes it, and has its result.
                continue
            sent.add()
            try:
                outs = outgoing(result)
            except BaseException as error:  # noqa: BLE001 - also what a generator raises
                sent.done(record, error)
                continue
            try:
                for out in outs:
                    sent.add()
                    if not self._send_one(sent, record, out):
                        yield from self._send_late(sent, record, out)
                sent.done()
            except Exception as error:  # noqa: BLE001 - such as a partition that is no number
                sent.done(record, _failed_send(error))
        sent.done()
        return sent

    def _send_late(
        self, sent: _Outstanding, record: ParallelRecord, out: OutgoingRecord
    ) -> Steps[None]:
        """Wait for room; not on an event loop, which others use as well."""
        failures: list[BaseException] = []

        def attempt(timeout_s: float) -> bool:
            try:
                return self._send_one(sent, record, out, timeout_s)
            except BaseException as error:  # noqa: BLE001 - raised below, in the steps
                failures.append(error)
                return True

        if not (yield attempt, self.timeout_s):
            sent.done()
            raise DeadlineExceededError(
                f"the producer's queue was full for {self.timeout_s:g} s; see whether its brokers"
                " answer"
            )
        if failures:
            raise failures[0]

    def _send_one(
        self,
        sent: _Outstanding,
        record: ParallelRecord,
        out: OutgoingRecord,
        timeout_s: float = 0.0,
    ) -> bool:
        """Queue a result; False: there was no room for so long."""
        on_produced = self.on_produced

        def delivered(error: KafkaError | KafkaMQError | None, message: Record) -> None:
            if error is not None:
                sent.done(record, _failed_send(broker_error(error, f"sending to {out.topic}")))
                return
            if on_produced is not None:
                tell("on_produced", on_produced, record, out, *place_of(message))
            sent.done()

        try:
            return self.producer.send(out, delivered, timeout_s)
        except BaseException:
            sent.done()
            raise

    def _failures(
        self, outputs: list[_Result], sent: _Outstanding, *, in_time: bool
    ) -> list[tuple[PoolRun, ParallelRecord, BaseException | Unwritten]]:
        if in_time:
            failed = sent.failed
            return [(run, each, failed[each]) for run, each, _ in outputs if each in failed]
        late = DeadlineExceededError(f"results were not confirmed within {self.timeout_s:g} s")
        return [(run, record, Unwritten(late)) for run, record, _ in outputs]


def _failed_send(error: Exception) -> Exception | Unwritten:
    is_ours = isinstance(error, StateError)
    is_over = isinstance(error, BrokerError) and error.is_fatal
    is_kafkas = is_over or is_retriable(error) or meaning(error) in REFUSALS
    return Unwritten(error) if is_ours or is_kafkas else error


def _waves(runs: Sequence[PoolRun]) -> Iterator[list[_Result]]:
    """Yield what may be sent at once: behind a record that failed before, nothing that is in its
    order.

    So what has to be done again for its sake is done again once: runs are put off meanwhile.
    """
    places = dict.fromkeys(runs, 0)
    while places:
        now: list[_Result] = []
        for run, place in list(places.items()):
            outputs = run.outputs or []
            for record, result in outputs[place:]:
                now.append((run, record, result))
                places[run] += 1
                if record._failure is not None and run.is_serial:
                    break
            if places[run] >= len(outputs):
                del places[run]
        if now:
            yield now


class ResultProducer:
    """Two producers, made when they are first needed; thread-safe."""

    def __init__(self, config: ParallelConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        # By whether each record goes in a batch of its own.
        self._producers: dict[bool, ThreadedProducer] = {}
        self._is_closed = False

    def send(self, out: OutgoingRecord, on_delivery: Delivered, timeout_s: float = 0.0) -> bool:
        """Queue one record; False: there is no room for it, for ``timeout_s``."""
        record = (out.topic, out.value, out.key, out.partition, tuple(out.header_list()) or None)

        def delivered(error: KafkaError | KafkaMQError | None, message: Record) -> None:
            if error is None or meaning(error) is not Meaning.TOO_LARGE:
                on_delivery(error, message)
                return
            # Kafka refuses a whole batch for the size of one record: alone, each shows whether it
            # is too large.
            try:
                self._send(self._open(is_alone=True), record, on_delivery)
            except KafkaMQError as failure:
                on_delivery(failure, message)

        try:
            self._send(self._open(is_alone=False), record, delivered, timeout_s)
        except DeadlineExceededError:
            return False
        except BrokerError as error:
            if meaning(error) is not Meaning.QUEUE_FULL and not error.is_fatal:
                raise
            return False
        return True

    def _send(
        self,
        producer: ThreadedProducer,
        record: _Record,
        on_delivery: Delivered,
        timeout_s: float = 0.0,
    ) -> None:
        def reported(error: KafkaError | None, message: Record) -> None:
            try:
                on_delivery(None if error is None else producer.failed(error), message)
            finally:
                producer.reported += 1

        producer.produce(*record, reported, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Flush, and end; what is not confirmed by then fails. Idempotent."""
        with self._lock:
            self._is_closed = True
            producers = list(self._producers.values())
        for producer in producers:
            with suppress(KafkaMQError):
                producer.close(timeout_s)

    def _open(self, *, is_alone: bool) -> ThreadedProducer:
        settings = {"batch_num_messages": 1} if is_alone else {}
        with self._lock:
            if is_alone not in self._producers:
                if self._is_closed:
                    raise StateError("the consumer is closed; it sends no more")
                service = self._config.service
                self._producers[is_alone] = ThreadedProducer(
                    service,
                    producer_settings(service, partitioner="murmur2_random", **settings),
                    name="kafkamq-results",
                    verb="sending",
                    on_start=partial(enter, self._config),
                )
            return self._producers[is_alone]


class ResultStream:
    """A queue between workers and one iterator; what was iterated over is done."""

    def __init__(self, work_queue: ParallelWorkQueue) -> None:
        self._work_queue = work_queue
        self._waiting: Queue[_Result] = Queue(MAX_WAITING)

    def publish(self, worker: PoolWorker) -> Steps[None]:
        """Queue the results, and wait while there is no room."""
        for output in self._work_queue.hand_on(worker):
            put = partial(self._put, output)
            while not self._work_queue.is_stopped and not (yield put, _SLICE_S):
                pass

    def _put(self, result: _Result, timeout_s: float) -> bool:
        try:
            self._waiting.put(result, timeout_s > 0, timeout_s)
        except Full:
            return False
        return True

    def results(
        self, has_ended: Callable[[], bool], slice_s: float = _SLICE_S
    ) -> Iterator[tuple[ParallelRecord, object] | None]:
        """Record and result; the record is done when the next one is asked for.

        None, without a slice to wait: there is nothing now.
        """
        while not has_ended():
            try:
                run, record, result = self._waiting.get(slice_s > 0, slice_s)
            except Empty:
                if not slice_s:
                    yield None
                continue
            if not run.is_stale:
                # Else another member's handler has the record, and its result is told.
                yield record, result
            self._work_queue.complete(run.partition, [record.offset])


class ProducedStream:
    """What Kafka has of results, for one iterator; its records are done.

    ``MAX_WAITING`` wait for the iterator; then workers wait before they send more. Who is at it by
    then, or in a transaction with others, adds a little. Workers do not wait for an iterator at the
    end: it goes on until all is told.
    """

    def __init__(self, is_ending: Callable[[], bool]) -> None:
        self._is_ending = is_ending
        self._changed = threading.Condition()
        self._waiting: deque[Produced] = deque()
        self._is_left = False

    def put(self, record: ParallelRecord, result: OutgoingRecord, *place: int) -> None:
        with self._changed:
            if self._is_left:
                return
            self._waiting.append(Produced(record, result, *place))
            self._changed.notify_all()

    def await_room(self, timeout_s: float) -> bool:
        with self._changed:
            return self._is_ending() or self._changed.wait_for(
                lambda: len(self._waiting) < MAX_WAITING, timeout_s
            )

    def results(
        self, has_ended: Callable[[], bool], slice_s: float = _SLICE_S
    ) -> Iterator[Produced | None]:
        """Yield them as Kafka confirmed them; None, without a slice: there is nothing now."""
        try:
            while True:
                # This is asked before the look, which so sees everything that came until then.
                is_last = has_ended()
                produced = self._next(0.0 if is_last else slice_s)
                if produced is None and is_last:
                    return
                if produced is not None or not slice_s:
                    yield produced
        finally:
            self._leave()

    def _next(self, timeout_s: float) -> Produced | None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting, timeout_s):
                return None
            self._changed.notify_all()
            return self._waiting.popleft()

    def _leave(self) -> None:
        with self._changed:
            self._is_left = True
            count = len(self._waiting)
        if count:
            _log.warning(
                "results that Kafka has are told to nobody, as their iteration was left",
                extra={"count": count},
            )


async def taken_async(results: Iterator[T | None]) -> AsyncIterator[T]:
    """Yield what ``results`` of a stream gives without waiting, on an event loop."""
    with closing(results):  # type: ignore[type-var]  # it is a generator
        for each in results:
            if each is None:
                await asyncio.sleep(_ASYNC_SLICE_S)
            else:
                yield each
