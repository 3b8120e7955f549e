"""R14 and R8: what becomes of a due message, and how long a nacked one waits."""

from __future__ import annotations

import pytest

from kafkamq.config import Backoff
from kafkamq.markers.rules.delivery import (
    Copy,
    DeadLetter,
    DueCause,
    Settle,
    decide,
)
from kafkamq.queue.rules.retry import backoff_delay_ms
from kafkamq.types import DeadLetterReason, Marker, MarkerType, MessageId

BEGIN_MS = 50_000  # log clock
START_MS = 1_700_000_000_000  # timestamp of the START
CAUSES = tuple(DueCause)


def settle(cause: DueCause, *, after_ms: int = 4000, of_schedule: bool = False) -> Settle:
    return Settle(
        start_offset=9,
        message_id=MessageId(0, 1),
        of_schedule=of_schedule,
        cause=cause,
        begin_ms=BEGIN_MS,
        clock_ms=BEGIN_MS + after_ms,
        deadline_ms=BEGIN_MS + 3000,
        verdict_offset=-1,
    )


def start(count: int = 1, *, limit: int = 3, expires_at_ms: int = 0) -> Marker:
    return Marker(
        MarkerType.START,
        MessageId(0, 1),
        3000,
        delivery_count=count,
        max_deliveries=limit,
        expires_at_ms=expires_at_ms,
    )


def decided(cause: DueCause, marker: Marker, error: str = "", **options: int) -> Copy | DeadLetter:
    return decide(
        settle(cause, **options),
        marker,
        start_timestamp_ms=START_MS,
        max_deliveries=5,
        error=error,
    )


@pytest.mark.parametrize("cause", [DueCause.LEASE_ENDED, DueCause.MAX_LEASE, DueCause.NACKED])
@pytest.mark.parametrize("count", [1, 2])
def test_r14_a_copy_counts_one_more(cause: DueCause, count: int) -> None:
    assert decided(cause, start(count)) == Copy(count + 1)


def test_r14_a_released_one_was_never_delivered() -> None:
    assert decided(DueCause.RELEASED, start(2)) == Copy(2)


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (DueCause.LEASE_ENDED, DeadLetterReason.MAX_DELIVERIES),
        (DueCause.NACKED, DeadLetterReason.MAX_DELIVERIES),
        (DueCause.MAX_LEASE, DeadLetterReason.MAX_LEASE),
    ],
)
def test_r14_the_last_allowed_delivery_ends_in_the_dead_letters(
    count: int, cause: DueCause, reason: DeadLetterReason
) -> None:
    assert decided(cause, start(count), "boom") == DeadLetter(reason, "boom")


@pytest.mark.parametrize("count", [3, 4])
def test_r14_unless_it_was_released(count: int) -> None:
    assert decided(DueCause.RELEASED, start(count)) == Copy(count)


@pytest.mark.parametrize(("count", "copied"), [(4, True), (5, False)])
def test_r14_no_limit_of_its_own_means_the_default(count: int, copied: bool) -> None:
    result = decided(DueCause.LEASE_ENDED, start(count, limit=0))
    assert isinstance(result, Copy) is copied


def test_r14_one_delivery_allowed() -> None:
    reason = DeadLetterReason.MAX_DELIVERIES
    assert decided(DueCause.LEASE_ENDED, start(1, limit=1)) == DeadLetter(reason)


def test_r14_kafka_mq_gos_start_counts_as_the_first() -> None:
    assert decided(DueCause.LEASE_ENDED, start(0, limit=0)) == Copy(2)


@pytest.mark.parametrize("count", [1, 3])
def test_r14_rejected_at_any_count(count: int) -> None:
    rejected = DeadLetter(DeadLetterReason.REJECTED, "no such user")
    assert decided(DueCause.REJECTED, start(count), "no such user") == rejected


@pytest.mark.parametrize("cause", [c for c in CAUSES if c is not DueCause.REJECTED])
@pytest.mark.parametrize(("after_ms", "expired"), [(4999, False), (5000, False), (5001, True)])
def test_r14_expired_when_the_clock_is_strictly_later(
    cause: DueCause, after_ms: int, expired: bool
) -> None:
    """By the log clock since its START, whatever the absolute times are."""
    marker = start(1, expires_at_ms=START_MS + 5000)
    result = decided(cause, marker, after_ms=after_ms)
    assert (result == DeadLetter(DeadLetterReason.EXPIRED)) is expired
    assert isinstance(result, Copy) is not expired


def test_r14_expiry_comes_before_the_count() -> None:
    marker = start(3, expires_at_ms=START_MS + 1)
    assert decided(DueCause.NACKED, marker) == DeadLetter(DeadLetterReason.EXPIRED)


def test_r14_a_verdict_beats_a_later_expiry() -> None:
    marker = start(1, expires_at_ms=START_MS + 1)
    assert decided(DueCause.REJECTED, marker, "bad") == DeadLetter(DeadLetterReason.REJECTED, "bad")


def test_r10_rejected_because_it_had_expired_when_it_was_started() -> None:
    marker = start(1, expires_at_ms=START_MS - 1)
    result = decided(DueCause.REJECTED, marker, "expired")
    assert result == DeadLetter(DeadLetterReason.EXPIRED, "expired")


def test_r14_never_expires() -> None:
    assert decided(DueCause.LEASE_ENDED, start(1), after_ms=10**12) == Copy(2)


def test_r14_the_first_copy_of_a_schedule_is_delivery_one() -> None:
    marker = Marker(MarkerType.SCHEDULE, delivery_count=1)
    assert decided(DueCause.SCHEDULED, marker, of_schedule=True) == Copy(1)


def test_r14_a_schedule_ignores_the_limits_of_deliveries() -> None:
    marker = Marker(MarkerType.SCHEDULE, delivery_count=9, max_deliveries=1)
    assert decided(DueCause.SCHEDULED, marker, of_schedule=True) == Copy(1)


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("limit", [0, 1, 3])
def test_r14_counts_never_shrink_and_never_jump(cause: DueCause, count: int, limit: int) -> None:
    of_schedule = cause is DueCause.SCHEDULED
    result = decided(cause, start(count, limit=limit), of_schedule=of_schedule)
    if isinstance(result, Copy) and not of_schedule:
        more = 0 if cause is DueCause.RELEASED else 1
        assert result.delivery_count == max(1, count) + more


# ---- R8


@pytest.mark.parametrize(
    ("count", "delay_ms"),
    [(0, 1000), (1, 1000), (2, 2000), (3, 4000), (9, 256_000), (10, 512_000), (11, 600_000)],
)
def test_r08_the_delay_doubles_up_to_the_longest(count: int, delay_ms: int) -> None:
    assert backoff_delay_ms(Backoff(jitter=0.0), count, 0.7) == delay_ms


@pytest.mark.parametrize(("unit", "delay_ms"), [(0.0, 1600), (0.5, 2000), (0.999, 2399)])
def test_r08_jitter_spreads_it_around(unit: float, delay_ms: int) -> None:
    assert backoff_delay_ms(Backoff(jitter=0.2), 2, unit) == delay_ms


def test_r08_a_huge_count_does_not_overflow() -> None:
    assert backoff_delay_ms(Backoff(jitter=0.0), 1 << 31, 0.0) == 600_000
    assert backoff_delay_ms(Backoff(first=0.0, jitter=0.0), 1 << 31, 0.0) == 0
