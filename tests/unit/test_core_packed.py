"""R18: what is packed is the same as what is not, and is small."""

from __future__ import annotations

import copy
import tracemalloc
from random import Random

import pytest

from kafkamq.core.delivery import Settle
from kafkamq.core.entry import NEVER
from kafkamq.core.redelivery import RedeliveryTracker
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
    return sum(c.packed.count for c in tracker.table.chunks.values() if c.packed is not None)


def test_a_verdicts_offset_outlives_packing() -> None:
    pair = Pair()
    pair.record(1000, start(1))
    pair.record(1001, end(1, Outcome.NACK, delay=500))
    for offset in range(2, 5):
        pair.record(1002, start(offset))
    assert packed(pair.packing) >= 3
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


def test_a_held_message_takes_few_bytes() -> None:
    count = 4 * 4096
    tracker = RedeliveryTracker(max_loose=128)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for offset in range(count):
            tracker.apply(offset, 1_000_000 + offset // 10, start(offset))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / count <= 60
