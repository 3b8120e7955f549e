"""The thread that owns the consumer: polls, feeds the work queue, commits.

On a revoke (``revoked``) it waits for what is in flight, commits what is done, forgets the rest.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from time import monotonic, sleep

from kafkamq.errors import StateError
from kafkamq.parallel.commits import Assignment, Committer
from kafkamq.parallel.config import CommitMode, ParallelConfig, Partition, tell
from kafkamq.parallel.dead_letters import ParallelDeadLetters
from kafkamq.parallel.record import ParallelRecord, make_records
from kafkamq.parallel.result_producer import ResultProducer
from kafkamq.parallel.rules.flow import PartitionFlow, Stall, StallDetector
from kafkamq.parallel.rules.partitions import PartitionState
from kafkamq.parallel.source import Position, Source
from kafkamq.parallel.stats import Stats
from kafkamq.parallel.transactions import TransactionCommitter
from kafkamq.parallel.wire.offset_zstd import require_zstandard
from kafkamq.parallel.work_queue import ParallelWorkQueue
from kafkamq.runtime.inside import enter
from kafkamq.runtime.rules.fan_out import Adjustable, FanOut
from kafkamq.runtime.rules.hanging import Slots
from kafkamq.runtime.work_queue import Executor
from kafkamq.transport.record import Record
from kafkamq.types import DeadLetterReason

MAX_POLL = 1000  # records of one poll
TICK_S = 0.02  # the longest wait for records, and how often the rest is looked after
_SAMPLE = 64  # of so many records one is asked for its size
_LATE_S = 300.0  # for a commit that librdkafka still waits for
ROOM_S = 0.05  # how long a full partition is waited for before it is paused
_log = logging.getLogger(__name__)


class State(Enum):
    """What a parallel consumer is doing."""

    UNUSED = "unused"
    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"
    CLOSING = "closing"
    CLOSED = "closed"
    FAILED = "failed"


class Engine:
    """Runs one consumer from ``start`` to ``close``."""

    def __init__(self, config: ParallelConfig) -> None:
        require_zstandard()
        self.config = config
        self.stats = Stats()
        self.work_queue = ParallelWorkQueue(config, self.stats)
        self.results = ResultProducer(config)
        self.dead_letters = ParallelDeadLetters(config, self.work_queue, self.stats)
        self.state = State.UNUSED
        self.failure: BaseException | None = None
        self.ended = threading.Event()
        self.on_turn: Callable[[], None] = _nothing  # each turn of the thread
        self.on_end: Callable[[], None] = _nothing
        self._assignments: dict[Partition, Assignment] = {}
        self._source = Source(config, self, self.stats)
        self._must_rewind = False
        self._is_leaving_late = False
        self._committer = self._make_committer()
        self._pool: Executor | None = None
        self._fan_out: FanOut | None = None
        self._steered: Adjustable = self.work_queue
        self._is_ending = threading.Event()
        self._drain_until_s = 0.0
        self._close_until_s = 0.0
        self._tended_s = 0.0
        self._committed_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kafkamq-parallel", daemon=True)

    def _make_committer(self) -> Committer:
        given = (self.config, self.work_queue, self._source.commits, self.assignments, self.stats)
        if not self.config.is_transactional:
            return Committer(*given, self.fail)
        return TransactionCommitter(*given, self.fail, self._rewind_soon)

    @property
    def committer(self) -> Committer:
        """What commits; in mode transactional a ``TransactionCommitter``."""
        return self._committer

    def assignments(self) -> list[Assignment]:
        return list(self._assignments.values())

    def slots(self) -> Slots:
        """What its handlers are at; from any thread."""
        pool = self._pool
        return Slots(0, ()) if pool is None or self.ended.is_set() else pool.slots()

    @property
    def concurrency(self) -> int:
        """How many handlers may be at work at once."""
        config, fan_out = self.config, self._fan_out
        at_once = config.threads if config.processes else config.concurrency
        if fan_out is not None:
            at_once = fan_out.limit
        return at_once * max(1, config.processes)

    # Beginning and end.

    def steer(self, fan_out: FanOut, slots: Adjustable) -> None:
        """Let it say how many slots are at work; before the start."""
        self._fan_out, self._steered = fan_out, slots
        slots.set_limit(fan_out.limit)

    def start(self, pool: Executor) -> None:
        try:
            self._source.subscribe()
        finally:
            if self.state is not State.UNUSED:
                raise StateError("the parallel consumer was closed while it connected")
        self._pool = pool
        self.state = State.RUNNING
        try:
            self._committer.start()
            pool.start()
            self._thread.start()
        except BaseException as error:  # such as transactions that may not be, too many threads
            self.failure = error
            self.work_queue.stop()
            self._committer.end(self.config.commit_timeout_ms / 1000)
            self._source.close()
            self.state = State.FAILED
            self.ended.set()
            raise

    def fail(self, error: BaseException) -> None:
        """Stop because of that; the first one counts."""
        if self.failure is None:
            self.failure = error
            _log.error("the parallel consumer stops", extra={"error": str(error)})
        self._is_ending.set()

    @property
    def is_ending(self) -> bool:
        """Whether it drains, closes or has failed."""
        return self._is_ending.is_set()

    def commit_soon(self) -> None:
        self._committer.request()

    def end(self, *, timeout_s: float, drain_s: float) -> None:
        """Begin to close, and return at once; ``ended`` is set at the end."""
        now_s = monotonic()
        if self.state is State.UNUSED:
            self.state = State.CLOSED
            self._source.close()
            self.ended.set()
            return
        if drain_s <= 0:
            self.work_queue.stop()
        drain_until_s, close_until_s = now_s + drain_s, now_s + drain_s + timeout_s
        if self._is_ending.is_set():  # the earlier end counts: a close ends a drain
            drain_until_s = min(drain_until_s, self._drain_until_s)
            close_until_s = min(close_until_s, self._close_until_s)
        self._drain_until_s, self._close_until_s = drain_until_s, close_until_s
        self._is_ending.set()

    def _run(self) -> None:
        enter(self.config)
        try:
            while not self._is_ending.is_set():
                self._step(is_reading=True)
        except BaseException as error:  # noqa: BLE001 - raised to whoever waits
            self.fail(error)
        try:
            self._shut_down()
        except BaseException as error:  # noqa: BLE001 - as above
            self.fail(error)
        finally:
            self.state = State.CLOSED if self.failure is None else State.FAILED
            self.on_end()
            self.ended.set()
        if self._is_leaving_late and self._committer.end(_LATE_S):
            self._source.close()

    def _shut_down(self) -> None:
        pool = self._pool
        assert pool is not None
        if self.failure is None and self._drain_until_s > monotonic():
            self.state = State.DRAINING
            self.work_queue.resume()
            while self.work_queue.open_count() and monotonic() < self._drain_until_s:
                self._stay()
        self.state = State.CLOSING
        self.work_queue.stop()
        while not pool.join(0) and monotonic() < self._close_until_s:
            self._stay()
        pool.cancel()
        timeout_s = self.config.commit_timeout_ms / 1000
        self.dead_letters.close(max(1.0, self._close_until_s - monotonic()))
        self.results.close(max(1.0, self._close_until_s - monotonic()))
        is_idle = self._committer.commit_at_last(timeout_s)  # also when it fails: done is done
        self._tell_of_refusal()
        if not self._committer.end(timeout_s) or not is_idle:
            _log.warning("a last commit has no answer; leaving the group goes on behind it")
            self._is_leaving_late = True  # a client must not be ended with a commit inside of it
            return
        self._forget(list(self._assignments))
        self._source.close()

    def _tell_of_refusal(self) -> None:
        """After a commit that none will follow."""
        refusal = self._committer.refusal
        if refusal is not None:
            _log.warning(
                "the last commit failed: what was done since the one before comes again",
                extra={"group": self.config.group_id, "error": str(refusal)},
            )

    def _stay(self) -> None:
        """Remain a member while the end is waited for; trouble with that is none any more."""
        try:
            self._step(is_reading=False)
        except BaseException as error:  # noqa: BLE001 - the first failure is the one that counts
            self.fail(error)
            sleep(TICK_S)

    # Reading.

    def _step(self, *, is_reading: bool) -> None:
        if self._must_rewind:
            self._rewind()
        if not is_reading:  # nor fetching, which would take time from who is waited for
            self._pause(self.assignments())
        groups = self._source.poll(MAX_POLL, TICK_S)
        self.stats.last_poll_s = monotonic()
        self.on_turn()
        if is_reading and (groups or self._source.ends):
            self._take_in(groups)
        now_s = monotonic()
        if now_s - self._tended_s >= TICK_S:
            self._tended_s = now_s
            self._tend(now_s, is_reading=is_reading)

    def _rewind_soon(self) -> None:
        self._must_rewind = True

    def _rewind(self) -> None:
        """A transaction was aborted: read again from what is committed."""
        self._must_rewind = False
        begun = {
            place: assignment.committed_offset for place, assignment in self._assignments.items()
        }
        self._forget(list(begun))
        self.assigned(self._source.rewind(begun))

    def _take_in(self, groups: Sequence[tuple[Partition, Sequence[Record]]]) -> None:
        crowded: Assignment | None = None
        for place, messages in groups:
            assignment = self._assignments.get(place)
            if assignment is None:  # went in the same poll
                continue
            records = make_records(messages, assignment.partition)
            self.stats.polled += len(records)
            self.work_queue.add(assignment.partition, records)
            assignment.flow.observe(list(map(len, messages[::_SAMPLE])))
            if assignment.partition.tracker.open_count >= assignment.flow.max_open:
                crowded = assignment
        for place, offset in self._source.ends.items():
            assignment = self._assignments.get(place)
            if assignment is not None:
                with self.work_queue.lock:
                    assignment.partition.tracker.advance(offset)
        if crowded is not None:
            self._make_room(crowded)

    def _make_room(self, crowded: Assignment) -> None:
        """Wait a moment, as pausing throws away what is fetched ahead; then pause."""
        self.work_queue.await_room(crowded.partition, crowded.flow.resume_open, ROOM_S)
        self._pause(
            assignment
            for assignment in self.assignments()
            if not assignment.flow.fetch(assignment.partition.tracker.open_count)
        )

    def _pause(self, assignments: Iterable[Assignment]) -> None:
        paused = [assignment for assignment in assignments if not assignment.is_paused]
        for assignment in paused:
            assignment.is_paused = True
        if paused:
            self._source.pause([assignment.place for assignment in paused])

    def _tend(self, now_s: float, *, is_reading: bool) -> None:
        self.work_queue.tend()
        if self._fan_out is not None:
            self._fan_out.steer(now_s * 1000, self._steered)
        self.dead_letters.tend()
        now_ms = int(now_s * 1000)
        for assignment in list(self._assignments.values()):
            tracker = assignment.partition.tracker
            if is_reading and assignment.is_paused and assignment.flow.fetch(tracker.open_count):
                assignment.is_paused = False
                self._source.resume([assignment.place])
            with self.work_queue.lock:
                stall = assignment.stalls.observe(tracker.first_open(), now_ms)
            if stall is not None:
                self._stalled(assignment, stall)
        if self.config.commit_mode is CommitMode.SYNCHRONOUS:
            self._commit_in_step(now_s)

    def _commit_in_step(self, now_s: float) -> None:
        if now_s - self._committed_s >= self.config.commit_interval_ms / 1000:
            self._committed_s = now_s
            self._committer.commit_now(self.config.commit_timeout_ms / 1000)

    def _stalled(self, assignment: Assignment, stall: Stall) -> None:
        self.stats.stalls += 1
        topic, partition = assignment.place
        _log.warning(
            "a record holds the committed offset back",
            extra={
                "topic": topic,
                "partition": partition,
                "offset": stall.offset,
                "held_ms": stall.held_ms,
            },
        )
        held_s = stall.held_ms / 1000
        tell("on_stall", self.config.hooks.on_stall, topic, partition, stall.offset, held_s)
        if self.config.gives_up_stalled:
            self._give_up_stalled(
                assignment, stall.offset, f"held the committed offset back for {held_s:g} s"
            )

    def _give_up_stalled(self, assignment: Assignment, offset: int, error_text: str) -> None:
        """Make a dead letter of a record that holds others up; then the offset moves."""
        record = self.work_queue.find(assignment.partition, offset)
        if record is not None:
            reason = DeadLetterReason.MAX_LEASE
            written = self.dead_letters.write(record, reason, error_text)
            self.dead_letters.hold(record, reason, written)

    # Membership, told by the source inside ``poll``.

    def assigned(self, positions: Sequence[Position]) -> None:
        config = self.config
        for position in positions:
            place = (position.topic, position.partition)
            partition = self.work_queue.assign(place, position.tracker)
            self._assignments[place] = Assignment(
                partition,
                PartitionFlow(config.limits),
                StallDetector(stall_after_ms=config.stall_after_ms),
                position.offset,
                position.tracker.version if position.is_committed else -1,
            )
        places = [(position.topic, position.partition) for position in positions]
        _log.info("partitions were assigned", extra={"partitions": places})
        if any(not position.is_committed for position in positions):
            self._committer.request()  # a new group's start, before anything else happens to it
        tell("on_assigned", config.hooks.on_assigned, places)

    def revoked(self, partitions: Sequence[Partition]) -> None:
        """Commit what is done of these, within the budget, and forget them."""
        assignments = [
            self._assignments[place] for place in partitions if place in self._assignments
        ]
        self._await_in_flight([assignment.partition for assignment in assignments])
        self.dead_letters.tend_all()
        if assignments and not self._committer.commit_at_last(self.config.commit_timeout_ms / 1000):
            _log.warning("no answer to the commit of revoked partitions")
        self._tell_of_refusal()
        self._forget(partitions)
        _log.info("partitions were revoked", extra={"partitions": list(partitions)})
        tell("on_revoked", self.config.hooks.on_revoked, list(partitions), False)

    def _await_in_flight(self, partitions: Sequence[PartitionState[ParallelRecord]]) -> None:
        """Hand out nothing of these any more, and wait for what is in flight (bounded)."""
        self.work_queue.recall(partitions)
        deadline_s = monotonic() + self.config.revoke_timeout_ms / 1000
        while self.work_queue.has_in_flight(partitions) and monotonic() < deadline_s:
            sleep(0.001)

    def lost(self, partitions: Sequence[Partition]) -> None:
        """Another member has these already: commit nothing of them."""
        if isinstance(self._committer, TransactionCommitter):
            self._committer.forget()
        self._forget(partitions)
        _log.warning("partitions were lost", extra={"partitions": list(partitions)})
        tell("on_revoked", self.config.hooks.on_revoked, list(partitions), True)

    def restarted(self, position: Position) -> None:
        """The log is another one: what is done of the old one says nothing of its records.

        What is in flight is of the old one, and counts nowhere any more.
        """
        places = [(position.topic, position.partition)]
        self._forget(places)
        tell("on_revoked", self.config.hooks.on_revoked, places, True)
        self.assigned([position])

    def _forget(self, partitions: Sequence[Partition]) -> None:
        for place in partitions:
            assignment = self._assignments.pop(place, None)
            if assignment is not None:
                self.work_queue.close(assignment.partition)
        self.dead_letters.forget()


def _nothing() -> None:
    """Nobody wants to know."""
