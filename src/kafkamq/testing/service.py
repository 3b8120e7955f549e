"""Queues in memory: the queue API without Kafka, on a clock that a test sets.

    service = MemoryService(clock=Clock())
    orders = service.queue("orders")

    @orders.handler()
    def handle(order: dict) -> None: ...

    orders.producer().send(b'{"id": 1}')
    with Worker(service) as worker: ...

What it is given is refused and kept as by the backend that it plays; ``markers`` is the default. A
queue's messages are one list: there are no partitions and nothing outlives the process.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, cast

from kafkamq.config import QueueConfig, ServiceConfig, milliseconds
from kafkamq.errors import StateError
from kafkamq.queue.backend import ConsumerPlan, StoredMessage
from kafkamq.queue.connections import Connections
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.delivery import Delivery
from kafkamq.queue.message import Message
from kafkamq.queue.namespace import NamespaceFacts
from kafkamq.queue.producer import Producer
from kafkamq.queue.queue import Queue
from kafkamq.queue.recorder import SendTally
from kafkamq.queue.rules.capabilities import Feature, has, require
from kafkamq.queue.rules.waiting import Waiting
from kafkamq.queue.sender import Sender
from kafkamq.queue.service import Service
from kafkamq.queue.topic_consumer import TopicConsumer
from kafkamq.queue.topic_message import TopicMessage
from kafkamq.queue.wire.headers import (
    Origin,
    dead_letter_headers,
    read_message_headers,
)
from kafkamq.queue.wire.keys import join_key
from kafkamq.transport.record import RecordLike, headers_of
from kafkamq.types import Backend, DeadLetterReason, Headers, ScheduleToken

__all__ = ["Clock", "MemoryDeadLetter", "MemoryService"]

_PARTITION = ("partition", 0)
_FACTS = NamespaceFacts(
    message_topic_id=b"",
    message_partitions=1,
    marker_partitions=1,
    marker_retention_ms=-1,
    max_message_bytes=1_048_576,
    max_marker_bytes=1_048_576,
)

_TOLD_S = 1.0  # how long a receive waits for on_lease_lost


class Clock:
    """A clock that stands still until a test moves it; thread-safe."""

    def __init__(self, start: float = 0.0) -> None:
        """``start`` is in seconds."""
        self._now_ms = round(start * 1000)
        self._moved: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def now_ms(self) -> int:
        """What it shows."""
        return self._now_ms

    def advance(self, seconds: float | timedelta) -> None:
        """Move it on; what falls due is due when this returns."""
        with self._lock:
            self._now_ms += milliseconds(seconds, name="seconds")
            told = list(self._moved)
        for tell in told:
            tell()

    def on_move(self, tell: Callable[[], None]) -> None:
        """Call this after each move."""
        with self._lock:
            self._moved.append(tell)


class _RealClock(Clock):
    """The machine's."""

    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


@dataclass(frozen=True)
class _Record:
    """A message as it lies in a queue; read as confluent-kafka's are."""

    name: str
    number: int
    place: int
    sender_key: bytes | None
    payload: bytes | None
    fields: Headers
    sent_ms: int
    expires_ms: float = math.inf

    def topic(self) -> str:
        return self.name

    def partition(self) -> int:
        return self.number

    def offset(self) -> int:
        return self.place

    def key(self) -> bytes | None:
        return self.sender_key

    def value(self) -> bytes | None:
        return self.payload

    def headers(self) -> Headers:
        return self.fields

    def set_headers(self, value: object) -> None:
        raise NotImplementedError

    def latency(self) -> float:
        return 0.0

    def timestamp(self) -> tuple[int, int]:
        return 1, self.sent_ms


@dataclass(frozen=True)
class MemoryDeadLetter:
    """A dead letter, with the headers that it would have in Kafka."""

    queue_id: str
    key: bytes | None
    payload: bytes | None
    headers: Mapping[str, bytes | None]

    @property
    def reason(self) -> str:
        """Why: as ``DeadLetterReason``'s values."""
        return (self.headers.get("kafkamq-reason") or b"").decode()

    @property
    def error(self) -> str:
        """The text for people."""
        return (self.headers.get("kafkamq-error") or b"").decode()

    @property
    def delivery_count(self) -> int:
        """Deliveries it had."""
        return int(self.headers.get("kafkamq-delivery-count") or b"0")


@dataclass
class _Item:
    record: _Record
    count: int = 1
    deadline_ms: float = math.inf


@dataclass
class _Store:
    """One queue; ``changed`` guards all of it."""

    clock: Clock
    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: Waiting[_Item] = field(default_factory=Waiting)
    letters: list[MemoryDeadLetter] = field(default_factory=list)
    scheduled: set[int] = field(default_factory=set)
    places: Any = field(default_factory=count)

    def notify(self) -> None:
        with self.changed:
            self.changed.notify_all()


class MemoryService(Service):
    """A ``Service`` whose queues are in this process's memory; thread-safe."""

    def __init__(self, namespace: str = "memory", *, clock: Clock | None = None) -> None:
        """``clock``: None is the machine's."""
        super().__init__("memory:1", namespace)
        self.clock = clock if clock is not None else _RealClock()
        self._backend = _MemoryBackend(self.clock)

    @property
    def cluster(self) -> None:
        """There are no brokers."""

    def create_topics(
        self, *, partitions: int = 8, marker_partitions: int = 8, replication_factor: int = -1
    ) -> None:
        """Nothing to create."""

    def dead_letters(self, queue_id: str | None = None) -> list[MemoryDeadLetter]:
        """What was given up, of one queue or of all, in order."""
        return [
            letter
            for name, store in self._backend.stores().items()
            for letter in store.letters
            if queue_id in (None, name)
        ]

    def _queue(self, config: QueueConfig) -> Queue:
        return Queue(self._connections, self._handlers, config, lambda _: self._backend)


class _MemoryBackend:
    """A ``QueueBackend`` that plays each of the others."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._stores: dict[str, _Store] = {}

    def open_consumer(
        self, connections: Connections, queue: QueueConfig, plan: ConsumerPlan
    ) -> Consumer:
        del connections
        return _MemoryConsumer(self._store(queue), queue, plan)

    def open_producer(self, connections: Connections, queue: QueueConfig) -> Producer:
        return _MemoryProducer(self._store(queue), connections.config, queue)

    def create_topics(
        self, config: ServiceConfig, queue: QueueConfig, *, partitions: int, replication_factor: int
    ) -> None:
        del config, partitions, replication_factor
        require(queue.backend, Feature.OWN_TOPIC, f"queue {queue.queue_id!r}")

    def stored_payload(
        self, config: ServiceConfig, record: RecordLike, queue_id: str
    ) -> StoredMessage | None:
        del config
        return StoredMessage(join_key(queue_id, record.key()), record.value(), headers_of(record))

    def stores(self) -> dict[str, _Store]:
        with self._lock:
            return dict(self._stores)

    def _store(self, queue: QueueConfig) -> _Store:
        with self._lock:
            store = self._stores.get(queue.queue_id)
            if store is None:
                store = self._stores[queue.queue_id] = _Store(self._clock)
                self._clock.on_move(store.notify)
            return store


class _MemorySender:
    """What a ``Producer`` needs of a ``Sender``: each record is there at once."""

    def __init__(self, store: _Store, config: ServiceConfig, queue: QueueConfig) -> None:
        self.config = config
        self.namespace = self
        self.tally = SendTally()
        self.reported = 0
        self.is_full = False
        self._store = store
        self._queue = queue

    def facts(self) -> NamespaceFacts:
        return _FACTS

    def check(self, doing: str) -> None:
        """It cannot fail."""

    def flush(self, timeout_s: float) -> None:
        """Nothing to wait for."""

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int,
        headers: Headers,
        on_delivery: Callable[[None, Any], None],
        delay_ms: int = 0,
    ) -> None:
        store, backend = self._store, self._queue.backend
        ttl_ms = read_message_headers(headers).ttl_ms
        with store.changed:
            sent_ms = store.clock.now_ms() + delay_ms
            expires_ms = math.inf if ttl_ms is None else sent_ms + ttl_ms
            place = next(store.places)
            record = _Record(topic, partition, place, key, value, headers, sent_ms, expires_ms)
            if delay_ms:
                store.scheduled.add(place)
            lane: Hashable = None if backend in (Backend.MARKERS, Backend.SHARE) else key
            if backend is Backend.CLAIMS:  # by partition, and there is one
                lane = _PARTITION
            store.waiting.add(lane, _Item(record), due_ms=sent_ms if delay_ms else None)
            store.changed.notify_all()
        on_delivery(None, record)


class _MemoryProducer(Producer):
    def __init__(self, store: _Store, config: ServiceConfig, queue: QueueConfig) -> None:
        self._memory = _MemorySender(store, config, queue)
        super().__init__(cast("Sender", self._memory), queue)
        self._store = store

    def cancel(self, token: ScheduleToken) -> None:
        self._require(Feature.DELAYED_SEND, "cancel()")
        with self._store.changed:
            place = token.offset
            if place not in self._store.scheduled:
                raise StateError(f"no delayed message of queue {self.queue_id!r} waits there")
            self._store.scheduled.discard(place)
            self._store.waiting.keep(lambda _, item: item.record.place != place)

    def _schedule(
        self, payload: bytes | None, key: bytes | None, headers: Headers, id: str, delay_ms: int
    ) -> Delivery:
        delivery = Delivery(self._sender, self.queue_id, id, self._topic, True)
        self._memory.produce(
            self._topic, payload, key, 0, headers, delivery._report, delay_ms=delay_ms
        )
        return delivery


class _MemoryLetters:
    """Keeps dead letters in their queue's store."""

    def __init__(self, store: _Store, queue_id: str) -> None:
        self._store = store
        self._queue_id = queue_id

    def park(self, message: TopicMessage, reason: DeadLetterReason, error: str) -> Future[None]:
        headers = dead_letter_headers(
            message.raw_headers,
            reason=reason,
            error=error,
            delivery_count=message.delivery_count,
            origin=Origin(message.topic, 0, message.message_id.offset, message.timestamp_ms),
            queue_id=self._queue_id,
        )
        letter = MemoryDeadLetter(self._queue_id, message.key, message.payload, dict(headers))
        with self._store.changed:
            self._store.letters.append(letter)
        parked: Future[None] = Future()
        parked.set_result(None)
        return parked

    def close(self, timeout_s: float) -> None:
        del timeout_s


class _MemoryConsumer(TopicConsumer):
    """Leases by the service's clock; a live consumer renews those of what it holds."""

    def __init__(self, store: _Store, queue: QueueConfig, plan: ConsumerPlan) -> None:
        super().__init__(queue, _MemoryLetters(store, queue.queue_id), plan.on_lease_lost)
        self._store = store
        self._changed = store.changed
        self._is_ordered = plan.ordering != "unordered"
        self._renews = has(queue.backend, Feature.LONG_HANDLERS)

    def _now_ms(self) -> int:
        return self._store.clock.now_ms()

    def moment_s(self, clock_ms: float) -> float:
        return clock_ms / 1000  # of the service's clock

    def receive_many(self, n: int, timeout: float = 1.0) -> list[Message]:
        """As ever; ``on_lease_lost`` has run when it returns, so that tests need not wait."""
        messages = super().receive_many(n, timeout)
        self._lost_leases.finish(_TOLD_S)
        return messages

    def _fill(self, n: int) -> None:
        store, now_ms = self._store, self._now_ms()
        self._expire(now_ms)
        while len(self._ready) < n:
            taken = store.waiting.take(now_ms)
            if taken is None:
                return
            lane, item = taken
            store.scheduled.discard(item.record.place)
            if lane is not None and not self._is_ordered:
                store.waiting.done(lane)  # the next one of its key need not wait
                lane = None
            deadline_ms = math.inf if self._renews else now_ms + self._queue.redelivery_timeout_ms
            message = TopicMessage(
                self,
                item.record,
                delivery_count=item.count,
                deadline_ms=deadline_ms,
                place=(lane, item),
            )
            if now_ms > item.record.expires_ms:
                self._claim_unseen(message)
                self._park(message, DeadLetterReason.EXPIRED, "")
                continue
            self._ready.append(message)

    def _claim_unseen(self, message: TopicMessage) -> None:
        message.state = type(message.state).SETTLED

    def _expire(self, now_ms: int) -> None:
        """Leases that have ended: the messages come again, or were delivered often enough."""
        for message in list(self._held.values()):
            if now_ms > message._deadline_ms:
                self._lose(message)
                if message.delivery_count >= self.max_deliveries:
                    self._park(message, DeadLetterReason.MAX_DELIVERIES, "")
                else:
                    self._again(message, 0)

    def _done(self, message: TopicMessage) -> None:
        lane, _ = _place(message)
        with self._store.changed:
            self._store.waiting.done(lane)
            self._store.changed.notify_all()

    def _again(self, message: TopicMessage, delay_ms: int) -> None:
        lane, item = _place(message)
        if not has(self._queue.backend, Feature.RETRY_DELAY):
            delay_ms = 0
        with self._store.changed:
            again = _Item(item.record, message.delivery_count + 1)
            self._store.waiting.retry(lane, again, self._now_ms() + delay_ms)
            self._store.changed.notify_all()

    def _confirm(self, timeout_s: float) -> None:
        del timeout_s

    def _end(self, timeout_s: float) -> None:
        """What was not handed out is released; what was comes again, its delivery counted."""
        del timeout_s
        with self._store.changed:
            while self._ready:
                message = self._ready.pop()
                assert isinstance(message, TopicMessage)
                lane, item = _place(message)
                self._store.waiting.put_back(lane, item)
            for message in list(self._held.values()):
                self._lose(message)
                if message.delivery_count >= self.max_deliveries:
                    self._park(message, DeadLetterReason.MAX_DELIVERIES, "")
                else:
                    self._again(message, 0)
            self._store.changed.notify_all()


def _place(message: TopicMessage) -> tuple[Hashable, _Item]:
    place = message.place
    assert isinstance(place, tuple)
    lane, item = place
    assert isinstance(item, _Item)
    return lane, item
