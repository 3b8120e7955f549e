"""What becomes of the outcomes of handlers before their records count as done."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import NoneType
from typing import Protocol, TypeAlias

from kafkamq.errors import (
    BrokerError,
    ConfigError,
    DeadlineExceededError,
    KafkaMQError,
    StateError,
)
from kafkamq.parallel.config import tell
from kafkamq.parallel.failure_policy import FailurePolicy, Unwritten
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.result_producer import ResultProducer
from kafkamq.parallel.work_queue import ParallelWorkQueue, PoolRun, PoolWorker
from kafkamq.runtime.steps import Attempt, Steps, take, take_async
from kafkamq.runtime.verdicts import is_verdict
from kafkamq.transport.errors import REFUSALS, KafkaError, broker_error, is_retriable, meaning
from kafkamq.transport.record import Record

_SLICE_S = 0.1


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
    partition: int = -1  # -1: by the key's murmur2 hash, as Java; without a key by chance

    def __post_init__(self) -> None:
        for name, kinds in _KINDS:
            value = getattr(self, name)
            if not isinstance(value, kinds):
                raise ConfigError(f"{name} of a result is {type(value).__name__}: {_WANTED[name]}")
        try:
            well_formed = all(map(_is_header, self.header_list()))
        except (TypeError, ValueError):
            well_formed = False
        if not well_formed:
            raise ConfigError(f"headers of a result: {_WANTED['headers']}")

    def header_list(self) -> list[tuple[str, bytes | None]]:
        given = self.headers
        return list(given.items()) if isinstance(given, Mapping) else list(given)


_WANTED = {
    "topic": "it must be a str",
    "value": "it must be bytes, or None: a tombstone",
    "key": "it must be bytes, or None",
    "partition": "it must be an int",
    "headers": "they must be str names with values of bytes or None",
}
_KINDS: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("topic", (str,)),
    ("value", (bytes, NoneType)),
    ("key", (bytes, NoneType)),
    ("partition", (int,)),
    ("headers", (Mapping, Sequence)),
)


def _is_header(header: Sequence[object]) -> bool:
    name, value = header
    return isinstance(name, str) and isinstance(value, bytes | None)


Outputs: TypeAlias = "list[tuple[PoolRun, ParallelRecord, object]]"
"""Records and their runs, and what their handlers returned."""

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


def place_of(report: Record) -> tuple[int, int]:
    """Partition and offset of a delivery report; -1: it does not say."""
    partition, offset = report.partition(), report.offset()
    return -1 if partition is None else partition, -1 if offset is None else offset


def granted(what: Attempt | Future[None] | None) -> Steps[None]:
    """Wait until it succeeds."""
    while what is not None and not (yield what, _SLICE_S):
        pass


class Publisher(Protocol):
    """Decides when what workers finished counts as done.

    It empties the ``outputs`` of the runs that the worker has finished, and puts off what could not
    be published.
    """

    def publish(self, worker: PoolWorker) -> Steps[None]:
        """After a worker's runs, before it takes more."""


def outgoing(result: object) -> Iterable[OutgoingRecord]:
    """The records in what a handler returned."""
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


_RESULTS = "poll_and_produce takes OutgoingRecord, several of them, None, or a verdict"


class _Outstanding:
    """Deliveries that a worker waits for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 1  # the sender itself
        self.ended: Future[None] = Future()
        self.failed: dict[ParallelRecord, BaseException | Unwritten] = {}

    def add(self) -> None:
        with self._lock:
            self._count += 1

    def done(
        self,
        record: ParallelRecord | None = None,
        error: BaseException | Unwritten | None = None,
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
    await_room: Attempt | None = None  # of who is told by ``on_produced``

    def __post_init__(self) -> None:
        self.work_queue.is_deferred = True

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

    def _send(self, outputs: Outputs) -> Steps[_Outstanding]:
        sent = _Outstanding()
        for run, record, result in outputs:
            if run.is_stale:  # another member does it, and has its result
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
            return self.producer.send(
                out.topic,
                out.value,
                out.key,
                out.header_list(),
                delivered,
                out.partition,
                timeout_s,
            )
        except BaseException:
            sent.done()
            raise

    def _failures(
        self, outputs: Outputs, sent: _Outstanding, *, in_time: bool
    ) -> list[tuple[PoolRun, ParallelRecord, BaseException | Unwritten]]:
        """In the order of the results."""
        if in_time:
            failed = sent.failed
            return [(run, each, failed[each]) for run, each, _ in outputs if each in failed]
        late = DeadlineExceededError(f"results were not confirmed within {self.timeout_s:g} s")
        return [(run, record, Unwritten(late)) for run, record, _ in outputs]


def _failed_send(error: Exception) -> Exception | Unwritten:
    """Of a result; ``Unwritten``, unless it is refused for what it is, or for where it goes to."""
    is_ours = isinstance(error, StateError)  # the producer is closed
    is_over = isinstance(error, BrokerError) and error.is_fatal
    is_kafkas = is_over or is_retriable(error) or meaning(error) in REFUSALS
    return Unwritten(error) if is_ours or is_kafkas else error


def _waves(runs: Sequence[PoolRun]) -> Iterator[Outputs]:
    """What may be sent at once: behind a record that failed before, nothing that is in its order.

    So what has to be done again for its sake is done again once: runs are put off meanwhile.
    """
    places = dict.fromkeys(runs, 0)
    while places:
        now: Outputs = []
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
        """A result for the publisher, or what the retry policy makes of it.

        Says whether the run goes on behind the record.
        """
        if run.is_stale:  # another member does it, and decides what becomes of it
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
