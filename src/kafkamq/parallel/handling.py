"""The shards of a parallel consumer as a ``WorkQueue``: what becomes of its handlers' outcomes."""

from __future__ import annotations

from collections.abc import Sequence

from kafkamq.parallel.failure_policy import FailurePolicy
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.results import Publisher
from kafkamq.parallel.work_queue import ParallelWorkQueue, PoolWorker
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
        self._has_publisher = publisher is not None
        self.make_slot, self.join, self.calls = (
            work_queue.make_slot,
            work_queue.join,
            work_queue.calls,
        )
        self.take, self.done, self.fail = work_queue.take, work_queue.done, policy.fail
        self.publish = _nothing if publisher is None else publisher.publish
        self.publish_async = _nothing_async if publisher is None else publisher.publish_async

    @property
    def is_stopped(self) -> bool:
        return self._work_queue.is_stopped

    def _is_result(self, outcome: object) -> bool:
        """Whether that is for the publisher."""
        if not self._has_publisher or is_verdict(outcome):
            return False
        return outcome is not None or self._takes_all

    def acknowledge(self, worker: PoolWorker, record: ParallelRecord, outcome: object) -> bool:
        """A result, or what the retry policy makes of it."""
        if self._is_result(outcome):
            worker.outputs.append((record, outcome))
            return True
        return self._keep(worker, record, self._policy.apply(record, outcome))

    async def acknowledge_async(
        self, worker: PoolWorker, record: ParallelRecord, outcome: object
    ) -> bool:
        if self._is_result(outcome):
            worker.outputs.append((record, outcome))
            return True
        return self._keep(worker, record, await self._policy.apply_async(record, outcome))

    @staticmethod
    def _keep(worker: PoolWorker, record: ParallelRecord, due_ms: int | None) -> bool:
        """Whether its run goes on behind a record that is tried again then."""
        if due_ms is None:
            return True
        worker.failed = [*(worker.failed or ()), (record, due_ms)]
        return worker.current is None or not worker.current[0].is_serial

    def abandon(self, worker: PoolWorker, records: Sequence[ParallelRecord]) -> None:
        """They are not done, and come again elsewhere."""


def _nothing(_: PoolWorker) -> None:
    """There is nothing to publish."""


async def _nothing_async(_: PoolWorker) -> None:
    """The same."""
