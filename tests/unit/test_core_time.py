"""R1-R3: the log's clock, the strict end of a lease, and the grace after a gap in the log."""

from __future__ import annotations

import pytest
from tests.unit.core_fold import START_MS, Fold, T

from kafkamq.markers.rules.delivery import DueCause
from kafkamq.queue.rules.log_clock import NO_TIMESTAMP, LogClock
from kafkamq.types import Outcome


def test_r01_clock_is_the_sum_of_positive_differences() -> None:
    clock = LogClock()
    steps = [clock.advance(at_ms) for at_ms in (1000, 1500, 1500, 900, 1000, 3000)]
    assert steps == [0, 500, 0, 0, 100, 2000]
    assert clock.now_ms == 1000 + 500 + 100 + 2000


def test_r01_trackers_that_start_at_different_offsets_agree_on_differences() -> None:
    times = [5000, 9000, 2000, 2500, 8000, 7000, 7001]
    whole, part = LogClock(), LogClock()
    for at_ms in times[:3]:
        whole.advance(at_ms)
    part.advance(times[2])
    difference = whole.now_ms - part.now_ms
    for at_ms in times[3:]:
        assert whole.advance(at_ms) == part.advance(at_ms)
        assert whole.now_ms - part.now_ms == difference


def test_r01_a_backward_step_of_the_broker_ends_no_lease() -> None:
    fold = Fold()
    fold.start(START_MS)
    fold.tick(START_MS - 3_600_000)
    fold.crawl(START_MS - 3_600_000, START_MS - 3_600_000 + T)
    assert fold.due() == set()
    fold.tick(START_MS - 3_600_000 + T + 1)
    assert fold.due() == {1}


def test_r01_a_forward_step_hurts_only_what_is_open_at_that_moment() -> None:
    fold = Fold()
    fold.start(START_MS, 1)
    fold.tick(START_MS + 3_600_000)  # grants a grace
    fold.start(START_MS + 3_600_000, 2)
    fold.crawl(START_MS + 3_600_000, START_MS + 3_600_000 + T)
    assert fold.due() == {1}


def test_r01_records_without_log_append_time_do_not_move_the_clock() -> None:
    fold = Fold()
    fold.start(START_MS)
    for _ in range(5):
        fold.tick(NO_TIMESTAMP)
    fold.crawl(START_MS, START_MS + T)
    assert fold.due() == set()
    fold.keepalive(NO_TIMESTAMP)  # but it applies, at the clock that is
    assert fold.lease_end() == START_MS + 2 * T


def test_r01_the_first_timestamp_is_no_difference() -> None:
    """A log whose first records have no LogAppendTime: the first one that does ends nothing."""
    fold = Fold()
    fold.start(NO_TIMESTAMP, 1)
    fold.start(START_MS, 2)
    assert fold.due() == set()
    fold.tick(START_MS + T)
    fold.tick(START_MS + T + 1)
    assert fold.due() == {1, 2}


def test_r02_a_record_first_moves_the_clock_then_applies() -> None:
    """What ends a lease late by its own timestamp is late, though it is the next record."""
    fold = Fold()
    fold.start(START_MS, timeout=10_000)
    fold.crawl(START_MS, START_MS + 10_000, 1000)
    fold.ack(START_MS + 10_001)
    assert fold.due() == {1}
    assert fold.tracker.late_verdicts == 1


@pytest.mark.parametrize(("late_ms", "due"), [(-1, set()), (0, set()), (1, {1})])
def test_r02_due_only_when_the_clock_is_strictly_later(late_ms: int, due: set[int]) -> None:
    fold = Fold()
    fold.start(START_MS)
    fold.crawl(START_MS, START_MS + T - 1)
    fold.tick(START_MS + T + late_ms)
    assert fold.due() == due


@pytest.mark.parametrize("late_ms", [-1, 0, 1])
def test_r02_strict_also_for_nack_schedule_and_max_lease(late_ms: int) -> None:
    fold = Fold()
    fold.start(START_MS, 1)
    fold.nack(START_MS, 1, delay=5000)
    first = fold.schedule(START_MS, 5000)
    fold.start(START_MS, 2, timeout=60_000, max_lease=5000)
    fold.tick(START_MS + 5000 + late_ms)
    passed = late_ms > 0
    assert fold.state(1) == ("due" if passed else "waiting")
    assert fold.state(first, of_schedule=True) == ("due" if passed else "waiting")
    assert fold.state(2) == ("due" if passed else "held")


# ---- R3


def test_r03_a_gap_gives_a_held_entry_half_its_timeout() -> None:
    fold = Fold()
    fold.start(START_MS)
    fold.tick(START_MS + T + 1)
    assert fold.due() == set()
    assert fold.lease_end() == START_MS + T + 1 + T // 2


def test_r03_grace_is_three_seconds_at_most() -> None:
    fold = Fold()
    fold.start(START_MS, timeout=60_000)
    fold.tick(START_MS + 70_000)
    assert fold.lease_end() == START_MS + 70_000 + 3000


@pytest.mark.parametrize(("step_ms", "granted"), [(T // 3, False), (T // 3 + 1, True)])
def test_r03_only_when_the_passing_records_own_step_is_over_a_third(
    step_ms: int, granted: bool
) -> None:
    fold = Fold()
    fold.start(START_MS)
    fold.tick(START_MS + T - 1)  # a large step, but it passes nothing
    fold.tick(START_MS + T - 1 + step_ms)
    assert (fold.state() == "held") is granted


def test_r03_each_entry_is_judged_by_its_own_timeout() -> None:
    fold = Fold()
    fold.start(START_MS, 1, timeout=900)
    fold.start(START_MS, 2, timeout=1200)
    fold.tick(START_MS + 850)
    fold.tick(START_MS + 1201)  # a step of 351: over 900/3, not over 1200/3
    assert (fold.state(1), fold.state(2)) == ("held", "due")


def test_r03_once() -> None:
    fold = Fold()
    fold.start(START_MS)
    fold.tick(START_MS + 10_000)
    assert fold.state() == "held"
    fold.tick(START_MS + 20_000)
    assert fold.state() == "due"
    assert fold.settle().deadline_ms == START_MS + 10_000 + T // 2


@pytest.mark.parametrize("sign_of_life", ["start", "keepalive", "keepalive of the consumer"])
def test_r03_the_next_sign_of_life_arms_it_again(sign_of_life: str) -> None:
    fold = Fold()
    fold.start(START_MS)
    fold.tick(START_MS + 10_000)
    if sign_of_life == "start":
        fold.start(START_MS + 10_100)
    elif sign_of_life == "keepalive":
        fold.keepalive(START_MS + 10_100, 1)
    else:
        fold.keepalive(START_MS + 10_100)
    fold.tick(START_MS + 20_000)
    assert fold.state() == "held"
    assert fold.lease_end() == START_MS + 20_000 + T // 2


@pytest.mark.parametrize("of", [1, None])
def test_r03_the_passing_record_itself_may_arm_it_again(of: int | None) -> None:
    fold = Fold()
    fold.start(START_MS)
    fold.keepalive(START_MS + 10_000, of)
    assert fold.lease_end() == START_MS + 10_000 + T
    fold.tick(START_MS + 20_000)
    assert fold.state() == "held"


def test_r03_a_keepalive_before_the_gap_does_not_arm_it() -> None:
    fold = Fold()
    fold.start(START_MS)
    fold.keepalive(START_MS + 1000)
    fold.tick(START_MS + 10_000)
    fold.tick(START_MS + 20_000)
    assert fold.state() == "due"


def test_r03_a_keepalive_too_short_to_renew_still_arms_it() -> None:
    fold = Fold()
    fold.start(START_MS)
    fold.tick(START_MS + 10_000)
    fold.keepalive(START_MS + 10_000, timeout=1)
    fold.tick(START_MS + 20_000)
    assert fold.state() == "held"


def test_r03_somebody_elses_keepalive_does_not_arm_it() -> None:
    fold = Fold()
    fold.start(START_MS, by="a")
    fold.tick(START_MS + 10_000)
    fold.keepalive(START_MS + 10_100, by="b")
    fold.tick(START_MS + 20_000)
    assert fold.state() == "due"


def test_r03_never_once_max_lease_has_passed() -> None:
    fold = Fold()
    fold.start(START_MS, max_lease=5000)
    fold.tick(START_MS + 5001)
    assert fold.settle().cause is DueCause.MAX_LEASE


def test_r03_grace_does_not_reach_beyond_max_lease() -> None:
    fold = Fold()
    fold.start(START_MS, max_lease=5000)
    fold.tick(START_MS + 4900)
    assert fold.lease_end() == START_MS + 5000


def test_r03_only_held_entries_get_it() -> None:
    fold = Fold()
    fold.start(START_MS)
    fold.nack(START_MS, delay=T)
    first = fold.schedule(START_MS, T)
    fold.tick(START_MS + 60_000)
    assert fold.state() == "due"
    assert fold.state(first, of_schedule=True) == "due"


def test_r03_a_dead_worker_gets_one_grace_at_most() -> None:
    fold = Fold()
    fold.start(START_MS)
    for minute in range(1, 4):
        fold.tick(START_MS + minute * 60_000)
    assert fold.settle().deadline_ms == START_MS + 60_000 + T // 2


def test_r03_a_gap_that_passes_nothing_takes_no_grace_away() -> None:
    fold = Fold()
    fold.start(START_MS, timeout=60_000)
    fold.tick(START_MS + 59_000)
    fold.keepalive(START_MS + 59_000)
    fold.tick(START_MS + 200_000)
    assert fold.state() == "held"


def test_r03_late_worker_after_the_grace_is_late() -> None:
    fold = Fold()
    fold.start(START_MS)
    fold.tick(START_MS + 10_000)
    fold.end(START_MS + 10_000 + T // 2 + 1, Outcome.ACK)
    assert fold.state() == "due"
    assert fold.tracker.late_verdicts == 1
