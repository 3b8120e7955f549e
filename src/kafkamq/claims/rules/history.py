"""What each record of a coordination log did, by the safe rules: the history of its owners."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kafkamq.claims.rules.log import Claim, ClaimLog
from kafkamq.types import MarshalRecord, MarshalType


class ClaimEventKind(Enum):
    """What a record did."""

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
    """One record and what it did."""

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
