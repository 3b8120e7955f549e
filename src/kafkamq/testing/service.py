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
from typing import Any

from kafkamq.config import QueueConfig, ServiceConfig, milliseconds, utf8
from kafkamq.errors import StateError
from kafkamq.queue.backend import ConsumerPlan, check_order
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.handler import HandlerSpec
from kafkamq.queue.ids import uuid7
from kafkamq.queue.message import Message
from kafkamq.queue.producer import Producer
from kafkamq.queue.queue import Queue
from kafkamq.queue.rules.capabilities import Feature, has, require
from kafkamq.queue.rules.waiting import Waiting
from kafkamq.queue.service import Service
from kafkamq.queue.topic_consumer import TopicConsumer
from kafkamq.queue.topic_message import TopicMessage
from kafkamq.queue.wire.headers import Origin, dead_letter_headers, message_headers
from kafkamq.queue.wire.keys import join_key
from kafkamq.queue.wire.outgoing import checked_headers, checked_id, payload_bytes
from kafkamq.types import Backend, DeadLetterReason, Headers, ScheduleToken, SentMessage

__all__ = ["Clock", "MemoryDeadLetter", "MemoryService"]

_PARTITION = ("partition", 0)

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

    place: int
    name: str
    sender_key: bytes | None
    payload: bytes | None
    fields: Headers
    sent_ms: int
    expires_ms: float = math.inf

    def topic(self) -> str:
        return self.name

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self.place

    def key(self) -> bytes | None:
        return self.sender_key

    def value(self) -> bytes | None:
        return self.payload

    def headers(self) -> list[tuple[str, bytes | None]]:
        return list(self.fields)

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
        self._stores: dict[str, _Store] = {}

    @property
    def cluster(self) -> None:
        """There are no brokers."""

    def create_topics(
        self, *, partitions: int = 8, marker_partitions: int = 8, replication_factor: int = -1
    ) -> None:
        """Nothing to create."""

    def queue(self, queue_id: str, **options: Any) -> Queue:
        """See ``Service.queue``."""
        queue = super().queue(queue_id, **options)
        return _MemoryQueue(self, queue.config)

    def dead_letters(self, queue_id: str | None = None) -> list[MemoryDeadLetter]:
        """What was given up, of one queue or of all, in order."""
        with self._lock:
            stores = list(self._stores.items())
        return [
            letter for name, store in stores for letter in store.letters if queue_id in (None, name)
        ]

    def open_consumer(self, spec: HandlerSpec, plan: ConsumerPlan) -> Consumer:
        """See ``Service.open_consumer``."""
        return self._consumer(spec.queue, plan)

    def _store(self, queue_id: str) -> _Store:
        with self._lock:
            store = self._stores.get(queue_id)
            if store is None:
                store = self._stores[queue_id] = _Store(self.clock)
                self.clock.on_move(store.notify)
            return store

    def _producer(self, config: QueueConfig) -> Producer:
        self._check()
        return _MemoryProducer(self.config, self._store(config.queue_id), config)

    def _consumer(self, config: QueueConfig, plan: ConsumerPlan) -> Consumer:
        self._check()
        ordering = check_order(config, plan)
        consumer = _MemoryConsumer(self._store(config.queue_id), config, plan, ordering)
        with self._lock:
            self._consumers.append(consumer)
        return consumer


class _MemoryQueue(Queue):
    def create_topics(self, *, partitions: int = 8, replication_factor: int = -1) -> None:
        """Nothing to create."""
        require(self._config.backend, Feature.OWN_TOPIC, f"queue {self.queue_id!r}")


class _Delivered:
    """The outcome of a send that has happened."""

    def __init__(self, sent: SentMessage) -> None:
        self._sent = sent

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> SentMessage:
        del timeout
        return self._sent

    def add_done_callback(self, function: Callable[[Any], None]) -> None:
        function(self)


class _MemoryProducer(Producer):
    def __init__(self, config: ServiceConfig, store: _Store, queue: QueueConfig) -> None:
        self._store = store
        self._queue = queue
        self._queue_id = queue.queue_id
        self._topic = queue.topic or config.message_topic

    @property
    def is_full(self) -> bool:
        return False

    def send(  # type: ignore[override]  # a delivery that is done
        self,
        payload: bytes | None,
        *,
        key: bytes | str | None = None,
        headers: Mapping[str, bytes] | None = None,
        delay: float | timedelta = 0.0,
        ttl: float | timedelta | None = None,
        id: str | None = None,
    ) -> _Delivered:
        """See ``Producer.send``."""
        backend = self._queue.backend
        asked = f"queue {self._queue_id!r}: send"
        if delay:
            require(backend, Feature.DELAYED_SEND, f"{asked}(delay=...)")
        if ttl is not None:
            require(backend, Feature.TTL, f"{asked}(ttl=...)")
        payload_bytes(payload)
        delay_ms = milliseconds(delay, name="delay") if delay else 0
        ttl_ms = None if ttl is None else milliseconds(ttl, name="ttl")
        name = uuid7() if id is None else checked_id(id).decode()
        own, _ = checked_headers(headers)
        sender_key = utf8(key, name="key") if isinstance(key, str) else key
        join_key(self._queue_id, sender_key)  # checks it
        store = self._store
        with store.changed:
            now_ms = store.clock.now_ms()
            place = next(store.places)
            expires_ms = math.inf if ttl_ms is None else now_ms + delay_ms + ttl_ms
            record = _Record(
                place,
                self._topic,
                sender_key,
                payload,
                message_headers(own, id=name, ttl_ms=ttl_ms),
                now_ms + delay_ms,
                expires_ms,
            )
            due_ms = now_ms + delay_ms if delay_ms else None
            if delay_ms:
                store.scheduled.add(place)
            lane: Hashable = None if backend in (Backend.MARKERS, Backend.SHARE) else sender_key
            if backend is Backend.CLAIMS:  # by partition, and there is one
                lane = _PARTITION
            store.waiting.add(lane, _Item(record), due_ms=due_ms)
            store.changed.notify_all()
        token = ScheduleToken(self._queue_id, 0, place) if delay_ms else None
        sent = SentMessage(self._queue_id, name, self._topic, 0, place, record.sent_ms, token)
        return _Delivered(sent)

    def cancel(self, token: ScheduleToken) -> None:
        """See ``Producer.cancel``."""
        with self._store.changed:
            place = token.offset
            if place not in self._store.scheduled:
                raise StateError(f"no delayed message of queue {self._queue_id!r} waits there")
            self._store.scheduled.discard(place)
            self._store.waiting.keep(lambda _, item: item.record.place != place)

    def flush(self, timeout: float = 30.0) -> None:
        """Nothing to wait for."""


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

    def __init__(
        self, store: _Store, queue: QueueConfig, plan: ConsumerPlan, ordering: str
    ) -> None:
        super().__init__(queue, _MemoryLetters(store, queue.queue_id), plan.on_lease_lost)
        self._store = store
        self._changed = store.changed
        self._is_ordered = ordering != "unordered"
        self._renews = has(queue.backend, Feature.LONG_HANDLERS)

    def _now_ms(self) -> int:
        return self._store.clock.now_ms()

    def _moment_s(self, clock_ms: float) -> float:
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
