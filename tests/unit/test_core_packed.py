"""R18: what is packed is the same as what is not, and is small."""

from __future__ import annotations

import copy
import tracemalloc
from random import Random

import pytest

from kafkamq.markers.rules.delivery import Settle
from kafkamq.markers.rules.entry import NEVER
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.types import Marker, MarkerType, MessageId, Outcome

T = 3000


def start(offset: int, consumer: str = "a") -> Marker:
    return Marker(MarkerType.START, MessageId(0, offset), T, consumer_id=consumer)


def end(offset: int, outcome: Outcome, delay: int = 0) -> Marker:
    return Marker(MarkerType.END, MessageId(0, offset), delay, consumer_id="a", outcome=outcome)


class Pair:
    """Two trackers of one log; the second one packs as soon as it may."""

    def __init__(self) -> None:
        self.plain = RedeliveryTracker(max_loose=NEVER)
        self.packing = RedeliveryTracker(max_loose=1)
        self.offset = 0

    def record(self, at_ms: int, marker: Marker) -> None:
        for tracker in (self.plain, self.packing):
            tracker.apply(self.offset, at_ms, marker)
        self.offset += 1

    def compare(self) -> None:
        plain, packing = self.plain, self.packing
        assert packing.committable_offset() == plain.committable_offset()
        assert packing.open_count() == plain.open_count()
        assert packing.due_count() == plain.due_count()
        assert packing.next_wake().has_due == plain.next_wake().has_due
        copy.deepcopy(packing).check()  # a copy: looking at all entries unpacks them


def packed(tracker: RedeliveryTracker) -> int:
    return tracker.table.packed.count


def test_a_verdicts_offset_outlives_packing() -> None:
    pair = Pair()
    pair.record(1000, start(1))
    pair.record(1001, end(1, Outcome.NACK, delay=500))
    for offset in range(2, 6):
        pair.record(1002, start(offset))
    assert packed(pair.packing) >= 2
    pair.record(1600, Marker(MarkerType.TICK))
    (settle,) = pair.packing.plan()
    assert isinstance(settle, Settle)
    assert settle.verdict_offset == 1
    assert [settle] == list(pair.plain.plan())


def test_what_was_taken_out_is_not_packed_any_more() -> None:
    pair = Pair()
    for offset in range(10):
        pair.record(1000, start(offset))
    for offset in range(9):
        pair.record(1001, end(offset, Outcome.ACK))
        pair.compare()
    assert pair.packing.in_progress() == {MessageId(0, 9)}
    pair.packing.check()


def test_packed_entries_hold_the_position() -> None:
    pair = Pair()
    for offset in range(10):
        pair.record(1000, start(offset))
    pair.record(1001, start(5, "b"))  # looked at, so it is packed no more
    assert pair.packing.committable_offset() == 0
    pair.record(1001, end(0, Outcome.ACK))
    assert pair.packing.committable_offset() == 1


@pytest.mark.parametrize("seed", range(10))
def test_packing_changes_nothing(seed: int) -> None:
    random, pair, at_ms = Random(seed), Pair(), 1_000_000
    asked: list[Settle] = []
    for _ in range(300):
        at_ms += random.choice([0, 0, 1, 50, 400, 1500])
        offset = random.randrange(12) + 4096 * random.randrange(2)
        kind = random.randrange(8)
        if kind < 4:
            pair.record(at_ms, start(offset, random.choice("ab")))
        elif kind < 6:
            pair.record(at_ms, end(offset, random.choice(list(Outcome)), delay=700))
        elif kind == 6:
            pair.record(at_ms, Marker(MarkerType.KEEPALIVE, None, T, consumer_id="a"))
        else:
            plan = list(pair.plain.plan())
            assert list(pair.packing.plan()) == plan
            asked += [action for action in plan if isinstance(action, Settle)]
        if asked and random.random() < 0.2:
            aborted, asked = asked, []
            pair.plain.aborted(aborted)
            pair.packing.aborted(aborted)
        pair.compare()
    assert pair.packing.in_progress() == pair.plain.in_progress()
    pair.packing.check()


@pytest.mark.parametrize("one_in", [1, 100, 10_000])
def test_pages_are_split_and_joined(one_in: int) -> None:
    random, pair, held = Random(one_in), Pair(), []
    for number in random.sample(range(1500), 1500):
        pair.record(1000, start(number * one_in))
        held.append(number * one_in)
    pair.compare()
    random.shuffle(held)
    for offset in held[:1400]:
        pair.record(1001, end(offset, Outcome.ACK))
    pair.compare()
    pair.record(1002 + T, Marker(MarkerType.TICK))  # a grace (R3)
    pair.record(1003 + 2 * T, Marker(MarkerType.TICK))
    assert packed(pair.packing)
    for _ in range(4):
        plan = pair.plain.plan(limit=30)
        pair.packing.plan(limit=30)
        assert len(plan) in (30, 10)
    assert pair.packing.due_count() == 100
    assert pair.packing.plan() == []
    pair.compare()
    for offset in held[1400:]:
        pair.record(9000, end(offset, Outcome.REDELIVERED))
    assert pair.packing.open_count() == packed(pair.packing) == 0


def test_a_renewed_page_wakes_again() -> None:
    pair = Pair()
    for offset in range(0, 1000, 100):
        pair.record(1000, start(offset))
    for at_ms in range(1500, 9000, 500):
        pair.record(at_ms, Marker(MarkerType.KEEPALIVE, None, T, consumer_id="a"))
        pair.compare()
    assert packed(pair.packing) >= 6
    assert not pair.packing.due_count()
    for at_ms in range(9000, 12_500, 500):
        pair.record(at_ms, Marker(MarkerType.TICK))
        pair.compare()
    assert pair.packing.due_count() == 10
    assert list(pair.packing.plan()) == list(pair.plain.plan())


@pytest.mark.parametrize(("one_in", "in_flight"), [(1, 50), (100, 40), (10_000, 6)])
def test_few_in_flight_are_not_packed(one_in: int, in_flight: int) -> None:
    tracker = RedeliveryTracker(max_loose=64)
    records = []
    for number in range(400):
        records.append(start(number * one_in))
        if number >= in_flight:
            records.append(end((number - in_flight) * one_in, Outcome.ACK))
    for offset, record in enumerate(records):
        tracker.apply(offset, 1000, record)
        assert not packed(tracker)
    for number in range(400, 500):
        tracker.apply(len(records) + number, 1000, start(number * one_in))
    assert packed(tracker)


@pytest.mark.parametrize("one_in", [1, 10, 60, 100, 1000, 10_000])
def test_a_held_message_takes_few_bytes(one_in: int) -> None:
    count = 8 * 1024
    tracker = RedeliveryTracker(max_loose=16)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(count):
            tracker.apply(number, 1_000_000 + number // 10, start(number * one_in))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / count <= 60
