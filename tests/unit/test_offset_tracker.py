"""The offset tracker: what may be committed, and what a restart takes up again."""

from __future__ import annotations

import random

import pytest

from kafkamq.errors import StateError
from kafkamq.parallel.rules.offsets import OffsetTracker, Progress


def tracker_at(base: int, *polled: int) -> OffsetTracker:
    tracker = OffsetTracker(base)
    tracker.add(list(polled))
    return tracker


def restored(progress: Progress) -> OffsetTracker:
    """What the next owner of the partition starts with."""
    return OffsetTracker(
        progress.committable_offset,
        highest_seen=progress.highest_succeeded,
        incompletes=progress.incompletes,
    )


def test_nothing_polled() -> None:
    tracker = OffsetTracker(7)
    assert tracker.committable_offset() == tracker.next_offset == 7
    assert tracker.progress() == Progress(7, 6, (), 0)
    assert tracker.first_open() is None


def test_what_is_in_flight_is_never_committed() -> None:
    tracker = tracker_at(0, *range(10))
    tracker.complete([1, 2, 3])
    assert tracker.committable_offset() == 0
    assert tracker.progress().incompletes == (0,)
    tracker.complete([0])
    assert tracker.committable_offset() == 4
    tracker.complete([9, 6])
    assert tracker.committable_offset() == tracker.first_open() == 4
    assert tracker.progress().incompletes == (4, 5, 7, 8)
    tracker.complete([8, 7, 5, 4])
    assert tracker.progress() == Progress(10, 9, (), tracker.version)
    assert tracker.first_open() is None


def test_open_offsets_above_the_highest_that_succeeded_are_not_in_the_map() -> None:
    tracker = tracker_at(5, 5, 6, 7, 8)
    assert tracker.progress().incompletes == ()
    assert tracker.first_open() is not None
    assert tracker.progress().highest_succeeded == 4
    tracker.complete([6])
    assert tracker.progress().incompletes == (5,)


def test_a_map_is_needed_only_for_what_is_done_beyond_the_committed_offset() -> None:
    tracker = tracker_at(0, 0, 1, 2)  # at 0 a map of nothing done would say that 0 is done
    assert not tracker.progress().needs_map
    tracker.complete([0])
    assert not tracker.progress().needs_map
    tracker.complete([2])
    assert tracker.progress().needs_map
    tracker.complete([1])
    assert not tracker.progress().needs_map


def test_offsets_that_do_not_exist_hold_nothing_back() -> None:
    tracker = tracker_at(0, 0, 3, 9)  # transaction markers, compaction
    tracker.complete([0])
    assert tracker.committable_offset() == 3
    tracker.complete([9])
    assert tracker.progress() == Progress(3, 9, (3,), tracker.version)
    tracker.complete([3])
    assert tracker.committable_offset() == 10
    tracker.advance(14)  # markers at the end of the log
    assert tracker.committable_offset() == 14
    assert tracker.first_open() is None
    tracker.advance(12)
    assert tracker.next_offset == 14


def test_the_position_does_not_pass_what_is_open() -> None:
    tracker = tracker_at(0, 0, 1)
    tracker.advance(50)
    assert tracker.committable_offset() == 0
    tracker.complete([0, 1])
    assert tracker.committable_offset() == 50


def test_what_was_polled_is_not_accepted_twice() -> None:
    tracker = tracker_at(0, 0, 1, 2)
    tracker.complete([1])
    assert list(tracker.add([0, 1, 2, 3])) == [3]
    assert list(tracker.add([0, 1])) == []
    assert tracker.open_count == 3
    assert tracker.next_offset == 4


def test_completing_what_is_not_open_is_ignored() -> None:
    tracker = tracker_at(10, 10, 11)
    tracker.complete([3, 12, 99, 11, 11])
    assert tracker.progress() == Progress(10, 11, (10,), tracker.version)
    tracker.complete([])
    tracker.complete([500])
    assert tracker.highest_succeeded == 11
    assert list(tracker.add([12])) == [12]


def test_offsets_must_ascend() -> None:
    tracker = OffsetTracker(0)
    for offsets in ([1, 0], [0, 0], [0, 5, 4, 6]):
        with pytest.raises(StateError, match="ascend"):
            tracker.add(offsets)
    assert tracker.next_offset == 0
    assert tracker.open_count == 0


@pytest.mark.parametrize(("highest_seen", "holes"), [(9, (5,)), (12, (13,)), (-1, (10,))])
def test_a_map_with_holes_outside_is_refused(highest_seen: int, holes: tuple[int, ...]) -> None:
    with pytest.raises(StateError, match="holes outside"):
        OffsetTracker(10, highest_seen=highest_seen, incompletes=holes)


def test_the_version_tells_whether_there_is_something_to_commit() -> None:
    tracker = OffsetTracker(0)
    seen = [tracker.version]
    for change in (
        lambda: tracker.add([0, 1, 2]),
        lambda: tracker.complete([1]),
        lambda: tracker.advance(9),
    ):
        change()
        assert tracker.version > seen[-1]
        seen.append(tracker.version)
    tracker.complete([])
    tracker.advance(9)
    tracker.add([])
    assert tracker.version == tracker.progress().version == seen[-1]


# Restarts.


def test_a_single_stuck_message_in_front_of_20000() -> None:
    tracker = tracker_at(1_000, *range(1_000, 21_001))
    tracker.complete(range(1_001, 21_001))
    progress = tracker.progress()
    assert progress == Progress(1_000, 21_000, (1_000,), tracker.version)
    second = restored(progress)
    assert second.committable_offset() == 1_000
    assert list(second.add(range(1_000, 1_500))) == [1_000]
    assert list(second.add(range(1_500, 21_010))) == list(range(21_001, 21_010))
    second.complete([1_000])
    assert second.committable_offset() == 21_001


def test_a_restart_in_the_middle_of_a_restart_keeps_what_is_done() -> None:
    tracker = tracker_at(0, *range(100))
    tracker.complete([5, 50, 99])
    second = restored(tracker.progress())
    assert len(second.progress().incompletes) == 97
    assert second.open_count == 0
    assert list(second.add(range(10))) == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    second.complete([0, 1, 2])
    third = restored(second.progress())
    assert third.committable_offset() == 3
    assert [o for o in range(3, 100) if o not in third.add([o])] == [5, 50, 99]


def test_a_map_without_holes() -> None:
    """Committed below what is done, as some tool may: nothing of it is repeated."""
    tracker = OffsetTracker(10, highest_seen=19)
    assert tracker.progress() == Progress(10, 19, (), 0)
    assert list(tracker.add(range(10, 22))) == [20, 21]
    assert tracker.committable_offset() == 20


def test_a_map_that_ends_with_a_hole() -> None:
    """Parallel Consumer may write one, when nothing has succeeded yet."""
    tracker = OffsetTracker(10, highest_seen=15, incompletes=(10, 15))
    assert tracker.progress() == Progress(10, 15, (10, 15), 0)
    assert list(tracker.add(range(10, 17))) == [10, 15, 16]
    assert tracker.progress().incompletes == (10, 15)


def test_holes_that_vanished_from_the_log() -> None:
    tracker = OffsetTracker(10, highest_seen=20, incompletes=(10, 12, 15, 20))
    assert list(tracker.add([11, 12, 13])) == [12]  # 10 was compacted away
    assert tracker.progress().incompletes == (12, 15, 20)
    assert tracker.committable_offset() == 12
    tracker.complete([12])
    assert list(tracker.add([30, 31])) == [30, 31]
    assert tracker.progress().incompletes == ()
    assert tracker.committable_offset() == 30


def test_holes_that_the_position_passed() -> None:
    tracker = OffsetTracker(10, highest_seen=20, incompletes=(10, 15))
    tracker.advance(12)
    assert tracker.committable_offset() == 12
    assert tracker.progress().incompletes == (15,)
    tracker.advance(40)
    assert tracker.progress() == Progress(40, 39, (), tracker.version)


def test_a_first_poll_below_the_committed_offset_drops_the_map() -> None:
    tracker = OffsetTracker(100, highest_seen=200, incompletes=(100, 150))
    assert list(tracker.add([40, 41, 170])) == [40, 41, 170]
    assert tracker.committable_offset() == 40
    assert tracker.highest_succeeded == 39
    tracker.check()


def test_only_the_first_poll_can_drop_the_map() -> None:
    tracker = OffsetTracker(100, highest_seen=110, incompletes=(100, 105))
    tracker.add([100])
    assert list(tracker.add([99])) == []
    assert tracker.progress().incompletes == (100, 105)
    other = OffsetTracker(100, highest_seen=110, incompletes=(100, 105))
    other.advance(101)
    assert list(other.add([99])) == []
    assert other.progress().incompletes == (105,)


def test_memory_goes_by_what_is_open() -> None:
    tracker = tracker_at(0, 0)
    for start in range(1, 200_001, 1_000):
        tracker.add(range(start, start + 1_000))
        tracker.complete(range(start, start + 1_000))
        assert tracker.open_count == 1
    assert tracker.progress() == Progress(0, 200_000, (0,), tracker.version)


def test_any_order_of_completion_ends_at_the_same_place() -> None:
    rng = random.Random(5)
    offsets = sorted(rng.sample(range(3_000), 1_000))
    tracker = tracker_at(0, *offsets)
    left = set(offsets)
    shuffled = rng.sample(offsets, len(offsets))
    for start in range(0, 1_000, 37):
        done = shuffled[start : start + 37]
        tracker.complete(done)
        left.difference_update(done)
        assert tracker.committable_offset() == min(left, default=offsets[-1] + 1)
        tracker.check()
    assert tracker.first_open() is None
