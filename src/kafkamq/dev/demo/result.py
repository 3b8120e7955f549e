"""What the verdict says, as numbers and as text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueResult:
    """One queue, or all of them; counts are of messages, not of copies."""

    queue: str
    sent: int = 0  # messages that Kafka confirmed
    acked: int = 0  # with an ACK
    redelivered: int = 0  # that came again at least once
    dead_lettered: int = 0
    lost: int = 0  # neither acked nor dead-lettered
    duplicated: int = 0  # whose handler finished more than once
    poison: int = 0
    poison_missing: int = 0  # poison that is not in the dead letters with its reason
    in_time_redelivered: int = 0  # acked before the deadline, and copied all the same
    unexplained: int = 0  # copies and dead letters without their END, or ENDs without a copy
    late_p50_s: float | None = None  # of copies and dead letters, after their deadline
    late_p99_s: float | None = None

    @property
    def is_ok(self) -> bool:
        return not (
            self.lost or self.poison_missing or self.in_time_redelivered or self.unexplained
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict of one demo."""

    total: QueueResult
    queues: Sequence[QueueResult]
    sent_confirmed: int | None = None  # what the senders were told; None: nobody counted
    is_settled: bool = True  # nothing was open when the logs were read
    seconds: float = 0.0
    errors: Sequence[str] = ()  # what ended the demo before its verdict

    @property
    def failures(self) -> list[str]:
        """What is wrong, in words; empty: all is well."""
        if self.errors:
            return list(self.errors)
        total = self.total
        found = []
        if total.sent == 0:
            found.append("the topics hold no message at all")
        if self.sent_confirmed is not None and total.sent != self.sent_confirmed:
            found.append(
                f"Kafka confirmed {self.sent_confirmed:,} messages, the topics hold {total.sent:,}"
            )
        if total.lost:
            found.append(f"{total.lost:,} messages are neither acknowledged nor dead letters")
        if total.poison_missing:
            found.append(f"{total.poison_missing:,} poison messages are not in the dead letters")
        if total.in_time_redelivered:
            found.append(
                f"{total.in_time_redelivered:,} messages were acknowledged in time and came again"
            )
        if total.unexplained:
            found.append(f"{total.unexplained:,} copies or ENDs that the log does not explain")
        if not self.is_settled:
            found.append("some messages were still open when the time was over")
        return found

    @property
    def is_ok(self) -> bool:
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        """Totals, the verdict in one word, and one object per queue."""
        totals = asdict(self.total)
        del totals["queue"]
        return {
            **totals,
            "verdict": "ok" if self.is_ok else "failed",
            "failures": self.failures,
            "seconds": round(self.seconds, 1),
            "queues": [asdict(queue) for queue in self.queues],
        }

    @classmethod
    def from_rows(cls, rows: Sequence[dict[str, Any]], **more: Any) -> Verdict:
        """From the rows of the verdict's SQL: one per queue, and one with an empty queue: all."""
        names = {item.name for item in fields(QueueResult)}
        results = [
            QueueResult(**{name: value for name, value in row.items() if name in names})
            for row in rows
        ]
        totals = [item for item in results if not item.queue] or [QueueResult(queue="")]
        queues = sorted((item for item in results if item.queue), key=lambda item: item.queue)
        return cls(total=totals[0], queues=queues, **more)
