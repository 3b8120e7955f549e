"""Where workers give back what they did and take what is next; thread-safe.

One lock, held for one call of the scheduler or two; no lock, future or callback per record. A
worker that finds nothing is parked and woken when there is something. ``tend``, called every few
milliseconds, takes from a worker that is stuck in one record what it has not begun.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import length_hint
from time import monotonic
from typing import TypeAlias

from kafkamq.parallel.config import ParallelConfig
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.rules.offsets import OffsetTracker
from kafkamq.parallel.rules.shards import PartitionState, Run, Scheduler
from kafkamq.runtime.rules.hanging import Call
from kafkamq.runtime.rules.pace import RateLimit, RunSize, Totals
from kafkamq.runtime.work_queue import ParkedSlots, Slot, Waker
from kafkamq.transport.clock import monotonic_ms
from kafkamq.types import PartitionId

MAX_TAKE = 512
MAX_RUN = 64
# What is given up is not tried again: its dead letter ends this wait.
HELD_MS = 366 * 86_400_000
# Behind this a busy worker keeps only what it has begun.
STUCK_S = 0.02

PoolWorker: TypeAlias = Slot[ParallelRecord]
"""One of those who call handlers."""

PoolRun: TypeAlias = Run[ParallelRecord]


@dataclass(slots=True)
class Stats:
    polled: int = 0
    processed: int = 0
    failed: int = 0
    dead_lettered: int = 0
    skipped: int = 0
    stalls: int = 0
    commits: int = 0
    commit_failures: int = 0
    # Commits with a part of the map, as it was too long.
    maps_cut: int = 0
    # Metadata that others wrote, or that is damaged.
    maps_ignored: int = 0
    last_commit_s: float = 0.0
    last_poll_s: float = 0.0


class ParallelWorkQueue:
    """The scheduler behind a lock, and who works on it."""

    def __init__(self, config: ParallelConfig, stats: Stats) -> None:
        self.config = config
        self.lock = threading.Lock()
        self.scheduler: Scheduler[ParallelRecord] = Scheduler(
            ordering=config.ordering, null_keys=config.null_keys
        )
        self.is_stopped = False
        # Given up, but for their dead letters: they wait, and what is behind them in their order.
        self.held: set[ParallelRecord] = set()
        # With this, what a handler has returned from is done only when it is published.
        self.is_deferred = False
        self._stats = stats
        self._is_paused = False
        self._workers: list[PoolWorker] = []
        self._laden: set[PoolWorker] = set()
        self._parked = ParkedSlots()
        self._concurrency = config.concurrency
        self._completed, self._spent_s = 0, 0.0
        self._pace = RunSize(max_records=MAX_TAKE)
        self._batch_size = config.batch_size
        self._batch_linger_s = config.batch_linger_ms / 1000
        self._batch_since_s: float | None = None
        self._rate = None if config.max_rate is None else RateLimit(config.max_rate)
        self._room = threading.Event()
        self._crowded: PartitionState[ParallelRecord] | None = None
        self._room_below = 0

    # Workers.

    def make_slot(self) -> PoolWorker:
        return PoolWorker()

    def join(self, workers: Sequence[PoolWorker], waker: Waker) -> None:
        self._workers = list(workers)
        self._parked.join(len(workers), waker)

    @property
    def limit(self) -> int:
        return self._parked.limit

    @property
    def has_backlog(self) -> bool:
        return self.scheduler.has_ready and not self._is_paused

    def set_limit(self, limit: int) -> None:
        """Change how many workers may be at work at once; see ``Adjustable``."""
        with self.lock:
            self._concurrency = limit
            self._parked.set_limit(limit)
            self._wake_for_work()

    def totals(self) -> Totals:
        with self.lock:
            spent_ms = self._spent_s * 1000
            return Totals(self._completed, spent_ms, self._parked.busy, self.has_backlog)

    def take(self, worker: PoolWorker, limit: int = 0) -> list[PoolRun]:
        now_s = monotonic()
        # What the worker is through with is freed behind the lock: a record is some mallocs.
        _through = worker.runs
        with self.lock:
            if worker.handed:
                self._completed += worker.handed
                self._spent_s += now_s - worker.began_s
                worker.handed = 0
            if worker.taken or worker.finished:
                # This includes a run that the worker was relieved of as a whole.
                self._collect(worker, now_s)
            parked = self._parked
            is_closed = self._is_paused or self.is_stopped or parked.is_over
            runs = [] if is_closed else self._take(now_s, limit)
            if self.held:
                runs = [run for run in runs if self._may_begin(run)]
            if runs:
                self._hand_out(worker, runs, limit)
                worker.began_s = now_s
                if parked.wakeable and self.scheduler.has_ready and not self._pace.is_light:
                    parked.wake(1)
            else:
                parked.park(worker)
                if not limit:
                    worker.forget()
        return runs

    def _hand_out(self, worker: PoolWorker, runs: list[PoolRun], limit: int) -> None:
        count = sum([len(run.records) for run in runs])
        if limit:
            worker.taken += count
            self._parked.unpark(worker)
        else:
            worker.taken = worker.handed = count
            worker.runs = runs
            worker.pending = iter(runs)
        if worker.taken > worker.width:
            self._laden.add(worker)

    def _collect(self, worker: PoolWorker, now_s: float) -> None:
        finished, worker.finished = worker.finished, []
        if self.is_deferred:
            for run in finished:
                if run.failed is not None or run.end is not None:
                    self._release(worker, run)
            finished = [run for run in finished if not run.is_released]
        self.scheduler.finish(finished)
        if worker.spent_us is None:
            count, spent_us = worker.taken, (now_s - worker.began_s) * 1e6
        else:
            count, spent_us = sum([len(run.records) for run in finished]), worker.spent_us
            worker.spent_us = 0.0
        worker.taken -= count
        self._pace.observe(count, spent_us)
        self._stats.processed += count
        if self._crowded is not None:
            self._look_for_room(self._crowded)

    def collect(self, worker: PoolWorker) -> None:
        with self.lock:
            if worker.taken or worker.finished:
                self._collect(worker, monotonic())

    def _take(self, now_s: float, limit: int) -> list[PoolRun]:
        scheduler = self.scheduler
        waiting = scheduler.waiting_count
        if not waiting:
            return []
        size = limit or self._batch_size or self._pace.size(waiting, self._concurrency)
        if self._batch_linger_s and waiting < size:  # has a list that is not full waited enough?
            self._batch_since_s = self._batch_since_s or now_s
            if now_s - self._batch_since_s < self._batch_linger_s:
                return []
        rate = self._rate
        if rate is not None:
            size = min(size, rate.available(now_s * 1000))
            if not size:
                return []
        max_run = self._max_run(limit) if limit else None
        runs = scheduler.take(int(now_s * 1000), size, max_run=max_run)
        if rate is not None:
            rate.spend(sum([len(run.records) for run in runs]))
        if runs:
            self._batch_since_s = None
        return runs

    def _may_begin(self, run: PoolRun) -> bool:
        """Put back what is held and all behind it; False: the run is nothing but that.

        A record that is held comes here when one before it in its order is tried again.
        """
        at = next((at for at, each in enumerate(run.records) if each in self.held), None)
        if at == 0:
            failed = [(run.records[0], monotonic_ms() + HELD_MS)]
            self.scheduler.release(run, processed=1, failed=failed)
        elif at is not None:
            self.scheduler.reclaim(run, run.records[at:])
        return at != 0

    def _max_run(self, limit: int) -> int:
        """A process has several handlers: what it takes is for all of them."""
        width = sum([worker.width for worker in self._workers])
        runs = self.scheduler.ready_runs(min(limit, width))
        return max(1, min(limit // max(runs, 1), MAX_RUN))

    def done(self, worker: PoolWorker, run: PoolRun, processed: int | None = None) -> None:
        run.end = processed
        if self.is_deferred or (processed is None and run.failed is None):
            worker.finished.append(run)
        else:
            with self.lock:
                self._release(worker, run)

    def hand_on(self, worker: PoolWorker) -> list[tuple[PoolRun, ParallelRecord, object]]:
        """Let go of all that the worker has tried; its results are in flight until ``complete``."""
        found = []
        with self.lock:
            runs, worker.finished = worker.finished, []
            for run in runs:
                outputs, run.outputs = run.outputs or (), None
                found += [(run, record, result) for record, result in outputs]
                self.scheduler.keep(run.partition, len(outputs))
                self._release(worker, run, kept={record.offset for record, _ in outputs})
        return found

    def _release(self, worker: PoolWorker, run: PoolRun, kept: Collection[int] = ()) -> None:
        """Settle a run: what did not fail is done, but for what is kept."""
        partition, failed = run.partition, run.failed or ()
        worker.taken -= len(run.records)
        untried = [] if run.end is None else run.records[run.end :]
        given_up = [record.offset for record in untried if record.is_given_up]
        if not run.is_stale:
            wrong = {record.offset for record, _ in failed}.union(kept)
            tried = [record.offset for record in run.records[: run.end]]
            done = [offset for offset in tried if offset not in wrong] + given_up
            self._stats.processed += len(done)
            self.scheduler.complete(partition, done)
        failed = [each for each in failed if partition.tracker.is_open(each[0].offset)]
        self._stats.failed += len(failed)
        self.scheduler.release(run, processed=run.end, failed=failed)
        self.scheduler.withdraw(partition, given_up)

    def complete(self, partition: PartitionState[ParallelRecord], offsets: Sequence[int]) -> None:
        with self.lock:
            self.scheduler.keep(partition, -len(offsets))
            self.scheduler.complete(partition, offsets)
            self._stats.processed += len(offsets)
            if self._crowded is not None:
                self._look_for_room(self._crowded)

    def _wake_for_work(self) -> None:
        wakeable = self._parked.wakeable
        if self._is_paused or not wakeable or not self.scheduler.has_ready:
            return
        wanted = 1
        if not self._pace.is_light:
            waiting = self.scheduler.waiting_count
            takes = -(-waiting // (self._batch_size or self._pace.size(waiting, self._concurrency)))
            wanted = self.scheduler.ready_runs(min(takes, wakeable))
        self._parked.wake(max(1, wanted))

    # The owner of the consumer.

    def assign(
        self, partition: PartitionId, tracker: OffsetTracker
    ) -> PartitionState[ParallelRecord]:
        with self.lock:
            return self.scheduler.assign(partition, tracker)

    def add(
        self, partition: PartitionState[ParallelRecord], records: Sequence[ParallelRecord]
    ) -> None:
        with self.lock:
            self.scheduler.add(partition, records)
            self._wake_for_work()

    def tend(self) -> None:
        """Wake who is needed, and give to others what a stuck worker has not begun."""
        now_s = monotonic()
        with self.lock:
            for worker in list(self._laden):
                if worker.taken <= worker.width:
                    self._laden.discard(worker)
                elif now_s - worker.began_s > STUCK_S and self._relieve(worker):
                    self._pace.observe(1, (now_s - worker.began_s) * 1e6)
            due_ms = self.scheduler.next_due_ms()
            if due_ms is not None and due_ms <= now_s * 1000:
                self._parked.wake(1)
            self._wake_for_work()

    def _relieve(self, worker: PoolWorker) -> int:
        """Settle what the worker has done, and take back what it has not begun."""
        if worker.give_back is not None:
            worker.give_back()
            return 0
        relieved = 0
        for run in list(worker.pending):
            relieved += len(run.records)
            self.scheduler.release(run, processed=0)
        current = worker.current
        if current is not None:
            run, records = current
            if not run.is_released:
                rest = list(records)
                relieved += len(rest)
                self.scheduler.reclaim(run, rest)
                # All but the last that it has begun are done, but for those that failed.
                wrong = {record.offset for record, _ in run.failed or ()}
                done = [each.offset for each in run.records[:-1] if each.offset not in wrong]
                if not self.is_deferred:
                    self.scheduler.complete(run.partition, done)
        finished = worker.finished
        while finished and not self.is_deferred:
            self.scheduler.finish([finished.pop()])
        worker.taken -= relieved
        worker.handed -= relieved
        return relieved

    def recall(self, partitions: Sequence[PartitionState[ParallelRecord]]) -> None:
        """Hand out nothing of these partitions, and take back what no worker has begun."""
        with self.lock:
            for partition in partitions:
                self.scheduler.hold(partition)
            for worker in self._workers:
                self._relieve(worker)
            self._wake_for_work()

    def close(self, partition: PartitionState[ParallelRecord]) -> None:
        """The partition is not ours any more: who is at a run of it begins no more of that."""
        with self.lock:
            self.scheduler.close(partition)
            for worker in self._workers:
                if worker.give_back is not None:
                    worker.give_back()
                current = worker.current
                if current is not None and current[0].partition is partition:
                    for _ in current[1]:
                        pass

    def has_in_flight(self, partitions: Sequence[PartitionState[ParallelRecord]]) -> bool:
        """Return whether workers are at records of these, or their results are not taken."""
        with self.lock:
            return any(partition.in_flight_count for partition in partitions)

    def find(self, partition: PartitionState[ParallelRecord], offset: int) -> ParallelRecord | None:
        with self.lock:
            # What a worker took last may be done: it stays there until the worker takes more.
            if not partition.tracker.is_open(offset):
                return None
            for worker in self._workers:
                runs: list[PoolRun] = list(worker.runs)
                for run in runs:
                    if run.partition is partition:
                        for record in run.records:
                            if record.offset == offset:
                                return record
            return self.scheduler.find(partition, offset)

    def give_up(self, partition: PartitionState[ParallelRecord], offsets: Sequence[int]) -> None:
        """They are kept elsewhere, and done; a handler at one of them does not count any more."""
        with self.lock:
            self.scheduler.withdraw(partition, offsets)
            self.scheduler.complete(partition, offsets)
            self._wake_for_work()

    def await_room(
        self, partition: PartitionState[ParallelRecord], below: int, timeout_s: float
    ) -> None:
        """Wait until a partition has at most so many records open."""
        self._room.clear()
        with self.lock:
            self._crowded, self._room_below = partition, below
            self._look_for_room(partition)
        self._room.wait(timeout_s)
        with self.lock:
            self._crowded = None

    def _look_for_room(self, partition: PartitionState[ParallelRecord]) -> None:
        if partition.tracker.open_count <= self._room_below:
            self._crowded = None
            self._room.set()

    # All of it.

    def pause(self) -> None:
        with self.lock:
            self._is_paused = True

    def resume(self) -> None:
        with self.lock:
            self._is_paused = False
            self._wake_for_work()

    def stop(self) -> None:
        """Hand out nothing any more; workers end after what they are at, and do not begin more."""
        with self.lock:
            self.is_stopped = True
            for worker in self._workers:
                self._relieve(worker)
            self._parked.wake_all()

    def calls(self, slots: Sequence[PoolWorker]) -> list[Call]:
        """Return the calls; a long one counts from its worker's take, or ``STUCK_S`` later."""
        with self.lock:
            found = [(worker, _at(worker)) for worker in slots if worker.taken > 0]
            return [
                Call(worker.began_s, record.place, worker.caller)
                for worker, record in found
                if record is not None
            ]

    def in_flight_count(self) -> int:
        with self.lock:
            return self.scheduler.in_flight_count

    def open_count(self) -> int:
        with self.lock:
            return sum([partition.tracker.open_count for partition in self.scheduler.partitions])


def _at(worker: PoolWorker) -> ParallelRecord | None:
    """Return the record that a worker is at, the first one of a list; None: it is between two."""
    current, runs = worker.current, worker.runs
    if current is not None and current[0] in runs:
        records = current[0].records
        at = len(records) - 1 - length_hint(current[1])
        return records[max(at, 0)] if records else None
    return next((run.records[0] for run in runs if run.records), None)
