"""The thread that owns the consumer joins the group, polls, feeds the work queue, commits.

On a revoke (``Engine.revoked``) it waits for what is in flight, commits what is done, forgets the
rest. Reading begins at the committed offset, with the map of what is done beyond it (``Source``).
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from time import monotonic, sleep

from kafkamq.errors import (
    BrokerError,
    ConfigError,
    DataLossError,
    KafkaMQError,
    StateError,
    WireError,
)
from kafkamq.parallel.commits import Assignment, Committer
from kafkamq.parallel.config import CommitMode, ParallelConfig
from kafkamq.parallel.failure_policy import ParallelDeadLetters
from kafkamq.parallel.record import make_records
from kafkamq.parallel.results import ResultProducer
from kafkamq.parallel.rules.flow import PartitionFlow, Stall, StallDetector
from kafkamq.parallel.rules.offsets import OffsetTracker
from kafkamq.parallel.transactions import TransactionCommitter
from kafkamq.parallel.wire import offsets as offset_maps
from kafkamq.parallel.wire.offsets import require_zstandard
from kafkamq.parallel.work_queue import ParallelWorkQueue, Stats
from kafkamq.runtime.rules.hanging import Slots
from kafkamq.runtime.rules.pace import Adjustable, FanOut
from kafkamq.runtime.work_queue import Executor, enter
from kafkamq.transport.commits import CommitTurns, OffsetCommit
from kafkamq.transport.errors import Meaning, is_retriable, meaning
from kafkamq.transport.group_consumer import GroupConsumer
from kafkamq.transport.record import Record
from kafkamq.types import DeadLetterReason, PartitionId

MAX_POLL = 1000
TICK_S = 0.02
_SAMPLE = 64
_LATE_S = 300.0
ROOM_S = 0.05
_log = logging.getLogger(__name__)
_REQUEST_S = 5.0
_PATIENCE_S = 30.0


class State(Enum):
    UNUSED = "unused"
    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"
    CLOSING = "closing"
    CLOSED = "closed"
    FAILED = "failed"


class Engine:
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
        self.on_turn: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None
        self._assignments: dict[PartitionId, Assignment] = {}
        self._source = Source(config, self, self.stats)
        self._must_rewind = False
        self._is_leaving_late = False
        given = (config, self.work_queue, self._source.commits, self.assignments, self.stats)
        self.committer = (
            TransactionCommitter(*given, self.fail, self._rewind_soon)
            if config.is_transactional
            else Committer(*given, self.fail)
        )
        self._pool: Executor | None = None
        self._fan_out: FanOut | None = None
        self._steered: Adjustable = self.work_queue
        self._is_ending = threading.Event()
        self._drain_until_s = 0.0
        self._close_until_s = 0.0
        self._tended_s = 0.0
        self._committed_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kafkamq-parallel", daemon=True)

    def assignments(self) -> list[Assignment]:
        return list(self._assignments.values())

    def slots(self) -> Slots:
        pool = self._pool
        return Slots(0, ()) if pool is None or self.ended.is_set() else pool.slots()

    @property
    def concurrency(self) -> int:
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
            self.committer.start()
            pool.start()
            self._thread.start()
        except BaseException as error:
            self.failure = error
            self.work_queue.stop()
            self.committer.end(self.config.commit_timeout_ms / 1000)
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

    def is_ending(self) -> bool:
        return self._is_ending.is_set()

    def has_stopped(self) -> bool:
        """Return whether nothing is handed out any more."""
        return self.work_queue.is_stopped or self.ended.is_set()

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
        if self._is_ending.is_set():
            # The earlier end counts: a close ends a drain.
            drain_until_s = min(drain_until_s, self._drain_until_s)
            close_until_s = min(close_until_s, self._close_until_s)
        self._drain_until_s, self._close_until_s = drain_until_s, close_until_s
        self._is_ending.set()

    def _run(self) -> None:
        enter(self.config)
        try:
            while not self._is_ending.is_set():
                self._step(is_reading=True)
        except BaseException as error:  # noqa: BLE001 - raised by what waits
            self.fail(error)
        try:
            self._shut_down()
        except BaseException as error:  # noqa: BLE001 - as above
            self.fail(error)
        finally:
            self.state = State.CLOSED if self.failure is None else State.FAILED
            self.on_end()
            self.ended.set()
        if self._is_leaving_late and self.committer.end(_LATE_S):
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
        # It is committed also when a part of it failed: done is done.
        is_idle = self.committer.commit_at_last(timeout_s)
        self._tell_of_refusal()
        if not self.committer.end(timeout_s) or not is_idle:
            _log.warning("a last commit has no answer; leaving the group goes on behind it")
            # A client must not be ended with a commit inside of it.
            self._is_leaving_late = True
            return
        self._forget(list(self._assignments))
        self._source.close()

    def _tell_of_refusal(self) -> None:
        refusal = self.committer.refusal
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
        if not is_reading:
            # Nothing is fetched, either: that would take time from what is waited for.
            self._pause(self.assignments())
        groups = self._source.poll(MAX_POLL, TICK_S)
        self.stats.last_poll_s = monotonic()
        self.on_turn()
        if is_reading and (groups or self._source.group.ends):
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

    def _take_in(self, groups: Sequence[tuple[PartitionId, Sequence[Record]]]) -> None:
        crowded: Assignment | None = None
        for place, messages in groups:
            assignment = self._assignments.get(place)
            if assignment is None:
                # The partition went in the same poll.
                continue
            records = make_records(messages, assignment.partition)
            self.stats.polled += len(records)
            self.work_queue.add(assignment.partition, records)
            assignment.flow.observe(list(map(len, messages[::_SAMPLE])))
            if assignment.partition.tracker.open_count >= assignment.flow.max_open:
                crowded = assignment
        for place, offset in self._source.group.ends.items():
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
            self._source.group.pause([assignment.place for assignment in paused])

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
                self._source.group.resume([assignment.place])
            with self.work_queue.lock:
                stall = assignment.stalls.observe(tracker.first_open(), now_ms)
            if stall is not None:
                self._stalled(assignment, stall)
        is_due = now_s - self._committed_s >= self.config.commit_interval_ms / 1000
        if is_due and self.config.commit_mode is CommitMode.SYNCHRONOUS:
            self._committed_s = now_s
            self.committer.commit_now(self.config.commit_timeout_ms / 1000)

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
        self.config.tell("on_stall", topic, partition, stall.offset, held_s)
        record = None
        if self.config.gives_up_stalled:
            record = self.work_queue.find(assignment.partition, stall.offset)
        if record is not None:
            # As a dead letter it lets the offset move.
            reason = DeadLetterReason.MAX_LEASE
            error_text = f"held the committed offset back for {held_s:g} s"
            written = self.dead_letters.write(record, reason, error_text)
            self.dead_letters.hold(record, reason, written)

    # Membership, told by the source inside ``poll``.

    def assigned(self, positions: Sequence[Position]) -> None:
        config = self.config
        for position in positions:
            partition = self.work_queue.assign(position.place, position.tracker)
            self._assignments[position.place] = Assignment(
                partition,
                PartitionFlow(config.limits),
                StallDetector(stall_after_ms=config.stall_after_ms),
                position.offset,
                position.tracker.version if position.is_committed else -1,
                position.metadata,
            )
        places = [position.place for position in positions]
        _log.info("partitions were assigned", extra={"partitions": places})
        if any(not position.is_committed for position in positions):
            # A new group's start is committed before anything else happens to it.
            self.committer.request()
        config.tell("on_assigned", places)

    def revoked(self, partitions: Sequence[PartitionId]) -> None:
        """Wait for what is in flight of these (bounded), commit what is done, and forget them."""
        assignments = [
            self._assignments[place] for place in partitions if place in self._assignments
        ]
        going = [assignment.partition for assignment in assignments]
        self.work_queue.recall(going)
        deadline_s = monotonic() + self.config.revoke_timeout_ms / 1000
        while self.work_queue.has_in_flight(going) and monotonic() < deadline_s:
            sleep(0.001)
        self.dead_letters.tend_all()
        if assignments and not self.committer.commit_at_last(self.config.commit_timeout_ms / 1000):
            _log.warning("no answer to the commit of revoked partitions")
        self._tell_of_refusal()
        self._forget(partitions)
        _log.info("partitions were revoked", extra={"partitions": list(partitions)})
        self.config.tell("on_revoked", list(partitions), False)

    def lost(self, partitions: Sequence[PartitionId]) -> None:
        """Another member has these already: commit nothing of them."""
        if isinstance(self.committer, TransactionCommitter):
            self.committer.forget()
        self._forget(partitions)
        _log.warning("partitions were lost", extra={"partitions": list(partitions)})
        self.config.tell("on_revoked", list(partitions), True)

    def restarted(self, position: Position) -> None:
        """The log is another one: what is done of the old one says nothing of its records.

        What is in flight is of the old one, and counts nowhere any more.
        """
        places = [position.place]
        self._forget(places)
        self.config.tell("on_revoked", places, True)
        self.assigned([position])

    def _forget(self, partitions: Sequence[PartitionId]) -> None:
        for place in partitions:
            assignment = self._assignments.pop(place, None)
            if assignment is not None:
                self.work_queue.close(assignment.partition)
        self.dead_letters.forget()


@dataclass(frozen=True, slots=True)
class Position:
    """It says where reading begins.

    Attributes:
        offset: The first record to poll.
        tracker: What is done from there on.
        is_committed: Whether the group has committed it.
        metadata: What it has committed with it.
    """

    place: PartitionId
    offset: int
    tracker: OffsetTracker
    is_committed: bool
    metadata: str = ""


class Source:
    def __init__(self, config: ParallelConfig, member: Engine, stats: Stats) -> None:
        self._config = config
        self._member = member
        self._stats = stats
        self.group = GroupConsumer(
            config.service,
            self,
            config.topics,
            group_id=config.group_id,
            client_id=f"kafkamq-{config.group_id[:20]}-{uuid.uuid4().hex[:12]}",
            socket_timeout_ms=10_000,
            allow_auto_create_topics=False,
            # Markers and deleted records behind the last record count for the position.
            enable_partition_eof=True,
        )
        self.commits = CommitTurns(self.group)

    def subscribe(self) -> None:
        for topic in self._config.topics:
            if not topic.startswith("^"):
                self._require(topic)
        try:
            self.group.join()
        except BrokerError as error:
            raise ConfigError(f"topics is {self._config.topics!r}: {error}") from error

    def _require(self, topic: str) -> None:
        try:
            self.group.partition_count(topic)
        except BrokerError as error:
            if meaning(error) is not Meaning.NO_TOPIC:
                raise
            error_text = f"topic {topic} cannot be read: {error}; create it first"
            raise BrokerError(error_text, code=error.code) from error

    # Reading.

    def poll(self, limit: int, wait_s: float) -> list[tuple[PartitionId, Sequence[Record]]]:
        """Return records by partition, in order; returns as soon as there are any."""
        self.commits.serve()
        self._note_member()
        with self.commits.inside():
            batch = self.group.poll(limit, wait_s)
        groups = _by_partition(batch) if batch else []
        if self.group.outside:
            others = {place for place in list(self.group.outside) if self._is_another_log(place)}
            groups = [each for each in groups if each[0] not in others]
        return groups

    def _is_another_log(self, place: PartitionId) -> bool:
        """Read a partition on whose position is outside its log; True: the offsets are others'."""
        position = self.group.outside[place]
        try:
            low, high = self.group.bounds(place)
        except KafkaMQError as error:
            if not is_retriable(error):
                raise
            return False
        if low <= position <= high:
            start = position
        else:
            error_text = self._data_loss(place, position, low, high)
            if self._config.on_data_loss == "raise":
                raise DataLossError(
                    f"{error_text}; go on at the log's start with on_data_loss='skip', or set the"
                    f" offsets of group {self._config.group_id}",
                    code="OFFSET_OUT_OF_RANGE",
                )
            _log.warning("records were lost and are skipped", extra={"error": error_text})
            start = low
        self.group.place({place: start})
        is_another = position > high
        if is_another:
            self._member.restarted(Position(place, start, OffsetTracker(start), False))
            # The member knows of no pause any more.
            self.group.resume([place])
        return is_another

    def _data_loss(self, place: PartitionId, position: int, low: int, high: int) -> str:
        where = f"{place[0]}[{place[1]}] of group {self._config.group_id!r}"
        if position < low:
            return (
                f"{low - position} records of {where} are gone: they were deleted before they were"
                f" read; the position is {position}, the log starts at {low}"
            )
        return (
            f"the position {position} of {where} is beyond the log's end {high}: the topic was"
            " truncated or recreated"
        )

    def rewind(self, begun: Mapping[PartitionId, int]) -> list[Position]:
        """Read these again from what is committed; where nothing is, from where they began."""
        positions = self._find(list(begun), begun)
        self.group.place({each.place: each.offset for each in positions})
        self.group.resume(begun)
        return positions

    def _find(
        self, partitions: Sequence[PartitionId], begun: Mapping[PartitionId, int] | None = None
    ) -> list[Position]:
        """Ask the group's coordinator, and the log's ends where they matter.

        Raises:
            BrokerError: No answer, or a refusal.
            DataLossError: Nothing is committed and ``start`` is "none".
            WireError: Foreign metadata, and the policy is to raise.
        """
        deadline_s = monotonic() + _PATIENCE_S
        while True:
            try:
                found = self.group.committed_with_metadata(partitions, timeout_s=_REQUEST_S)
                return [self._position(each, begun or {}) for each in found]
            except KafkaMQError as error:  # noqa: PERF203 - the loop is the repetition
                if not is_retriable(error) or monotonic() > deadline_s:
                    raise
                _log.info("where to read is not known yet", extra={"error": str(error)})
                sleep(0.1)

    def _position(self, found: OffsetCommit, begun: Mapping[PartitionId, int]) -> Position:
        place, offset = (found.topic, found.partition), found.offset
        if offset < 0:
            start = begun[place] if place in begun else self._first(place)
            return Position(place, start, OffsetTracker(start), False)
        if not found.metadata:
            return Position(place, offset, OffsetTracker(offset), True)
        _, end = self.group.bounds(place, timeout_s=_REQUEST_S)
        try:
            found_map = offset_maps.decode(offset, found.metadata, log_end=end)
        except WireError as error:
            if self._config.on_foreign_metadata == "raise":
                raise WireError(
                    f"the commit metadata of group {self._config.group_id} is no offset map"
                    f" ({error.reason}); on_foreign_metadata='ignore' starts at the committed"
                    " offset",
                    topic=found.topic,
                    partition=found.partition,
                    offset=offset,
                ) from error
            self._stats.maps_ignored += 1
            _log.warning(
                "commit metadata that is no offset map is ignored; what was done beyond the"
                " committed offset is done again",
                extra={
                    "topic": found.topic,
                    "partition": found.partition,
                    "error": error.reason,
                    "chars": len(found.metadata),
                },
            )
            return Position(place, offset, OffsetTracker(offset), True, found.metadata)
        tracker = OffsetTracker(
            offset, highest_seen=found_map.highest_seen, incompletes=found_map.incompletes
        )
        return Position(place, offset, tracker, True, found.metadata)

    def _first(self, place: PartitionId) -> int:
        """Return where a group begins that has committed nothing."""
        if self._config.start == "none":
            raise DataLossError(
                f"group {self._config.group_id} has no committed offset for"
                f" {place[0]}[{place[1]}], and start is 'none': commit one, or choose"
                " start='earliest' or 'latest'",
                code="NO_OFFSET",
            )
        low, high = self.group.bounds(place, timeout_s=_REQUEST_S)
        return low if self._config.start == "earliest" else high

    def _note_member(self) -> None:
        """Note the member before each poll, and in each callback of a rebalance.

        A cooperative one revokes in the generation that it has begun, and goes on with what stays.
        Kafka would refuse transactions of the generation before, the last of what goes among them.
        """
        if self._config.is_transactional:
            self.commits.note_member()

    # Membership, told by the group consumer inside its calls.

    def assigned(self, places: Sequence[PartitionId]) -> Mapping[PartitionId, int]:
        self._note_member()
        positions = self._find(places)
        self._member.assigned(positions)
        return {each.place: each.offset for each in positions}

    def revoked(self, places: Sequence[PartitionId], *, is_lost: bool) -> None:
        if is_lost:
            self._member.lost(places)
        else:
            self._note_member()
            self._member.revoked(places)
            self.commits.tend()

    def close(self) -> None:
        with self.commits.inside():
            self.group.close()


def _by_partition(batch: Sequence[Record]) -> list[tuple[PartitionId, Sequence[Record]]]:
    first, last = batch[0], batch[-1]
    partitions = list(map(Record.partition, batch))
    topics = list(map(Record.topic, batch))
    if partitions.count(first.partition()) == len(batch) == topics.count(last.topic()):
        return [((first.topic() or "", first.partition() or 0), batch)]
    groups: dict[PartitionId, list[Record]] = {}
    index = 0
    for place, run in groupby(zip(topics, partitions, strict=True)):
        end = index + sum(1 for _ in run)
        topic, partition = place
        groups.setdefault((topic or "", partition or 0), []).extend(batch[index:end])
        index = end
    return list(groups.items())
