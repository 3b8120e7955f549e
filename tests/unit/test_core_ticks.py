"""R4: when a silent log gets a TICK, and when it does not."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.unit.core_fold import START_MS, Fold, T

from kafkamq.markers.rules.delivery import DueCause
from kafkamq.markers.rules.ticks import TickPolicy, Wake
from kafkamq.types import Outcome

QUIET = Wake(None, None, False)


def lease(deadline_ms: int, timeout_ms: int = T, *, has_due: bool = False) -> Wake:
    return Wake(deadline_ms, deadline_ms - timeout_ms // 4, has_due)


def policy(monotonic_ms: int = 0, max_silence_ms: int = 1000) -> TickPolicy:
    result = TickPolicy(monotonic_ms, max_silence_ms)
    result.on_read(monotonic_ms, 10)
    return result


def test_r04_nothing_open_no_tick() -> None:
    ticks = policy()
    assert not any(ticks.wants_tick(at_ms, 5000, QUIET) for at_ms in range(0, 10**7, 10_000))


def test_r04_a_quarter_before_the_deadline_and_behind_it() -> None:
    ticks = policy()
    wake = lease(5000 + T)
    warn_ms = T - T // 4
    assert not ticks.wants_tick(warn_ms, 5000, wake)
    assert ticks.wants_tick(warn_ms + 1, 5000, wake)
    # The TICK was read: the log has crossed that point, the deadline comes next.
    ticks.on_read(warn_ms + 1, 11)
    clock_ms = 5000 + warn_ms + 1
    assert not ticks.wants_tick(T, clock_ms, wake)
    assert ticks.wants_tick(T + 1, clock_ms, wake)


def test_r04_newer_records_put_it_off() -> None:
    ticks = policy()
    wake = lease(5000 + T)
    ticks.on_read(T, 11)  # read just now: the estimate begins again
    assert not ticks.wants_tick(T + 1, 5000 + 100, wake)
    ticks.on_read(2 * T, 11)  # nothing newer
    assert ticks.wants_tick(2 * T, 5000 + 100, wake)


def test_r04_one_at_a_time_until_it_was_read() -> None:
    ticks = policy()
    wake = lease(5000 + T, has_due=True)
    assert ticks.wants_tick(60_000, 5000, wake)
    ticks.on_sent(60_000)
    assert not ticks.wants_tick(90_000, 5000, wake)
    ticks.on_delivered(10)
    assert not ticks.wants_tick(90_000, 5000, wake)
    ticks.on_read(90_000, 10)  # up to it, but not it
    assert not ticks.wants_tick(90_000, 5000, wake)
    ticks.on_read(90_000, 11)
    assert ticks.wants_tick(190_000, 5000, wake)


def test_r04_one_that_failed_is_written_again() -> None:
    ticks = policy()
    ticks.on_sent(60_000)
    ticks.on_failed()
    assert ticks.wants_tick(60_001, 5000, lease(5000 + T))


def test_r04_read_before_its_delivery_report() -> None:
    ticks = policy()
    ticks.on_sent(60_000)
    ticks.on_read(60_001, 11)
    assert not ticks.wants_tick(99_000, 5000, lease(5000 + T))
    ticks.on_delivered(10)
    assert ticks.wants_tick(99_000, 5000, lease(5000 + T))


def test_r04_a_report_that_nobody_waits_for_changes_nothing() -> None:
    ticks = policy()
    ticks.on_delivered(99)
    assert ticks.wants_tick(60_000, 5000, lease(5000 + T))


@pytest.mark.parametrize("max_silence_ms", [1000, 250])
def test_r04_once_a_second_while_something_due_is_not_settled(max_silence_ms: int) -> None:
    ticks = policy(max_silence_ms=max_silence_ms)
    due = Wake(None, None, True)
    sent = []
    offset = 10
    for at_ms in range(0, 10_000, 50):
        if ticks.wants_tick(at_ms, 5000, due):
            sent.append(at_ms)
            ticks.on_sent(at_ms)
            ticks.on_delivered(offset)
            offset += 1
            ticks.on_read(at_ms, offset)
    gaps = [later - earlier for earlier, later in pairwise(sent)]
    assert len(sent) >= 9
    assert set(gaps) == {max_silence_ms}


def test_r04_also_while_other_records_come() -> None:
    ticks = policy()
    due = Wake(None, None, True)
    ticks.on_sent(0)
    ticks.on_delivered(10)
    for at_ms in range(0, 1000, 100):
        ticks.on_read(at_ms, 11 + at_ms)
        assert not ticks.wants_tick(at_ms, 5000, due)
    assert ticks.wants_tick(1000, 5000, due)


def test_r04_one_that_is_not_read_soon_waits_while_no_grace_is_near() -> None:
    ticks = policy()
    wake = lease(5000 + T)
    clock_ms = 5000 + T - 1  # read just before the deadline: the gap is small
    for at_ms, is_read_soon, wanted in ((100, False, False), (100, True, True)):
        assert ticks.wants_tick(at_ms, clock_ms, wake, is_read_soon=is_read_soon) is wanted
    assert ticks.wants_tick(T // 4, clock_ms, wake, is_read_soon=False)  # R3
    due = Wake(None, None, True)
    assert not ticks.wants_tick(60_000, clock_ms, due, is_read_soon=False)


def test_r04_one_that_was_not_written_for_this_batch_gets_another_one() -> None:
    ticks = TickPolicy(0, lead_ms=150)
    ticks.on_read(0, 10)
    wake = lease(5000 + T)
    ticks.on_sent(T + 1)
    assert not ticks.wants_tick(T + 500, 5000, wake)  # it may be on its way still
    ticks.on_delivered(10)
    assert not ticks.wants_tick(T + 151, 5000, wake)
    assert not ticks.wants_tick(T + 500, 5000, wake, is_read_soon=False)
    assert ticks.wants_tick(T + 152, 5000, wake)


def test_r04_two_may_be_unread_and_no_more() -> None:
    ticks = TickPolicy(0, lead_ms=150)
    ticks.on_read(0, 10)
    wake = lease(5000 + T)
    for sent_ms, offset in ((T + 1, 10), (T + 500, 11)):
        assert ticks.wants_tick(sent_ms, 5000, wake)
        ticks.on_sent(sent_ms)
        ticks.on_delivered(offset)
    assert not ticks.wants_tick(10 * T, 5000, wake)  # nobody reads
    ticks.on_read(10 * T, 11)
    assert ticks.wants_tick(11 * T, 5000, wake)


def test_r04_each_ticks_time_is_when_it_was_sent() -> None:
    ticks = TickPolicy(0, lead_ms=150)
    ticks.on_read(0, 10)
    for sent_ms, offset in ((1000, 10), (1500, 11)):
        ticks.on_sent(sent_ms)
        ticks.on_delivered(offset)
    ticks.on_failed()  # a third one
    ticks.on_read(3000, 11, 6000)  # up to the first: the log's clock is 5000 ahead
    wake = Wake(60_000, 60_000, False)
    ticks.on_read(4000, 12, 6100)
    assert not ticks.wants_tick(55_000, 6100, wake)
    assert ticks.wants_tick(55_001, 6100, wake)


def test_r04_a_ticks_time_is_when_it_was_sent_and_not_when_it_was_read() -> None:
    ticks = policy()
    wake = lease(5000 + T)
    warn_ms = T - T // 4
    ticks.on_sent(warn_ms + 1)
    ticks.on_delivered(10)
    ticks.on_read(warn_ms + 1000, 11)
    assert not ticks.wants_tick(T, 5000 + warn_ms + 1, wake)
    assert ticks.wants_tick(T + 1, 5000 + warn_ms + 1, wake)


def test_r04_how_far_the_logs_clock_is_ahead_is_remembered_for_a_minute() -> None:
    ticks = policy()
    ticks.on_read(1000, 11, 6000)  # the last record was fresh: the log's clock is 5000 ahead
    ticks.on_read(2000, 12, 6100)  # this one was 900 old
    wake = Wake(60_000, 60_000, False)
    assert not ticks.wants_tick(55_000, 6100, wake)
    assert ticks.wants_tick(55_001, 6100, wake)
    ticks.on_read(70_000, 13, 74_000)  # clocks drift: what was seen last counts
    wake = Wake(80_000, 80_000, False)
    assert not ticks.wants_tick(76_000, 74_000, wake)
    assert ticks.wants_tick(76_001, 74_000, wake)


# ---- the tracker's side


def test_r04_what_a_partition_waits_for() -> None:
    fold = Fold()
    assert fold.tracker.next_wake() == QUIET
    fold.start(START_MS, 1, timeout=8000)
    fold.start(START_MS, 2, timeout=4000)
    assert fold.tracker.next_wake() == Wake(START_MS + 4000, START_MS + 3000, False)
    fold.ack(START_MS, 1)
    fold.ack(START_MS, 2)
    assert fold.tracker.next_wake() == QUIET


def test_r04_waiting_and_scheduled_ones_too() -> None:
    fold = Fold()
    fold.start(START_MS)
    fold.nack(START_MS, delay=1500)
    fold.schedule(START_MS, 900)
    wake = fold.tracker.next_wake()
    assert wake.deadline_ms == START_MS + 900
    fold.tick(START_MS + 901)
    assert fold.tracker.next_wake().has_due
    assert fold.tracker.next_wake().deadline_ms == START_MS + 1500


def test_r04_carries_too() -> None:
    fold = Fold(carry_after_ms=700)
    fold.schedule(START_MS, 90_000)
    assert fold.tracker.next_wake().deadline_ms == START_MS + 700


def test_r04_asked_for_is_not_settled() -> None:
    fold = Fold()
    fold.start(START_MS)
    fold.end(START_MS, Outcome.RELEASE)
    assert fold.tracker.next_wake().has_due
    fold.tracker.plan()
    assert fold.tracker.next_wake().has_due
    fold.redelivered(START_MS)
    assert fold.tracker.next_wake() == QUIET


@pytest.mark.parametrize("timeouts", [(3000,), (60_000,), (60_000, 1000), (700, 5000, 30_000)])
def test_r03_r04_on_a_silent_log_a_dead_worker_gets_no_grace(timeouts: tuple[int, ...]) -> None:
    """The TICK before the deadline makes the step that passes it a small one."""
    fold = Fold()
    for number, timeout in enumerate(timeouts):
        fold.start(START_MS, number, timeout=timeout)
    ticks = policy()
    ends: dict[int, int] = {}
    for at_ms in range(0, 70_000, 10):
        if ticks.wants_tick(at_ms, fold.tracker.clock_ms, fold.tracker.next_wake()):
            ticks.on_sent(at_ms)
            ticks.on_delivered(fold.tick(START_MS + at_ms))
        ticks.on_read(at_ms, fold.offset)
        for action in fold.tracker.plan():
            assert action.cause is DueCause.LEASE_ENDED
            ends[action.message_id.offset] = at_ms
            fold.redelivered(START_MS + at_ms, action.message_id)
    assert {number: timeouts[number] for number in ends} == dict(enumerate(timeouts))
    assert all(at_ms - timeouts[number] <= 20 for number, at_ms in ends.items())
    assert fold.offset <= 2 * len(timeouts) + 2 * 6 * len(timeouts)


def test_r04_the_log_has_passed_what_is_waited_for_by_the_same_estimate() -> None:
    """For engines that read in batches: the next one finds something that is due."""
    ticks = policy()  # the log's clock is 1000 ms ahead
    ticks.on_read(5000, 12, 6000)
    wake = Wake(7000, 6500, False)
    assert [ticks.has_passed(at_ms, 6000, wake) for at_ms in (6000, 6001)] == [False, True]
    assert not ticks.has_passed(90_000, 6000, QUIET)
