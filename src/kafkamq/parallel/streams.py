"""Results of handlers as an iterator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from queue import Empty, Full, Queue

from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.rules.partitions import PartitionState
from kafkamq.parallel.work_queue import ParallelWorkQueue, PoolWorker

MAX_WAITING = 1024  # results that nobody has taken; then workers wait
_SLICE_S = 0.1
_ASYNC_SLICE_S = 0.002


class ResultStream:
    """A queue between workers and one iterator; what was iterated over is done."""

    def __init__(self, work_queue: ParallelWorkQueue) -> None:
        self._work_queue = work_queue
        self._waiting: Queue[tuple[PartitionState[ParallelRecord], ParallelRecord, object]] = Queue(
            MAX_WAITING
        )
        work_queue.is_deferred = True

    def publish(self, worker: PoolWorker) -> None:
        """Queue the results, and wait while there is no room."""
        outputs, worker.outputs = worker.outputs, []
        partitions = self._work_queue.hand_on(worker, [record for record, _ in outputs])
        for record, result in outputs:
            while not self._work_queue.is_stopped:
                try:
                    self._waiting.put((partitions[record], record, result), timeout=_SLICE_S)
                    break
                except Full:
                    continue

    async def publish_async(self, worker: PoolWorker) -> None:
        outputs, worker.outputs = worker.outputs, []
        partitions = self._work_queue.hand_on(worker, [record for record, _ in outputs])
        for record, result in outputs:
            while not self._work_queue.is_stopped:
                try:
                    self._waiting.put_nowait((partitions[record], record, result))
                    break
                except Full:
                    await asyncio.sleep(_ASYNC_SLICE_S)

    def results(self, has_ended: Callable[[], bool]) -> Iterator[tuple[ParallelRecord, object]]:
        """Record and result; the record is done when the next one is asked for."""
        while not has_ended():
            try:
                partition, record, result = self._waiting.get(timeout=_SLICE_S)
            except Empty:
                continue
            yield record, result
            self._work_queue.complete(partition, [record.offset])

    async def results_async(
        self, has_ended: Callable[[], bool]
    ) -> AsyncIterator[tuple[ParallelRecord, object]]:
        while not has_ended():
            try:
                partition, record, result = self._waiting.get_nowait()
            except Empty:
                await asyncio.sleep(_ASYNC_SLICE_S)
                continue
            yield record, result
            self._work_queue.complete(partition, [record.offset])
