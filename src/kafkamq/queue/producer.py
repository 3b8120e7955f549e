"""Sends messages to one queue, now or later.

``Producer`` makes records of messages, ``Delivery`` says what becomes of each, and ``Sender`` is
the client that all producers to one topic share.
"""

from __future__ import annotations

import atexit
import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TypeAlias

from kafkamq.config import QueueConfig, milliseconds, utf8, wait_seconds
from kafkamq.errors import ConfigError, KafkaMQError
from kafkamq.metrics import catalog
from kafkamq.queue.names import uuid7
from kafkamq.queue.namespace import Namespace
from kafkamq.queue.rules.capabilities import Feature, require
from kafkamq.queue.wire.headers import (
    ID,
    OWN_HEADER_BYTES,
    checked_headers,
    checked_id,
    message_headers,
    payload_bytes,
)
from kafkamq.queue.wire.keys import key_partition
from kafkamq.transport.errors import KafkaError, broker_error
from kafkamq.transport.producer import NewRecord, ThreadedProducer
from kafkamq.transport.record import Record
from kafkamq.transport.settings import producer_settings
from kafkamq.types import Headers, OutgoingMessage, ScheduleToken, SentMessage

# librdkafka's ``queue.buffering.max.messages``: when it is reached, ``send`` waits.
MAX_QUEUED = 100_000
MAX_EXIT_S = 10.0
SEND_TIMEOUT_S = 30.0
_FOLD = 1000
Notes: TypeAlias = "deque[tuple[int, float]]"
_TOGETHER = 500
_Receipt = tuple[int, int, int]
"""Partition, offset and broker timestamp in milliseconds of a message that was written."""

_SLICE_S = 0.25
_log = logging.getLogger(__name__)
# One lock serves all deliveries: it is taken only where somebody waits.
_lock = threading.Lock()


class Producer:
    """Sends to one queue; idempotent, acks=all, thread-safe.

    Without a key the partition is random, with one it follows from the key (R26's murmur2).
    """

    _unkeyed: bytes | None = None
    _is_stamped = False

    def __init__(self, sender: Sender, queue: QueueConfig) -> None:
        """Only ``Queue.producer`` makes producers, of this class or of a subclass."""
        self._sender = sender
        self._namespace = sender.namespace
        self._queue = queue
        self._topic = queue.topic or self._namespace.config.message_topic
        self._destination = Destination(sender, queue.queue_id, self._topic)

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def __repr__(self) -> str:
        return f"<Producer of {self.queue_id!r}>"

    @property
    def queue_id(self) -> str:
        return self._queue.queue_id

    @property
    def is_full(self) -> bool:
        """Return whether ``send`` would wait, as messages come faster than Kafka takes them."""
        return self._sender.is_full

    def send(
        self,
        payload: bytes | None,
        *,
        key: bytes | str | None = None,
        headers: Mapping[str, bytes] | Headers | None = None,
        delay: float | timedelta = 0.0,
        ttl: float | timedelta | None = None,
        id: str | None = None,
    ) -> Delivery:
        """Queue one message and return; the delivery says what became of it.

        Args:
            payload: Anything; None is a null payload, which is not the same as an empty one.
            key: Messages of one key are in one partition.
            headers: Travel with every copy, untouched; a tuple of pairs can name one twice. Names
                ``kafkamq-...`` that the protocol uses are refused.
            delay: Seconds until it enters the queue. The token of the confirmed send cancels it.
            ttl: Seconds in the queue, from its first copy's append, after which it is not handed
                out any more but goes to the dead letters as ``expired``.
            id: A label that travels with every copy; a UUIDv7 when not given. It does not
                deduplicate.

        Raises:
            ConfigError: Something of a wrong type, a negative delay or ttl, a header name of the
                protocol's, or a message that is larger than what could be copied (R11). Or the
                backend has no delays, or no TTL.
            DeadlineExceededError: The send queue stayed full for 30 s.
            StateError: The service is closed, or this is a forked child.
        """
        if delay:
            self._require(Feature.DELAYED_SEND, "send(delay=...)")
            delay_ms = milliseconds(delay, name="delay")
        record, delivery = self._outgoing(payload, key, headers, ttl, id)
        if delay and delay_ms:
            return self._schedule(payload, record[1], record[3] or (), delivery._id, delay_ms)
        self._sender.produce(self._topic, *record)
        return delivery

    def send_many(self, messages: Iterable[OutgoingMessage]) -> list[Delivery]:
        """Queue many messages; as ``send``, one after the other."""
        deliveries: list[Delivery] = []
        waiting: list[NewRecord] = []
        # What an iterator is still to bring may take long.
        together = _TOGETHER if isinstance(messages, Sequence) else 1
        try:
            for message in messages:
                if message.delay:
                    self._produce_all(waiting)
                    delivery = self.send(
                        message.payload,
                        key=message.key,
                        headers=message.headers,
                        delay=message.delay,
                        ttl=message.ttl,
                        id=message.id,
                    )
                else:
                    record, delivery = self._outgoing(
                        message.payload, message.key, message.headers, message.ttl, message.id
                    )
                    waiting.append(record)
                    if len(waiting) >= together:
                        self._produce_all(waiting)
                deliveries.append(delivery)
        finally:
            self._produce_all(waiting)
        return deliveries

    def _produce_all(self, waiting: list[NewRecord]) -> None:
        """Queue these in their order; they are forgotten first: an interrupt sends none twice."""
        records, done = list(waiting), 0
        waiting.clear()
        while done < len(records):
            done += self._sender.produce_all(self._topic, records[done:])
            if done < len(records):
                # It waits for room, or says why the next record is refused.
                self._sender.produce(self._topic, *records[done])
                done += 1

    def _outgoing(
        self,
        payload: bytes | None,
        key: bytes | str | None,
        headers: Mapping[str, bytes] | Headers | None,
        ttl: float | timedelta | None,
        id: str | None,
    ) -> tuple[NewRecord, Delivery]:
        """Check a message, and make its record and its delivery."""
        size = OWN_HEADER_BYTES
        size += len(payload) if isinstance(payload, bytes) else payload_bytes(payload)
        record_key = self._unkeyed if key is None else self._key_of(key)
        if record_key is not None:
            size += len(record_key)
        if id is None:
            id = uuid7()
        else:
            size += len(checked_id(id))
        if headers is None and ttl is None and not self._is_stamped:
            every: Headers = ((ID, id.encode()),)
        else:
            own, own_bytes = checked_headers(headers)
            size += own_bytes
            ttl_ms = None
            if ttl is not None:
                self._require(Feature.TTL, "send(ttl=...)")
                ttl_ms = milliseconds(ttl, name="ttl")
            every = self._headers_of(own, id, ttl_ms)
        facts = self._namespace.facts()
        if size > facts.max_message_bytes:
            raise ConfigError(
                f"the message has {size} bytes with key and headers: {self._topic} and "
                f"{self._namespace.config.dead_letter_topic} take {facts.max_message_bytes} at most"
                " (max.message.bytes less what a copy or a dead letter adds); send a reference to"
                " the data instead"
            )
        count = facts.message_partitions
        if key is None or record_key is None:
            partition = int(random.random() * count)
        else:
            partition = key_partition(record_key, count)
        delivery = Delivery(self._destination, id)
        return (payload, record_key, partition, every, delivery._report), delivery

    def cancel(self, token: ScheduleToken) -> None:
        """Take back a delayed message; returns when the cancellation is in the log.

        Args:
            token: ``SentMessage.schedule`` of the confirmed send.

        Raises:
            ConfigError: No token; a ``SentMessage`` is none, its offset may name another message.
                Or the backend has no delayed sends.
            StateError: It is too late, the message enters the queue; or there is no such message.
            BrokerError, DeadlineExceededError: Kafka did not confirm; ask again.
        """
        del token
        self._require(Feature.DELAYED_SEND, "cancel()")
        raise ConfigError(f"cancel: nothing is delayed in topic {self._topic}")

    def flush(self, timeout: float | timedelta = 30.0) -> None:
        """Wait until all sends of this service so far are confirmed or failed; drops nothing.

        Raises:
            ConfigError: ``timeout`` is no time.
            DeadlineExceededError: Not in time; the sends go on.
        """
        timeout_s = wait_seconds(timeout, may_be_endless=True)
        self._sender.check("flushing")
        self._sender.flush(timeout_s)

    def _headers_of(self, own: Headers, id: str, ttl_ms: int | None) -> Headers:
        return message_headers(own, id=id, ttl_ms=ttl_ms)

    # What a backend with a shared topic, or with delays, does otherwise.

    def _key_of(self, key: bytes | str) -> bytes:
        record_key = utf8(key, name="key") if isinstance(key, str) else key
        payload_bytes(record_key, name="key")
        return record_key

    def _schedule(
        self, payload: bytes | None, key: bytes | None, headers: Headers, id: str, delay_ms: int
    ) -> Delivery:
        raise ConfigError(f"delay: topic {self._topic} is not the namespace's, which alone has it")

    def _require(self, feature: Feature, asked: str) -> None:
        require(self._queue.backend, feature, f"queue {self.queue_id!r}: {asked}")


class Destination:
    """It says where messages of a queue go, and has notes of those that are there.

    Delayed ones are SCHEDULEs (``is_delayed``); cancellations are not counted (``is_counted``).
    """

    __slots__ = ("is_delayed", "notes", "queue_id", "sender", "topic")

    def __init__(
        self,
        sender: Sender,
        queue_id: str,
        topic: str,
        *,
        is_delayed: bool = False,
        is_counted: bool = True,
    ) -> None:
        self.sender = sender
        self.queue_id = queue_id
        self.topic = topic
        self.is_delayed = is_delayed
        self.notes: Notes = deque(maxlen=0)
        if is_counted:
            self.notes = sender.recorder.notes_of(queue_id, is_delayed=is_delayed)

    def doing(self) -> str:
        return f"sending to {self.topic}"


class Delivery:
    """The outcome of one send, like a future; thread-safe.

    Kafka confirms or fails every send within ``message.timeout.ms`` (30 s).
    """

    __slots__ = ("_callbacks", "_destination", "_id", "_outcome")

    def __init__(self, destination: Destination, id: str) -> None:
        self._destination = destination
        self._id = id
        self._outcome: _Receipt | KafkaError | None = None
        self._callbacks: list[Callable[[Delivery], None]] | None = None

    def done(self) -> bool:
        return self._outcome is not None

    def result(self, timeout: float | timedelta | None = None) -> SentMessage:
        """Return where the message stands; waits for it.

        Args:
            timeout: Seconds; None: until Kafka has decided.

        Raises:
            ConfigError: ``timeout`` is no time.
            BrokerError: It failed.
            DeadlineExceededError: Not known in time; the send goes on, ask again.
        """
        if not self.done():
            self._wait(None if timeout is None else wait_seconds(timeout, may_be_endless=True))
        outcome = self._outcome
        if not isinstance(outcome, tuple):
            assert outcome is not None
            raise broker_error(outcome, self._destination.doing()) from None
        queue_id, topic, token = self._destination.queue_id, self._destination.topic, None
        partition, offset, timestamp_ms = outcome
        if self._destination.is_delayed:
            token = ScheduleToken(queue_id, partition, offset)
        return SentMessage(queue_id, self._id, topic, partition, offset, timestamp_ms, token)

    def add_done_callback(self, function: Callable[[Delivery], None]) -> None:
        """Call ``function(delivery)`` when it is done, at once if it is done already.

        It is called by the thread that serves delivery reports: keep it short.
        """
        with _lock:
            self._callbacks = [*(self._callbacks or ()), function]
        if self.done():
            # It may have ended since: the one that takes the callbacks calls them.
            self._call_back()

    def _wait(self, timeout: float | None) -> None:
        is_done = threading.Event()

        def told(_: Delivery) -> None:
            is_done.set()

        self.add_done_callback(told)
        deadline_s = None if timeout is None else time.monotonic() + timeout
        doing = self._destination.doing()
        try:
            while True:
                left_s = _SLICE_S if deadline_s is None else deadline_s - time.monotonic()
                if is_done.wait(max(0.0, min(left_s, _SLICE_S))) or self.done():
                    return
                self._destination.sender.check(doing)
                if left_s <= 0:
                    raise self._destination.sender.watch.deadline(doing, timeout or 0.0)
        finally:
            with _lock:
                left = [each for each in self._callbacks or () if each is not told]
                self._callbacks = left or None

    def _report(self, error: KafkaError | None, record: Record) -> None:
        destination = self._destination
        try:
            if error is None:
                partition = record.partition() or 0
                self._outcome = partition, record.offset() or 0, record.timestamp()[1]
                destination.notes.append((partition, record.latency() or 0.0))
            else:
                # First: after a fatal error of the client the next line may fail.
                self._outcome = error
                self._outcome = destination.sender.failed(error)
                destination.sender.recorder.failed(destination.queue_id)
            if self._callbacks is not None:
                self._call_back()
        finally:
            destination.sender.reported += 1

    def _call_back(self) -> None:
        with _lock:
            callbacks, self._callbacks = self._callbacks, None
        for function in callbacks or ():
            try:
                function(self)
            except Exception:  # noqa: BLE001, PERF203 - the user's code must not stop reports
                _log.exception("a done callback of a delivery failed")


class Sender(ThreadedProducer):
    """All producers of a service share it; thread-safe."""

    def __init__(self, namespace: Namespace, **more: object) -> None:
        config = namespace.config
        settings = producer_settings(config, queue_buffering_max_messages=MAX_QUEUED, **more)
        self.namespace = namespace
        self.recorder = SendRecorder()
        super().__init__(
            config,
            settings,
            name="kafkamq-sender",
            owner="Service",
            verb="sending",
            max_block_s=SEND_TIMEOUT_S,
            on_turn=self._look_after,
        )
        atexit.register(self._flush_at_exit)

    @property
    def is_full(self) -> bool:
        return len(self) >= MAX_QUEUED - 1000

    def close(self, timeout_s: float = 0.0) -> None:
        try:
            super().close(timeout_s)
        finally:
            atexit.unregister(self._flush_at_exit)
            self.recorder.close()
            self.namespace.close()

    def _look_after(self) -> None:
        self.namespace.refresh_if_old()
        self.recorder.fold()

    def _flush_at_exit(self) -> None:
        if self._is_closed or self._fork.is_forked:
            return
        try:
            self.flush(MAX_EXIT_S)
        except KafkaMQError as error:
            _log.error("the process ends with unconfirmed sends", extra={"error": str(error)})


class SendRecorder:
    """Counts for the producers of one service; thread-safe.

    A delivery report only notes two values; they are counted by the thousand, and when asked.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notes: dict[tuple[str, bool], Notes] = {}
        self._forget = catalog.SENT.watch(self._fold_now)

    def notes_of(self, queue_id: str, *, is_delayed: bool) -> Notes:
        """Make, or find, what delivery reports of a queue note their sends in."""
        with self._lock:
            return self._notes.setdefault((queue_id, is_delayed), deque())

    def failed(self, queue_id: str) -> None:
        catalog.SEND_FAILED.add(1, queue_id)

    def close(self) -> None:
        self._fold_now()
        self._forget()

    def _fold_now(self) -> dict[tuple[str, ...], float]:
        self.fold(least=1)
        return {}

    def fold(self, *, least: int = _FOLD) -> None:
        """Count what is noted, of queues with at least so many notes."""
        with self._lock:
            for (queue_id, is_delayed), notes in self._notes.items():
                if len(notes) < least:
                    continue
                noted = [notes.popleft() for _ in range(len(notes))]
                partitions, seconds = zip(*noted, strict=True)
                for partition, count in Counter(partitions).items():
                    # A delayed message is in no partition of the queue yet.
                    catalog.SENT.add(count, queue_id, "" if is_delayed else partition)
                catalog.SEND_SECONDS.observe_each(seconds, queue_id)
