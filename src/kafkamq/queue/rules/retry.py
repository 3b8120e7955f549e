"""What becomes of a record whose handler failed: again, after a while, or never; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kafkamq.config import Backoff
from kafkamq.errors import ConfigError
from kafkamq.types import Ack, DeadLetterReason, Nack, Reject

RetryOn: TypeAlias = Mapping[type[BaseException], Backoff | None]
"""Exceptions that are worth another attempt, and back-offs of their own; None: the usual one."""


def retry_kinds(given: object) -> RetryOn | None:
    """Return what ``retry_on=`` says: kinds of exceptions, or their back-offs; None: any is worth
    it.

    Raises:
        ConfigError: It says something else.
    """
    if given is None:
        return None
    found = given if isinstance(given, Mapping) else None
    if found is None:
        found = dict.fromkeys(given if isinstance(given, Sequence) else [given])
    for kind, backoff in found.items():
        is_kind = isinstance(kind, type) and issubclass(kind, BaseException)
        if not is_kind or not isinstance(backoff, Backoff | None):
            raise ConfigError(
                f"retry_on is {given!r}: give kinds of exceptions, as (OSError,), or their"
                " back-offs, as {OSError: Backoff(first=5.0)}"
            )
    return dict(found)


def backoff_on(error: BaseException | None, kinds: RetryOn | None) -> Backoff | None:
    """Return the back-off of an exception's own kind, the first that fits; None: it has none."""
    found = (backoff for kind, backoff in (kinds or {}).items() if isinstance(error, kind))
    return next(found, None)


@dataclass(frozen=True, slots=True)
class Done: ...


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
    """Return what follows from the ``attempt``-th attempt (from 1); a rejection counts at once."""
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
