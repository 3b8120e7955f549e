"""The backend ``offsets``: a parallel consumer whose records are received one by one.

What is done is in the commits of a consumer group. Workers are slots that are driven by who
receives and who gives verdicts. A slot has one record out at a time; the next one follows when it
has its verdict. There are no threads of their own: a verdict moves its slot on, a receive moves
those that were woken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import BrokerError, DeadlineExceededError
from kafkamq.parallel.consumer import ParallelBase
from kafkamq.parallel.engine import Engine, State
from kafkamq.parallel.health import watch_engine
from kafkamq.parallel.record import Failure, ParallelRecord
from kafkamq.parallel.work_queue import ParallelWorkQueue, PoolWorker
from kafkamq.queue.backend import ConsumerPlan, TopicBackend
from kafkamq.queue.dead_letter_writer import DeadLetterOutbox
from kafkamq.queue.names import group_of_workers
from kafkamq.queue.topic_consumer import MessageState, TopicConsumer, TopicMessage
from kafkamq.runtime.rules.hanging import Slots
from kafkamq.transport.clock import monotonic_ms
from kafkamq.types import PartitionId


@dataclass(slots=True, eq=False, repr=False)
class Slot(PoolWorker):
    is_busy: bool = False


class SlotPool:
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
        with self._idle:
            self._is_abandoned = True
            self._idle.notify_all()

    def slots(self) -> Slots:
        """Handlers are not its business: it hands messages out."""
        return Slots(0, ())

    def advance_woken(self, limit: int) -> list[tuple[Slot, ParallelRecord]]:
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
            if slot.current is not None:
                run, records = slot.current
                if run.is_stale:
                    self._work_queue.done(slot, run, 0)
                    slot.current = None
                    continue
                record = next(records, None)
                if record is not None:
                    return record
                self._leave_run(slot)
            begun = next(slot.pending, None)
            if begun is not None:
                slot.current = begun, iter(begun.records)
            elif not self._work_queue.take(slot):
                return None

    def _leave_run(self, slot: Slot) -> None:
        assert slot.current is not None
        run, _ = slot.current
        processed = None
        if run.failed is not None and run.is_serial:
            processed = 1 + run.records.index(run.failed[0][0])
        self._work_queue.done(slot, run, processed)
        slot.current = None


class _Puller(ParallelBase):
    def begin(self, make_pool: Callable[[Engine], SlotPool]) -> Engine:
        self._fork_check.check()
        engine = self._engine
        engine.start(make_pool(engine))
        engine.on_end = watch_engine(engine)
        return engine


_Held = TopicMessage[tuple[Slot, ParallelRecord]]


class OffsetsConsumer(TopicConsumer[_Held]):
    """Order by key or partition, or none; what is done is in the commits of a consumer group."""

    def __init__(
        self,
        config: ServiceConfig,
        queue: QueueConfig,
        dead_letters: DeadLetterOutbox,
        plan: ConsumerPlan,
    ) -> None:
        super().__init__(queue, dead_letters, plan.on_lease_lost)
        self._puller = _Puller(
            queue.topic,
            group_id=group_of_workers(config, queue),
            bootstrap_servers=config.bootstrap_servers,
            kafka=config.kafka,
            ordering=plan.ordering or "key",
            null_keys=queue.null_keys,
            concurrency=queue.max_in_flight,
            on_data_loss=queue.on_data_loss,
            on_revoked=self._revoked,
        )
        self._engine = self._puller.begin(self._make_pool)

    def _make_pool(self, engine: Engine) -> SlotPool:
        self._slots = SlotPool(engine.work_queue, self._queue.max_in_flight, self._wake)
        return self._slots

    def _wake(self) -> None:
        # Called with the work queue's lock held, which a receive takes with ours held: so not ours.
        if self._changed.acquire(blocking=False):
            self._changed.notify()
            self._changed.release()

    def _check_failure(self) -> None:
        if self._engine.failure is not None:
            raise self._engine.failure

    def _fill(self, n: int) -> None:
        for slot, record in self._slots.advance_woken(n - len(self._ready)):
            self._offer(slot, record)

    def _offer(self, slot: Slot, record: ParallelRecord) -> None:
        message = TopicMessage(
            self, record._raw, delivery_count=record.attempt, place=(slot, record)
        )
        self._ready.append(message)

    def _move_on(self, slot: Slot, record: ParallelRecord | None) -> None:
        if record is not None:
            with self._changed:
                self._offer(slot, record)
                self._changed.notify()

    def _done(self, message: _Held) -> None:
        slot, _ = message.place
        self._move_on(slot, self._slots.advance(slot))

    def _is_ours(self, message: _Held) -> bool:
        return message.place[1]._is_ours

    def _dropped(self, message: _Held) -> None:
        self._done(message)

    # The slot goes on; of that partition nothing counts any more.

    def _again(self, message: _Held, delay_ms: int) -> None:
        slot, record = message.place
        record._failure = Failure(message.delivery_count, None, "")
        self._move_on(slot, self._slots.retry(slot, record, monotonic_ms() + delay_ms))

    def _revoked(self, partitions: list[PartitionId], _is_lost: bool) -> None:
        """Another member has these: what is held of them does not count any more."""
        gone = set(partitions)
        with self._changed:
            for message in [*self._held.values(), *self._ready]:
                slot, record = message.place
                if (record.topic, record.partition) in gone and message.state is MessageState.HELD:
                    self._lose(message)
                    self._slots.wake((slot,))
            self._changed.notify_all()
        self._dead_letters.prune()

    def _confirm(self, timeout_s: float) -> None:
        engine = self._engine
        self._check_failure()
        if engine.state is State.CLOSED:
            return
        # What is done of runs that slots have not ended counts, too.
        engine.work_queue.recall(())
        engine.committer.see_committed(timeout_s)

    def _end(self, timeout_s: float) -> None:
        with self._changed:
            while self._ready:
                message = self._ready.popleft()
                message.place[0].is_busy = False
        engine = self._engine
        engine.work_queue.stop()
        # What was handed out and is not settled comes again.
        for message in list(self._held.values()):
            message.place[0].is_busy = False
        self._slots.cancel()
        engine.end(timeout_s=0.0, drain_s=0.0)
        if not engine.ended.wait(timeout_s):
            raise DeadlineExceededError("leaving the group takes long, and goes on behind this")
        if isinstance(engine.failure, BrokerError):
            raise engine.failure


backend = TopicBackend(OffsetsConsumer)
