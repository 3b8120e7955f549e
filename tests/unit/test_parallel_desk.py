"""Where workers of the parallel consumer take and give back, with one that is stuck."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

import pytest

from kafkamq.config import ServiceConfig
from kafkamq.parallel.config import ParallelConfig
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.rules.lanes import Lane
from kafkamq.parallel.rules.offsets import OffsetTracker
from kafkamq.parallel.rules.shards import Ordering
from kafkamq.parallel.stats import Stats
from kafkamq.parallel.work_queue import STUCK_S, Desk, Trouble, Worker
from kafkamq.transport.clock import monotonic_ms

PLACE = ("topic", 0)


class Placed(ParallelRecord):
    """A record without a message."""

    __slots__ = ()
    topic, partition = PLACE  # type: ignore[assignment]

    def __init__(self, offset: int, key: str) -> None:
        super().__init__(None, offset, key.encode())  # type: ignore[arg-type]


class Room:
    """A desk with two workers and one partition."""

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
        self.desk = Desk(config, self.stats)
        self.workers = [Worker(), Worker()]
        self.woken: list[Worker] = []
        self.desk.join(self.workers, self)
        self.lane: Lane[ParallelRecord] = self.desk.assign(PLACE, OffsetTracker(0))
        self.end = 0

    def wake(self, workers: Sequence[Worker]) -> None:
        self.woken += workers

    def add(self, keys: str) -> None:
        records = [Placed(self.end + number, key) for number, key in enumerate(keys)]
        self.end += len(keys)
        self.desk.add(self.lane, records)

    def speed_up(self) -> None:
        """As if records took nothing."""
        self.desk._pace.observe(100_000, 1.0)

    def work(self, worker: Worker, count: int) -> list[int]:
        """Process so many of what the worker has, and be stuck in the next one."""
        done: list[int] = []
        for run in worker.pending:
            records = iter(run.records)
            worker.current, worker.failed = (run, records), None
            for record in records:
                if len(done) == count:
                    worker.began_s = monotonic() - 2 * STUCK_S
                    return done
                done.append(record.offset)
            worker.finished.append(run)
        return done

    @property
    def committable(self) -> int:
        return self.lane.tracker.committable_offset()


@pytest.mark.parametrize("ordering", [Ordering.KEY, Ordering.UNORDERED])
def test_a_stuck_worker_keeps_only_what_it_is_at(ordering: Ordering) -> None:
    room = Room(ordering)
    room.add("abcdefgh")
    room.speed_up()
    one, two = room.workers
    assert sum(len(run.records) for run in room.desk.take(one)) == 8
    assert room.desk.take(two) == []  # parked
    assert room.work(one, 3) == [0, 1, 2]
    room.desk.tend()
    assert room.woken == [two]
    room.speed_up()
    taken = [record.offset for run in room.desk.take(two) for record in run.records]
    assert taken == [4, 5, 6, 7]
    assert room.committable == 3  # what the stuck one has done counts
    assert [run.records[-1].offset for run in [one.current[0]] if one.current] == [3]


def test_of_one_key_the_rest_stays_behind_the_stuck_record() -> None:
    room = Room()
    room.add("aaaaab")
    room.speed_up()
    one, two = room.workers
    room.desk.take(one)
    room.desk.take(two)
    room.work(one, 2)
    room.desk.tend()
    room.speed_up()
    taken = [record.offset for run in room.desk.take(two) for record in run.records]
    assert taken == [5]
    assert room.committable == 2


def test_results_that_are_not_published_do_not_count() -> None:
    room = Room()
    room.desk.is_deferred = True
    room.add("baaaa")
    room.speed_up()
    one, _ = room.workers
    room.desk.take(one)
    room.work(one, 3)
    room.desk.tend()
    assert room.committable == 0
    room.desk.settle(one)
    assert room.committable == 1  # what it finished before


def test_what_failed_before_its_run_was_stuck_is_not_done() -> None:
    room = Room(Ordering.UNORDERED)
    room.add("abcd")
    room.speed_up()
    one, _ = room.workers
    room.desk.take(one)
    room.work(one, 2)
    assert one.current is not None
    one.failed = [(one.current[0].records[0], monotonic_ms() + 60_000)]
    room.desk.tend()
    assert room.committable == 0
    assert not room.lane.tracker.is_open(1)


def test_partitions_that_go_are_taken_back_from_workers() -> None:
    room = Room()
    room.add("abcdefgh")
    room.speed_up()
    one, two = room.workers
    room.desk.take(one)
    room.work(one, 3)
    room.desk.recall([room.lane])
    assert room.desk.has_in_flight([room.lane])
    assert room.desk.take(two) == []  # nothing of it is handed out
    assert room.committable == 3
    assert room.work(one, 100) == []  # nor begun by who had it


def test_a_failure_after_the_record_was_given_up_is_nothing() -> None:
    room = Room()
    room.add("ab")
    one, _ = room.workers
    (run,) = room.desk.take(one)
    record = room.desk.find(room.lane, 0)
    assert record is run.records[0]
    room.desk.give_up(room.lane, 0)
    assert room.committable == 1
    room.desk.release(one, Trouble(run, 1, [(record, monotonic_ms())]))
    assert room.stats.failed == 0
    assert room.desk.scheduler.waiting_count == 1
    room.desk.scheduler.check()


def test_paused_and_stopped() -> None:
    room = Room()
    room.add("ab")
    one, two = room.workers
    room.desk.pause()
    assert room.desk.take(one) == []
    room.desk.resume()
    assert room.woken == [one]
    assert room.desk.take(one)
    room.desk.stop()
    assert room.desk.take(two) == []
    assert room.desk.is_stopped


def test_lists_wait_a_moment_to_be_full() -> None:
    room = Room(batch_size=4, batch_linger_ms=60_000)
    room.add("abc")
    one, two = room.workers
    assert room.desk.take(one) == []
    room.add("d")
    assert sum(len(run.records) for run in room.desk.take(two)) == 4
    room.add("e")
    assert room.desk.take(one) == []
    room.desk._batch_since_s = monotonic() - 61
    assert sum(len(run.records) for run in room.desk.take(one)) == 1
