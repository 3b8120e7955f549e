"""Results of handlers as an iterator: as they are returned, or when Kafka has them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from functools import partial
from queue import Empty, Full, Queue
from typing import TypeAlias, TypeVar

from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.results import OutgoingRecord, Produced
from kafkamq.parallel.work_queue import ParallelWorkQueue, PoolRun, PoolWorker
from kafkamq.runtime.steps import Steps

T = TypeVar("T")
MAX_WAITING = 1024  # results that nobody has taken; then workers wait
_SLICE_S = 0.1
_ASYNC_SLICE_S = 0.002
_log = logging.getLogger(__name__)
_Result: TypeAlias = tuple[PoolRun, ParallelRecord, object]


async def taken_async(results: Iterator[T | None]) -> AsyncIterator[T]:
    """What ``results`` of a stream gives without waiting, on an event loop."""
    with closing(results):  # type: ignore[type-var]  # it is a generator
        for each in results:
            if each is None:
                await asyncio.sleep(_ASYNC_SLICE_S)
            else:
                yield each


class ResultStream:
    """A queue between workers and one iterator; what was iterated over is done."""

    def __init__(self, work_queue: ParallelWorkQueue) -> None:
        self._work_queue = work_queue
        self._waiting: Queue[_Result] = Queue(MAX_WAITING)
        work_queue.is_deferred = True

    def publish(self, worker: PoolWorker) -> Steps[None]:
        """Queue the results, and wait while there is no room."""
        for output in self._work_queue.hand_on(worker):
            put = partial(self._put, output)
            while not self._work_queue.is_stopped and not (yield put, _SLICE_S):
                pass

    def _put(self, result: _Result, timeout_s: float) -> bool:
        try:
            self._waiting.put(result, timeout_s > 0, timeout_s)
        except Full:
            return False
        return True

    def results(
        self, has_ended: Callable[[], bool], slice_s: float = _SLICE_S
    ) -> Iterator[tuple[ParallelRecord, object] | None]:
        """Record and result; the record is done when the next one is asked for.

        None, without a slice to wait: there is nothing now.
        """
        while not has_ended():
            try:
                run, record, result = self._waiting.get(slice_s > 0, slice_s)
            except Empty:
                if not slice_s:
                    yield None
                continue
            if not run.is_stale:  # else another member's handler has it, and its result is told
                yield record, result
            self._work_queue.complete(run.partition, [record.offset])


class ProducedStream:
    """What Kafka has of results, for one iterator; its records are done.

    ``MAX_WAITING`` wait for the iterator; then workers wait before they send more. Who is at it by
    then, or in a transaction with others, adds a little. Workers do not wait for an iterator at the
    end: it goes on until all is told.
    """

    def __init__(self, is_ending: Callable[[], bool]) -> None:
        self._is_ending = is_ending
        self._changed = threading.Condition()
        self._waiting: deque[Produced] = deque()
        self._is_left = False

    def put(self, record: ParallelRecord, result: OutgoingRecord, *place: int) -> None:
        """See ``OnProduced``; does not wait."""
        with self._changed:
            if self._is_left:
                return
            self._waiting.append(Produced(record, result, *place))
            self._changed.notify_all()

    def await_room(self, timeout_s: float) -> bool:
        """Wait until there is room, or none is needed."""
        with self._changed:
            return self._is_ending() or self._changed.wait_for(
                lambda: len(self._waiting) < MAX_WAITING, timeout_s
            )

    def results(
        self, has_ended: Callable[[], bool], slice_s: float = _SLICE_S
    ) -> Iterator[Produced | None]:
        """In the order in which Kafka confirmed them; None, without a slice: there is nothing."""
        try:
            while True:
                is_last = has_ended()  # before the look: what came until then is seen
                produced = self._next(0.0 if is_last else slice_s)
                if produced is None and is_last:
                    return
                if produced is not None or not slice_s:
                    yield produced
        finally:
            self._leave()

    def _next(self, timeout_s: float) -> Produced | None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting, timeout_s):
                return None
            self._changed.notify_all()
            return self._waiting.popleft()

    def _leave(self) -> None:
        with self._changed:
            self._is_left = True
            count = len(self._waiting)
        if count:
            _log.warning(
                "results that Kafka has are told to nobody, as their iteration was left",
                extra={"count": count},
            )
