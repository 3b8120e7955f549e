"""What a cluster in memory holds: its condition and time, the topics' logs, and its faults."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from confluent_kafka import (
    TIMESTAMP_CREATE_TIME,
    TIMESTAMP_LOG_APPEND_TIME,
    KafkaError,
    KafkaException,
    Uuid,
)

from kafkamq.types import PartitionId

_LONGEST_WAIT_S = 1.0
# Between two looks at faults: waiting threads would else wake each other without end.
_LOOK_S = 0.02


class _Pumped(Protocol):
    """A producer, as far as it is known here."""

    def pump(self, now_s: float) -> None:
        """Send what waits, and fail what is overdue."""


class State:
    """The lower half of ``MemoryKafka``: its topics and groups, its clock and its faults."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.now_ms = now_ms
        self.changed = threading.Condition()
        self.topics: dict[str, Topic] = {}
        self.faults = Faults()
        self._due_s = math.inf
        self._looks_s = 0.0
        self._backlog: dict[_Pumped, None] = {}

    def partition(self, place: PartitionId) -> Partition | None:
        topic = self.topics.get(place[0])
        if topic is None or not 0 <= place[1] < len(topic.partitions):
            return None
        return topic.partitions[place[1]]

    def due(self, at_s: float) -> None:
        self._due_s = min(self._due_s, at_s)

    def tick(self) -> float:
        now_s = time.monotonic()
        # Faults begin without a word.
        is_disturbed = bool(self.faults.cut) or self.faults.is_down
        if now_s >= self._due_s or (is_disturbed and now_s >= self._looks_s):
            self._due_s, self._looks_s = math.inf, now_s + _LOOK_S
            self._work(now_s)
            self.changed.notify_all()
        return now_s

    def _work(self, now_s: float) -> None:
        for producer in list(self._backlog):
            producer.pump(now_s)

    def wait(self, until_s: float) -> None:
        """Wait for a change, but not beyond this time or what is due; hold ``changed``."""
        now_s = time.monotonic()
        until_s = min(until_s, self._due_s, now_s + _LONGEST_WAIT_S)
        self.changed.wait(max(0.0, until_s - now_s))

    def keep(self, producer: _Pumped, *, has_backlog: bool) -> None:
        if has_backlog:
            self._backlog[producer] = None
        else:
            self._backlog.pop(producer, None)


TOPIC_DEFAULTS = {
    "cleanup.policy": "delete",
    "compression.type": "producer",
    "delete.retention.ms": "86400000",
    "max.message.bytes": "1048588",
    "message.timestamp.type": "CreateTime",
    "min.insync.replicas": "1",
    "retention.bytes": "-1",
    "retention.ms": "604800000",
    "segment.bytes": "1073741824",
    "unclean.leader.election.enable": "false",
}


@dataclass(slots=True, eq=False, repr=False)
class Transaction:
    """What one transaction wrote: its state, the partitions, and offsets of groups."""

    began_s: float
    is_open: bool = True
    is_aborted: bool = False
    touched: dict[Partition, None] = field(default_factory=dict)
    # By group and place:
    offsets: dict[tuple[str, PartitionId], tuple[int, str | None]] = field(default_factory=dict)


@dataclass(slots=True)
class LogRecord:
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]] | None
    transaction: Transaction | None


class Partition:
    """One partition's log. Control records take an offset each and are never handed out."""

    def __init__(self, topic: Topic, number: int) -> None:
        self.topic = topic
        self.number = number
        self.start = 0
        self.records: list[LogRecord | None] = []
        self.leader_epoch = 0
        self._open: dict[Transaction, int] = {}

    @property
    def end(self) -> int:
        return self.start + len(self.records)

    @property
    def stable(self) -> int:
        """Return the last stable offset, where a read_committed reader stops."""
        opened = self._open
        return min(opened.values()) if opened else self.start + len(self.records)

    def append(self, record: LogRecord) -> int:
        offset = self.end
        self.records.append(record)
        transaction = record.transaction
        if transaction is not None and transaction not in self._open:
            self._open[transaction] = offset
            transaction.touched[self] = None
        return offset

    def end_transaction(self, transaction: Transaction) -> None:
        if self._open.pop(transaction, None) is not None:
            self.records.append(None)

    def read(
        self, offset: int, limit: int, *, is_committed: bool
    ) -> tuple[list[tuple[int, LogRecord]], int]:
        """Return records and their offsets from ``offset`` on, and where to read on."""
        end = self.stable if is_committed else self.end
        found: list[tuple[int, LogRecord]] = []
        records, start = self.records, self.start
        while offset < end and len(found) < limit:
            record = records[offset - start]
            offset += 1
            if record is None:
                continue
            transaction = record.transaction
            if is_committed and transaction is not None and transaction.is_aborted:
                continue
            found.append((offset - 1, record))
        return found, offset

    def delete_before(self, offset: int) -> None:
        """Retention, or delete_records: what lies below is gone."""
        count = min(offset, self.end) - self.start
        if count > 0:
            del self.records[:count]
            self.start += count

    def truncate(self, end: int) -> None:
        """The new leader had nothing from there on."""
        assert not self._open, "no transaction is open"
        del self.records[max(0, end - self.start) :]
        self.leader_epoch += 1

    def offset_at(self, timestamp_ms: int, end: int) -> int:
        """Return the first offset below ``end`` of a record that is not older; -1: none."""
        for offset in range(self.start, end):
            record = self.records[offset - self.start]
            if record is not None and record.timestamp_ms >= timestamp_ms:
                return offset
        return -1

    def newest(self) -> tuple[int, int]:
        """Return offset and time of the record with the latest time; -1: there is none."""
        best = (-1, -1)
        for index, record in enumerate(self.records):
            if record is not None and record.timestamp_ms > best[1]:
                best = self.start + index, record.timestamp_ms
        return best


class Topic:
    """A topic; deleted and created again it is another object with another id."""

    def __init__(
        self, name: str, topic_id: Uuid, partitions: int, settings: Mapping[str, str]
    ) -> None:
        self.name = name
        self.topic_id = topic_id
        self.settings = {**TOPIC_DEFAULTS, **settings}
        self.partitions = [Partition(self, number) for number in range(partitions)]

    @property
    def timestamp_kind(self) -> int:
        if self.settings["message.timestamp.type"] == "LogAppendTime":
            return TIMESTAMP_LOG_APPEND_TIME
        return TIMESTAMP_CREATE_TIME


FATAL = (KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, KafkaError.UNKNOWN_PRODUCER_ID)
"""Codes that end a producer."""

UNKNOWN = KafkaError(KafkaError.UNKNOWN)
"""What a broker says that cannot do something, and does not say why; the client does not retry."""

REFUSALS = (
    KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION),
    KafkaError(KafkaError.COORDINATOR_NOT_AVAILABLE),
    KafkaError(KafkaError.NOT_COORDINATOR),
)
"""What a broker says that was asked as another one took over."""


@dataclass(frozen=True, slots=True)
class Fault:
    latency_s: float = 0.0
    """It takes so long to arrive."""
    error: KafkaError | None = None
    """The broker's answer; nothing has happened. Some are never told, see ``RETRIED``."""
    is_lost: bool = False
    """It never arrives, however often it is tried again: the client's time runs out."""
    is_answer_lost: bool = False
    """It happens, and the client's time runs out nevertheless."""


RETRIED = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.CONCURRENT_TRANSACTIONS,
    }
)
"""A producer tries its requests again by itself after these, a moment later."""

RETRY_S = 0.1

Plan = Callable[[str, object, "PartitionId | None"], "Fault | None"]


class Faults:
    """What a test may do to a cluster in memory. Nothing goes wrong unless something is set here.

    What happens to the brokers' data are methods: ``MemoryKafka.delete_records``, ``truncate``,
    ``delete_topic`` and ``add_partitions``, ``Groups.expire_offsets`` and ``expel``.
    ``Producer.fail`` is a fatal error, ``Groups.on_kept`` is told of every commit, and
    ``Groups.on_known`` when a client knows what is committed.

    Attributes:
        plan: Asked about every request; answers with a ``Fault``, or None. It gets the kind of the
            request, the client, and the topic and partition if there is one. Kinds: produce,
            metadata, list_offsets, commit, committed, join, init_transactions, send_offsets,
            end_transaction, admin; and fetch, the first one behind an assignment or a seek, of
            which the latency alone counts.
        is_full: Told a producer, says whether its queue has no room for the next record.
        told: Told a topic and its number of partitions, says how many an answer about it names:
            less from a broker that has not heard of all, 0 if not even of the topic.
        has_ids: Whether brokers tell the ids of topics; some do, while they are upgraded.
        is_down: No broker answers.
        offline: These partitions are led by nobody.
        hidden: Of these topics these clients (a client, a name) have not heard yet.
        cut: These clients reach no broker; a member among them is missed after its session timeout.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.is_full: Callable[[object], bool] | None = None
        self.told: Callable[[str, int], int] | None = None
        self.has_ids: Callable[[], bool] = lambda: True
        self.is_down = False
        self.offline: set[PartitionId] = set()
        self.hidden: set[tuple[object, str]] = set()
        self.cut: set[object] = set()

    def separates(self, client: object, place: PartitionId | None = None) -> bool:
        """Return whether a request of this client, to this partition, finds no broker."""
        return self.is_down or client in self.cut or place in self.offline

    def of(self, kind: str, client: object, place: PartitionId | None = None) -> Fault | None:
        return None if self.plan is None else self.plan(kind, client, place)


def kafka_error(
    code: int,
    text: str | None = None,
    *,
    fatal: bool = False,
    retriable: bool = False,
    abort: bool = False,
) -> KafkaError:
    return KafkaError(code, text, fatal, retriable, abort)


def failure(code: int, text: str | None = None, **kinds: bool) -> KafkaException:
    return KafkaException(kafka_error(code, text, **kinds))
