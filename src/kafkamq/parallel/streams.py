"""Results of handlers as an iterator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from queue import Empty, Full, Queue
from typing import TypeAlias

from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.rules.partitions import PartitionState
from kafkamq.parallel.work_queue import ParallelWorkQueue, PoolWorker
from kafkamq.runtime.steps import Steps

MAX_WAITING = 1024  # results that nobody has taken; then workers wait
_SLICE_S = 0.1
_ASYNC_SLICE_S = 0.002
_Result: TypeAlias = tuple[PartitionState[ParallelRecord], ParallelRecord, object]


class ResultStream:
    """A queue between workers and one iterator; what was iterated over is done."""

    def __init__(self, work_queue: ParallelWorkQueue) -> None:
        self._work_queue = work_queue
        self._waiting: Queue[_Result] = Queue(MAX_WAITING)
        work_queue.is_deferred = True

    def publish(self, worker: PoolWorker) -> Steps[None]:
        """Queue the results, and wait while there is no room."""
        outputs, worker.outputs = worker.outputs, []
        partitions = self._work_queue.hand_on(worker, [record for record, _ in outputs])
        for record, result in outputs:
            put = partial(self._put, (partitions[record], record, result))
            while not self._work_queue.is_stopped and not (yield put, _SLICE_S):
                pass

    def _put(self, result: _Result, timeout_s: float) -> bool:
        try:
            self._waiting.put(result, timeout_s > 0, timeout_s)
        except Full:
            return False
        return True

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
