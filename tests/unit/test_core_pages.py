"""R18: a state of many chunks: the index lists some, pages have the others."""

from __future__ import annotations

import json

from harness.agreement import StateStore
from tests.unit.core_fold import START_MS

from kafkamq.markers.rules.chunks import LIMITS, PageLimits
from kafkamq.markers.rules.hold import CHUNK_OFFSETS, ENDED_MEMORY_MS
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.markers.rules.snapshot import restore_tracker, take_snapshot
from kafkamq.types import Marker, MarkerType, MessageId, Outcome

HOUR_MS = 3_600_000
MANY = 3_000
UNLIMITED = PageLimits(listed=1 << 30)
IDLE = Marker(MarkerType.KEEPALIVE, None, 1000, consumer_id="nobody")


def far_apart(number: int) -> MessageId:
    return MessageId(0, number * CHUNK_OFFSETS)


def sparse(count: int) -> RedeliveryTracker:
    """SCHEDULEs in a chunk each, due a second after another."""
    tracker = RedeliveryTracker()
    for number in range(count):
        delay_ms = HOUR_MS + number * 1000
        tracker.apply(
            number, START_MS, Marker(MarkerType.SCHEDULE, far_apart(number), delay_ms, b"q")
        )
    return tracker


def stored(count: int, limits: PageLimits = LIMITS) -> StateStore:
    """In a store, and at rest there: it was read and written once more."""
    store = StateStore(limits=limits)
    store.save(sparse(count))
    store.save(store.restore())
    return store


def pages(store: StateStore) -> int:
    return len(json.loads(store.index)["pages"])


def test_r18_one_record_costs_the_same_beside_many_chunks() -> None:
    store = stored(MANY)
    assert len(store.index) < 100_000
    store.loads = 0
    tracker = store.restore()
    tracker.apply(MANY, START_MS, IDLE)
    assert tracker.plan() == []
    assert tracker.committable_offset() == 0
    assert tracker.open_count() == MANY
    assert tracker.next_wake().deadline_ms == START_MS + HOUR_MS
    snapshot = take_snapshot(tracker)
    assert store.loads == 0
    assert snapshot.changed == {}
    assert snapshot.removed == []


def test_r18_what_one_chunk_needs_is_one_page() -> None:
    store = stored(MANY)
    store.loads = 0
    tracker = store.restore()
    end = Marker(MarkerType.END, far_apart(7), outcome=Outcome.ACK, of_schedule=True)
    tracker.apply(MANY, START_MS, end)
    assert store.loads == 2  # the page and the chunk
    changed = take_snapshot(tracker).changed
    assert sorted(name.partition("/")[0] for name in changed) == ["1", "page"]
    assert sum(map(len, changed.values())) < 60_000


def test_r18_pages_wake_in_time_and_go_when_their_chunks_do() -> None:
    store = stored(MANY)
    due: list[int] = []
    offset, now_ms = MANY, START_MS + HOUR_MS
    while len(due) < MANY:
        now_ms += 300_000
        tracker = store.restore()
        tracker.apply(offset, now_ms, IDLE)
        actions = tracker.plan()
        for number, action in enumerate(actions, offset + 1):
            end = Marker(
                MarkerType.END, action.message_id, outcome=Outcome.REDELIVERED, of_schedule=True
            )
            tracker.apply(number, now_ms, end)
        due += [action.message_id.offset for action in actions]
        offset += len(actions) + 1
        tracker.check()
        store.save(tracker)
    assert sorted(due) == [number * CHUNK_OFFSETS for number in range(MANY)]
    tracker = store.restore()
    tracker.apply(offset, now_ms + ENDED_MEMORY_MS + 1, IDLE)
    store.save(tracker)
    assert store.chunks == {}
    assert pages(store) == 0


def test_r18_a_state_without_pages_is_shared_out_where_it_is_large() -> None:
    store = stored(MANY, UNLIMITED)
    assert pages(store) == 0
    assert len(store.index) > 150_000
    store.limits = LIMITS
    store.save(store.restore())
    assert pages(store) > 0
    assert len(store.index) < 100_000
    tracker = store.restore()
    assert tracker.scheduled() == {far_apart(number) for number in range(MANY)}
    tracker.check()


def test_r18_a_small_state_has_no_pages() -> None:
    assert pages(stored(LIMITS.listed)) == 0
    assert pages(stored(LIMITS.listed + 1)) > 0


def test_r18_the_next_engine_asks_again_for_what_pages_do_not_hold() -> None:
    """What is asked for stays in the index: a start goes through all of it, not through pages."""
    store = StateStore(limits=PageLimits(listed=4, kept=2, page=3, least=2))
    tracker = sparse(50)
    tracker.apply(50, START_MS + HOUR_MS + 20_001, IDLE)
    assert len(tracker.plan()) == 21
    store.save(tracker)
    store.save(store.restore())
    store.loads = 0
    later = restore_tracker(store.index, store.load, partition=0, engine=("spark", 2))
    assert not later.plan()
    tick = Marker(MarkerType.TICK, consumer_id="spark", engine_epoch=2)
    later.apply(51, START_MS, tick)
    assert len(later.plan()) == 21
    assert store.loads == 21
