"""The shards of a parallel consumer as a ``WorkQueue``: what becomes of its handlers' outcomes."""

from __future__ import annotations

from collections.abc import Sequence

from kafkamq.parallel.failure_policy import FailurePolicy
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.results import Publisher
from kafkamq.parallel.work_queue import ParallelWorkQueue, PoolRun, PoolWorker
from kafkamq.runtime.steps import Steps, take, take_async
from kafkamq.runtime.verdicts import is_verdict


class Handling:
    """What executors work on."""

    def __init__(
        self,
        work_queue: ParallelWorkQueue,
        policy: FailurePolicy,
        publisher: Publisher | None = None,
        *,
        takes_all: bool = False,
    ) -> None:
        self._work_queue = work_queue
        self._policy = policy
        self._takes_all = takes_all
        self._publisher = publisher
        self.make_slot, self.join = work_queue.make_slot, work_queue.join
        self.take, self.done, self.calls = work_queue.take, work_queue.done, work_queue.calls
        self.fail = policy.fail

    @property
    def is_stopped(self) -> bool:
        return self._work_queue.is_stopped

    @property
    def limit(self) -> int:
        return self._work_queue.limit

    @property
    def has_backlog(self) -> bool:
        return self._work_queue.has_backlog

    def acknowledge(
        self, worker: PoolWorker, run: PoolRun, record: ParallelRecord, outcome: object
    ) -> bool:
        del worker
        return take(self._acknowledge(run, record, outcome))

    async def acknowledge_async(
        self, worker: PoolWorker, run: PoolRun, record: ParallelRecord, outcome: object
    ) -> bool:
        del worker
        return await take_async(self._acknowledge(run, record, outcome))

    def _acknowledge(self, run: PoolRun, record: ParallelRecord, outcome: object) -> Steps[bool]:
        """A result for the publisher, or what the retry policy makes of it.

        Says whether the run goes on behind the record.
        """
        if run.is_stale:  # another member does it, and decides what becomes of it
            return True
        is_result = self._takes_all or outcome is not None
        if self._publisher is not None and is_result and not is_verdict(outcome):
            if run.outputs is None:
                run.outputs = []
            run.outputs.append((record, outcome))
            return True
        due_ms = yield from self._policy.apply(record, outcome)
        if due_ms is None:
            return True
        run.failed = [*(run.failed or ()), (record, due_ms)]
        return not run.is_serial

    def publish(self, worker: PoolWorker) -> None:
        if self._publisher is not None:
            take(self._publisher.publish(worker))

    async def publish_async(self, worker: PoolWorker) -> None:
        if self._publisher is not None:
            await take_async(self._publisher.publish(worker))

    def abandon(self, worker: PoolWorker, records: Sequence[ParallelRecord]) -> None:
        """They are not done, and come again elsewhere."""
