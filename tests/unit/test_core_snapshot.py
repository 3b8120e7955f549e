"""R18: the state in a store: small, without payloads, loaded where it is touched."""

from __future__ import annotations

import json

import pytest
from harness.agreement import StateStore
from tests.unit.core_fold import START_MS, Fold, T, message

from kafkamq.errors import UnsupportedVersionError, WireError
from kafkamq.markers.rules.delivery import DueCause, Settle
from kafkamq.markers.rules.hold import CHUNK_OFFSETS
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.markers.rules.snapshot import STATE_VERSION, restore_tracker, take_snapshot
from kafkamq.types import Marker, MarkerType, MessageBatch, MessageId, Outcome

SECRET = b"do not store me"


def test_r18_payloads_keys_and_headers_never_enter_the_state() -> None:
    fold = Fold()
    for number in range(10):
        marker = Marker(
            MarkerType.START,
            message(number),
            T,
            SECRET,
            SECRET,
            headers=(("header", SECRET),),
            reason=SECRET.decode(),
        )
        fold.record(START_MS, marker)
    fold.record(START_MS, Marker(MarkerType.SCHEDULE, None, T, SECRET, SECRET))
    reject = Marker(MarkerType.END, message(1), outcome=Outcome.REJECT, reason=SECRET.decode())
    fold.record(START_MS, reject)
    snapshot = take_snapshot(fold.tracker)
    for data in (snapshot.index, *snapshot.changed.values()):
        assert SECRET not in data


def test_r18_a_message_is_some_fifty_bytes() -> None:
    fold = RedeliveryTracker()
    for number in range(4000):
        marker = Marker(MarkerType.START, message(number), T, consumer_id="a" * 30)
        fold.apply(number, START_MS, marker)
    snapshot = take_snapshot(fold)
    assert sum(map(len, snapshot.changed.values())) <= 4000 * 48
    assert len(snapshot.index) < 400


def test_r31_messages_that_are_held_together_are_a_hold_a_page() -> None:
    tracker = RedeliveryTracker()
    batch = MessageBatch(0, b"", 0, 96, (1 << 1000) - 1)
    tracker.apply(0, START_MS, Marker(MarkerType.START, None, T, batches=(batch,)))
    assert sum(map(len, take_snapshot(tracker).changed.values())) < 17 * 50
    assert tracker.open_count() == 1000


def chunks_of_five() -> tuple[Fold, StateStore]:
    fold = Fold()
    for number in range(5):
        fold.start(START_MS + number * 1000, number * CHUNK_OFFSETS, timeout=10_000)
    store = StateStore()
    store.save(fold.tracker)
    assert len(store.chunks) == 5
    return fold, store


def test_r18_only_what_changed_is_written() -> None:
    fold, _ = chunks_of_five()
    assert take_snapshot(fold.tracker).changed == {}
    fold.keepalive(START_MS + 4000)  # of the consumer: in the index
    assert take_snapshot(fold.tracker).changed == {}
    fold.ack(START_MS + 4000, 0)
    changed = take_snapshot(fold.tracker).changed
    assert len(changed) == 1


@pytest.mark.parametrize("renewed", [False, True])
def test_r18_chunks_are_loaded_where_a_record_or_the_clock_touches_them(renewed: bool) -> None:
    fold, store = chunks_of_five()
    if renewed:
        fold.keepalive(START_MS + 4000)
        store.save(fold.tracker)
    tracker = store.restore()
    assert tracker.committable_offset() == 0
    assert tracker.open_count() == 5
    assert tracker.next_wake() == fold.tracker.next_wake()
    assert store.loads == 0
    offset = fold.offset
    tracker.apply(offset, START_MS + 5000, Marker(MarkerType.KEEPALIVE, message(0)))
    assert store.loads == 1
    for step in range(1, 14):
        tracker.apply(offset + step, START_MS + 5000 + 500 * step, None)
    # The clock passed the first two deadlines.
    assert store.loads == 2
    due = {action.message_id.offset for action in tracker.plan()}
    assert due == (set() if renewed else {CHUNK_OFFSETS})
    tracker.check()


def test_r18_what_holds_nothing_and_remembers_nothing_is_removed() -> None:
    fold, store = chunks_of_five()
    fold.ack(START_MS + 4000, 0)
    store.save(fold.tracker)
    assert len(store.chunks) == 5  # R12: it remembers
    fold.crawl(START_MS + 4000, START_MS + 64_001, 1000)
    store.save(fold.tracker)
    assert len(store.chunks) == 4


def test_r12_ends_are_remembered_through_the_store() -> None:
    fold, store = chunks_of_five()
    fold.ack(START_MS + 4000, 0)
    store.save(fold.tracker)
    tracker = store.restore()
    tracker.apply(fold.offset, START_MS + 4001, Marker(MarkerType.START, message(0), T))
    store.save(tracker)
    tracker = store.restore()
    assert json.loads(store.index)["version"] > 3  # releases before do not know of these
    causes = [each.cause for each in tracker.plan() if isinstance(each, Settle)]
    assert causes == [DueCause.ALREADY_ENDED]
    end = Marker(MarkerType.END, message(0), outcome=Outcome.ALREADY_ENDED)
    tracker.apply(fold.offset + 1, START_MS + 4002, end)
    assert message(0) not in tracker.in_progress()
    store.save(tracker)
    later = store.restore()
    later.apply(fold.offset + 2, START_MS + 64_003, Marker(MarkerType.START, message(0), T))
    assert message(0) in later.in_progress()
    hold = later.hold_of(message(0))
    assert hold is not None
    assert hold.deadline_ms == START_MS + 64_003 + T


def test_r12_what_was_forgotten_in_the_store_does_not_come_back_with_the_next_end() -> None:
    fold = Fold()
    fold.start(START_MS, 3, timeout=200_000)  # so that no wake of the chunk forgets it
    fold.ack(START_MS, 1)
    store = StateStore()
    store.save(fold.tracker)
    tracker = store.restore()
    tracker.apply(2, START_MS + 60_001, Marker(MarkerType.END, message(2)))
    tracker.apply(3, START_MS + 60_001, Marker(MarkerType.START, message(1), T))
    assert tracker.in_progress() == {message(1), message(3)}


def test_r15_asked_for_is_kept_and_cleared_by_the_next_engines_tick() -> None:
    fold = Fold(engine=("spark", 1))
    fold.start(START_MS)
    fold.end(START_MS, Outcome.RELEASE)
    fold.tick(START_MS, engine="spark", epoch=1)
    assert len(fold.tracker.plan()) == 1
    store = StateStore()
    store.save(fold.tracker)
    same = store.restore(engine=("spark", 1))
    assert same.is_live
    assert list(same.plan()) == []
    other = store.restore(engine=("spark", 2))
    assert not other.is_live
    assert list(other.plan()) == []
    tick = Marker(MarkerType.TICK, consumer_id="spark", engine_epoch=2)
    other.apply(fold.offset, START_MS, tick)
    assert [action.message_id for action in other.plan()] == [message(1)]
    other.check()


def test_r17_a_restored_tracker_that_was_not_live_is_not() -> None:
    fold = Fold(engine=("spark", 1))
    fold.start(START_MS)
    store = StateStore()
    store.save(fold.tracker)
    assert not store.restore(engine=("spark", 1)).is_live


def test_r18_identities_survive_the_names_of_chunks() -> None:
    ids = {
        MessageId(3, 1 << 50, bytes(range(16)), 7),
        MessageId(0, 0),
        MessageId(2, 4095, b"", 1),
    }
    fold = Fold(partition=9)
    for message_id in ids:
        fold.start(START_MS, message_id)
    offset = fold.schedule(START_MS, 1000)
    store = StateStore()
    store.save(fold.tracker)
    tracker = store.restore(partition=9)
    assert tracker.in_progress() == ids
    assert tracker.scheduled() == {MessageId(9, offset)}


def test_r21_state_of_a_newer_version_says_upgrade() -> None:
    index = json.loads(take_snapshot(RedeliveryTracker()).index)
    index["version"] = STATE_VERSION + 1
    with pytest.raises(UnsupportedVersionError, match="upgrade"):
        restore_tracker(json.dumps(index).encode(), lambda name: b"", partition=0)


_INDEX = json.loads(take_snapshot(RedeliveryTracker()).index)


@pytest.mark.parametrize(
    "index",
    [b"", b"{", b"[]", b"7", b"{}", b'{"version": 1}', b"\xff"]
    + [json.dumps(_INDEX | {name: [[]]}).encode() for name in ("pages", "chunks", "holders")],
)
def test_r18_an_index_that_cannot_be_read_is_named(index: bytes) -> None:
    with pytest.raises(WireError, match="state"):
        restore_tracker(index, lambda name: b"", partition=0)
