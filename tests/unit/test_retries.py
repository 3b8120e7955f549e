"""What follows from a handler's verdict."""

from __future__ import annotations

import pytest

from kafkamq.queue.rules.retry import Done, GiveUp, Retry, judge
from kafkamq.types import Ack, DeadLetterReason, Nack, Reject


@pytest.mark.parametrize(
    ("verdict", "attempt", "max_attempts", "expected"),
    [
        (Ack(), 1, 1, Done()),
        (Nack(), 1, None, Retry(None)),
        (Nack(), 1_000_000, None, Retry(None)),
        (Nack(delay=3.0), 2, 3, Retry(3.0)),
        (Nack(delay=3.0), 3, 3, GiveUp(DeadLetterReason.MAX_DELIVERIES)),
        (Nack(), 1, 1, GiveUp(DeadLetterReason.MAX_DELIVERIES)),
        (Reject("no use"), 1, None, GiveUp(DeadLetterReason.REJECTED)),
        (Reject(), 9, 3, GiveUp(DeadLetterReason.REJECTED)),
    ],
)
def test_verdicts(
    verdict: Ack | Nack | Reject,
    attempt: int,
    max_attempts: int | None,
    expected: Done | Retry | GiveUp,
) -> None:
    assert judge(verdict, attempt=attempt, max_attempts=max_attempts) == expected
