"""Workers of a parallel consumer that are driven by who receives and who gives verdicts.

A slot has one record out at a time; the next one follows when it has its verdict. There are no
threads of their own: a verdict moves its slot on, a receive moves those that were woken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.rules.partitions import PartitionPhase
from kafkamq.parallel.work_queue import ParallelWorkQueue, PoolWorker
from kafkamq.runtime.rules.hanging import Slots


@dataclass(slots=True, eq=False, repr=False)
class Slot(PoolWorker):
    """One record at a time."""

    is_at_run: bool = False
    is_busy: bool = False  # its record is in the application's hands


class SlotPool:
    """The slots of one consumer."""

    def __init__(
        self, work_queue: ParallelWorkQueue, count: int, on_woken: Callable[[], None]
    ) -> None:
        self._work_queue = work_queue
        self._slots = [Slot() for _ in range(count)]
        self._woken: deque[Slot] = deque()
        self._on_woken = on_woken
        self._is_abandoned = False
        self._idle = threading.Condition()

    def start(self) -> None:
        self._work_queue.join(self._slots, self)
        self._woken.extend(self._slots)

    def wake(self, workers: Sequence[PoolWorker]) -> None:
        """They are looked after at the next receive."""
        for worker in workers:
            assert isinstance(worker, Slot)
            self._woken.append(worker)
        self._on_woken()

    def join(self, timeout_s: float) -> bool:
        """Wait until nothing is in the application's hands."""
        deadline_s = monotonic() + timeout_s
        with self._idle:
            while not self._is_abandoned and any(slot.is_busy for slot in self._slots):
                left_s = deadline_s - monotonic()
                if left_s <= 0:
                    return False
                self._idle.wait(left_s)
        return True

    def cancel(self) -> None:
        """What is in the application's hands does not count any more."""
        with self._idle:
            self._is_abandoned = True
            self._idle.notify_all()

    def slots(self) -> Slots:
        """Handlers are not its business: it hands messages out."""
        return Slots(0, ())

    def advance_woken(self, limit: int) -> list[tuple[Slot, ParallelRecord]]:
        """Records of slots that were woken, at most so many."""
        found: list[tuple[Slot, ParallelRecord]] = []
        while len(found) < limit:
            try:
                slot = self._woken.popleft()
            except IndexError:
                break
            record = self.advance(slot)
            if record is not None:
                found.append((slot, record))
        return found

    def retry(self, slot: Slot, record: ParallelRecord, due_ms: int) -> ParallelRecord | None:
        """The slot's record failed, and is due again then; the slot's next one, or None."""
        assert slot.current is not None
        run = slot.current[0]
        run.failed = [*(run.failed or ()), (record, due_ms)]
        if run.is_serial:
            self._leave_run(slot)
        return self.advance(slot)

    def advance(self, slot: Slot) -> ParallelRecord | None:
        """The slot's record is done with: its next one, or None: it is parked."""
        record = self._next(slot)
        slot.is_busy = record is not None
        if record is None:
            with self._idle:
                self._idle.notify_all()
        return record

    def _next(self, slot: Slot) -> ParallelRecord | None:
        while True:
            if slot.is_at_run:
                assert slot.current is not None
                run, records = slot.current
                if run.shard.partition.phase is PartitionPhase.CLOSED:
                    self._work_queue.done(slot, run, 0)
                    slot.is_at_run = False
                    continue
                record = next(records, None)
                if record is not None:
                    return record
                self._leave_run(slot)
            run_or_none = next(slot.pending, None)
            if run_or_none is not None:
                slot.current = run_or_none, iter(run_or_none.records)
                slot.is_at_run = True
            elif not self._work_queue.take(slot):
                return None

    def _leave_run(self, slot: Slot) -> None:
        assert slot.current is not None
        run, _ = slot.current
        processed = None
        if run.failed is not None and run.is_serial:
            processed = 1 + run.records.index(run.failed[0][0])
        self._work_queue.done(slot, run, processed)
        slot.is_at_run = False
