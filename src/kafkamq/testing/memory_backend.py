"""Queues in memory have the queue API without Kafka, on a clock that a test sets.

    service = MemoryService(clock=Clock())
    orders = service.queue("orders")

    @orders.handler()
    def handle(order: dict) -> None: ...

    orders.producer().send(b'{"id": 1}')
    with Worker(service) as worker: ...

A queue behaves as on the backend that it names: what is refused, who counts deliveries, what ends
a lease, when a dead letter is written. The doubles share ``TopicConsumer`` with the backends and
decide by their rules. Consumers of one queue take its messages in turn: partitions have no owners.
Nothing outlives the process.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, cast

from kafkamq.config import Options, QueueConfig, ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.markers.producer import MAX_DELAY_MS
from kafkamq.markers.rules.delivery import Copy, DueCause, Settle, decide
from kafkamq.markers.rules.handout import expires_at_ms, nack_delay_ms
from kafkamq.queue.backend import Connections, ConsumerPlan, Settler, StoredMessage
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.dead_letter_writer import DeadLetterOutbox, TopicOutbox
from kafkamq.queue.message import Message, only_ack
from kafkamq.queue.namespace import NamespaceFacts
from kafkamq.queue.producer import Delivery, Destination, Producer, Sender, SendRecorder
from kafkamq.queue.rules.capabilities import Feature, require
from kafkamq.queue.service import Queue, Service
from kafkamq.queue.topic_consumer import MessageState, TopicConsumer, TopicMessage
from kafkamq.queue.wire.headers import copy_headers, read_message_headers
from kafkamq.queue.wire.keys import join_key
from kafkamq.share.settings import ShareLimits, share_lock_ms
from kafkamq.testing.memory_queue import Clock, Item, MemoryDeadLetter, MemoryQueue, MemoryRecord
from kafkamq.transport.producer import NewRecord, Report
from kafkamq.transport.record import RecordLike, headers_of
from kafkamq.types import (
    Backend,
    DeadLetterReason,
    Headers,
    Marker,
    MarkerType,
    MessageId,
    Outcome,
    ScheduleToken,
)

_TOLD_S = 1.0
_SHARE_LIMITS = ShareLimits(
    min_lock_ms=15_000,
    max_lock_ms=60_000,
    max_deliveries=5,
    max_members=200,
    session_ms=45_000,
    min_session_ms=45_000,
    max_session_ms=60_000,
)
_Held = TopicMessage[tuple[Hashable, Item]]
RETENTION_MS = 7 * 86_400_000
"""Of messages and markers."""
_FACTS = NamespaceFacts(
    message_topic_id=b"",
    message_partitions=1,
    marker_partitions=1,
    message_retention_ms=RETENTION_MS,
    marker_retention_ms=RETENTION_MS,
    max_message_bytes=1_047_564,
    max_marker_bytes=1_113_100,
)
_OWN_TOPIC_BYTES = 1_114_112


class _RealClock(Clock):
    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


class MemoryService(Service):
    """A ``Service`` whose queues are in this process's memory; thread-safe."""

    def __init__(self, namespace: str = "memory", *, clock: Clock | None = None) -> None:
        """``clock``: None is the machine's."""
        super().__init__("memory:1", namespace)
        self.clock = clock if clock is not None else _RealClock()
        self._backend = MemoryBackend(self.clock)

    @property
    def cluster(self) -> None:
        """There are no brokers."""

    def create_topics(
        self,
        *,
        partitions: int = Options.partitions.default,
        marker_partitions: int = Options.marker_partitions.default,
        replication_factor: int = Options.replication_factor.default,
    ) -> None:
        """There is nothing to create, but queues that are used from now on have partitions."""
        if partitions < 1 or marker_partitions < 1:
            raise ConfigError("partitions and marker_partitions must be >= 1")
        self._backend.shared_partitions = partitions

    def dead_letters(self, queue_id: str | None = None) -> list[MemoryDeadLetter]:
        found: list[MemoryDeadLetter] = []
        for queue in self._backend.queues():
            if queue_id in (None, queue.queue_id):
                queue.tick()
                found += queue.letters
        return found

    def _queue(self, config: QueueConfig) -> Queue:
        return Queue(self._connections, self._handlers, config, lambda _: self._backend)


class MemoryBackend:
    """A ``QueueBackend`` that plays all others."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._queues: dict[str, MemoryQueue] = {}
        self.shared_partitions = 1

    def open_consumer(
        self, connections: Connections, queue: QueueConfig, plan: ConsumerPlan
    ) -> Consumer:
        kind = _AtMostOnceDouble if queue.is_at_most_once else _CONSUMERS[queue.backend]
        outbox: DeadLetterOutbox = _MemoryOutbox(self._queue(queue))
        if queue.dead_letter_writer is not None:
            outbox = TopicOutbox(connections.config, queue)
        return kind(self._queue(queue), queue, plan, outbox)

    def open_producer(self, connections: Connections, queue: QueueConfig) -> Producer:
        return MemoryProducer(self._queue(queue), connections.config, queue)

    def open_settler(self, connections: Connections, queue: QueueConfig) -> Settler:
        """Queues in memory have no tokens: nothing here outlives the process."""
        raise ConfigError(f"queue {queue.queue_id!r}: queues in memory have no tokens")

    def create_topics(
        self, config: ServiceConfig, queue: QueueConfig, *, partitions: int, replication_factor: int
    ) -> None:
        """Without it a queue has one partition."""
        del config, replication_factor
        require(queue.backend, Feature.OWN_TOPIC, f"queue {queue.queue_id!r}")
        if partitions < 1:
            raise ConfigError(f"partitions is {partitions}: it must be >= 1")
        self._queue(queue).partitions = partitions

    def stored_payload(
        self, config: ServiceConfig, record: RecordLike, queue_id: str
    ) -> StoredMessage | None:
        del config
        return StoredMessage(join_key(queue_id, record.key()), record.value(), headers_of(record))

    def queues(self) -> list[MemoryQueue]:
        with self._lock:
            return list(self._queues.values())

    def _queue(self, config: QueueConfig) -> MemoryQueue:
        with self._lock:
            queue = self._queues.get(config.queue_id)
            if queue is None:
                queue = self._queues[config.queue_id] = MemoryQueue(config.queue_id, self._clock)
                if config.backend is Backend.MARKERS:
                    queue.partitions = self.shared_partitions
                self._clock.on_move(queue.tick)
            return queue


class _MemoryOutbox:
    def __init__(self, queue: MemoryQueue) -> None:
        self._queue = queue

    def write(
        self, message: Message, reason: DeadLetterReason, error: str, _: object = None
    ) -> Future[None]:
        with self._queue.changed:
            record = cast("_Held", message).place[1].record
            self._queue.give_up(record, message.delivery_count, reason, error)
        written: Future[None] = Future()
        written.set_result(None)
        return written

    def prune(self) -> None: ...

    def close(self, timeout_s: float) -> None:
        del timeout_s


class _MemoryConsumer(TopicConsumer[_Held]):
    """A consumer of ``claims`` holds messages while it lives, and counts deliveries."""

    def __init__(
        self,
        memory: MemoryQueue,
        queue: QueueConfig,
        plan: ConsumerPlan,
        outbox: DeadLetterOutbox,
    ) -> None:
        super().__init__(queue, outbox, plan.on_lease_lost)
        self._memory = memory
        self._ages.wall_ms = memory.clock.now_ms
        self._changed = memory.changed
        self._ordering = plan.ordering
        # A lock that no broker gives is refused here.
        self._deadline_ms()
        with memory.changed:
            memory.consumers.append(self)

    def _now_ms(self) -> int:
        return self._memory.clock.now_ms()

    def moment_s(self, clock_ms: float) -> float:
        return clock_ms / 1000

    def receive_many(self, n: int, timeout: float | timedelta = 1.0) -> list[Message]:
        """Besides, ``on_lease_lost`` has run when it returns, so that tests need not wait."""
        messages = super().receive_many(n, timeout)
        self._lost_leases.finish(_TOLD_S)
        return messages

    def expire(self, now_ms: int) -> None:
        for message in list(self._held.values()):
            if now_ms > message._deadline_ms:
                self._lose(message)
                self._lease_ended(message)

    def _fill(self, n: int) -> None:
        memory = self._memory
        memory.tick()
        for item in memory.arrived:
            memory.waiting.add(self._shard_of(item.record), item)
        memory.arrived.clear()
        while len(self._ready) < n:
            taken = memory.waiting.take(self._now_ms())
            if taken is None:
                return
            item = taken[1]
            message = TopicMessage(
                self,
                item.record,
                delivery_count=item.count,
                deadline_ms=self._deadline_ms(),
                place=taken,
            )
            if self._is_alive(message):
                self._ready.append(message)
            else:
                message.state = MessageState.ACKNOWLEDGED

    def _shard_of(self, record: MemoryRecord) -> Hashable:
        if self._ordering == "partition":
            return record.number
        if self._ordering != "key":
            return None
        if record.own_key is None and self._queue.null_keys == "serial":
            return record.number
        return record.own_key

    def _done(self, message: _Held) -> None:
        with self._memory.changed:
            self._memory.waiting.done(message.place[0])
            self._memory.changed.notify_all()

    def _again(self, message: _Held, delay_ms: int) -> None:
        shard, item = message.place
        again = Item(item.record, message.delivery_count + 1)
        with self._memory.changed:
            self._memory.waiting.retry(shard, again, self._now_ms() + delay_ms)
            self._memory.changed.notify_all()

    def _confirm(self, timeout_s: float) -> None:
        del timeout_s

    def _end(self, timeout_s: float) -> None:
        del timeout_s
        memory = self._memory
        with memory.changed:
            for each in reversed(self._ready):
                self._leave(each, is_seen=False)
            for message in reversed(list(self._held.values())):
                self._leave(message, is_seen=True)
            self._held.clear()
            self._ready.clear()
            memory.consumers.remove(self)
            self._ended()
            memory.changed.notify_all()

    # What backends do otherwise.

    def _deadline_ms(self) -> float:
        return math.inf

    def _is_alive(self, message: _Held) -> bool:
        """Return whether it may be handed out; if not, it is seen to."""
        del message
        return True

    def _lease_ended(self, message: _Held) -> None:
        """Deliver again what was held for too long; with ``changed`` held."""
        self._again(message, 0)

    def _leave(self, message: _Held, *, is_seen: bool) -> None:
        """The consumer ends without a verdict on it."""
        del is_seen
        self._memory.waiting.put_back(*message.place)

    def _ended(self) -> None:
        if not self._memory.consumers:
            self._memory.forget_deliveries()


class _OffsetsDouble(_MemoryConsumer):
    """A consumer as of ``claims``, which is told of what it holds when it leaves the group."""

    def _leave(self, message: _Held, *, is_seen: bool) -> None:
        self._lose(message)
        super()._leave(message, is_seen=is_seen)


class _MarkersDouble(_MemoryConsumer):
    """Leases are renewed up to ``max_lease``; a tracker writes copies and dead letters."""

    def moment_s(self, clock_ms: float) -> float:
        return min(clock_ms, self._now_ms() + self._queue.redelivery_timeout_ms) / 1000

    def _deadline_ms(self) -> float:
        return self._now_ms() + self._queue.max_lease_ms

    def _is_alive(self, message: _Held) -> bool:
        expires_ms = _expires_ms(message)
        if 0 < expires_ms < self._now_ms():  # R10
            self._due(message, DueCause.REJECTED, 0, DeadLetterReason.EXPIRED.value)
            return False
        return True

    def _lease_ended(self, message: _Held) -> None:
        self._due(message, DueCause.MAX_LEASE, 0)

    def _judge(self, message: _Held, outcome: Outcome, reason: str, delay_ms: int | None) -> None:
        if outcome is Outcome.REJECT:
            self._due(message, DueCause.REJECTED, 0, reason)
            return
        wait_ms = nack_delay_ms(
            delay_ms,
            backoff=self._queue.backoff,
            delivery_count=message.delivery_count,
            retention_ms=RETENTION_MS,
            random_unit=random.random(),
        )
        self._due(message, DueCause.NACKED, wait_ms, reason)

    def _leave(self, message: _Held, *, is_seen: bool) -> None:
        if is_seen:
            self._due(message, DueCause.LEASE_ENDED, self._queue.redelivery_timeout_ms)
        else:
            self._memory.waiting.put_back(*message.place)

    def _ended(self) -> None:
        """Deliveries are counted by the log."""

    def _due(self, message: _Held, cause: DueCause, wait_ms: int, error: str = "") -> None:
        memory, record, now_ms = self._memory, message.place[1].record, self._now_ms()
        begin_ms = int(message._deadline_ms) - self._queue.max_lease_ms
        start = Marker(
            MarkerType.START,
            delivery_count=message.delivery_count,
            expires_at_ms=_expires_ms(message),
            max_deliveries=self._queue.max_deliveries,
        )
        settle = Settle(
            start_offset=0,
            message_id=MessageId(record.number, record.place),
            of_schedule=False,
            cause=cause,
            begin_ms=begin_ms,
            clock_ms=now_ms + wait_ms,
            deadline_ms=now_ms + wait_ms,
            verdict_offset=-1,
        )
        with memory.changed:
            memory.at(now_ms + wait_ms, partial(_fire, memory, record, settle, start, error))


def _fire(
    memory: MemoryQueue, record: MemoryRecord, settle: Settle, start: Marker, error: str
) -> None:
    """Do what a tracker does with a message that is due (R14)."""
    decision = decide(
        settle,
        start,
        start_timestamp_ms=settle.begin_ms,
        max_deliveries=start.max_deliveries,
        error=error,
    )
    if isinstance(decision, Copy):
        headers = copy_headers(
            record.fields, delivery_count=decision.delivery_count, origin=record.origin()
        )
        copy = memory.record(record.log, record.number, record.own_key, record.payload, headers)
        memory.add(copy, decision.delivery_count)
    else:
        memory.give_up(record, start.delivery_count, decision.reason, decision.error)


def _expires_ms(message: _Held) -> int:
    read = read_message_headers(message.raw_headers)
    if read.ttl_ms is None:
        return 0
    since_ms = message.timestamp_ms if read.origin is None else read.origin.timestamp_ms
    return expires_at_ms(read.ttl_ms, since_ms)


class _ShareDouble(_MemoryConsumer):
    """Locks end and are not renewed; a broker counts deliveries and has no delays."""

    @cached_property
    def _lock_ms(self) -> int:
        return share_lock_ms(self._queue, _SHARE_LIMITS)

    @property
    def max_deliveries(self) -> int:
        return _SHARE_LIMITS.handed_out(self._queue.max_deliveries)

    def _deadline_ms(self) -> float:
        return self._now_ms() + self._lock_ms

    def _is_alive(self, message: _Held) -> bool:
        if message.delivery_count <= self.max_deliveries:
            return True
        message._count -= 1
        error_text = f"{message._count} deliveries ended without a verdict, or were given back"
        self._write_dead_letter(message, DeadLetterReason.MAX_DELIVERIES, error_text)
        return False

    def _again(self, message: _Held, delay_ms: int) -> None:
        del delay_ms
        super()._again(message, 0)

    def _leave(self, message: _Held, *, is_seen: bool) -> None:
        if is_seen or message.delivery_count < self.max_deliveries:
            self._again(message, 0)
        else:
            # Another delivery would be its last: the queue's tail gets a copy.
            self._memory.waiting.put_back(*message.place)

    def _ended(self) -> None:
        """Deliveries are counted by the broker."""


class _AtMostOnceDouble(_MarkersDouble):
    """What is handed out is done, whatever becomes of it."""

    def receive_many(self, n: int, timeout: float | timedelta = 1.0) -> list[Message]:
        messages = super().receive_many(n, timeout)
        for message in messages:
            super()._done(cast("_Held", message))
        return messages

    def _done(self, message: _Held) -> None:
        """Do nothing: the message was done when it was received."""

    def _deadline_ms(self) -> float:
        return math.inf

    def _is_alive(self, message: _Held) -> bool:
        return not 0 < _expires_ms(message) < self._now_ms()

    def _leave(self, message: _Held, *, is_seen: bool) -> None:
        if not is_seen:
            super()._leave(message, is_seen=is_seen)

    def acknowledge(self, message: _Held, outcome: Outcome, **facts: Any) -> None:
        only_ack(message, outcome.name.lower())
        super().acknowledge(message, outcome, **facts)

    def extend(self, message: _Held, extension_ms: int) -> None:
        only_ack(message, "extend")


_CONSUMERS: dict[Backend, type[_MemoryConsumer]] = {
    Backend.MARKERS: _MarkersDouble,
    Backend.OFFSETS: _OffsetsDouble,
    Backend.SHARE: _ShareDouble,
    Backend.CLAIMS: _MemoryConsumer,
}


class MemorySender:
    """What a ``Producer`` needs of a ``Sender``, and of its namespace."""

    is_full = False

    def __init__(self, queue: MemoryQueue, config: ServiceConfig, is_shared: bool) -> None:
        self.config = config
        self.namespace = self
        self.recorder = SendRecorder()
        self.reported = 0
        self._queue = queue
        self._is_shared = is_shared

    def facts(self) -> NamespaceFacts:
        facts = replace(_FACTS, message_partitions=self._queue.partitions)
        return facts if self._is_shared else replace(facts, max_message_bytes=_OWN_TOPIC_BYTES)

    def check(self, doing: str) -> None:
        """It does not fail."""

    def flush(self, timeout_s: float) -> None:
        """Each send has happened."""

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int,
        headers: Headers | None,
        on_delivery: Report,
    ) -> None:
        with self._queue.changed:
            record = self._queue.record(topic, partition, key, value, headers or ())
            self._queue.add(record)
        on_delivery(None, cast("Any", record))

    def produce_all(self, topic: str, records: Sequence[NewRecord]) -> int:
        for record in records:
            self.produce(topic, *record)
        return len(records)


class MemoryProducer(Producer):
    """A producer whose messages are there at once."""

    def __init__(self, queue: MemoryQueue, config: ServiceConfig, settings: QueueConfig) -> None:
        sender = MemorySender(queue, config, settings.backend is Backend.MARKERS)
        super().__init__(cast("Sender", sender), settings)
        self._memory = queue

    def cancel(self, token: ScheduleToken) -> None:
        self._require(Feature.DELAYED_SEND, "cancel()")
        if not isinstance(token, ScheduleToken):
            raise ConfigError(f"token is a {type(token).__name__}: give a schedule")
        with self._memory.changed:
            self._memory.cancel(token.offset)

    def _schedule(
        self, payload: bytes | None, key: bytes | None, headers: Headers, id: str, delay_ms: int
    ) -> Delivery:
        if delay_ms > MAX_DELAY_MS:
            raise ConfigError(f"delay is {delay_ms / 1000:g} s: ten years at most")
        queue, topic = self._memory, self._topic
        log = self._namespace.config.marker_topic
        partition = int(random.random() * queue.partitions)

        def append() -> None:
            queue.add(queue.record(topic, partition, key, payload, headers))

        delivery = Delivery(Destination(self._sender, self.queue_id, log, is_delayed=True), id)
        with queue.changed:
            marker = queue.record(log, 0, None, None, ())
            queue.schedule(marker, queue.clock.now_ms() + delay_ms, append)
        delivery._report(None, cast("Any", marker))
        return delivery
