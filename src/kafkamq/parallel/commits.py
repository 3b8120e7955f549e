"""Commits what is done, and the maps of what is done beyond it; in a thread of its own.

A commit may wait behind the member's own request to join, for as long as the slowest member takes;
nothing else waits for it then. What was not confirmed is committed again with the next one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic, sleep

from kafkamq.errors import DeadlineExceededError, KafkaMQError, LeaseLostError
from kafkamq.parallel.config import ParallelConfig
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.rules.flow import FlowLimits, MapVerdict, PartitionFlow, StallDetector
from kafkamq.parallel.rules.offsets import Progress
from kafkamq.parallel.rules.shards import PartitionPhase, PartitionState
from kafkamq.parallel.wire import offsets as offset_maps
from kafkamq.parallel.work_queue import ParallelWorkQueue, Stats
from kafkamq.runtime.work_queue import enter
from kafkamq.transport.commits import CommitTurns, OffsetCommit
from kafkamq.transport.errors import (
    KafkaException,
    Meaning,
    broker_error,
    is_retriable,
    kafka_error,
    meaning,
)
from kafkamq.types import PartitionId

_TURN_S = 0.02
_SOON_S = 0.05
# The time without maps after a broker has refused one, doubled with each refusal.
_NO_MAPS_S = 60.0
_MAX_NO_MAPS_S = 3600.0
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Assignment:
    """One assignment of a partition, as its owner and the committer see it."""

    partition: PartitionState[ParallelRecord]
    flow: PartitionFlow
    stalls: StallDetector
    committed_offset: int
    # The version of the tracker's progress; -1: nothing is committed.
    committed_version: int
    committed_metadata: str = ""
    # As it was planned last.
    metadata: str = ""
    is_paused: bool = False
    is_cut: bool = False

    @property
    def place(self) -> PartitionId:
        place = self.partition.place
        assert isinstance(place, tuple)
        return place


@dataclass(slots=True)
class Plan:
    """What changed since the last commit, and those commits by which Kafka would know more."""

    parts: list[tuple[Assignment, Progress, MapVerdict]] = field(default_factory=list)
    commits: list[OffsetCommit] = field(default_factory=list)

    def known(self) -> list[OffsetCommit]:
        """Return commits of its parts that Kafka has already, where there is no other one."""
        return [
            OffsetCommit(*assignment.place, progress.committable_offset, assignment.metadata)
            for assignment, progress, _ in self.parts
        ]

    def is_current(self) -> bool:
        """Return whether all of its assignments last, with the logs that they are of."""
        return all(
            assignment.partition.phase is not PartitionPhase.CLOSED
            for assignment, _, _ in self.parts
        )


def plan_commits(
    assignments: Iterable[Assignment],
    work_queue: ParallelWorkQueue,
    stats: Stats,
    limits: FlowLimits,
    *,
    with_maps: bool,
) -> Plan:
    with work_queue.lock:
        wanted = [
            (assignment, assignment.partition.tracker.progress())
            for assignment in assignments
            if assignment.partition.phase is not PartitionPhase.CLOSED
            and assignment.partition.tracker.version != assignment.committed_version
        ]
    plan = Plan()
    for assignment, progress in wanted:
        metadata = ""
        if progress.needs_map and with_maps:
            metadata = offset_maps.encode(
                progress.committable_offset, progress.highest_succeeded, progress.incompletes
            )
        verdict = assignment.flow.judge_map(len(metadata), progress)
        if not verdict.is_written:
            stats.maps_cut += 1
            whole = len(metadata)
            metadata, end = _cut(progress, whole, limits)
            if not assignment.is_cut:
                # Commits of a map that is cut follow each other quickly: only the first is logged.
                _log.warning(
                    "an offset map is too long and is cut: after a restart what is done beyond its"
                    " end is done again",
                    extra={"partition": assignment.place, "chars": whole, "end": end},
                )
        assignment.is_cut = not verdict.is_written
        assignment.metadata = metadata
        plan.parts.append((assignment, progress, verdict))
        offset = progress.committable_offset
        known = assignment.committed_offset, assignment.committed_metadata
        if assignment.committed_version < 0 or known != (offset, metadata):
            plan.commits.append(OffsetCommit(*assignment.place, offset, metadata))
    with work_queue.lock:
        for assignment, _, verdict in plan.parts:
            if assignment.partition.phase is not PartitionPhase.CLOSED:
                work_queue.scheduler.set_ceiling(assignment.partition, verdict.ceiling)
    return plan


def _cut(progress: Progress, chars: int, limits: FlowLimits) -> tuple[str, int]:
    """Return the map of as much of the progress as may be committed, and the last offset in it."""
    base, end = progress.committable_offset, progress.highest_succeeded
    while end >= base:
        # Its length goes by its range, more or less: a little less than that, until it fits.
        end = (
            base - 1 + min(end - base, int((end - base + 1) * limits.max_map_chars / chars * 0.95))
        )
        metadata = ""
        if end >= base:
            metadata = offset_maps.encode(base, end, progress.incompletes)
        chars = len(metadata)
        if chars <= limits.max_map_chars:
            return metadata, end
    return "", base - 1


@dataclass(eq=False, repr=False)
class Committer:
    """Commits every ``commit_interval``, and when told to; not for transactions."""

    config: ParallelConfig
    work_queue: ParallelWorkQueue
    commits: CommitTurns
    assignments: Callable[[], list[Assignment]]
    stats: Stats
    fail: Callable[[BaseException], None]

    def __post_init__(self) -> None:
        self._no_maps_s = _NO_MAPS_S
        self._no_maps_until_s = 0.0
        # Whether the last commit failed and the same may succeed soon; and why, and whether that
        # passes.
        self._may_succeed = False
        self._refusal: tuple[KafkaMQError, bool] | None = None
        self._wanted = threading.Condition()
        self._asked = 0
        self._answered = 0
        self._is_ended = False
        self._thread = threading.Thread(target=self._run, name="kafkamq-commits", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def commit_now(self, timeout_s: float) -> bool:
        """Commit what is done by now, and wait; False: no answer in time, which may still come."""
        return self._commit_by(monotonic() + timeout_s)

    @property
    def refusal(self) -> KafkaMQError | None:
        return None if self._refusal is None else self._refusal[0]

    def commit_at_last(self, timeout_s: float) -> bool:
        """Commit, and try again while that may succeed: there is no later commit."""
        deadline_s = monotonic() + timeout_s
        while self._commit_by(deadline_s):
            if not self._may_succeed:
                return True
            if monotonic() >= deadline_s:
                return False
            sleep(_SOON_S)
        return False

    def see_committed(self, timeout_s: float) -> None:
        """Return when Kafka has all that is done by now; commits are made again until then."""
        deadline_s = monotonic() + timeout_s
        with self.work_queue.lock:
            wanted = [
                (assignment, assignment.partition.tracker.version)
                for assignment in self.assignments()
            ]
        while True:
            is_answered = self._commit_by(deadline_s)
            with self.work_queue.lock:
                missing = [
                    assignment
                    for assignment, version in wanted
                    if assignment.committed_version < version
                ]
                gone = [
                    assignment.place
                    for assignment in missing
                    if assignment.partition.phase is PartitionPhase.CLOSED
                ]
            if not missing:
                return
            error, is_retried = self._refusal or (None, True)
            if error is not None and not is_retried:
                raise error
            if gone:
                raise LeaseLostError(f"{gone} went to another member before the commit")
            if not is_answered or monotonic() >= deadline_s:
                error_text = "no answer" if error is None else str(error)
                raise DeadlineExceededError(
                    f"offsets of group {self.config.group_id} are not committed after"
                    f" {timeout_s:g} s: {error_text}"
                )
            sleep(_SOON_S)

    def _commit_by(self, deadline_s: float) -> bool:
        with self._wanted:
            self._asked += 1
            mine = self._asked
            self._wanted.notify_all()
        while True:
            with self._wanted:
                left_s = deadline_s - monotonic()
                if self._answered < mine and left_s > 0 and self._thread.is_alive():
                    self._wanted.wait(min(left_s, _TURN_S))
                if self._answered >= mine:
                    return True
                if left_s <= 0 or not self._thread.is_alive():
                    return False
            self.commits.tend()

    def request(self) -> None:
        with self._wanted:
            self._asked += 1
            self._wanted.notify_all()

    def end(self, timeout_s: float) -> bool:
        with self._wanted:
            self._is_ended = True
            self._wanted.notify_all()
        deadline_s = monotonic() + timeout_s
        while self._thread.is_alive() and (left_s := deadline_s - monotonic()) > 0:
            self._thread.join(min(left_s, _TURN_S))
            self.commits.tend()
        return not self._thread.is_alive()

    def _run(self) -> None:
        enter(self.config)
        interval_s = self.config.commit_interval_ms / 1000
        wait_s = interval_s
        while True:
            with self._wanted:
                if self._asked == self._answered and not self._is_ended:
                    self._wanted.wait(wait_s)
                if self._is_ended:
                    return
                asked = self._asked
            try:
                is_crowded = self._commit()
            except Exception as error:  # noqa: BLE001 - the owner raises it
                self.fail(error)
                is_crowded = False
            wait_s = min(_SOON_S, interval_s) if is_crowded else interval_s
            with self._wanted:
                self._answered = asked
                self._wanted.notify_all()

    def _commit(self) -> bool:
        self._may_succeed = False
        plan = self._plan()
        if plan.commits:
            try:
                self.commits.commit(plan.commits, plan.is_current)
            except KafkaException as error:
                self._failed(error)
                return True
        self.confirm(plan)
        return any(verdict.ceiling is not None for _, _, verdict in plan.parts)

    def _plan(self) -> Plan:
        return plan_commits(
            self.assignments(),
            self.work_queue,
            self.stats,
            self.config.limits,
            with_maps=monotonic() >= self._no_maps_until_s,
        )

    def _failed(self, error: KafkaException) -> None:
        self.stats.commit_failures += 1
        what = meaning(error)
        if what is Meaning.METADATA_TOO_LARGE:
            # For a while: the next coordinator, or this one with another setting, may take them.
            self._no_maps_until_s = monotonic() + self._no_maps_s
            _log.error(
                "the broker takes shorter commit metadata than offset maps need: commits go"
                " without maps for a while; raise offset.metadata.max.bytes to 4096",
                extra={"group": self.config.group_id, "again_s": self._no_maps_s},
            )
            self._no_maps_s = min(2 * self._no_maps_s, _MAX_NO_MAPS_S)
            self._may_succeed = True
            return
        ours = broker_error(error, f"committing offsets of group {self.config.group_id}")
        self._may_succeed = is_retriable(ours) and what is not Meaning.NO_MEMBER
        self._refusal = (ours, self._may_succeed)
        if not is_retriable(ours):
            raise ours from error
        _log.info("a commit failed and is made again", extra={"code": kafka_error(error).name()})

    def confirm(self, plan: Plan) -> None:
        """Note that Kafka has all of it, and tell the user of what is new."""
        with self.work_queue.lock:
            for assignment, progress, _ in plan.parts:
                assignment.committed_version = progress.version
                assignment.committed_offset = progress.committable_offset
                assignment.committed_metadata = assignment.metadata
        self._refusal = None
        if not plan.commits:
            return
        if any(each.metadata for each in plan.commits):
            self._no_maps_s = _NO_MAPS_S
        self.stats.commits += 1
        self.stats.last_commit_s = monotonic()
        committed = {(each.topic, each.partition): each.offset for each in plan.commits}
        self.config.tell("on_committed", committed)
