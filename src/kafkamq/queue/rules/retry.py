"""What becomes of a record whose handler failed: again, after a while, or never; pure."""

from __future__ import annotations

from dataclasses import dataclass

from kafkamq.config import Backoff
from kafkamq.types import Ack, DeadLetterReason, Nack, Reject


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
    """What follows from the ``attempt``-th attempt (from 1); a rejection counts at once."""
    if isinstance(verdict, Ack):
        return Done()
    if isinstance(verdict, Reject):
        return GiveUp(DeadLetterReason.REJECTED)
    if max_attempts is not None and attempt >= max_attempts:
        return GiveUp(DeadLetterReason.MAX_DELIVERIES)
    return Retry(verdict.delay)


def backoff_delay_ms(backoff: Backoff, delivery_count: int, random_unit: float) -> int:
    """Delay before delivery ``delivery_count + 1``; ``random_unit`` in [0, 1) draws the jitter."""
    doublings = min(max(delivery_count, 1) - 1, 60)
    delay_s = min(backoff.max, backoff.first * 2.0**doublings)
    spread = 1.0 - backoff.jitter + 2.0 * backoff.jitter * random_unit
    return round(delay_s * spread * 1000)
