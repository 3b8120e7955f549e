"""A producer in memory has a bounded queue, reports inside ``poll`` and ``flush``, fatal errors."""

from __future__ import annotations

import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, consistent, murmur2

from kafkamq.transport.memory.client import Transactional, int_of
from kafkamq.transport.memory.cluster import StaleEpochError
from kafkamq.transport.memory.state import (
    RETRIED,
    RETRY_S,
    Fault,
    LogRecord,
    Partition,
    kafka_error,
)
from kafkamq.types import PartitionId

_BATCH_BYTES = 70
_HEADER_BYTES = 4
_NO_TIMESTAMP = (0, -1)
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Queued:
    place: PartitionId
    value: bytes | None
    key: bytes | None
    headers: list[tuple[str, bytes | None]] | None
    callback: Callable[[KafkaError | None, Message], object] | None
    queued_s: float
    deadline_s: float
    not_before_s: float = 0.0
    fault: Fault | None = None
    fault_known: bool = False
    error: KafkaError | None = None
    offset: int = -1
    timestamp: tuple[int, int] = _NO_TIMESTAMP

    @property
    def size(self) -> int:
        size = _BATCH_BYTES + len(self.value or b"") + len(self.key or b"")
        for name, value in self.headers or ():
            size += _HEADER_BYTES + len(name) + len(value or b"")
        return size

    def message(self) -> Message:
        """Return it as the delivery report gets it."""
        told: dict[str, Any] = {} if self.offset < 0 else {"offset": self.offset}
        return Message(
            topic=self.place[0],
            partition=self.place[1],
            key=self.key,
            value=self.value,
            error=self.error,
            timestamp=self.timestamp,
            latency=time.monotonic() - self.queued_s,
            **told,
        )


class Producer(Transactional):
    """It works as confluent_kafka's: idempotent, and transactional with a ``transactional.id``."""

    _closed_text = "Producer has been closed"

    def __init__(self, settings: Mapping[str, Any], logger: object = None) -> None:
        super().__init__(settings, logger)
        default_ms = 300_000 if self.transactional_id is None else int(self._transaction_ms)
        timeout_ms = int_of(settings, default_ms, "message.timeout.ms", "delivery.timeout.ms")
        self._timeout_s = timeout_ms / 1000 if timeout_ms else math.inf
        self._max_queued = int_of(settings, 100_000, "queue.buffering.max.messages")
        self._max_bytes = int_of(settings, 1_000_000, "message.max.bytes")
        self._is_murmur2 = "murmur2" in str(settings.get("partitioner", ""))
        propagation_ms = int_of(settings, 30_000, "topic.metadata.propagation.max.ms")
        self._propagation_s = propagation_ms / 1000
        self._missing: dict[str, float] = {}
        self._queues: dict[PartitionId, deque[_Queued]] = {}
        self._unanswered: list[_Queued] = []
        self._reports: deque[_Queued] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __bool__(self) -> bool:
        """A producer is one, also without records."""
        return True

    # ---- queueing

    def produce(
        self,
        topic: str,
        value: str | bytes | None = None,
        key: str | bytes | None = None,
        partition: int = -1,
        callback: Callable[[KafkaError | None, Message], object] | None = None,
        on_delivery: Callable[[KafkaError | None, Message], object] | None = None,
        timestamp: int = 0,
        headers: Any = None,
    ) -> None:
        with self.cluster.changed:
            self._check_open()
            error = self._refusal(topic, partition, value, key)
            if error is not None:
                if error.code() == KafkaError._QUEUE_FULL:
                    raise BufferError("Local: Queue full")
                raise KafkaException(error)
            report = on_delivery if callback is None else callback
            self._queue(topic, value, key, partition, report, headers)
            self.cluster.changed.notify_all()

    def produce_batch(
        self,
        topic: str,
        messages: list[dict[str, Any]],
        partition: int = -1,
        callback: Callable[[KafkaError | None, Message], object] | None = None,
        on_delivery: Callable[[KafkaError | None, Message], object] | None = None,
    ) -> int:
        with self.cluster.changed:
            self._check_open()
            taken, whole = 0, on_delivery if callback is None else callback
            for message in messages:
                value, key = message.get("value"), message.get("key")
                error = self._refusal(topic, partition, value, key)
                if error is not None:
                    message["_error"] = error
                    continue
                report = message.get("callback", message.get("on_delivery", whole))
                self._queue(topic, value, key, partition, report, message.get("headers"))
                taken += 1
            self.cluster.changed.notify_all()
            return taken

    def _refusal(
        self, topic: str, partition: int, value: str | bytes | None, key: str | bytes | None
    ) -> KafkaError | None:
        code = 0
        if self._fatal is not None:
            code = KafkaError._FATAL
        elif not self._may_produce:
            code = KafkaError._STATE
        elif self._is_full():
            code = KafkaError._QUEUE_FULL
            _log.debug("a record found the queue full", extra={"topic": topic, "value": value})
        elif len(value or b"") + len(key or b"") > self._max_bytes:
            code = KafkaError.MSG_SIZE_TOO_LARGE
        elif partition >= self.known.get(topic, 1 << 31):
            code = KafkaError._UNKNOWN_PARTITION
        elif self._missing and self._is_missing(topic):
            code = KafkaError._UNKNOWN_TOPIC
        if not code:
            return None
        return kafka_error(code, "Unable to produce message: " + kafka_error(code).str())

    def _is_full(self) -> bool:
        is_full = self.cluster.faults.is_full
        return self._count >= self._max_queued or (is_full is not None and is_full(self))

    def _queue(
        self,
        topic: str,
        value: str | bytes | None,
        key: str | bytes | None,
        partition: int,
        callback: Callable[[KafkaError | None, Message], object] | None,
        headers: Any,
    ) -> None:
        now_s = self.cluster.tick()
        key, value = _encoded(key), _encoded(value)
        if partition < 0:
            partition = self._partition_of(topic, key)
        place = topic, partition
        queued = _Queued(
            place, value, key, _headers(headers), callback, now_s, now_s + self._timeout_s
        )
        self._count += 1
        waiting = self._queues.get(place)
        if waiting is None and self._send(queued, now_s):
            return
        self._queues.setdefault(place, deque()).append(queued)
        self._waits(queued)

    def _partition_of(self, topic: str, key: bytes | None) -> int:
        """Chosen when it is queued; of a topic without partitions the first one."""
        count = self.known.get(topic) or self._learn(topic)
        if not count:
            return 0
        if key is None:
            return random.randrange(count)
        return int(murmur2(key, count) if self._is_murmur2 else consistent(key, count))

    # ---- sending

    @property
    def waiting(self) -> set[str]:
        return {topic for topic, _ in self._queues}

    def pump(self, now_s: float) -> None:
        """Send what waits and may go now, fail what is overdue; the caller holds ``changed``."""
        late = [each for each in self._unanswered if each.deadline_s <= now_s]
        for queued in late:
            self._unanswered.remove(queued)
            self._report(queued, kafka_error(KafkaError._MSG_TIMED_OUT))
        for place, waiting in list(self._queues.items()):
            while waiting:
                # This comes first: an error may purge what waits.
                queued = waiting.popleft()
                if queued.deadline_s <= now_s:
                    self._report(queued, kafka_error(KafkaError._MSG_TIMED_OUT))
                elif self._fatal is not None or not self._send(queued, now_s):
                    waiting.appendleft(queued)
                    break
            if not waiting:
                self._queues.pop(place, None)
            else:
                self._waits(waiting[0])
        for queued in self._unanswered:
            self.cluster.due(queued.deadline_s)
        self.cluster.keep(self, has_backlog=bool(self._queues or self._unanswered))

    def _waits(self, queued: _Queued) -> None:
        now_s = time.monotonic()
        again_s = queued.not_before_s if queued.not_before_s > now_s else math.inf
        faults = self.cluster.faults
        if again_s > queued.deadline_s and faults.separates(self, queued.place):
            # Faults end without a word.
            again_s = now_s + 0.05
        self.cluster.due(min(queued.deadline_s, again_s))
        self.cluster.keep(self, has_backlog=True)

    def _send(self, queued: _Queued, now_s: float) -> bool:
        """Return whether it is appended or has failed; False: it waits."""
        if now_s < queued.not_before_s:
            return False
        cluster, place = self.cluster, queued.place
        faults = cluster.faults
        if faults.plan is not None and not queued.fault_known:
            queued.fault_known = True
            fault = faults.plan("produce", self, place)
            if fault is not None and fault.error is not None and fault.error.code() in RETRIED:
                fault = Fault(latency_s=fault.latency_s + RETRY_S)
            queued.fault = fault
            if fault is not None and (fault.latency_s or fault.is_lost):
                queued.not_before_s = math.inf if fault.is_lost else now_s + fault.latency_s
                return False
        if faults.separates(self, place):
            self._look_around()
            return False
        partition = cluster.partition(place)
        if partition is None:
            return self._has_no_place(queued, now_s)
        self.known.setdefault(place[0], len(partition.topic.partitions))
        if self._missing:
            self._missing.pop(place[0], None)
        if self._skips(partition):
            self._report(queued, kafka_error(KafkaError._PURGE_QUEUE))
        elif queued.fault is not None and queued.fault.error is not None:
            self._refused(queued, queued.fault.error)
        elif queued.size > int(partition.topic.settings["max.message.bytes"]):
            self._refused(queued, kafka_error(KafkaError.MSG_SIZE_TOO_LARGE))
            self._refused_by(partition)
        else:
            self._append(queued, partition)
        return True

    def _has_no_place(self, queued: _Queued, now_s: float) -> bool:
        """The topic or the partition is unknown: a topic may appear for a while yet."""
        topic = queued.place[0]
        if self._learn(topic):
            self._missing.pop(topic, None)
            self._report(queued, kafka_error(KafkaError._UNKNOWN_PARTITION))
            return True
        gone_s = self._missing.setdefault(topic, now_s) + self._propagation_s
        if now_s >= gone_s:
            self._report(queued, kafka_error(KafkaError.UNKNOWN_TOPIC_OR_PART))
            return True
        queued.not_before_s = min(gone_s, now_s + 0.1)
        return False

    def _is_missing(self, topic: str) -> bool:
        """Say whether the topic has not been there for so long that records are refused at once."""
        if topic not in self._missing or self._topic(topic) is not None:
            return False
        return time.monotonic() >= self._missing[topic] + self._propagation_s

    def _append(self, queued: _Queued, partition: Partition) -> None:
        transaction = None
        if self.transactional_id is not None:
            try:
                transaction = self._joined(partition)
            except StaleEpochError:
                is_joined = self._fenced_by(partition)
                code = KafkaError._FENCED if is_joined else KafkaError._PURGE_QUEUE
                self._report(queued, kafka_error(code))
                return
        now_ms = self.cluster.now_ms()
        record = LogRecord(now_ms, queued.key, queued.value, queued.headers, transaction)
        queued.offset = partition.append(record)
        queued.timestamp = partition.topic.timestamp_kind, now_ms
        if queued.fault is not None and queued.fault.is_answer_lost:
            self._unanswered.append(queued)
            self.cluster.due(queued.deadline_s)
            self.cluster.keep(self, has_backlog=True)
        else:
            self._reports.append(queued)

    def _refused(self, queued: _Queued, error: KafkaError) -> None:
        self._report(queued, error)
        topic, number = queued.place
        self._produce_failed(
            error,
            f"ProduceRequest for {topic} [{number}] with 1 message(s) failed: {error.str()}:"
            " current transaction must be aborted",
        )

    def _report(self, queued: _Queued, error: KafkaError) -> None:
        queued.error, queued.offset, queued.timestamp = error, -1, _NO_TIMESTAMP
        self._reports.append(queued)
        if error.code() != KafkaError._PURGE_QUEUE:
            self._failed += 1

    # ---- serving

    def poll(self, timeout: float = -1) -> int:
        self._check_open()
        with self._turns(timeout) as wait:
            self._look_around()
            while not (self._reports or self._errors or self._unraised is not None) and wait():
                self._look_around()
        return self._serve()

    def flush(self, timeout: float = -1) -> int:
        self._check_open()
        deadline_s = math.inf if timeout < 0 else time.monotonic() + timeout
        while True:
            self._serve()
            left_s = deadline_s - time.monotonic()
            if not self._count or left_s <= 0:
                return self._count
            with self._turns(min(left_s, 1e9)) as wait:
                self._look_around()
                while self._count and not (self._reports or self._errors) and wait():
                    self._look_around()

    def _serve(self) -> int:
        """Run what is reported; raises what ended the client, once."""
        served = self._serve_errors()
        reports = self._reports
        while reports:
            with self.cluster.changed:
                if not reports:
                    break
                queued = reports.popleft()
            served += 1
            try:
                if queued.callback is not None:
                    queued.callback(queued.error, queued.message())
            finally:
                with self.cluster.changed:
                    self._count -= 1
        unraised, self._unraised = self._unraised, None
        if unraised is not None:
            raise KafkaException(unraised)
        return served

    def purge(self, in_queue: bool = True, in_flight: bool = True, blocking: bool = True) -> None:
        self._check_open()
        with self.cluster.changed:
            if in_queue:
                self._purge()
            if in_flight:
                unanswered, self._unanswered = self._unanswered, []
                for queued in unanswered:
                    self._report(queued, kafka_error(KafkaError._PURGE_INFLIGHT))
            self.cluster.changed.notify_all()

    def _purge(self) -> None:
        queues, self._queues = self._queues, {}
        for waiting in queues.values():
            while waiting:
                self._report(waiting.popleft(), kafka_error(KafkaError._PURGE_QUEUE))

    def fail(self, code: int, text: str = "injected") -> None:
        """A test's: the client fails for good, with this code."""
        with self.cluster.changed:
            self._set_fatal(kafka_error(code, text, fatal=True))
            self.cluster.changed.notify_all()

    def kill(self) -> None:
        """A test's: as if its process were killed; a transaction stays open until its timeout."""
        with self.cluster.changed:
            self._is_closed = True
            self._queues.clear()
            self._unanswered.clear()
            self._count = 0
            self.cluster.keep(self, has_backlog=False)

    def close(self) -> bool:
        """Close as confluent_kafka's does; an open transaction is aborted."""
        with self.cluster.changed:
            if self._is_closed:
                return True
            self._abort_at_close()
            self._is_closed = True
            self._queues.clear()
            self._count = 0
            self.cluster.keep(self, has_backlog=False)
        return True


def _encoded(data: str | bytes | None) -> bytes | None:
    return data.encode() if isinstance(data, str) else data


def _headers(headers: Any) -> list[tuple[str, bytes | None]] | None:
    if not headers:
        return None
    pairs: Sequence[tuple[str, Any]] = list(
        headers.items() if isinstance(headers, dict) else headers
    )
    return [(name, _encoded(value)) for name, value in pairs]
