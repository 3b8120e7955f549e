"""Scheduling: order, turns, assignments and ceilings."""

from __future__ import annotations

import random

import pytest
from tests.unit.shard_records import (
    Sample,
    all_offsets,
    offsets,
    partition_with,
    samples,
    scheduler,
)

from kafkamq.errors import ConfigError, StateError
from kafkamq.parallel.rules.offsets import OffsetTracker
from kafkamq.parallel.rules.shards import NullKeys, Ordering, PartitionPhase, Scheduler

ORDERINGS = list(Ordering)


# Order.


def test_one_key_is_in_one_worker_at_a_time_while_others_pass() -> None:
    target = scheduler(max_run=2)
    partition = partition_with(target, ["a", "b", "a", "a", "c", "b"])
    first = target.take(0, 2)
    assert offsets(first) == [[0, 2]]
    assert offsets(target.take(0, 10)) == [[1, 5], [4]]
    assert target.take(0, 10) == []
    target.finish(first)
    assert offsets(target.take(0, 10)) == [[3]]
    assert partition.in_flight_count == 4
    target.check()


def test_a_blocked_key_does_not_stop_what_others_commit() -> None:
    target = scheduler()
    partition = partition_with(target, ["a", "b", "b", "c"])
    stuck, *others = target.take(0, 10)
    target.finish(others)
    assert offsets([stuck]) == [[0]]
    assert partition.tracker.progress().incompletes == (0,)
    assert partition.tracker.highest_succeeded == 3
    target.finish([stuck])
    assert partition.tracker.first_open() is None
    assert not partition.serial


def test_records_that_arrive_while_their_key_is_out_wait_for_it() -> None:
    target = scheduler()
    partition = partition_with(target, ["a"])
    out = target.take(0, 10)
    target.add(partition, samples(["a", "a"], first=1))
    assert target.take(0, 10) == []
    target.finish(out)
    assert offsets(target.take(0, 10)) == [[1, 2]]


def test_by_partition() -> None:
    target = scheduler(Ordering.PARTITION, max_run=2)
    partition_with(target, ["a", "b", "c"], partition=0)
    partition_with(target, ["a", "b"], partition=1)
    runs = target.take(0, 10)
    assert offsets(runs) == [[0, 1], [0, 1]]
    assert target.take(0, 10) == []
    target.finish(runs)
    assert offsets(target.take(0, 10)) == [[2]]


def test_unordered_is_cut_into_chunks() -> None:
    target = scheduler(Ordering.UNORDERED, max_run=3)
    partition = partition_with(target, ["a"] * 8)
    assert offsets(target.take(0, 5)) == [[0, 1, 2], [3, 4]]
    assert offsets(target.take(0, 100)) == [[5, 6, 7]]
    assert partition.parallel is None
    target.add(partition, samples(["a"], first=8))
    assert offsets(target.take(0, 100)) == [[8]]


def test_records_without_a_key_are_serial_by_default() -> None:
    target = scheduler()
    partition_with(target, [None, "a", None])
    assert offsets(target.take(0, 1)) == [[0]]
    assert offsets(target.take(0, 10)) == [[1]]


def test_records_without_a_key_in_no_order() -> None:
    target = scheduler(null_keys=NullKeys.PARALLEL)
    partition_with(target, [None, "a", None, "a", None])
    assert offsets(target.take(0, 3)) == [[1, 3], [0]]
    assert offsets(target.take(0, 1)) == [[2]]
    assert offsets(target.take(0, 9)) == [[4]]


def test_equal_keys_are_one_shard_whatever_object_they_are() -> None:
    target = scheduler()
    partition = target.assign(0, OffsetTracker(0))
    target.add(partition, [Sample(0, b"key"), Sample(1, bytes(bytearray(b"key")))])
    assert offsets(target.take(0, 1)) == [[0]]
    assert target.take(0, 9) == []


def test_equal_keys_of_two_partitions_are_two_shards() -> None:
    target = scheduler()
    partition_with(target, ["a"], partition=0)
    partition_with(target, ["a"], partition=1)
    assert len(target.take(0, 10)) == 2


def test_a_long_shard_in_many_small_runs() -> None:
    target = scheduler(max_run=7)
    partition = partition_with(target, ["a"] * 1_000)
    seen: list[int] = []
    first = 1_000
    while runs := target.take(0, 7):
        assert len(runs) == 1
        seen += [record.offset for record in runs[0].records]
        if first < 6_000:
            first += target.add(partition, samples(["a"] * 13, first=first))
        target.finish(runs)
        if len(seen) % 500 < 7:
            target.check()
    assert seen == list(range(first))
    assert partition.tracker.first_open() is None


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_long_shard_lets_go_of_what_is_done(ordering: Ordering) -> None:
    """Or an endless hot key would keep all of its records in memory."""
    target = scheduler(ordering, max_run=10)
    partition = partition_with(target, ["a"] * 1_000)
    kept = 0
    for first in range(1_000, 21_000, 10):
        target.add(partition, samples(["a"] * 10, first=first))
        (run,) = target.take(0, 10)
        kept = max(kept, len(run.shard.records))
        target.finish([run])
    assert kept < 2_000


# Turns.


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_partitions_take_turns(ordering: Ordering) -> None:
    target = scheduler(ordering)
    partitions = [
        partition_with(
            target, [f"{partition}-{i}" for i in range(40 * 10 ** (partition % 2))], partition
        )
        for partition in range(5)
    ]
    for _ in range(4):
        turn = [target.take(0, 8) for _ in partitions]
        assert [runs[0].partition for runs in turn] == partitions
        for runs in turn:
            target.finish(runs)


def test_keys_take_turns() -> None:
    target = scheduler(max_run=4)
    partition = partition_with(target, ["hot"] * 100)
    target.add(partition, samples(["a", "b", "c"], first=100))
    served = []
    for _ in range(8):
        runs = target.take(0, 4)
        served += [run.shard.key for run in runs]
        target.finish(runs)
    assert served[:5] == [b"hot", b"a", b"b", b"c", b"hot"]


def test_records_without_an_order_take_turns_with_keys() -> None:
    target = scheduler(null_keys=NullKeys.PARALLEL, max_run=4)
    partition = partition_with(target, [None] * 20)
    target.add(partition, samples(["a", "b"], first=20))
    served = [run.shard.key for _ in range(4) for run in target.take(0, 4)]
    assert served[:4] == [None, b"a", b"b", None]


def test_a_poison_record_without_delay_does_not_keep_the_others_waiting() -> None:
    for ordering in (Ordering.KEY, Ordering.UNORDERED):
        target = scheduler(ordering)
        partition_with(target, ["bad", "a", "b", "c"])
        done = set()
        for _ in range(8):
            (run,) = target.take(0, 1)
            if run.records[0].offset:
                done.add(run.records[0].offset)
                target.finish([run])
            else:
                target.release(run, failed=[(run.records[0], 0)])
        assert done == {1, 2, 3}


def test_a_worker_never_gets_more_than_it_asked_for() -> None:
    target = scheduler()
    partition_with(target, [f"{index}" for index in range(60)] + ["hot"] * 90)
    assert target.take(0, 0) == []
    assert len(all_offsets(target.take(0, 50))) == 50
    assert len(all_offsets(target.take(0, 500))) == 10 + 64


# Epochs.


def test_a_closed_lane_counts_nothing() -> None:
    target = scheduler()
    partition = partition_with(target, ["a", "b", "c", "a"])
    target.set_ceiling(partition, 2)
    first, second, third = target.take(0, 3)
    target.release(second, failed=[(second.records[0], 50)])
    target.close(partition)
    assert first.is_stale
    assert target.partitions == ()
    assert target.take(100, 10) == []
    assert target.next_due_ms() is None
    progress = partition.tracker.progress()
    target.finish([first])
    target.complete(partition, [0, 1, 2, 3])
    target.release(third, processed=0)
    assert target.add(partition, samples(["a"], first=4)) == 0
    target.set_ceiling(partition, None)
    assert target.take(100, 10) == []
    assert partition.tracker.progress() == progress
    assert (partition.waiting_count, partition.in_flight_count) == (0, 0)
    target.close(partition)
    target.check()


def test_closing_a_lane_leaves_the_delays_of_others() -> None:
    target = scheduler()
    gone, stays = (partition_with(target, ["a"], partition) for partition in (0, 1))
    for run, due_ms in zip(target.take(0, 2), (10, 20), strict=True):
        target.release(run, failed=[(run.records[0], due_ms)])
    target.close(gone)
    assert target.next_due_ms() == 20
    (run,) = target.take(20, 9)
    assert run.partition is stays


def test_closing_a_lane_keeps_the_delays_of_others_in_order() -> None:
    target = scheduler()
    keys = [f"{index}" for index in range(40)]
    gone, stays = (partition_with(target, keys, partition) for partition in (0, 1))
    due = random.Random(3).sample(range(1_000), 80)
    for run, due_ms in zip(target.take(0, 80), due, strict=True):
        target.release(run, failed=[(run.records[0], due_ms)])
    target.close(gone)
    expected = sorted(due[40:])
    seen = []
    while (due_ms := target.next_due_ms()) is not None:
        seen.append(due_ms)
        (run,) = target.take(due_ms, 9)
        assert run.partition is stays
    assert seen == expected


def test_an_assignment_that_comes_again_has_a_state_of_its_own() -> None:
    target = scheduler()
    first = partition_with(target, ["a"])
    (run,) = target.take(0)
    second = target.assign(0, OffsetTracker(0))
    assert first.phase is PartitionPhase.CLOSED
    assert second is not first
    assert target.add(second, samples(["a"])) == 1
    target.finish([run])  # of the old assignment
    assert second.tracker.open_count == 1
    assert second.in_flight_count == 0
    target.close(first)
    assert target.partitions == (second,)


def test_a_held_lane_hands_out_nothing_and_counts_what_is_in_flight() -> None:
    target = scheduler()
    partition = partition_with(target, ["a", "b", "c", "a"])
    runs = target.take(0, 3)
    assert offsets(runs) == [[0, 3], [1]]
    target.hold(partition)
    target.release(runs[0], processed=1, failed=[(runs[0].records[0], 5)])
    assert target.take(99, 10) == []
    assert target.add(partition, samples(["d"], first=4)) == 1
    assert target.take(99, 10) == []
    target.complete(partition, [1])
    target.check()


def test_records_that_are_done_are_left_out() -> None:
    target = scheduler()
    partition = target.assign(0, OffsetTracker(10, highest_seen=13, incompletes=(11,)))
    assert target.add(partition, samples(["a"] * 5, first=10)) == 2
    assert offsets(target.take(0, 9)) == [[11, 14]]
    assert target.add(partition, samples(["a"] * 5, first=10)) == 0


def test_runs_of_several_lanes_are_finished_together() -> None:
    target = scheduler()
    first = partition_with(target, ["a", "b"], partition=0)
    second = partition_with(target, ["a", "b", "c"], partition=1)
    runs = target.take(0, 9)
    target.finish([runs[4], runs[0], runs[2]])
    assert (first.tracker.open_count, second.tracker.open_count) == (1, 1)
    assert first.tracker.committable_offset() == 1
    assert second.tracker.progress().incompletes == (1,)


def test_a_key_that_comes_again_after_its_last_record_was_done() -> None:
    for done_first in (True, False):
        target = scheduler()
        partition = partition_with(target, ["a"])
        (run,) = target.take(0)
        if done_first:
            target.complete(partition, [0])
        target.release(run)
        assert not partition.serial
        target.complete(partition, [0])
        target.add(partition, samples(["a"], first=1))
        assert offsets(target.take(0)) == [[1]]


def test_a_run_is_released_once() -> None:
    target = scheduler()
    partition_with(target, ["a"])
    (run,) = target.take(0)
    target.finish([run])
    with pytest.raises(StateError, match="released before"):
        target.release(run)
    with pytest.raises(StateError, match="released before"):
        target.finish([run])


def test_max_run_is_at_least_one() -> None:
    with pytest.raises(ConfigError, match="max_run"):
        Scheduler(max_run=0)


# Ceilings.


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_nothing_above_the_ceiling_is_handed_out(ordering: Ordering) -> None:
    target = scheduler(ordering)
    partition = partition_with(target, ["a", "b"] * 5)
    target.set_ceiling(partition, 6)
    runs = target.take(0, 100)
    assert all_offsets(runs) == [0, 1, 2, 3, 4, 5, 6]
    target.finish(runs)
    target.add(partition, samples(["c"], first=10))
    assert target.take(0, 100) == []
    target.check()
    target.set_ceiling(partition, 8)
    target.check()
    runs = target.take(0, 100)
    assert all_offsets(runs) == [7, 8]
    target.finish(runs)
    target.set_ceiling(partition, None)
    assert all_offsets(target.take(0, 100)) == [9, 10]


def test_a_ceiling_holds_back_its_own_partition_only() -> None:
    target = scheduler()
    partition = partition_with(target, ["a", "b"], partition=0)
    partition_with(target, ["a", "b"], partition=1)
    target.set_ceiling(partition, -1)
    assert [run.partition.place for run in target.take(0, 9)] == [1, 1]


def test_a_failed_record_below_the_ceiling_is_tried_again() -> None:
    target = scheduler()
    partition = partition_with(target, ["a", "b", "a"])
    run = target.take(0, 2)[0]
    target.release(run, processed=1, failed=[(run.records[0], 10)])
    target.set_ceiling(partition, 1)
    assert all_offsets(target.take(10, 9)) == [0, 1]


@pytest.mark.parametrize("ordering", list(Ordering))
def test_what_a_worker_has_is_busy_until_it_comes_back(ordering: Ordering) -> None:
    """Its partition is read again: no second worker gets what the first one is still at."""
    target = scheduler(ordering, max_run=1)
    partition = partition_with(target, ["a", "b", "a"])
    [run] = target.take(0, 1)
    again = target.assign(0, OffsetTracker(0))
    assert target.add(again, samples(["a", "b", "a"])) == 3
    behind = {Ordering.KEY: [1], Ordering.PARTITION: [], Ordering.UNORDERED: [1, 2]}[ordering]
    others = target.take(0, 9)
    assert all_offsets(others) == behind
    third = target.assign(0, OffsetTracker(0))  # and once more
    target.add(third, samples(["a", "b", "a"]))
    assert target.take(0, 9) == []
    target.finish(others)
    target.check()
    assert all_offsets(target.take(0, 9)) == behind
    target.release(run)
    target.check()
    assert 0 in all_offsets(target.take(0, 9))
    assert partition.tracker.open_count == 3
