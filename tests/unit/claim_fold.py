"""A claim log that tells one sequence of records: times of sender, observer and broker agree."""

from __future__ import annotations

from typing import Any

from kafkamq.claims.rules.log import Claim, ClaimLog
from kafkamq.types import MarshalRecord, MarshalType

GROUP, TOPIC = "gr", "test1"


class ClaimFold:
    def __init__(self, rules: str = "safe", **options: Any) -> None:
        self.log = ClaimLog(rules, **options)
        self.offset = 0

    def record(
        self,
        type: MarshalType,
        at_s: float,
        who: str = "a",
        *,
        offset: int = 0,
        partition: int = 0,
        group: str = GROUP,
        topic: str = TOPIC,
        time_s: int | None = None,
        expires_at_s: int = 0,
    ) -> int:
        """Append a record of ``who`` = client, or client.instance; returns its offset."""
        client, _, instance = who.partition(".")
        return self.append(
            MarshalRecord(
                type,
                time_s=int(at_s) if time_s is None else time_s,
                instance=instance or f"i-{client}",
                client=client,
                group=group,
                topic=topic,
                partition=partition,
                offset=offset,
                expires_at_s=expires_at_s,
            ),
            at_s,
        )

    def append(self, record: MarshalRecord | None, at_s: float) -> int:
        at = self.offset
        self.log.apply(record, offset=at, observed_at_s=at_s, broker_time_s=at_s)
        self.log.check()
        self.offset += 1
        return at

    def beat(self, at_s: float, who: str = "a", offset: int = 0, **more: Any) -> int:
        return self.record(MarshalType.HEARTBEAT, at_s, who, offset=offset, **more)

    def claims(self, at_s: float, who: str = "a", **more: Any) -> int:
        return self.record(MarshalType.CLAIMING_PARTITION, at_s, who, **more)

    def release(self, at_s: float, who: str = "a", offset: int = 0, **more: Any) -> int:
        return self.record(MarshalType.RELEASING_PARTITION, at_s, who, offset=offset, **more)

    def intend(self, at_s: float, who: str = "a", offset: int = 0, **more: Any) -> int:
        return self.record(MarshalType.CLAIMING_MESSAGES, at_s, who, offset=offset, **more)

    def pause(self, at_s: float, until_s: int, *, group: str = GROUP) -> int:
        return self.record(
            MarshalType.RELEASE_GROUP, at_s, "adm", group=group, topic="", expires_at_s=until_s
        )

    def at(self, now_s: float, partition: int = 0, *, group: str = GROUP) -> Claim:
        return self.log.claim(group, TOPIC, partition, now_s=now_s)

    def owner(self, now_s: float, partition: int = 0) -> str:
        """``client.instance`` of who holds it, or nothing."""
        claim = self.at(now_s, partition)
        return f"{claim.client}.{claim.instance}" if claim.is_valid else ""
