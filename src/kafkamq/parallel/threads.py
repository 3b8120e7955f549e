"""Workers for ``def`` handlers: threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import monotonic

from kafkamq.parallel.handling import UNTRIED, Handling, end_batch, outcomes_of, take_batch
from kafkamq.parallel.inside import enter
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.rules.lanes import LaneState, Run
from kafkamq.parallel.work_queue import Failed, Worker
from kafkamq.runtime.rules.hanging import Slots

__all__ = ["ThreadPool", "ThreadWorker"]


class ThreadWorker(Worker):
    """A worker with a gate that it waits at while it is parked."""

    __slots__ = ("gate",)

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Lock()
        self.gate.acquire()


class ThreadPool:
    """Calls a handler for each record, in ``count`` threads."""

    def __init__(self, handling: Handling, count: int) -> None:
        self._handling = handling
        self._desk = handling.desk
        self._settler = handling.settler
        self._handler = handling.handler
        self._takes_all = handling.takes_all
        self._workers = [ThreadWorker() for _ in range(count)]
        self._threads = [
            threading.Thread(
                target=self._run, args=(worker,), name=f"kafkamq-worker-{number}", daemon=True
            )
            for number, worker in enumerate(self._workers)
        ]

    def start(self) -> None:
        """Begin."""
        self._desk.join(self._workers, self)
        for thread in self._threads:
            thread.start()

    def wake(self, workers: Sequence[Worker]) -> None:
        """Open their gates."""
        for worker in workers:
            assert isinstance(worker, ThreadWorker)
            worker.gate.release()

    def join(self, timeout_s: float) -> bool:
        """Wait until all have ended, after ``Desk.stop``; False: some are still at it."""
        deadline_s = monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def cancel(self) -> None:
        """A thread cannot be ended: what it is at goes on, and does not count."""

    def slots(self) -> Slots:
        """What its threads are at."""
        return Slots(len(self._workers), self._desk.calls())

    def _run(self, worker: ThreadWorker) -> None:
        enter(self._settler.config)
        try:
            self._work(worker)
        except BaseException as error:  # noqa: BLE001 - a worker less must not go unnoticed
            self._settler.fail(error)

    def _work(self, worker: ThreadWorker) -> None:
        desk, publisher = self._desk, self._handling.publisher
        takes_lists = self._handling.takes_lists
        while True:
            if not desk.exchange(worker):
                if desk.is_stopped:
                    return
                worker.gate.acquire()
                continue
            if takes_lists:
                self._process_list(worker)
            else:
                for run in worker.pending:
                    failed = self._process(worker, run)
                    if failed is None:
                        worker.finished.append(run)
                    else:
                        desk.let_go(worker, run, failed)
            if publisher is not None:
                publisher.publish(worker)

    def _process(self, worker: Worker, run: Run[ParallelRecord]) -> Failed:
        """None: all of it is done. Otherwise what failed, and when it is tried again."""
        handler, shard = self._handler, run.shard
        lane, is_serial = shard.lane, shard.is_serial
        records = iter(run.records)
        worker.current, worker.failed = (run, records), None
        for record in records:
            if lane.state is LaneState.CLOSED:
                return worker.failed or []
            try:
                outcome = handler(record)
            except BaseException as error:  # noqa: BLE001 - the policy decides
                outcome = error
            if outcome is not None or self._takes_all:
                due_ms = self._settle(worker, record, outcome)
                if due_ms is not None:
                    worker.failed = [*(worker.failed or ()), (record, due_ms)]
                    if is_serial:
                        break
        return worker.failed

    def _settle(self, worker: Worker, record: ParallelRecord, outcome: object) -> int | None:
        if self._handling.is_result(outcome):
            worker.outputs.append((record, outcome))
            return None
        return self._settler.settle(record, outcome)

    def _process_list(self, worker: Worker) -> None:
        runs, records = take_batch(worker)
        if not records:  # taken back in the meantime
            return
        try:
            result: object = self._handler(records)
        except BaseException as error:  # noqa: BLE001 - the policy decides
            result = error
        due: dict[int, int] = {}
        untried: set[int] = set()
        for record, outcome in zip(records, outcomes_of(result, len(records)), strict=True):
            if outcome is UNTRIED:
                untried.add(id(record))
            elif outcome is not None or self._takes_all:
                due_ms = self._settle(worker, record, outcome)
                if due_ms is not None:
                    due[id(record)] = due_ms
        end_batch(self._desk, worker, runs, due, untried)
