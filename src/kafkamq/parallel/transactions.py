"""Results and offsets go in one transaction: readers of committed data see each exactly once.

All workers share one producer. A worker sends the results of what it took, and settles it, inside a
gate; a commit closes the gate, so that a transaction holds results and their offsets or neither.
When a transaction fails, everything since the last one is forgotten and read again. So does one
that holds results of a partition whose offsets it cannot hold any more, as the partition has gone.

A result that Kafka refuses fails its transaction, and would fail every one to come: who is to blame
is remembered, and has had an attempt for each. Of a batch that is too large Kafka refuses all; the
largest result is to blame.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import cast

from kafkamq.errors import BrokerError, KafkaMQError, StateError
from kafkamq.parallel.commits import Committer, Plan
from kafkamq.parallel.config import tell
from kafkamq.parallel.failure_policy import FailurePolicy
from kafkamq.parallel.record import Failure, ParallelRecord
from kafkamq.parallel.results import (
    OnProduced,
    OutgoingRecord,
    Produced,
    granted,
    outgoing,
    place_of,
)
from kafkamq.parallel.rules.shards import PartitionState
from kafkamq.parallel.work_queue import PoolRun, PoolWorker
from kafkamq.runtime.steps import Attempt, Steps
from kafkamq.transport.errors import KafkaError, KafkaException, Meaning, broker_error, meaning
from kafkamq.transport.record import Record
from kafkamq.transport.transactions import TransactionalProducer
from kafkamq.types import RecordId

# Failed records that are remembered; more at once mean that Kafka refuses everything.
MAX_BLAMED = 10_000
# Results of a transaction that are waited for, at which it is committed.
MAX_UNTOLD = 10_000
# What these errors say is the consequence of another record's failure.
_COLLATERAL = (Meaning.PURGED, Meaning.OTHERS_FAULT)
_GIVEN_UP = -1


def _place(record: ParallelRecord) -> RecordId:
    return record.topic, record.partition, record.offset


_log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class TransactionCommitter(Committer):
    rewind: Callable[[], None]

    def __post_init__(self) -> None:
        super().__post_init__()
        # Workers pass one by one; a commit waits until none is inside, and keeps it closed.
        self.gate = threading.Lock()
        self._producer = TransactionalProducer(
            self.config.service,
            f"kafkamq.{self.config.group_id}.{uuid.uuid4().hex}",
            partitioner="murmur2_random",
            # This is a proposal: users may raise it.
            transaction_timeout_ms=10_000,
        )
        self._has_begun = False
        self._failure: BaseException | None = None
        self._partitions: set[PartitionState[ParallelRecord]] = set()
        self._suspects: list[tuple[int, ParallelRecord, BaseException]] = []
        self._fatal: BaseException | None = None
        self._blamed: dict[RecordId, tuple[int, BaseException]] = {}
        self.on_produced: OnProduced | None = None
        self._produced: list[Produced] = []

    def start(self) -> None:
        self._producer.init()
        super().start()

    def send(self, worker: PoolWorker) -> Iterator[None]:
        """Put, inside the gate, a worker's results into the transaction and settle what it did.

        Before it may wait, it yields: who must not wait lets another thread do the rest.
        """
        for run in worker.finished:
            outputs, run.outputs = run.outputs, None
            if outputs and not run.is_stale:
                self._partitions.add(run.partition)
                for record, result in outputs:
                    yield from self._send_one(record, cast("Sequence[OutgoingRecord]", result))
        self.work_queue.collect(worker)
        if len(self._produced) >= MAX_UNTOLD:
            self.request()

    def _send_one(
        self, record: ParallelRecord, results: Sequence[OutgoingRecord]
    ) -> Iterator[None]:
        if self._failure is not None:
            return
        # Of this transaction: what Kafka confirms when it is aborted already is told to nobody.
        produced = None if self.on_produced is None else self._produced

        def delivered(out: OutgoingRecord, error: KafkaError | None, report: Record) -> None:
            if error is None and produced is not None:
                produced.append(Produced(record, out, *place_of(report)))
            what = None if error is None else meaning(error)
            if error is None or what in _COLLATERAL:
                return
            ours = broker_error(error, f"sending the result of {record!r}")
            if what is Meaning.TOO_LARGE:
                size = max(len(out.value or b"") for out in results)
                self._suspects.append((size, record, ours))
            elif what is Meaning.INVALID_RECORD:
                self._blame(record, ours)
            elif isinstance(ours, BrokerError) and not ours.is_retriable:
                self._fatal = ours

        try:
            for out in results:
                self._begin()
                new = (out.topic, out.partition, out.key, out.value, tuple(out.header_list()))
                told = partial(delivered, out)
                if not self._producer.offer(new, on_delivery=told):
                    yield
                    self._producer.produce(new, on_delivery=told)
        except Exception as error:  # noqa: BLE001 - the transaction is not whole, whatever it is
            self._failure = error
            is_kafkas = isinstance(error, KafkaMQError)
            if not is_kafkas or meaning(error) is Meaning.TOO_LARGE:
                self._blame(record, error)

    def _begin(self) -> None:
        if not self._has_begun:
            self._producer.begin()
            self._has_begun = True

    def _blame(self, record: ParallelRecord, error: BaseException) -> None:
        place = _place(record)
        if len(self._blamed) < MAX_BLAMED or place in self._blamed:
            self._blamed[place] = (self._blamed.get(place, (0, error))[0] + 1, error)

    def give_up(self, record: ParallelRecord) -> None:
        """Its dead letter is in place, also if this transaction is aborted for another's sake."""
        if _place(record) in self._blamed:
            self._blamed[_place(record)] = (_GIVEN_UP, self._blamed[_place(record)][1])

    def _forget_blamed(self) -> None:
        """Forget those that are done after all, or of partitions that went."""
        if not self._blamed:
            return
        trackers = {
            assignment.place: assignment.partition.tracker for assignment in self.assignments()
        }
        with self.work_queue.lock:
            for place in list(self._blamed):
                tracker = trackers.get(place[:2])
                if tracker is None or not (
                    tracker.is_open(place[2]) or place[2] >= tracker.next_offset
                ):
                    del self._blamed[place]

    def refused(
        self, worker: PoolWorker
    ) -> Iterator[tuple[PoolRun, ParallelRecord, BaseException]]:
        """Take those of a worker's results that cannot be sent, and say why."""
        for run in worker.finished:
            outputs, run.outputs = run.outputs or (), []
            for record, result in outputs:
                if run.is_stale or run.is_behind(record):
                    break
                blame = self._blamed.get(_place(record)) if self._blamed else None
                if blame is not None and blame[0] == _GIVEN_UP:
                    continue
                known = 0 if record._failure is None else record._failure.attempts
                if blame is not None and known < blame[0]:
                    record._failure = Failure(blame[0] - 1, blame[1], "")
                    yield run, record, blame[1]
                    continue
                try:
                    run.outputs.append((record, list(outgoing(result))))
                except BaseException as error:  # noqa: BLE001 - also what a generator raises
                    yield run, record, error

    def forget(self) -> None:
        """Abort what was not committed: partitions went without notice."""
        with self.gate:
            self._abort(None)

    def _commit(self) -> bool:
        with self.gate:
            # Before the partitions: a member that has lost some of them since is refused by Kafka.
            member = self.commits.member
            plan = self._plan()
            if self._failure is None and not plan.commits and not self._has_begun:
                self.confirm(plan)
                return False
            try:
                if self._failure is not None:
                    raise self._failure
                self._begin()
                timeout_s = self.config.commit_timeout_ms / 1000
                # Kafka refuses a former member by its offsets, so results go with some always.
                if commits := plan.commits or plan.known():
                    targets = [each.target for each in commits]
                    self._producer.send_offsets(targets, member, timeout_s=timeout_s)
                if not self._is_current(plan):
                    raise StateError("it is of a partition that has gone")
                self._producer.commit(timeout_s=timeout_s)
                self._has_begun = False
                self._partitions.clear()
            except (KafkaMQError, KafkaException) as error:
                if meaning(error) is Meaning.METADATA_TOO_LARGE:
                    # Without the map, results beyond the offset would come twice after a crash.
                    self._fatal = BrokerError(
                        f"group {self.config.group_id}: the broker takes shorter commit metadata"
                        " than offset maps need, and transactions do not go without: raise"
                        " offset.metadata.max.bytes to 4096",
                        code="OFFSET_METADATA_TOO_LARGE",
                    )
                self._abort(error)
                return True
            except BaseException as error:
                if error is not self._failure:
                    raise
                self._abort(error)
                return True
            self._forget_blamed()
            self._tell_produced()
        self.confirm(plan)
        return any(verdict.ceiling is not None for _, _, verdict in plan.parts)

    def _is_current(self, plan: Plan) -> bool:
        parts = {assignment.partition for assignment, _, _ in plan.parts}
        return self._partitions <= parts and plan.is_current()

    def _tell_produced(self) -> None:
        """Inside the gate: while somebody is told, the next transaction does not grow."""
        produced, self._produced = self._produced, []
        for each in produced:
            place = (each.partition, each.offset)
            tell("on_produced", self.on_produced, each.record, each.result, *place)

    def _abort(self, error: BaseException | None) -> None:
        """Inside the gate: nothing since the last commit has happened."""
        self.stats.commit_failures += 1
        self._failure = None
        self._has_begun = False
        self._produced = []
        self._partitions.clear()
        if self._suspects:
            _, record, refusal = max(self._suspects, key=lambda suspect: suspect[0])
            self._suspects.clear()
            self._blame(record, refusal)
        _log.warning(
            "a transaction is aborted; what it held is processed again", extra={"error": str(error)}
        )
        # What is done from here on counts nowhere.
        for assignment in self.assignments():
            self.work_queue.close(assignment.partition)
        self._producer.abort()
        if not self._producer.is_ready:
            self._producer.init()
        self.rewind()
        if self._fatal is not None:
            raise self._fatal

    def end(self, timeout_s: float) -> bool:
        has_ended = super().end(timeout_s)
        if has_ended:
            self._producer.close()
        return has_ended


@dataclass(frozen=True, slots=True)
class TransactionPublisher:
    committer: TransactionCommitter
    policy: FailurePolicy
    await_room: Attempt | None = None

    def publish(self, worker: PoolWorker) -> Steps[None]:
        if any(run.outputs for run in worker.finished):
            yield from granted(self.await_room)
        for run, record, error in self.committer.refused(worker):
            due_ms = yield from self.policy.apply(record, error)
            if due_ms is None:
                self.committer.give_up(record)
            else:
                run.put_off(record, due_ms)
        gate = self.committer.gate
        yield from granted(lambda timeout_s: gate.acquire(timeout=timeout_s))
        passing, sent = self._pass(worker), cast("Future[None]", Future())
        if next(passing, True):
            return
        rest = partial(_finish, passing, sent)
        try:
            threading.Thread(target=rest, name="kafkamq-results", daemon=True).start()
        except RuntimeError:
            rest()
        yield from granted(sent)
        sent.result()

    def _pass(self, worker: PoolWorker) -> Iterator[None]:
        try:
            yield from self.committer.send(worker)
        finally:
            self.committer.gate.release()


def _finish(passing: Iterator[None], sent: Future[None]) -> None:
    """Send what may have to wait for Kafka, which must not happen on an event loop."""
    try:
        for _ in passing:
            pass
    except BaseException as error:  # noqa: BLE001 - raised by who waits for it
        sent.set_exception(error)
    else:
        sent.set_result(None)
