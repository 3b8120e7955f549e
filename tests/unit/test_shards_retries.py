"""Retries: whose turn comes when, and nothing twice."""

from __future__ import annotations

import pytest
from tests.unit.shard_records import all_offsets, fail, offsets, partition_with, samples, scheduler

from kafkamq.parallel.rules.shards import Ordering

SERIAL = [Ordering.KEY, Ordering.PARTITION]


@pytest.mark.parametrize("ordering", SERIAL)
def test_a_failed_record_holds_its_shard_until_it_is_due(ordering: Ordering) -> None:
    target = scheduler(ordering)
    partition = partition_with(target, ["a"] * 4)
    (run,) = target.take(0, 3)
    target.complete(partition, [0])
    target.release(run, processed=2, failed=[(run.records[1], 100)])
    target.add(partition, samples(["a"], first=4))
    assert target.take(99, 10) == []
    assert target.next_due_ms() == 100
    assert not target.has_ready
    (run,) = target.take(100, 10)
    assert offsets([run]) == [[1, 2, 3, 4]]
    assert target.next_due_ms() is None
    target.finish([run])
    assert partition.tracker.first_open() is None


def test_without_an_order_only_the_failed_record_waits() -> None:
    target = scheduler(Ordering.UNORDERED, max_run=4)
    partition = partition_with(target, ["a"] * 6)
    (run,) = target.take(0, 4)
    target.complete(partition, [0, 3])
    target.release(run, failed=[(run.records[1], 70), (run.records[2], 50)])
    assert offsets(target.take(0, 10)) == [[4, 5]]
    assert target.take(49, 10) == []
    assert offsets(target.take(50, 10)) == [[2]]
    assert offsets(target.take(70, 10)) == [[1]]
    target.check()


def test_what_was_not_tried_comes_back_at_once_and_first() -> None:
    target = scheduler(Ordering.KEY, max_run=3)
    partition_with(target, ["a"] * 6)
    (run,) = target.take(0, 3)
    target.release(run, processed=0)
    assert offsets(target.take(0, 2)) == [[0, 1]]
    other = scheduler(Ordering.UNORDERED)
    partition_with(other, ["a"] * 4)
    (run,) = other.take(0, 3)
    other.complete(run.partition, [0])
    other.release(run, processed=1)
    assert sorted(offsets(other.take(0, 9))) == [[1, 2], [3]]


def test_a_batch_with_bad_records_in_the_middle() -> None:
    """The verdicts are one by one; a serial shard then waits for the latest of the failed."""
    target = scheduler()
    partition = partition_with(target, ["a"] * 6)
    (run,) = target.take(0, 5)
    target.complete(partition, [0, 2, 4])
    target.release(run, failed=[(run.records[1], 30), (run.records[3], 20)])
    assert target.take(29, 10) == []
    assert offsets(target.take(30, 10)) == [[1, 3, 5]]
    assert partition.tracker.progress().incompletes == (1, 3)


def test_retries_come_by_due_time_and_then_by_turn() -> None:
    target = scheduler()
    partition_with(target, ["a", "b", "c", "d"])
    for run, due_ms in zip(target.take(0, 4), (30, 10, 20, 10), strict=True):
        fail(target, run, due_ms)
    assert [target.next_due_ms(), offsets(target.take(10, 9))] == [10, [[1], [3]]]
    assert offsets(target.take(30, 9)) == [[2], [0]]


@pytest.mark.parametrize("ordering", list(Ordering))
def test_a_record_that_fails_again_and_again_is_there_once(ordering: Ordering) -> None:
    target = scheduler(ordering)
    partition = partition_with(target, ["a", "b"])
    for attempt in range(50):
        runs = target.take(attempt * 10, 9)
        assert all_offsets(runs) == [0, 1]
        for run in runs:
            due_ms = attempt * 10 + 10
            target.release(run, failed=[(record, due_ms) for record in run.records])
        assert partition.waiting_count == 2
        assert len(partition.delayed) <= 2
        target.check()
    target.finish(target.take(9_999, 9))
    assert partition.waiting_count == partition.in_flight_count == 0


def test_a_record_that_is_given_up_lets_its_shard_go_on() -> None:
    """The owner has put it into the dead letters: it is done, and not among the failed."""
    target = scheduler()
    partition = partition_with(target, ["a", "a"])
    (run,) = target.take(0)
    fail(target, run, 10)
    (run,) = target.take(10)
    target.complete(partition, [0])
    target.release(run, processed=1)
    assert offsets(target.take(10, 9)) == [[1]]
    assert partition.tracker.committable_offset() == 1


def test_what_waited_behind_a_withdrawn_record_goes_on_at_once() -> None:
    target = scheduler()
    partition = partition_with(target, ["a", "a", "b"])
    first, other = target.take(0, 10)
    target.finish([other])
    fail(target, first, due_ms=60_000)
    assert target.take(0, 10) == []
    assert target.find(partition, 0) is not None
    target.withdraw(partition, [0])
    target.complete(partition, [0])
    target.check()
    assert target.find(partition, 0) is None
    assert offsets(target.take(0, 10)) == [[1]]
    assert target.next_due_ms() is None
