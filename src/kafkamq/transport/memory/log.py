"""Topics and their partitions: records, control records, open transactions, what is deleted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from confluent_kafka import TIMESTAMP_CREATE_TIME, TIMESTAMP_LOG_APPEND_TIME, Uuid

Place = tuple[str, int]
"""Topic, partition."""

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
    offsets: dict[tuple[str, Place], tuple[int, str | None]] = field(default_factory=dict)


@dataclass(slots=True)
class LogRecord:
    """One record as it lies in the log."""

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
        """The last stable offset, where a read_committed reader stops."""
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
        """Records and their offsets from ``offset`` on, and where to read on."""
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
        """The first offset below ``end`` of a record that is not older; -1: none."""
        for offset in range(self.start, end):
            record = self.records[offset - self.start]
            if record is not None and record.timestamp_ms >= timestamp_ms:
                return offset
        return -1

    def newest(self) -> tuple[int, int]:
        """Offset and time of the record with the latest time; -1: there is none."""
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
        """Of its records, as ``Message.timestamp`` tells it."""
        if self.settings["message.timestamp.type"] == "LogAppendTime":
            return TIMESTAMP_LOG_APPEND_TIME
        return TIMESTAMP_CREATE_TIME
