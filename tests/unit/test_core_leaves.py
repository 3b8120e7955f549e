"""R31: thousands of holds of one log, which are divided and joined in every way."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from harness.agreement import StateStore
from tests.unit.core_fold import START_MS, Fold

from kafkamq.markers.rules.delivery import DueCause, Settle, each_message
from kafkamq.markers.rules.hold import MAX_HOLDS, MIN_HOLDS
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.types import Marker, MarkerType, MessageBatch, MessageId, Outcome, expand

HOUR_MS = 3_600_000
CHUNKS = 5


def batch(rng: random.Random, length: int) -> MessageBatch:
    """Of messages in one chunk, all of them or every other one or so."""
    at = rng.randrange(4096 - length)
    bits = rng.choice(((1 << length) - 1, 1 | rng.getrandbits(length)))
    return MessageBatch(0, b"", 0, rng.randrange(CHUNKS) * 4096 + at, bits)


def random_log(rng: random.Random, count: int) -> list[Marker]:
    """First mostly STARTs, then mostly ENDs: holds become many, small, and few again."""
    log = []
    for number in range(count):
        starts = 0.8 if number < count // 2 else 0.1
        kind = MarkerType.START if rng.random() < starts else MarkerType.END
        if rng.random() < 0.1:
            kind = MarkerType.KEEPALIVE
        length = rng.choice((1, 2, 3, 50, 400) if kind is MarkerType.START else (1, 20, 1000))
        log.append(
            Marker(
                kind,
                None,
                rng.choice((HOUR_MS, 2 * HOUR_MS)),
                consumer_id=rng.choice(("a", "b")),
                outcome=rng.choice((Outcome.ACK, Outcome.ACK, Outcome.NACK, Outcome.REJECT)),
                batches=(batch(rng, length),),
            )
        )
    return log


_DUE = (DueCause.REJECTED, DueCause.ALREADY_ENDED)


class Plain:
    """Each message by itself; no lease ends before the end."""

    def __init__(self) -> None:
        self.open: dict[MessageId, tuple[int, DueCause]] = {}  # START, and why it will be due
        self.ended: set[MessageId] = set()

    def apply(self, offset: int, marker: Marker) -> None:
        for each in expand(marker):
            assert each.message_id is not None
            start, cause = self.open.get(each.message_id, (offset, None))
            if each.type is MarkerType.START and cause is None:
                again = each.message_id in self.ended
                cause = DueCause.ALREADY_ENDED if again else DueCause.LEASE_ENDED
                self.open[each.message_id] = offset, cause
                self.ended.discard(each.message_id)
            elif each.type is not MarkerType.END or cause in _DUE:
                pass
            elif each.outcome is Outcome.ACK:
                self.open.pop(each.message_id, None)
                self.ended.add(each.message_id)
            elif cause is DueCause.LEASE_ENDED:
                rejects = each.outcome is Outcome.REJECT
                cause = DueCause.REJECTED if rejects else DueCause.NACKED
                self.open[each.message_id] = start, cause


@pytest.mark.parametrize("is_stored", [False, True])
def test_r31_holds_are_found_however_they_are_divided(is_stored: bool) -> None:
    rng = random.Random(31)
    tracker, plain, store = RedeliveryTracker(), Plain(), StateStore()
    largest = 0
    for offset, marker in enumerate(random_log(rng, 500)):
        tracker.apply(offset, START_MS + offset, marker)
        plain.apply(offset, marker)
        holds = [len(leaf.holds) for leaf in tracker.table.leaves()]
        largest = max(largest, sum(holds))
        assert all(size <= MAX_HOLDS for size in holds)
        if is_stored and offset % 40 == 0:
            store.save(tracker)
            tracker = store.restore()
        if offset % 50 == 0:
            tracker.check()
            assert tracker.in_progress() == set(plain.open)
    assert is_stored or largest > 3 * MAX_HOLDS
    for step in range(30):
        tracker.apply(500 + step, START_MS + step * HOUR_MS // 4, None)  # behind the graces
    tracker.check()
    planned = [action for action in each_message(tracker.plan()) if isinstance(action, Settle)]
    assert {each.message_id: (each.start_offset, each.cause) for each in planned} == plain.open
    for offset, action in enumerate(planned, 530):
        end = Marker(MarkerType.END, action.message_id, outcome=Outcome.REDELIVERED)
        tracker.apply(offset, START_MS + 10 * HOUR_MS, end)
    tracker.check()
    assert tracker.open_count() == 0
    assert list(tracker.table.leaves()) == []


def test_r31_what_few_holds_are_left_share_leaves() -> None:
    tracker = RedeliveryTracker()
    count = 10_000
    for number in range(count):
        start = Marker(MarkerType.START, MessageId(0, number), HOUR_MS)
        tracker.apply(number, START_MS, start)
    for number in range(count):
        if number % 50:
            tracker.apply(count + number, START_MS, Marker(MarkerType.END, MessageId(0, number)))
    tracker.check()
    assert len(list(tracker.table.leaves())) <= count // 50 // MIN_HOLDS + 1


@pytest.mark.parametrize("one_in", [1, 60, 10_000])
def test_r31_a_hold_takes_the_same_memory_however_far_apart_they_are(one_in: int) -> None:
    tracker = RedeliveryTracker()
    count = 5000
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(count):
        start = Marker(MarkerType.START, MessageId(0, number * one_in), HOUR_MS, consumer_id="a")
        tracker.apply(number, START_MS + number // 100, start)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 210 * count


def test_r31_what_is_due_is_planned_from_whichever_leaf_it_moves_to() -> None:
    fold = Fold()
    for number in range(MAX_HOLDS):
        fold.start(START_MS, 128 * number, timeout=HOUR_MS)
    last = 128 * (MAX_HOLDS - 1)
    fold.end(START_MS, Outcome.REJECT, last)
    fold.start(START_MS, 64, timeout=HOUR_MS)  # one too many: the leaf is cut
    assert fold.due() == {last}
