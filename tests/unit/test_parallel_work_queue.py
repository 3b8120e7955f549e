"""Where workers of the parallel consumer take and give back, with one that is stuck."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from time import monotonic
from typing import Any

import pytest

from kafkamq.config import ServiceConfig
from kafkamq.parallel.config import ParallelConfig
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.rules.offsets import OffsetTracker
from kafkamq.parallel.rules.shards import Ordering, PartitionState
from kafkamq.parallel.work_queue import STUCK_S, ParallelWorkQueue, PoolWorker, Stats
from kafkamq.transport.clock import monotonic_ms

PLACE = ("topic", 0)


class Placed(ParallelRecord):
    """A record without a message."""

    __slots__ = ("__weakref__",)
    topic, partition = PLACE  # type: ignore[assignment]

    def __init__(self, offset: int, key: str, assignment: object = None) -> None:
        super().__init__(None, offset, key.encode(), assignment)  # type: ignore[arg-type]


class Room:
    """A work queue with two workers and one partition."""

    def __init__(self, ordering: Ordering = Ordering.KEY, **settings: Any) -> None:
        config = ParallelConfig(
            service=ServiceConfig(bootstrap_servers="nowhere:1"),
            topics=("topic",),
            group_id="g",
            ordering=ordering,
            concurrency=2,
            **settings,
        )
        self.stats = Stats()
        self.queue = ParallelWorkQueue(config, self.stats)
        self.workers = [PoolWorker(), PoolWorker()]
        self.woken: list[PoolWorker] = []
        self.queue.join(self.workers, self)
        self.partition: PartitionState[ParallelRecord] = self.queue.assign(PLACE, OffsetTracker(0))
        self.end = 0

    def wake(self, workers: Sequence[PoolWorker]) -> None:
        self.woken += workers

    def add(self, keys: str) -> None:
        numbered = enumerate(keys, self.end)
        records = [Placed(offset, key, self.partition) for offset, key in numbered]
        self.end += len(keys)
        self.queue.add(self.partition, records)

    def speed_up(self) -> None:
        """Tell the queue that records take next to no time."""
        self.queue._pace.observe(100_000, 1.0)

    def work(self, worker: PoolWorker, count: int) -> list[int]:
        """Process so many of what the worker has, and be stuck in the next one."""
        done: list[int] = []
        for run in worker.pending:
            records = iter(run.records)
            worker.current = run, records
            for record in records:
                if len(done) == count:
                    worker.began_s = monotonic() - 2 * STUCK_S
                    return done
                done.append(record.offset)
            worker.finished.append(run)
        return done

    @property
    def committable(self) -> int:
        return self.partition.tracker.committable_offset()


@pytest.mark.parametrize("ordering", [Ordering.KEY, Ordering.UNORDERED])
def test_a_stuck_worker_keeps_only_what_it_is_at(ordering: Ordering) -> None:
    room = Room(ordering)
    room.add("abcdefgh")
    room.speed_up()
    one, two = room.workers
    assert sum(len(run.records) for run in room.queue.take(one)) == 8
    assert room.queue.take(two) == []  # parked
    assert room.work(one, 3) == [0, 1, 2]
    room.queue.tend()
    assert room.woken == [two]
    room.speed_up()
    taken = [record.offset for run in room.queue.take(two) for record in run.records]
    assert taken == [4, 5, 6, 7]
    assert room.committable == 3  # what the stuck one has done counts
    assert [run.records[-1].offset for run in [one.current[0]] if one.current] == [3]


def test_of_one_key_the_rest_stays_behind_the_stuck_record() -> None:
    room = Room()
    room.add("aaaaab")
    room.speed_up()
    one, two = room.workers
    room.queue.take(one)
    room.queue.take(two)
    room.work(one, 2)
    room.queue.tend()
    room.speed_up()
    taken = [record.offset for run in room.queue.take(two) for record in run.records]
    assert taken == [5]
    assert room.committable == 2


def test_results_that_are_not_published_do_not_count() -> None:
    room = Room()
    room.queue.is_deferred = True
    room.add("baaaa")
    room.speed_up()
    one, _ = room.workers
    room.queue.take(one)
    room.work(one, 3)
    room.queue.tend()
    assert room.committable == 0
    room.queue.collect(one)
    assert room.committable == 1  # what it finished before


def test_what_failed_before_its_run_was_stuck_is_not_done() -> None:
    room = Room(Ordering.UNORDERED)
    room.add("abcd")
    room.speed_up()
    one, _ = room.workers
    room.queue.take(one)
    room.work(one, 2)
    assert one.current is not None
    one.current[0].failed = [(one.current[0].records[0], monotonic_ms() + 60_000)]
    room.queue.tend()
    assert room.committable == 0
    assert not room.partition.tracker.is_open(1)


def test_partitions_that_go_are_taken_back_from_workers() -> None:
    room = Room()
    room.add("abcdefgh")
    room.speed_up()
    one, two = room.workers
    room.queue.take(one)
    room.work(one, 3)
    room.queue.recall([room.partition])
    assert room.queue.has_in_flight([room.partition])
    assert room.queue.take(two) == []  # nothing of it is handed out
    assert room.committable == 3
    assert room.work(one, 100) == []  # nor begun by who had it


def test_a_failure_after_the_record_was_given_up_is_nothing() -> None:
    room = Room()
    room.add("ab")
    one, _ = room.workers
    (run,) = room.queue.take(one)
    record = room.queue.find(room.partition, 0)
    assert record is run.records[0]
    room.queue.give_up(room.partition, [0])
    assert room.committable == 1
    run.failed = [(record, monotonic_ms())]
    room.queue.done(one, run, 1)
    assert room.stats.failed == 0
    assert room.queue.scheduler.waiting_count == 1
    room.queue.scheduler.check()


def test_paused_and_stopped() -> None:
    room = Room()
    room.add("ab")
    one, two = room.workers
    room.queue.pause()
    assert room.queue.take(one) == []
    room.queue.resume()
    assert room.woken == [one]
    assert room.queue.take(one)
    room.queue.stop()
    assert room.queue.take(two) == []
    assert room.queue.is_stopped


def test_lists_wait_a_moment_to_be_full() -> None:
    room = Room(batch_size=4, batch_linger_ms=60_000)
    room.add("abc")
    one, two = room.workers
    assert room.queue.take(one) == []
    room.add("d")
    assert sum(len(run.records) for run in room.queue.take(two)) == 4
    room.add("e")
    assert room.queue.take(one) == []
    room.queue._batch_since_s = monotonic() - 61
    assert sum(len(run.records) for run in room.queue.take(one)) == 1


def test_beyond_the_limit_nothing_is_handed_out_and_who_has_some_keeps_it() -> None:
    room = Room()
    one, two = room.workers
    room.add("abcd")
    assert room.queue.take(one)
    assert room.queue.take(two)
    room.queue.set_limit(1)
    assert (room.queue.limit, room.queue.totals().busy) == (1, 2)
    assert room.queue.take(two) == []  # it waits, although there is something to do
    assert room.queue.take(one)
    room.add("ef")
    room.queue.tend()
    assert room.woken == []
    room.queue.set_limit(2)
    assert room.woken == [two]
    assert room.queue.take(two)


def test_a_stop_wakes_who_waits_behind_the_limit() -> None:
    room = Room()
    room.queue.set_limit(1)
    one, two = room.workers
    room.add("ab")
    assert room.queue.take(two) == []
    assert room.queue.take(one)
    room.queue.stop()
    assert room.woken == [two]


def test_a_limit_that_is_set_before_the_workers_are_there_holds() -> None:
    room = Room()
    room.queue.set_limit(1)
    room.queue.join(room.workers, room)
    assert room.queue.limit == 1


@pytest.mark.parametrize("is_deferred", [False, True])
def test_totals_count_calls_whatever_becomes_of_them(is_deferred: bool) -> None:
    """Done, failed, or handed on to a stream: each has taken its time."""
    room = Room()
    room.queue.is_deferred = is_deferred
    one, _ = room.workers
    room.add("abc")
    for number in range(3):
        (run,) = room.queue.take(one)
        one.began_s -= 1.0
        if number == 1:
            run.failed = [(run.records[0], 0)]
            room.queue.done(one, run)
        elif number == 2:
            one.finished.append(run)
            room.queue.hand_on(one)
        else:
            one.finished.append(run)
    room.queue.pause()
    room.queue.take(one)
    totals = room.queue.totals()
    assert totals.completed == 3
    assert 3000 <= totals.spent_ms < 4000
    assert not totals.has_backlog  # what waits is not handed out


def test_a_worker_that_has_nothing_to_do_keeps_no_records() -> None:
    room = Room()
    one, _ = room.workers
    room.add("ab")
    room.speed_up()
    room.queue.take(one)
    room.work(one, 100)
    kept = [weakref.ref(record) for run in one.runs for record in run.records]
    assert room.queue.take(one) == []
    gc.collect()
    assert [each() for each in kept] == [None, None]
    assert room.committable == 2
