"""What becomes of a record whose handler failed: again, after a while, or never; pure."""

from __future__ import annotations

from dataclasses import dataclass

from kafkamq.types import Ack, DeadLetterReason, Nack, Reject

__all__ = ["Done", "GiveUp", "Retry", "judge"]


@dataclass(frozen=True, slots=True)
class Done:
    """Processed after all."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again after ``delay_s``; None: by the back-off."""

    delay_s: float | None = None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Tried for the last time."""

    reason: DeadLetterReason


def judge(
    verdict: Ack | Nack | Reject, *, attempt: int, max_attempts: int | None
) -> Done | Retry | GiveUp:
    """What follows from a verdict on the ``attempt``-th attempt (from 1).

    A rejection counts at once, a nack as long as there are attempts left.
    """
    if isinstance(verdict, Ack):
        return Done()
    if isinstance(verdict, Reject):
        return GiveUp(DeadLetterReason.REJECTED)
    if max_attempts is not None and attempt >= max_attempts:
        return GiveUp(DeadLetterReason.MAX_DELIVERIES)
    return Retry(verdict.delay)
