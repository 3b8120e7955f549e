"""Reads a coordination topic as it stands, record by record, for those who look into it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kafkamq.claims.log_engine import interval_of
from kafkamq.claims.rules.audit import ClaimAudit, ClientAudit
from kafkamq.claims.rules.ranges import RangeLog
from kafkamq.claims.topic import find_topic
from kafkamq.claims.wire.marshal import decode_value
from kafkamq.claims.wire.ranges import decode_range
from kafkamq.config import ServiceConfig
from kafkamq.errors import WireError
from kafkamq.transport.admin import Admin
from kafkamq.transport.follower import Follower

_BATCH = 5000
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Scanned(Generic[R]):
    """One record; ``record`` is None when it is malformed, and ``reason`` says why."""

    partition: int
    offset: int
    timestamp_ms: int
    record: R | None
    reason: str = ""
    interval_ms: int = 0  # 0: its sender did not say


@dataclass(slots=True)
class TopicAudit:
    """The findings in all records of a coordination topic."""

    records: int = 0
    partitions: dict[int, ClaimAudit] = field(default_factory=dict)
    malformed: Counter[str] = field(default_factory=Counter)  # by reason
    intervals_ms: Counter[int] = field(default_factory=Counter)  # what senders go by
    gaps: int = 0  # offsets without a record: transactions, or compaction

    def clients(self) -> dict[tuple[str, str], ClientAudit]:
        """What all coordination partitions tell of each client, by group and client."""
        found: dict[tuple[str, str], ClientAudit] = {}
        for part in self.partitions.values():
            for key, seen in part.clients.items():
                if key in found:
                    found[key].merge(seen)
                else:
                    found[key] = copy(seen)
        return found


def scan_topic(
    config: ServiceConfig,
    topic: str,
    decode: Callable[[bytes | None], R],
    *,
    follow: bool = False,
) -> Iterator[Scanned[R]]:
    """Yield every record from the start to the present end; with ``follow`` without an end."""
    with Admin(config) as admin:
        count = find_topic(admin, topic).partitions
        bounds = admin.log_bounds(topic, range(count))
    follower = Follower(
        config, f"reading {topic}", isolation_level="read_uncommitted", enable_partition_eof=True
    )
    missing = {number: end for number, (first, end) in bounds.items() if first < end}
    try:
        follower.place({(topic, number): first for number, (first, _) in bounds.items()})
        while follow or missing:
            reached: dict[int, int] = {}
            for record in follower.poll(_BATCH, 0.5):
                number, offset = record.partition() or 0, record.offset() or 0
                if follow or offset < bounds[number][1]:
                    found, reason = None, ""
                    try:
                        found = decode(record.value())
                    except WireError as error:
                        reason = error.reason
                    time_ms = record.timestamp()[1]
                    yield Scanned(number, offset, time_ms, found, reason, interval_of(record))
                reached[number] = offset + 1
            follower.require_inside()
            reached |= {number: offset for (_, number), offset in follower.ends.items()}
            missing = {
                number: end for number, end in missing.items() if reached.get(number, 0) < end
            }
    finally:
        follower.close()


def audit_topic(config: ServiceConfig, topic: str, *, interval_s: float) -> TopicAudit:
    """Read a topic to its end and say what is in it."""
    audit = TopicAudit()
    expected: dict[int, int] = {}
    for each in scan_topic(config, topic, decode_value):
        audit.records += 1
        audit.gaps += each.offset - expected.get(each.partition, each.offset)
        expected[each.partition] = each.offset + 1
        part = audit.partitions.get(each.partition)
        if part is None:
            part = audit.partitions[each.partition] = ClaimAudit(interval_s)
        if each.record is None:
            audit.malformed[each.reason] += 1
            continue
        audit.intervals_ms[each.interval_ms] += 1
        part.apply(each.record, offset=each.offset, broker_time_ms=each.timestamp_ms)
    return audit


def range_logs(
    config: ServiceConfig, range_topic: str, *, interval_s: float
) -> list[tuple[RangeLog, float]]:
    """Read a topic of range claims to its end: by group and topic its log, and its last time, s."""
    logs: dict[tuple[str, str], RangeLog] = {}
    numbers: dict[tuple[str, str], int] = {}
    since_s: dict[int, float | None] = {}  # None: nothing was deleted yet
    now_s: dict[int, float] = {}
    for each in scan_topic(config, range_topic, decode_range):
        now_s[each.partition] = each.timestamp_ms / 1000
        since_s.setdefault(each.partition, now_s[each.partition] if each.offset else None)
        if each.record is None:
            continue
        key = (each.record.group, each.record.topic)
        if key not in logs:
            logs[key] = RangeLog(*key, interval_s, since_s=since_s[each.partition])
            numbers[key] = each.partition
        logs[key].apply(each.record, offset=each.offset, broker_time_s=each.timestamp_ms / 1000)
    return [(logs[key], now_s[numbers[key]]) for key in sorted(logs)]
