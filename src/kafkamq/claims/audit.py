"""Reads a coordination topic as it stands, and shows the history of owners, and faults.

``ClaimHistory`` says what each record did by the safe rules. ``ClaimAudit`` looks for what must not
be in a log, and knows nothing of the rules:

An instance *acts* as the owner of a partition when it heartbeats there, or announces messages after
that; its claims and releases end what it did before. Two instances own a partition at once when one
of them acts, another one acts, and the first acts again, all within two heartbeat intervals of the
broker's time: whatever claims were accepted, both believed that it was theirs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from kafkamq.claims.log_engine import find_topic, interval_of
from kafkamq.claims.rules.log import Claim, ClaimLog
from kafkamq.claims.rules.ranges import RangeLog, decode_range
from kafkamq.claims.wire.marshal import decode_value
from kafkamq.config import ServiceConfig
from kafkamq.errors import WireError
from kafkamq.transport.admin import Admin
from kafkamq.transport.follower import Follower
from kafkamq.types import MarshalRecord, MarshalType

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
    # 0: its sender did not say.
    interval_ms: int = 0


@dataclass(slots=True)
class TopicAudit:
    records: int = 0
    partitions: dict[int, ClaimAudit] = field(default_factory=dict)
    malformed: Counter[str] = field(default_factory=Counter)
    intervals_ms: Counter[int] = field(default_factory=Counter)
    gaps: int = 0

    def clients(self) -> dict[tuple[str, str], ClientAudit]:
        """Return what all coordination partitions tell of each client, by group and client."""
        found: dict[tuple[str, str], ClientAudit] = {}
        for part in self.partitions.values():
            for key, seen in part.clients.items():
                if key in found:
                    found[key].merge(seen)
                else:
                    found[key] = copy(seen)
        return found


def scan_topic(
    config: ServiceConfig, topic: str, decode: Callable[[bytes | None], R], *, follow: bool = False
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
    """Read a topic of range claims to its end: by group and topic its log, and the time in s.

    The time is the wall clock's, or that of the log's last record where this is later.
    """
    logs: dict[tuple[str, str], RangeLog] = {}
    numbers: dict[tuple[str, str], int] = {}
    # None: nothing was deleted yet.
    since_s: dict[int, float | None] = {}
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
    return [(logs[key], max(now_s[numbers[key]], time.time())) for key in sorted(logs)]


_MAX_DUAL_CLAIMS = 1000
_MAX_INSTANCES = 1000
_MAX_PARTITION = 2**31 - 1
_ACTS = (MarshalType.HEARTBEAT, MarshalType.CLAIMING_MESSAGES)

_GroupPartition = tuple[str, str, int]
_Instance = tuple[str, str]


@dataclass(frozen=True, slots=True)
class DualClaim:
    """A partition that had two owners at once."""

    group: str
    topic: str
    partition: int
    first: _Instance
    second: _Instance
    offset: int
    broker_time_ms: int


@dataclass(slots=True)
class ClientAudit:
    """What the log tells of one client of a group."""

    records: int = 0
    instance: str = ""
    former: set[str] = field(default_factory=set)
    # A former one wrote again: two processes use one client id.
    returns: int = 0
    least_skew_s: float = 0.0
    most_skew_s: float = 0.0

    def merge(self, other: ClientAudit) -> None:
        """Add what another coordination partition tells of the same client."""
        self.records += other.records
        self.returns += other.returns
        self.least_skew_s = min(self.least_skew_s, other.least_skew_s)
        self.most_skew_s = max(self.most_skew_s, other.most_skew_s)


class ClaimAudit:
    """One coordination partition; ``apply`` takes its records in order."""

    def __init__(self, interval_s: float) -> None:
        self._stale_ms = round(2000 * interval_s)
        self._acts: dict[_GroupPartition, dict[_Instance, tuple[int, int]]] = {}
        self._last_ms = -1
        self.dual_claims: list[DualClaim] = []
        self.clients: dict[tuple[str, str], ClientAudit] = {}
        self.types: Counter[str] = Counter()
        self.impossible = 0
        self.steps_back = 0

    def apply(self, record: MarshalRecord, *, offset: int, broker_time_ms: int) -> None:
        self.types[record.type.value] += 1
        self.steps_back += broker_time_ms < self._last_ms
        self._last_ms = broker_time_ms
        self._meet(record, broker_time_ms)
        if record.type is MarshalType.RELEASE_GROUP:
            return
        if not 0 <= record.partition <= _MAX_PARTITION:
            self.impossible += 1
            return
        acts = self._acts.setdefault((record.group, record.topic, record.partition), {})
        me = (record.client, record.instance)
        if record.type not in _ACTS:
            acts.pop(me, None)
            return
        if record.type is MarshalType.CLAIMING_MESSAGES and me not in acts:
            # Its owner has heartbeaten before: this client only asks for it.
            return
        for instance, (at_ms, _) in list(acts.items()):
            if broker_time_ms - at_ms >= self._stale_ms:
                del acts[instance]
        mine_ms, mine_at = acts.get(me, (-1, -1))
        for other, (_, at) in acts.items():
            is_dual = other != me and mine_ms >= 0 and at > mine_at
            if is_dual and len(self.dual_claims) < _MAX_DUAL_CLAIMS:
                place = (record.group, record.topic, record.partition)
                self.dual_claims.append(DualClaim(*place, me, other, offset, broker_time_ms))
        acts[me] = (broker_time_ms, offset)

    def _meet(self, record: MarshalRecord, broker_time_ms: int) -> None:
        skew_s = record.time_s - broker_time_ms / 1000
        client = self.clients.get((record.group, record.client))
        if client is None:
            client = self.clients[record.group, record.client] = ClientAudit()
            client.least_skew_s = client.most_skew_s = skew_s
        client.records += 1
        if record.instance != client.instance and record.type in _ACTS:
            client.returns += record.instance in client.former
            if client.instance and len(client.former) < _MAX_INSTANCES:
                client.former.add(client.instance)
            client.instance = record.instance
        client.least_skew_s = min(client.least_skew_s, skew_s)
        client.most_skew_s = max(client.most_skew_s, skew_s)


class ClaimEventKind(Enum):
    CLAIMED = "claimed"
    TAKEN_OVER = "taken over"
    # A heartbeat did it: a restart, or a partition that nobody held.
    HANDED_OVER = "handed over"
    RENEWED = "renewed"
    ANNOUNCED = "announced"
    RELEASED = "released"
    PAUSED = "paused"
    RESUMED = "resumed"
    REFUSED = "refused"
    IGNORED = "ignored"


@dataclass(frozen=True, slots=True)
class ClaimEvent:
    """The effect of one record, and whose claim it changed."""

    kind: ClaimEventKind
    # The owner after the event; empty: nobody.
    client: str = ""
    instance: str = ""
    token: int = -1
    position: int = 0
    silence_s: float = 0.0


class ClaimHistory:
    """One coordination partition, read from where ``apply`` begins."""

    def __init__(self, interval_s: float, since_s: float | None = None) -> None:
        self._log = ClaimLog("safe", interval_s, since_s=since_s)

    def apply(self, record: MarshalRecord, *, offset: int, broker_time_ms: int) -> ClaimEvent:
        now_s = broker_time_ms / 1000
        before = self._claim(record, now_s)
        self._log.apply(record, offset=offset, observed_at_s=now_s, broker_time_s=now_s)
        if record.type is MarshalType.RELEASE_GROUP:
            is_pause = record.expires_at_s > now_s
            return ClaimEvent(ClaimEventKind.PAUSED if is_pause else ClaimEventKind.RESUMED)
        after = self._claim(record, now_s)
        silence_s = before.age_s if before.age_s < 1e9 else 0.0
        return ClaimEvent(
            _kind(record, before, after, offset),
            after.client,
            after.instance,
            after.token if after.client else -1,
            after.offset,
            silence_s,
        )

    def _claim(self, record: MarshalRecord, now_s: float) -> Claim:
        return self._log.claim(record.group, record.topic, record.partition, now_s=now_s)


def _kind(record: MarshalRecord, before: Claim, after: Claim, offset: int) -> ClaimEventKind:
    if record.type is MarshalType.CLAIMING_PARTITION:
        if after.token != offset:
            return ClaimEventKind.REFUSED
        was_held = bool(before.heartbeat_s)
        return ClaimEventKind.TAKEN_OVER if was_held else ClaimEventKind.CLAIMED
    if record.type is MarshalType.HEARTBEAT:
        if after.token == offset:
            return ClaimEventKind.HANDED_OVER
        is_renewal = after.renewed_at == offset
        return ClaimEventKind.RENEWED if is_renewal else ClaimEventKind.IGNORED
    if record.type is MarshalType.RELEASING_PARTITION:
        is_release = after.released_at == offset
        return ClaimEventKind.RELEASED if is_release else ClaimEventKind.IGNORED
    is_announced = after.intent_at == offset
    return ClaimEventKind.ANNOUNCED if is_announced else ClaimEventKind.IGNORED
