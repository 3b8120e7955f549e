"""What a coordination log shows to those who look into it: the history of owners, and faults.

``ClaimHistory`` says what each record did by the safe rules. ``ClaimAudit`` looks for what must not
be in a log, and knows nothing of the rules:

An instance *acts* as the owner of a partition when it heartbeats there, or announces messages after
that; its claims and releases end what it did before. Two instances own a partition at once when one
of them acts, another one acts, and the first acts again, all within two heartbeat intervals of the
broker's time: whatever claims were accepted, both believed that it was theirs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from kafkamq.claims.rules.log import Claim, ClaimLog
from kafkamq.types import MarshalRecord, MarshalType

_MAX_DUAL_CLAIMS = 1000
_MAX_INSTANCES = 1000
_MAX_PARTITION = 2**31 - 1
_ACTS = (MarshalType.HEARTBEAT, MarshalType.CLAIMING_MESSAGES)

_Place = tuple[str, str, int]
_Instance = tuple[str, str]


@dataclass(frozen=True, slots=True)
class DualClaim:
    """A partition that had two owners at once."""

    group: str
    topic: str
    partition: int
    first: _Instance  # client, instance; it acted before and after the other
    second: _Instance
    offset: int  # of the record that shows it
    broker_time_ms: int


@dataclass(slots=True)
class ClientAudit:
    """What the log tells of one client of a group."""

    records: int = 0
    instance: str = ""  # the one that wrote last
    former: set[str] = field(default_factory=set)  # those before it; bounded
    returns: int = 0  # a former one wrote again: two processes use one client id
    least_skew_s: float = 0.0  # its time minus the broker's, and the most of it
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
        """``interval_s``: the heartbeat interval of the topic's clients."""
        self._stale_ms = round(2000 * interval_s)
        self._acts: dict[_Place, dict[_Instance, tuple[int, int]]] = {}
        self._last_ms = -1
        self.dual_claims: list[DualClaim] = []  # two owners at once; bounded
        self.clients: dict[tuple[str, str], ClientAudit] = {}  # by group and client
        self.types: Counter[str] = Counter()  # records by type
        self.impossible = 0  # records of a partition that Kafka cannot have
        self.steps_back = 0  # records whose broker's time is before that of the record before

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
            return  # who owns it has heartbeaten before: this one only asks for it
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
    """The effects that a record can have on a claim."""

    CLAIMED = "claimed"  # it was free
    TAKEN_OVER = "taken over"  # its owner was silent
    HANDED_OVER = "handed over"  # by a heartbeat: a restart, or a partition that nobody held
    RENEWED = "renewed"
    ANNOUNCED = "announced"  # messages, at most once
    RELEASED = "released"
    PAUSED = "paused"  # the group
    RESUMED = "resumed"
    REFUSED = "refused"  # a claim of what is held
    IGNORED = "ignored"  # of somebody who does not own it


@dataclass(frozen=True, slots=True)
class ClaimEvent:
    """The effect of one record, and whose claim it changed."""

    kind: ClaimEventKind
    client: str = ""  # the owner after it; empty: nobody
    instance: str = ""
    token: int = -1  # of the ownership after it
    position: int = 0
    silence_s: float = 0.0  # since the owner's last sign of life before it


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
