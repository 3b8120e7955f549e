"""R7 on the tracker's side: one KEEPALIVE of a consumer renews exactly what that consumer holds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from random import Random
from types import FrameType

import pytest
from tests.unit.core_fold import START_MS, Fold, T, message

from kafkamq.markers.rules.hold import Holder, Holders
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.types import Marker, MarkerType, Outcome


def test_r07_one_record_renews_every_lease_of_the_consumer() -> None:
    fold = Fold()
    for offset in (1, 2, 5000, 9000):
        fold.start(START_MS, offset, by="a")
    fold.start(START_MS, 3, by="b")
    fold.keepalive(START_MS + 1000, by="a")
    assert [fold.lease_end(offset) for offset in (1, 2, 5000, 9000)] == [START_MS + 1000 + T] * 4
    assert fold.lease_end(3) == START_MS + T


def test_r07_without_a_timeout_each_message_gets_its_own() -> None:
    fold = Fold()
    fold.start(START_MS, 1, timeout=3000)
    fold.start(START_MS, 2, timeout=9000)
    fold.keepalive(START_MS + 1000)
    assert fold.lease_end(1) == START_MS + 4000
    assert fold.lease_end(2) == START_MS + 10_000


def test_r07_it_never_shortens() -> None:
    fold = Fold()
    fold.start(START_MS, 1, timeout=9000)
    fold.keepalive(START_MS + 1000, timeout=10)
    assert fold.lease_end(1) == START_MS + 9000


def test_r07_an_earlier_longer_renewal_outlives_a_later_shorter_one() -> None:
    fold = Fold()
    fold.start(START_MS, 1)
    fold.keepalive(START_MS + 100, timeout=60_000)
    fold.keepalive(START_MS + 200, timeout=10)
    assert fold.lease_end(1) == START_MS + 100 + 60_000


def test_r07_a_start_after_the_keepalive_gets_nothing_of_it() -> None:
    fold = Fold()
    fold.start(START_MS, 1)
    fold.keepalive(START_MS, timeout=60_000)
    fold.start(START_MS + 10, 2)
    assert fold.lease_end(1) == START_MS + 60_000
    assert fold.lease_end(2) == START_MS + 10 + T


def test_r07_a_second_start_sets_even_where_it_shortens() -> None:
    fold = Fold()
    fold.start(START_MS, 1)
    fold.keepalive(START_MS, timeout=60_000)
    fold.start(START_MS + 10, 1)
    assert fold.lease_end(1) == START_MS + 10 + T


def test_r07_keepalive_by_id_sets_even_where_it_shortens_and_nothing_follows() -> None:
    fold = Fold()
    fold.start(START_MS, 1)
    fold.start(START_MS, 2)
    fold.keepalive(START_MS, timeout=60_000)
    fold.keepalive(START_MS + 10, 1, timeout=500)
    assert fold.lease_end(1) == START_MS + 510
    assert fold.lease_end(2) == START_MS + 60_000


def test_r07_a_shortened_lease_is_renewed_with_the_others_again() -> None:
    fold = Fold()
    fold.start(START_MS, 1)
    fold.keepalive(START_MS, timeout=60_000)
    fold.keepalive(START_MS + 10, 1, timeout=500)
    fold.keepalive(START_MS + 20, timeout=700)
    assert fold.lease_end(1) == START_MS + 720


@pytest.mark.parametrize("change", ["start", "keepalive"])
def test_r07_renewals_follow_the_message_to_its_newer_holder(change: str) -> None:
    fold = Fold()
    fold.start(START_MS, 1, by="a")
    if change == "start":
        fold.start(START_MS + 100, 1, by="b")
    else:
        fold.keepalive(START_MS + 100, 1, by="b")
    fold.keepalive(START_MS + 200, by="a", timeout=60_000)
    assert fold.lease_end(1) == START_MS + 100 + T
    fold.keepalive(START_MS + 300, by="b", timeout=5000)
    assert fold.lease_end(1) == START_MS + 5300


def test_r07_back_to_the_first_holder() -> None:
    fold = Fold()
    fold.start(START_MS, 1, by="a")
    fold.start(START_MS, 1, by="b")
    fold.keepalive(START_MS, by="a", timeout=60_000)
    fold.keepalive(START_MS + 1, 1, by="a")
    assert fold.lease_end(1) == START_MS + 1 + T


def test_r07_an_empty_consumer_renews_nothing() -> None:
    fold = Fold()
    fold.start(START_MS, 1, by="")  # kafka-mq-go's
    fold.keepalive(START_MS + 100, by="", timeout=60_000)
    assert fold.lease_end(1) == START_MS + T
    fold.keepalive(START_MS + 100, 1, by="")
    assert fold.lease_end(1) == START_MS + 100 + T


def test_r07_a_keepalive_for_an_ended_or_unknown_message_creates_nothing() -> None:
    fold = Fold()
    fold.keepalive(START_MS, 7)
    fold.start(START_MS, 1)
    fold.ack(START_MS, 1)
    fold.keepalive(START_MS, 1)
    fold.keepalive(START_MS)
    assert fold.tracker.in_progress() == set()
    assert fold.tracker.committable_offset() == fold.offset


def test_r14_nothing_renews_beyond_max_lease() -> None:
    fold = Fold()
    fold.start(START_MS, 1, max_lease=10_000)
    for at_ms in range(START_MS + 500, START_MS + 10_001, 500):
        fold.keepalive(at_ms, timeout=60_000)
    fold.keepalive(START_MS + 10_000, 1, timeout=60_000)
    assert fold.state(1) == "held"
    fold.keepalive(START_MS + 10_001)
    assert fold.state(1) == "due"
    assert fold.settle(1).deadline_ms == START_MS + 10_000


def test_r14_max_lease_of_the_tracker_for_starts_that_name_none() -> None:
    fold = Fold(max_lease_ms=5000)
    fold.start(START_MS, 1, timeout=60_000)
    fold.start(START_MS, 2, timeout=60_000, max_lease=7000)
    assert fold.lease_end(1) == START_MS + 5000
    assert fold.lease_end(2) == START_MS + 7000


def test_r07_thousands_of_holders_come_and_go() -> None:
    """Holders without entries are swept; those with entries keep their renewals."""
    fold = Fold()
    fold.start(START_MS, 0, by="stays")
    fold.keepalive(START_MS, by="stays", timeout=50_000)
    for number in range(1, 1000):
        fold.start(START_MS, number, by=f"c{number}")
        fold.ack(START_MS, number, by=f"c{number}")
    assert fold.lease_end(0) == START_MS + 50_000
    assert len(fold.tracker.holders.used()) == 1
    fold.keepalive(START_MS + 10, by="stays", timeout=60_000)
    assert fold.lease_end(0) == START_MS + 60_010


@pytest.mark.parametrize("seed", range(20))
def test_r07_a_lease_gets_what_was_renewed_since_it_began(seed: int) -> None:
    """Whether its end is asked for behind each renewal or at last."""
    random, holders, now_ms = Random(seed), Holders(), 0
    joined: list[tuple[Holder, int, list[int]]] = []  # its own end, and what renewals set
    for _ in range(300):
        now_ms += random.choice((0, 0, 1, 7, 90))
        if random.random() < 0.5:
            timeout_ms = random.choice((5, 60, 200))
            end_ms = now_ms + random.choice((timeout_ms, 1))  # shortened by a KEEPALIVE by id
            joined.append((holders.join("a", timeout_ms, 5000, end_ms), end_ms, []))
        else:
            holders.renew("a", now_ms, explicit_ms := random.choice((0, 0, 3, 50, 150, 400)))
            for holder, _, ends in joined:
                ends.append(now_ms + (explicit_ms or holder.timeout_ms))
        if random.random() < 0.3 and joined:
            holder, end_ms, ends = random.choice(joined)
            assert max(end_ms, holder.renewed_until_ms) == max([end_ms, *ends])
    for holder, end_ms, ends in joined:
        assert max(end_ms, holder.renewed_until_ms) == max([end_ms, *ends])


def lines_run(function: Callable[[], object]) -> int:
    """How many lines of Python it takes."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: object) -> Callable[..., object]:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("differs", ["renewal", "max_lease", "timeout", "shorter renewal"])
def test_r07_starts_and_keepalives_in_turn_cost_the_same_each(differs: str) -> None:
    """Each START begins a variant of its own, as the renewal before is longer than its lease."""

    def fold(pairs: int) -> None:
        tracker = RedeliveryTracker()
        for number in range(pairs):
            longer = pairs - number if differs == "shorter renewal" else number
            start = Marker(
                MarkerType.START,
                message(number),
                T + (number if differs == "timeout" else 0),
                consumer_id="a",
                max_lease_ms=90_000_000 + (number if differs == "max_lease" else 0),
            )
            tracker.apply(2 * number, START_MS, start)
            renewal = Marker(MarkerType.KEEPALIVE, None, 9 * T + longer, consumer_id="a")
            tracker.apply(2 * number + 1, START_MS, renewal)

    few, many = lines_run(partial(fold, 100)), lines_run(partial(fold, 800))
    assert many < 12 * few


def test_r08_release_is_believed_of_the_holder_only() -> None:
    fold = Fold()
    fold.start(START_MS, 1, by="a")
    fold.start(START_MS, 1, by="b")
    fold.end(START_MS, Outcome.RELEASE, 1, by="a")
    assert fold.state(1) == "held"
    fold.end(START_MS, Outcome.RELEASE, message(1), by="b")
    assert fold.state(1) == "due"


def held(holders: Holders) -> int:
    return min((holder.timeout_ms for holder in holders.used()), default=0)


def test_r04_the_shortest_timeout_is_of_those_that_hold() -> None:
    holders = Holders()
    assert holders.shortest_timeout_ms() == 0
    slow = holders.join("a", 900, 5000, 1000)
    quick = holders.join("b", 300, 5000, 1000)
    other = holders.join("c", 300, 5000, 1000)
    holders.leave(quick)
    assert holders.shortest_timeout_ms() == 300
    holders.leave(other)
    assert holders.shortest_timeout_ms() == 900
    assert holders.join("b", 300, 5000, 1000) is quick
    assert holders.shortest_timeout_ms() == 300
    holders.leave(quick)
    holders.leave(slow)
    assert holders.shortest_timeout_ms() == 0


def test_r04_the_shortest_timeout_after_many_holders_were_dropped() -> None:
    random, holders = Random(4), Holders()
    joined: list[Holder] = []
    for number in range(5000):
        if len(joined) > 20 or (joined and random.random() < 0.4):
            holders.leave(joined.pop(random.randrange(len(joined))))
        else:
            timeout_ms = random.randrange(1, 400)
            joined.append(holders.join(f"consumer {number}", timeout_ms, 5000, 1000))
        assert holders.shortest_timeout_ms() == held(holders)
