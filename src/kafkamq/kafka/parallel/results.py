"""What becomes of the results of handlers before their records count as done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Protocol, TypeAlias

from confluent_kafka import KafkaError, Message

from kafkamq.clients.errors import broker_error
from kafkamq.errors import ConfigError, DeadlineExceededError
from kafkamq.kafka.parallel.desk import Desk, Trouble, Worker
from kafkamq.kafka.parallel.hooks import tell
from kafkamq.kafka.parallel.outbox import Outbox
from kafkamq.kafka.parallel.record import ParallelRecord
from kafkamq.kafka.parallel.settling import Settler

__all__ = ["OnProduced", "OutgoingRecord", "ProducePublisher", "Publisher", "outgoing", "put_off"]


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
        """The headers, in order."""
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


OnProduced: TypeAlias = Callable[[ParallelRecord, OutgoingRecord, int, int], object]
"""Gets the record that came in, the one that went out, its partition and offset."""


class Publisher(Protocol):
    """Decides when what workers finished counts as done.

    It empties the worker's ``outputs`` and ``troubles``; what is left in ``finished`` is done.
    """

    def publish(self, worker: Worker) -> None:
        """After a worker's runs, before it takes more; may wait."""

    async def publish_async(self, worker: Worker) -> None:
        """As ``publish``, without blocking the event loop."""


def outgoing(result: object) -> Iterable[OutgoingRecord]:
    """The records in what a handler returned.

    Raises:
        ConfigError: There is something else in it. What an iterable of the user's raises, too.
    """
    found = [result] if isinstance(result, OutgoingRecord) else result
    if not isinstance(found, Iterable):
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
        self._ended = threading.Event()
        self._tell: Callable[[], object] | None = None
        self.failed: dict[ParallelRecord, BaseException] = {}

    def add(self) -> None:
        with self._lock:
            self._count += 1

    def done(
        self, record: ParallelRecord | None = None, error: BaseException | None = None
    ) -> None:
        with self._lock:
            self._count -= 1
            if record is not None and error is not None:
                self.failed[record] = error
            is_last, tell_it = self._count == 0, self._tell
        if is_last:
            self._ended.set()
            if tell_it is not None:
                tell_it()

    def wait(self, timeout_s: float) -> bool:
        self.done()
        return self._ended.wait(timeout_s)

    async def wait_async(self, timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def open_it() -> None:
            if not ended.done():
                ended.set_result(None)

        with self._lock:
            self._tell = lambda: loop.call_soon_threadsafe(open_it)
        self.done()
        try:
            await asyncio.wait_for(ended, timeout_s)
        except (TimeoutError, asyncio.TimeoutError):
            return False
        return True


class ProducePublisher:
    """Sends results; a record is done when Kafka has confirmed all of its results."""

    def __init__(
        self,
        desk: Desk,
        settler: Settler,
        outbox: Outbox,
        *,
        timeout_s: float,
        on_produced: OnProduced | None,
    ) -> None:
        self._desk = desk
        self._settler = settler
        self._outbox = outbox
        self._timeout_s = timeout_s
        self._on_produced = on_produced
        desk.is_deferred = True

    def publish(self, worker: Worker) -> None:
        """Send, and wait until Kafka has it."""
        if not worker.outputs:
            self._end(worker)
            return
        sent = self._send(worker)
        in_time = sent.wait(self._timeout_s)
        for record, error in self._failures(worker, sent, in_time=in_time).items():
            put_off(worker, record, self._settler.settle(record, error))
        self._end(worker)

    async def publish_async(self, worker: Worker) -> None:
        """As ``publish``."""
        if not worker.outputs:
            self._end(worker)
            return
        sent = self._send(worker)
        in_time = await sent.wait_async(self._timeout_s)
        for record, error in self._failures(worker, sent, in_time=in_time).items():
            put_off(worker, record, await self._settler.settle_async(record, error))
        self._end(worker)

    def _end(self, worker: Worker) -> None:
        worker.outputs = []
        self._desk.release_all(worker)

    def _send(self, worker: Worker) -> _Outstanding:
        sent = _Outstanding()
        for record, result in worker.outputs:
            sent.add()
            try:
                for out in outgoing(result):
                    sent.add()
                    self._send_one(sent, record, out)
                sent.done()
            except Exception as error:  # noqa: BLE001 - also what a generator raises
                sent.done(record, error)
        return sent

    def _send_one(self, sent: _Outstanding, record: ParallelRecord, out: OutgoingRecord) -> None:
        on_produced = self._on_produced

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                sent.done(record, broker_error(error, f"sending to {out.topic}"))
                return
            if on_produced is not None:
                place = (message.partition() or 0, message.offset() or 0)
                tell("on_produced", on_produced, record, out, *place)
            sent.done()

        try:
            self._outbox.send(
                out.topic, out.value, out.key, out.header_list(), delivered, out.partition
            )
        except BaseException:
            sent.done()
            raise

    def _failures(
        self, worker: Worker, sent: _Outstanding, *, in_time: bool
    ) -> dict[ParallelRecord, BaseException]:
        if in_time:
            return dict(sent.failed)
        late = DeadlineExceededError(f"results were not confirmed within {self._timeout_s:g} s")
        return {record: late for record, _ in worker.outputs}


def put_off(worker: Worker, record: ParallelRecord, due_ms: int | None) -> None:
    """Its result could not be published: if it is to be tried again, its run is not finished."""
    if due_ms is None:
        return
    for trouble in worker.troubles:
        if record in trouble.run.records:
            trouble.failed = sorted(
                [*trouble.failed, (record, due_ms)], key=lambda each: each[0].offset
            )
            return
    for run in worker.finished:
        if record in run.records:
            worker.finished = [other for other in worker.finished if other is not run]
            worker.troubles.append(Trouble(run, None, [(record, due_ms)]))
            return
