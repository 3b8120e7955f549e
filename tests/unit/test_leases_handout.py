"""R5 (how far ahead), R6 (alone), R8 (delays), R10 (expired)."""

from __future__ import annotations

import pytest

from kafkamq.config import Backoff
from kafkamq.markers.rules.handout import (
    LastDeliveries,
    ReceiveAhead,
    expires_at_ms,
    has_expired,
    is_last_delivery,
    nack_delay_ms,
)
from kafkamq.markers.rules.leases import Lease, LeaseState


class Worker:
    """What R6 must know of a consumer."""

    def __init__(self, open_count: int = 0) -> None:
        self.open_count = open_count


def lease() -> Lease:
    held = Lease(0, [0], (b"", 0), 0, "me")
    held.state = LeaseState.HELD
    return held


@pytest.mark.parametrize(
    ("count", "limit", "is_last"),
    [(1, 5, False), (4, 5, False), (5, 5, True), (6, 5, True), (1, 1, False), (2, 1, False)],
)
def test_last_delivery(count: int, limit: int, is_last: bool) -> None:
    assert is_last_delivery(count, limit) is is_last


class TestAlone:
    def setup_method(self) -> None:
        self.rule = LastDeliveries()
        self.first, self.second = Worker(), Worker()
        self.rule.join(self.first)
        self.rule.join(self.second)

    def enter(self, worker: Worker, at_ms: int = 0) -> bool:
        entered = self.rule.enter(worker, at_ms)
        self.rule.entered(worker)
        return entered

    def test_ordinary_messages_of_many_consumers_go_together(self) -> None:
        self.first.open_count = 10
        assert self.enter(self.second)
        assert self.enter(self.first)

    def test_a_last_delivery_waits_for_the_whole_process(self) -> None:
        self.second.open_count = 1
        assert not self.rule.enter_last(self.first, 0)
        self.second.open_count = 0
        assert self.rule.enter_last(self.first, 1)

    def test_nothing_starts_beside_it_until_it_is_settled(self) -> None:
        alone = lease()
        assert self.rule.enter_last(self.first, 0)
        self.rule.entered(self.first, alone)
        assert not self.enter(self.second)
        assert not self.enter(self.first)
        assert not self.rule.enter_last(self.second, 0)
        alone.held.clear()
        alone.is_end_known = True
        self.rule.leave(self.second)  # it had asked, which keeps others waiting
        assert self.enter(self.first)

    def test_nothing_starts_beside_a_verdict_that_is_under_way(self) -> None:
        """Found by killing workers: poison right behind an acked last delivery buried it."""
        alone = lease()
        alone.deadline_ms = 5000
        self.rule.enter_last(self.first, 0)
        self.rule.entered(self.first, alone)
        alone.held.clear()
        assert not self.enter(self.second, 1)
        assert not self.enter(self.first, 4999)
        assert self.enter(self.first, 5000)  # a tracker answers for it by now

    def test_a_lost_one_is_not_held_any_more(self) -> None:
        alone = lease()
        self.rule.enter_last(self.first, 0)
        self.rule.entered(self.first, alone)
        alone.state = LeaseState.LOST
        assert self.enter(self.second)

    def test_who_waits_to_be_alone_keeps_others_from_starting_more(self) -> None:
        self.second.open_count = 1
        assert not self.rule.enter_last(self.first, 0)
        assert not self.enter(self.second, 500)
        assert not self.rule.enter_last(self.first, 900)
        assert not self.enter(self.second, 1500)

    def test_a_message_that_is_held_for_hours_does_not_stop_the_others(self) -> None:
        """Found by review: one long job and one last delivery stopped every queue for 12 h."""
        self.second.open_count = 1
        started = []
        for at_ms in range(0, 120_000, 500):
            assert not self.rule.enter_last(self.first, at_ms)
            if self.enter(self.second, at_ms):
                started.append(at_ms)
        assert 10_000 in started
        assert 60_000 <= 500 * len(started) <= 100_000  # most of the time, not all
        self.second.open_count = 0
        assert self.rule.enter_last(self.first, 120_000)

    def test_who_stops_asking_is_forgotten(self) -> None:
        self.second.open_count = 1
        assert not self.rule.enter_last(self.first, 0)
        assert self.enter(self.second, 1001)

    def test_who_holds_messages_itself_makes_nobody_wait(self) -> None:
        self.first.open_count = 1
        assert not self.rule.enter_last(self.first, 0)
        assert self.enter(self.second)

    def test_two_that_want_to_be_alone_take_turns(self) -> None:
        third = Worker(open_count=1)
        self.rule.join(third)
        assert not self.rule.enter_last(self.first, 0)
        assert not self.rule.enter_last(self.second, 1)
        third.open_count = 0
        assert not self.rule.enter_last(self.second, 2)
        assert self.rule.enter_last(self.first, 3)

    def test_planning_excludes_each_other(self) -> None:
        assert self.rule.enter(self.second, 0)  # its STARTs are not counted yet
        assert not self.rule.enter_last(self.first, 0)
        self.rule.entered(self.second)
        assert self.rule.enter_last(self.first, 0)

    def test_a_closed_consumer_is_not_alone_any_more(self) -> None:
        self.rule.enter_last(self.first, 0)
        self.rule.entered(self.first, lease())
        self.rule.leave(self.second)
        assert not self.enter(self.second)
        self.rule.leave(self.first)
        assert self.enter(self.second)

    def test_a_closed_consumer_counts_no_more(self) -> None:
        self.second.open_count = 5
        self.rule.leave(self.second)
        assert self.rule.enter_last(self.first, 0)


class TestReceiveAhead:
    def test_begins_with_the_buffer(self) -> None:
        assert ReceiveAhead(first=100, maximum=1000).size == 100
        assert ReceiveAhead(first=100, maximum=10).size == 10

    def test_grows_with_the_rate_up_to_the_maximum(self) -> None:
        ahead = ReceiveAhead(first=100, maximum=1000)
        sizes = []
        for _ in range(5):
            ahead.drained(ahead.size, 5)
            sizes.append(ahead.size)
        assert sizes == [200, 400, 800, 1000, 1000]

    def test_shrinks_when_handlers_are_slow(self) -> None:
        ahead = ReceiveAhead(first=100, maximum=1000)
        ahead.drained(100, 1)
        ahead.drained(200, 60_000)
        assert ahead.size == 100

    def test_many_are_no_more_than_asked_for_until_the_rate_says_so(self) -> None:
        ahead = ReceiveAhead(first=100, maximum=100_000)
        assert ahead.size_for(10) == 10
        ahead.drained(10, 10)  # 250 in a quarter of a second
        assert (ahead.size, ahead.size_for(10), ahead.size_for(30)) == (200, 200, 180)
        ahead.drained(200, 60_000)
        assert ahead.size_for(10) == 10

    def test_many_leave_room_for_the_next_ones_and_fit_into_caches(self) -> None:
        narrow, wide = ReceiveAhead(first=1, maximum=1000), ReceiveAhead(first=1, maximum=100_000)
        for _ in range(20):
            narrow.drained(10_000, 1)
            wide.drained(10_000, 1)
        assert (narrow.size, narrow.size_for(100), narrow.size_for(700)) == (1000, 500, 700)
        assert (wide.size_for(1000), wide.size_for(5000)) == (4000, 5000)

    def test_nothing_handed_out_says_nothing(self) -> None:
        ahead = ReceiveAhead(first=100, maximum=1000)
        ahead.drained(0, 0)
        assert ahead.size == 100


@pytest.mark.parametrize(
    ("ttl_ms", "origin_ms", "expected"),
    [
        (None, 1000, 0),
        (500, 1000, 1500),
        (0, 1000, 1000),
        (0, 0, 1),
        (500, -1, 0),
        ((1 << 63) - 1, 1000, (1 << 63) - 1),
    ],
)
def test_expiry(ttl_ms: int | None, origin_ms: int, expected: int) -> None:
    assert expires_at_ms(ttl_ms, origin_ms) == expected


@pytest.mark.parametrize(
    ("expiry_ms", "start_ms", "expired"),
    [(0, 9999, False), (1500, 1500, False), (1500, 1501, True), (1500, -1, False)],
)
def test_expired_by_the_broker_s_time_of_the_start(
    expiry_ms: int, start_ms: int, expired: bool
) -> None:
    assert has_expired(expiry_ms, start_ms) is expired


@pytest.mark.parametrize(
    ("requested_ms", "count", "retention_ms", "expected"),
    [
        (None, 1, -1, 1000),
        (None, 3, -1, 4000),
        (0, 3, -1, 0),
        (90_000, 1, -1, 90_000),
        (90_000, 1, 40_000, 10_000),  # R8: a quarter of the markers' retention
        (None, 10, 40_000, 10_000),
    ],
)
def test_nack_delay(requested_ms: int | None, count: int, retention_ms: int, expected: int) -> None:
    delay_ms = nack_delay_ms(
        requested_ms,
        backoff=Backoff(first=1.0, max=600.0, jitter=0.2),
        delivery_count=count,
        retention_ms=retention_ms,
        random_unit=0.5,
    )
    assert delay_ms == expected
