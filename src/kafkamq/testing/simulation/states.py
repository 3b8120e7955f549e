"""States that the seeds must reach, each at least once, or they test less than they seem to.

Most are told by the lines that the shells log; the others by the logs of Kafka.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kafkamq.queue.wire.headers import REASON
from kafkamq.testing.history import LogRecord, MessageHistory, Timeline, Why, read_timelines
from kafkamq.types import MarkerType

__all__ = ["STATES", "of_line", "of_logs"]

_LINES = {
    "a START waits while others go on": "STARTs are not confirmed, others go on",
    "revoked between START and commit": "partitions went to others with STARTs not committed",
    "a commit of offsets is made again": "a commit failed and is made again",
    "a transaction of STARTs is made again": "a transaction of STARTs is made again",
    "a group's offsets are gone, the ledger has them": "the group's offsets are gone",
    "a lease was lost": "a lease was lost",
    "a full queue at a verdict": "verdicts are written again",
    "a producer failed for good": "a producer failed for good and was recreated",
    "a plan retried": "settling again",
    "a settlement failed": "a settlement failed",
    "a partition moved from a tracker": "partitions revoked",
    "a partition cannot start yet": "a partition cannot start yet",
}
_FENCED = "fenced while firing"
_PART = "part of a plan retried"
_OF_LOGS = (
    "a message was carried forward",
    "a late verdict",
    "a START behind its END (R12)",
    "held longer than max_lease",
    "released",
    "a schedule was cancelled",
    "two STARTs of one message",
    "R17 with due entries",
    "dead letter: max-deliveries",
    "dead letter: rejected",
    "dead letter: expired",
    "dead letter: max-lease",
)
STATES = frozenset([*_LINES, _FENCED, *_OF_LOGS])  # _PART is counted, and seldom seen


def of_line(message: str, extra: Mapping[str, object]) -> list[str]:
    found = [state for state, begin in _LINES.items() if message.startswith(begin)]
    if extra.get("actions") and extra.get("error") == "FencedError":
        found.append(_FENCED)
    if extra.get("transactions_done"):
        found.append(_PART)
    return found


def of_logs(markers: Sequence[LogRecord], dead_letters: Sequence[LogRecord]) -> Counter[str]:
    found: Counter[str] = Counter()
    for letter in dead_letters:
        reason = dict(letter.headers).get(REASON) or b""
        found[f"dead letter: {reason.decode()}"] += 1
    for timeline in read_timelines(markers).values():
        for (of_schedule, _), own in timeline.of_message.items():
            kinds = Counter(timeline.marker(at).type for at in own)
            found["two STARTs of one message"] += kinds[MarkerType.START] > 1
            if of_schedule:
                carried = sum(timeline.marker(at).carried_forward for at in own)
                found["a message was carried forward"] += carried
        for history in timeline.histories():
            found.update(_of_history(timeline, history))
    return +found


def _of_history(timeline: Timeline, history: MessageHistory) -> Counter[str]:
    started = [at for at in timeline.starts_of_engines if 0 <= history.due < at < history.end]
    return Counter(
        {
            "a late verdict": history.late_acks,
            "a START behind its END (R12)": history.is_extra,
            "held longer than max_lease": history.why is Why.MAX_LEASE,
            "released": history.why is Why.RELEASED,
            "a schedule was cancelled": history.ending.value == "was cancelled",
            "R17 with due entries": len(started),
        }
    )
