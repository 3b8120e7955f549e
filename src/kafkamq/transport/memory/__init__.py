"""Kafka in memory: partitions, the broker's time, transactions, fencing, committed offsets.

As much of Kafka's behaviour as the markers protocol relies on, in one process and without threads:
offsets are given in append order and control records take offsets too; a ``read_committed`` reader
stops at the first open transaction and never sees an aborted one; ``init`` of a transactional id
aborts what an older producer left open and fences it; a transaction that stays open too long is
aborted by the broker. Every answer is immediate: whoever needs delays, losses or outages puts them
around these calls of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kafkamq.errors import BrokerError, FencedError, StateError
from kafkamq.types import Headers

__all__ = ["Committed", "LogRecord", "MemoryKafka", "TopicPartition", "TransactionalProducer"]

TopicPartition = tuple[str, int]


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One record of any topic, as a consumer gets it."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int  # LogAppendTime; -1: any other kind of timestamp
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


@dataclass(frozen=True, slots=True)
class Committed:
    """What a group committed for a partition."""

    offset: int
    metadata: str = ""


class _Transaction:
    __slots__ = ("begin_ms", "is_committed", "is_open", "offsets", "touched")

    def __init__(self, begin_ms: int) -> None:
        self.begin_ms = begin_ms
        self.is_open = True
        self.is_committed = False
        self.touched: dict[TopicPartition, int] = {}  # first offset in each partition
        self.offsets: dict[tuple[str, TopicPartition], Committed] = {}


@dataclass(slots=True)
class _Slot:
    record: LogRecord | None  # None: a control record
    transaction: _Transaction | None


class _Partition:
    def __init__(self) -> None:
        self.start_offset = 0
        self.slots: list[_Slot] = []  # of start_offset and behind
        self.open: dict[_Transaction, int] = {}

    @property
    def end_offset(self) -> int:
        return self.start_offset + len(self.slots)

    @property
    def stable_offset(self) -> int:
        return min(self.open.values(), default=self.end_offset)


class MemoryKafka:
    """A cluster of one broker. ``clock_ms`` is its clock: set it as you like, also backward."""

    def __init__(self, clock_ms: int = 1_700_000_000_000) -> None:
        self.clock_ms = clock_ms
        self._topics: dict[str, list[_Partition]] = {}
        self._log_append_time: dict[str, bool] = {}
        self._epochs: dict[str, int] = {}  # of transactional ids
        self._transactions: dict[str, _Transaction] = {}  # open, by transactional id
        self._timeouts_ms: dict[str, int] = {}
        self._committed: dict[tuple[str, TopicPartition], Committed] = {}

    # ---- topics

    def create_topic(
        self, topic: str, partitions: int = 1, *, log_append_time: bool = True
    ) -> None:
        """A topic; without ``log_append_time`` its records say -1 for their time."""
        if topic in self._topics:
            raise StateError(f"topic {topic} exists already")
        self._topics[topic] = [_Partition() for _ in range(partitions)]
        self._log_append_time[topic] = log_append_time

    def partition_count(self, topic: str) -> int:
        """How many partitions the topic has."""
        return len(self._partitions(topic))

    def add_partitions(self, topic: str, count: int) -> None:
        """Partitions may be added at any time (R26)."""
        self._partitions(topic).extend(_Partition() for _ in range(count))

    def delete_before(self, topic: str, partition: int, offset: int) -> None:
        """Retention: everything below ``offset`` is gone."""
        log = self._partition(topic, partition)
        offset = min(offset, log.end_offset)
        if offset > log.start_offset:
            del log.slots[: offset - log.start_offset]
            log.start_offset = offset

    def start_offset(self, topic: str, partition: int) -> int:
        """The first offset that is still there."""
        return self._partition(topic, partition).start_offset

    def end_offset(self, topic: str, partition: int) -> int:
        """The next offset to be given; open transactions and control records included."""
        return self._partition(topic, partition).end_offset

    def stable_offset(self, topic: str, partition: int) -> int:
        """Where a ``read_committed`` reader stops."""
        return self._partition(topic, partition).stable_offset

    # ---- writing

    def append(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
    ) -> LogRecord:
        """One record outside of any transaction."""
        return self._append(topic, partition, key, value, headers, None)

    def producer(
        self, transactional_id: str, *, transaction_timeout_ms: int = 10_000
    ) -> TransactionalProducer:
        """A transactional producer; it fences others when its ``init`` is called, not before."""
        return TransactionalProducer(self, transactional_id, transaction_timeout_ms)

    def expire_transactions(self) -> None:
        """Abort, as the broker does, what is open for longer than its timeout."""
        for name, transaction in list(self._transactions.items()):
            if self.clock_ms - transaction.begin_ms > self._timeouts_ms[name]:
                self._epochs[name] += 1
                self._finish(name, is_committed=False)

    # ---- reading

    def read(
        self,
        topic: str,
        partition: int,
        offset: int,
        limit: int = 1 << 30,
        *,
        read_committed: bool = True,
    ) -> tuple[list[LogRecord], int]:
        """Records from ``offset`` on, and the offset behind the last one that was looked at.

        Raises:
            BrokerError: ``offset`` lies outside of the log (auto.offset.reset=error).
        """
        log = self._partition(topic, partition)
        if not log.start_offset <= offset <= log.end_offset:
            raise BrokerError(
                f"{topic}[{partition}]: offset {offset} is not in "
                f"{log.start_offset}..{log.end_offset}",
                code="OFFSET_OUT_OF_RANGE",
            )
        end = log.stable_offset if read_committed else log.end_offset
        records: list[LogRecord] = []
        while offset < end and len(records) < limit:
            slot = log.slots[offset - log.start_offset]
            offset += 1
            if slot.record is not None and (not read_committed or _is_visible(slot)):
                records.append(slot.record)
        return records, offset

    def record_at(self, topic: str, partition: int, offset: int) -> LogRecord | None:
        """One committed record; None when it is gone, or none."""
        log = self._partition(topic, partition)
        if not log.start_offset <= offset < log.end_offset:
            return None
        slot = log.slots[offset - log.start_offset]
        return slot.record if _is_visible(slot) else None

    def records(self, topic: str) -> Iterator[LogRecord]:
        """All committed records of a topic, partition by partition."""
        for number, log in enumerate(self._partitions(topic)):
            yield from self.read(topic, number, log.start_offset)[0]

    # ---- offsets of groups

    def commit(self, group: str, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Commit offsets outside of any transaction."""
        for partition, committed in offsets.items():
            self._committed[group, partition] = committed

    def committed(self, group: str, topic: str, partition: int) -> Committed | None:
        """What the group committed last; offsets of an open transaction do not count yet."""
        return self._committed.get((group, (topic, partition)))

    # ---- inside

    def _partitions(self, topic: str) -> list[_Partition]:
        partitions = self._topics.get(topic)
        if partitions is None:
            raise BrokerError(f"topic {topic} does not exist", code="UNKNOWN_TOPIC_OR_PART")
        return partitions

    def _partition(self, topic: str, partition: int) -> _Partition:
        partitions = self._partitions(topic)
        if not 0 <= partition < len(partitions):
            raise BrokerError(f"{topic}[{partition}] does not exist", code="UNKNOWN_TOPIC_OR_PART")
        return partitions[partition]

    def _append(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        transaction: _Transaction | None,
    ) -> LogRecord:
        log = self._partition(topic, partition)
        timestamp_ms = self.clock_ms if self._log_append_time[topic] else -1
        record = LogRecord(topic, partition, log.end_offset, timestamp_ms, key, value, headers)
        log.slots.append(_Slot(record, transaction))
        if transaction is not None:
            log.open.setdefault(transaction, record.offset)
            transaction.touched.setdefault((topic, partition), record.offset)
        return record

    def _init(self, name: str, timeout_ms: int) -> int:
        self._epochs[name] = self._epochs.get(name, -1) + 1
        self._timeouts_ms[name] = timeout_ms
        if name in self._transactions:
            self._finish(name, is_committed=False)
        return self._epochs[name]

    def _finish(self, name: str, *, is_committed: bool) -> None:
        transaction = self._transactions.pop(name)
        transaction.is_open = False
        transaction.is_committed = is_committed
        for topic, number in transaction.touched:
            log = self._topics[topic][number]
            del log.open[transaction]
            log.slots.append(_Slot(None, None))
        if is_committed:
            self._committed.update(transaction.offsets)


def _is_visible(slot: _Slot) -> bool:
    return slot.transaction is None or slot.transaction.is_committed


class TransactionalProducer:
    """A producer with a transactional id; every call of a fenced one raises ``FencedError``."""

    def __init__(self, kafka: MemoryKafka, transactional_id: str, timeout_ms: int) -> None:
        self._kafka = kafka
        self._name = transactional_id
        self._timeout_ms = timeout_ms
        self._epoch = -1
        self._transaction: _Transaction | None = None

    def init(self) -> None:
        """Fence every other producer of the id, and abort what it left open."""
        self._epoch = self._kafka._init(self._name, self._timeout_ms)
        self._transaction = None

    def begin(self) -> None:
        """Open a transaction; nothing is sent before its first record."""
        if self._transaction is not None:
            raise StateError(f"{self._name}: a transaction is open")
        self._check_epoch()
        transaction = self._transaction = _Transaction(self._kafka.clock_ms)
        self._kafka._transactions[self._name] = transaction

    def produce(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
    ) -> LogRecord:
        """One record of the open transaction."""
        transaction = self._current()
        return self._kafka._append(topic, partition, key, value, headers, transaction)

    def send_offsets(self, group: str, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Offsets that are committed with the transaction, or not at all."""
        transaction = self._current()
        for partition, committed in offsets.items():
            transaction.offsets[group, partition] = committed

    def commit(self) -> None:
        """Everything becomes visible at once."""
        self._current()
        self._transaction = None
        self._kafka._finish(self._name, is_committed=True)

    def abort(self) -> None:
        """Nothing of it becomes visible."""
        self._current()
        self._transaction = None
        self._kafka._finish(self._name, is_committed=False)

    def _current(self) -> _Transaction:
        self._check_epoch()
        if self._transaction is None:
            raise StateError(f"{self._name}: no transaction is open")
        return self._transaction

    def _check_epoch(self) -> None:
        if self._epoch < 0:
            raise StateError(f"{self._name}: init was not called")
        if self._kafka._epochs[self._name] != self._epoch:
            self._transaction = None
            raise FencedError(
                f"{self._name}: another producer took over, or the transaction took too long",
                code="PRODUCER_FENCED",
                is_fatal=True,
            )
