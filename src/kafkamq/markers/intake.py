"""The intake brings messages to the application (R5), in a thread that owns the consumer.

Nobody else calls the Kafka consumer. Nothing here waits for an answer: between two polls there is
at most a second, whatever the application does and whatever a broker answers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from kafkamq.errors import KafkaMQError
from kafkamq.markers.ack_writer import AckWriter
from kafkamq.markers.message import MarkersMessage
from kafkamq.markers.reader import Helper, MessageReader
from kafkamq.markers.rules.pipeline import Covered, Pipeline, RunState
from kafkamq.markers.starts import MessageRun, Starter, Step, Transaction, Transactor
from kafkamq.markers.state import ConsumerState
from kafkamq.metrics.catalog import RECEIVED, RECEIVED_AGAIN
from kafkamq.metrics.health import health
from kafkamq.queue.names import group_of_workers
from kafkamq.queue.namespace import IDENTITY_AGE_S
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.commits import GroupOffsets, PendingCommit
from kafkamq.transport.errors import broker_error, is_retriable

MAX_GATHERED = 1000
GATHER_MS = 50
# A hand-out of these messages that is used up within this lets the next ones be STARTed while the
# application works, on queues with this redelivery timeout at least.
AHEAD_COUNT = 500
AHEAD_MS = 100
MIN_TIMEOUT_MS = 5000
PATIENCE_MS = 1000
COMMIT_INTERVAL_MS = 1000
COMMIT_TIMEOUT_S = 10.0
MAX_AGE_S = 15.0
# Records of one poll behind which there are more: these are read first.
MANY = 100
# One wait for reports of STARTs, or for the answer to a commit, which comes late anyway.
_SENT_S = 0.002
_OUTAGE_S = 0.02
_COMMIT_S = 0.0003
_AWAITED_S = 0.0001
# The longest wait in the client, which cannot be woken.
_BLOCK_S = 0.25
_IDLE_S = 0.1
_GATE_S = 0.02
_MOST_FAILURES = 10
RETRY_S = 0.1
MAX_RETRY_S = 1.0
_FULL_MS = 500
# What is ready is released before this share of its longest lease is left.
_BEFORE = 8
# What was asked for is brought so much longer than somebody waits.
LINGER_S = 0.1
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Demand:
    """What a ``receive`` that waits has asked for."""

    count: int
    start: int
    until_s: float


def usual_s(before_s: float, took_s: float) -> float:
    """Return how long a commit takes, from what it was thought to take and what the last one took.

    What took less is believed at once, as most of it may have been the wait for the look.
    """
    took_s = min(took_s, _OUTAGE_S)
    return min(took_s, before_s + (took_s - before_s) / 4)


class Intake:
    """One consumer's; the application's threads take what is ``ready``, with the state's lock.

    Attributes:
        ready: STARTed and committed, not handed out.
        ready_count: So many were there when the last ones came, at ``ready_ms``.
        demand: What is asked for; None: nothing.
        asked_ms: When somebody asked last; monotonic.
        under_way_count: Messages that are STARTed and not committed, as it was a moment ago.
        is_fast: Whether what was ready was many, and was used up at once.
        failures: What went wrong, each for one ``receive``.
    """

    def __init__(
        self, state: ConsumerState, ack_writer: AckWriter, transactor: Transactor | None
    ) -> None:
        self._state = state
        self._queue = queue = state.queue
        self._transactor = transactor
        self.pipeline: Pipeline[MarkersMessage] = Pipeline()
        self._starter = Starter(state, self.pipeline, ack_writer)
        self._ack_writer = ack_writer
        config, group = state.namespace.config, group_of_workers(state.namespace.config, queue)
        self._helper = Helper(
            f"kafkamq-helper-{queue.queue_id}",
            lambda: GroupOffsets(config, group),
            state.intake.ring,
        )
        self.ready: deque[MarkersMessage] = deque()
        self.ready_count = self.ready_ms = 0
        self.demand: Demand | None = None
        self.asked_ms = monotonic_ms()
        self.is_fast = False
        self.failures: deque[KafkaMQError] = deque()
        self._last_start = self._last_count = 0
        self._commit: PendingCommit | None = None
        self._starts: dict[int, int] = {}
        self._committed_ms = monotonic_ms()
        self._began_s = 0.0
        self._usual_s = 0.0
        self._step: Step | None = None
        self._transaction: Transaction | None = None
        self._gather_ms = 0
        self._late: set[int] = set()
        self.under_way_count = 0
        self._is_ahead = False
        self._block_s = 0.0
        self._given_up: list[PendingCommit] = []
        self._retry_s = self._pause_s = 0.0
        self._has_more = False
        self._polled_ms = monotonic_ms()
        self._is_ending = False
        self._no_more = threading.Event()
        self._is_drained = threading.Event()
        self._drain_s = 0.0
        self.reader = MessageReader(state, self.pipeline, self.revoked, ack_writer, self._helper)
        self.reader.is_in_transaction = lambda: self._transaction is not None
        self._loop = health.add(f"intake of {queue.queue_id}", max_age_s=MAX_AGE_S)
        self._thread = threading.Thread(
            target=self._run, name=f"kafkamq-intake-{queue.queue_id}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        steps = (
            self._wait,
            self._poll,
            self._helper.see_answers,
            self._see_topics,
            self._see_reports,
            self._see_transaction,
            self._see_commit,
            self._begin_commit,
            self._start,
            self._see_late,
            self._stay_or_leave,
            self._see_drained,
        )
        while not self._is_ending:
            self._loop.beat()
            left, has_failed = iter(steps), False
            # A step that fails keeps no other one from its turn.
            while True:
                try:
                    for step in left:
                        step()
                    break
                except KafkaMQError as error:
                    self._failed(error)
                except Exception as error:  # noqa: BLE001 - a dead intake would stop the consumer
                    _log.exception("the intake of a consumer failed and goes on")
                    self._failed(KafkaMQError(f"receiving failed: {error!r}"))
                has_failed = True
            if has_failed:
                self._state.intake.wait(_IDLE_S)
        self.reader.close()
        self._helper.end()

    def _failed(self, error: KafkaMQError) -> None:
        """The next ``receive`` raises it."""
        if any(str(each) == str(error) for each in list(self.failures)):
            return
        if len(self.failures) < _MOST_FAILURES:
            self.failures.append(error)
        else:
            _log.warning("receiving failed", extra={"error": str(error)})
        self._state.application.ring()

    @property
    def poll_age_s(self) -> float:
        return (monotonic_ms() - self._polled_ms) / 1000

    # Waiting and polling.

    def _wait(self) -> None:
        """Wait for what is under way, if anything is, or say how long the client may block."""
        self._block_s = 0.0
        bell = self._state.intake
        if self._has_more:
            # What is next is read while brokers write what was sent.
            return
        if self._starter.is_waiting:
            waited_s = (monotonic_ms() - self._starter.oldest_ms) / 1000
            self._starter.wait(max(_SENT_S, min(_OUTAGE_S, waited_s / 4)))
            return
        if self._late:
            self._starter.wait(0.0)
        if self._commit is not None:
            waited_s = time.monotonic() - self._began_s
            is_awaited = self.demand is not None and not self.ready
            least_s = _AWAITED_S if is_awaited else _COMMIT_S
            # Most commits take as long as those before, of which ``_usual_s`` tells: each look
            # earlier than that costs a turn.
            early_s = self._usual_s * 3 / 4 - waited_s
            bell.wait(max(least_s, min(_OUTAGE_S, max(waited_s / 4, early_s))))
            return
        wanted = self._wanted()
        if not wanted:
            bell.wait(_IDLE_S)
        elif (
            self.pipeline.startable_count
            or self._transaction
            or self._late
            or not self._poll_room(wanted)
            or self._room() <= 0
        ):
            bell.wait(_GATE_S)
        else:
            self._block_s = _BLOCK_S

    def _poll_room(self, wanted: int) -> int:
        """Return how many own messages a poll may bring; what may not be STARTed yet is bounded."""
        pipeline = self.pipeline
        return max(0, min(wanted - pipeline.startable_count, 2 * wanted + MANY - len(pipeline)))

    def _poll(self) -> None:
        self._has_more = False
        wanted = self._wanted()
        room = self._poll_room(wanted) if wanted else 0
        now_ms = monotonic_ms()
        # A poll takes a record; one that brings the answer to a commit must not wait.
        if not room and self._commit is None and now_ms - self._polled_ms < _FULL_MS:
            return
        self._polled_ms = now_ms
        count = self.reader.poll(room, self._block_s)
        self._has_more = count >= MANY and self.pipeline.startable_count < wanted

    def _wanted(self) -> int:
        if self._no_more.is_set():
            return 0
        demand = self.demand
        if demand is not None and time.monotonic() < demand.until_s:
            self._last_start, self._last_count = demand.start, demand.count
            return demand.start
        return self._last_start if self.is_fast else 0

    def _room(self) -> int:
        """Return how many more may be held; what waits for an answer does not keep others out."""
        most = self._queue.max_in_flight
        late = sum(
            len(run.offsets) for run in self.pipeline.under_way() if run.partition in self._late
        )
        return most - self._state.leases.open_count + min(late, most)

    # STARTs.

    def _start(self) -> None:
        """START what is asked for, or what soon will be (R5)."""
        if self._transaction is not None or self._no_more.is_set() or self._is_early:
            return
        count = self._count()
        count = min(count, self._room()) if count > 0 else 0
        if count <= 0 or (self._is_ahead and count < min(self._last_start, AHEAD_COUNT)):
            return
        if self.pipeline.is_stale(monotonic_ms()):
            # It was polled 20 s ago (R5): it is fetched again.
            self.reader.seek(self.pipeline.drop_polled())
            return
        if self._transactor is not None and not self._has_gathered(count):
            return
        try:
            step = self._starter.plan(count)
        except BaseException:
            # Nothing that was taken may be forgotten.
            self._give_up(list(self.pipeline.under_way()))
            raise
        if step is None:
            # Others go first (R6); an END that is under way may let it go on.
            self._state.keeper.ring()
            return
        if self._transactor is not None:
            self._begin_transaction(step)
        else:
            self._starter.write(step)
            self._see_reports()

    def _count(self) -> int:
        pipeline = self.pipeline
        startable = pipeline.startable_count
        under_way = list(pipeline.under_way())
        self.under_way_count = sum(len(run.offsets) for run in under_way)
        wanted = self._wanted() if startable else 0
        if not wanted:
            return 0
        late = self._late
        sent = [run for run in under_way if run.partition not in late]
        if self.is_fast:
            wanted *= 2
        wanted -= sum(len(run.offsets) for run in sent) + len(self.ready)
        self._is_ahead = bool(sent or self.ready)
        # What is polled in small pieces is STARTed in larger ones.
        if self._has_more or (sent and startable < min(wanted, self._last_start)):
            return 0
        count = min(wanted, startable)
        return count if count < self._last_count else count - count % self._last_count

    def _see_reports(self) -> None:
        """SENT runs of which all is reported are IN_LOG; what failed is read again."""
        if not self.pipeline.is_open:
            self._starter.see_reports()
            return
        failed = self._starter.see_reports()
        if failed:
            # What fails at once would be read and STARTed again without a pause.
            self._back_off()
        for start in failed:
            self._give_up(start.runs)
            assert start.error is not None, "it failed"
            topic = self._state.writer.topic
            self._failed(broker_error(start.error, f"writing STARTs to {topic}"))
        for run in self.pipeline.under_way():
            if run.state is RunState.SENT and not run.unreported and self._step is None:
                self.pipeline.in_log(run)

    def _see_late(self) -> None:
        """What waits for a marker partition that does not answer holds back its own alone."""
        late = self._starter.late_partitions(PATIENCE_MS)
        if late == self._late:
            return
        for number in late - self._late:
            self.pipeline.wait(number, "late")
        for number in self._late - late:
            self.pipeline.go_on(number, "late")
        if late - self._late:
            _log.warning(
                "STARTs are not confirmed, others go on", extra={"partitions": sorted(late)}
            )
        self._late = late

    def _give_up(self, runs: Iterable[MessageRun]) -> None:
        """Read these again (R5), with all that is behind them in their partitions."""
        gone: list[MessageRun] = []
        positions: dict[int, int] = {}
        for run in runs:
            more, position = self.pipeline.give_up(run)
            if more:
                gone += more
                positions[run.partition] = position
        self._starter.give_up(gone)
        self.reader.seek(positions)

    # Commits.

    def _begin_commit(self) -> None:
        """Commit what is IN_LOG; or, now and then, what is behind other queues' messages."""
        if self._commit is not None or self._transaction is not None or self._is_early:
            return
        pipeline, starts = self.pipeline, self.reader.starts
        if not (pipeline.has_prefix or starts or pipeline.is_set_back or self._may_skip()):
            return
        covered = pipeline.committable()
        if not covered.offsets and not starts:
            if covered.runs:
                # A former commit has them, though it had no answer.
                pipeline.committing(covered)
                self._committed()
            else:
                pipeline.nothing_to_commit()
            return
        self._send_commit(covered, starts)

    def _back_off(self) -> None:
        self._pause_s = min(MAX_RETRY_S, 2 * self._pause_s or RETRY_S)
        self._retry_s = time.monotonic() + self._pause_s

    @property
    def _is_early(self) -> bool:
        return time.monotonic() < self._retry_s

    def _send_commit(self, covered: Covered[MarkersMessage], starts: dict[int, int]) -> None:
        self._starts = dict(starts)
        self.pipeline.committing(covered)
        self._began_s = time.monotonic()
        self._commit = self.reader.begin_commit(covered.offsets | self._starts)

    def _may_skip(self) -> bool:
        skipped = self.pipeline.uncommitted_count
        if not skipped:
            return False
        are_many = skipped >= self._queue.max_messages_per_commit and not len(self.pipeline)
        return are_many or monotonic_ms() - self._committed_ms >= COMMIT_INTERVAL_MS

    def _see_commit(self) -> None:
        # It may be made late, behind a later one: that goes again.
        for given_up in self._given_up:
            if given_up.is_answered:
                self.pipeline.commit_again([each.partition for each in given_up.offsets])
        self._given_up = [each for each in self._given_up if not each.is_answered]
        commit = self._commit
        if commit is None:
            return
        if commit.is_answered and commit.error is None:
            self._usual_s = usual_s(self._usual_s, time.monotonic() - self._began_s)
            self._commit, self._pause_s = None, 0.0
            self._committed()
        elif commit.is_answered or time.monotonic() - self._began_s >= COMMIT_TIMEOUT_S:
            self._commit_failed(commit)

    def _committed(self) -> None:
        """What has set out is committed, by itself or in a transaction: the runs may go on."""
        covered, starts, self._starts = self.pipeline.covered, self._starts, {}
        runs = self.pipeline.committed()
        self._committed_ms = monotonic_ms()
        self.reader.note(covered.offsets | starts)
        for number, start in starts.items():
            self.reader.started_at(number, start)
        self._make_ready([run for run in runs if not run.is_adrift or self._is_still_ours(run)])

    def _commit_failed(self, commit: PendingCommit) -> None:
        starts, self._starts = self._starts, {}
        self._commit = None
        if not commit.is_answered:
            self._given_up.append(commit)
        # Skipped ones are not committed again at once.
        self._committed_ms = monotonic_ms()
        self._back_off()
        gone, positions = self.pipeline.commit_failed()
        self._starter.give_up(gone)
        self.reader.seek(positions)
        reason = "no answer" if commit.error is None else commit.error.str()
        _log.info(
            "a commit failed and is made again",
            extra={"queue": self._queue.queue_id, "error": reason},
        )
        if commit.error is not None and (gone or starts):
            topic = self._state.namespace.config.message_topic
            error = broker_error(commit.error, f"committing offsets of {topic}")
            if not is_retriable(error):
                raise error

    def _is_still_ours(self, run: MessageRun) -> bool:
        """Say whether a run may be handed out whose partition went while it was being committed."""
        is_again = self.pipeline.is_polled_again(run)
        if is_again:
            # Its messages are others by now, which have leases of their own.
            self._starter.give_up([run])
            return False
        if is_again is None:
            # It may be back, and not read yet: from where the group is now.
            self.reader.ask_again([run.partition])
        return True

    def _make_ready(self, runs: Sequence[MessageRun]) -> None:
        if not runs:
            return
        held = self._starter.finish(runs)
        if held:
            self.reader.positions.started(held[-1][0].log_begin_ms)
        with self._state.lock:
            self.ready.extend(chain.from_iterable(messages for _, messages in held))
        are_first = all(run.is_plain for run in runs)
        for lease, messages in held:
            RECEIVED.add(len(messages), self._queue.queue_id, lease.partition)
            again = 0 if are_first else sum(message._count > 1 for message in messages)
            if again:
                RECEIVED_AGAIN.add(again, self._queue.queue_id, lease.partition)
        self.ready_count, self.ready_ms = len(self.ready), monotonic_ms()
        self._state.application.ring()

    # Exactly once.

    def _has_gathered(self, wanted: int) -> bool:
        """Return whether a transaction may begin: it is full, or has waited long enough."""
        now_ms = monotonic_ms()
        self._gather_ms = self._gather_ms or now_ms
        count = self.pipeline.startable_count
        has_waited = now_ms - self._gather_ms >= GATHER_MS
        # An older position than the transaction's may be on its way.
        if self._commit is not None or (count < min(wanted, MAX_GATHERED) and not has_waited):
            return False
        self._gather_ms = 0
        return True

    def _begin_transaction(self, step: Step) -> None:
        """The same transaction has the offsets behind these STARTs."""
        assert self._transactor is not None, "it is made for exactly_once"
        for run in step.runs:
            self.pipeline.in_log(run)
        covered = self.pipeline.committable()
        self.pipeline.committing(covered)
        self._step = step
        self._transaction = self._transactor.begin(
            step.records, dict(covered.offsets), self.reader.group.membership()
        )

    def _see_transaction(self) -> None:
        transaction, step = self._transaction, self._step
        if transaction is None or not transaction.is_over or step is None:
            return
        self._transaction = self._step = None
        if transaction.is_done:
            self._starter.transacted(step)
            self._committed()
            return
        gone, _ = self.pipeline.commit_failed()
        self._starter.give_up(gone, is_undone=True)
        partitions = {run.partition for run in gone}
        self.pipeline.revoked(partitions)
        self.reader.ask_again(partitions)
        if transaction.error is not None:
            raise transaction.error

    # The group.

    def revoked(self, partitions: Sequence[int], is_lost: bool) -> None:
        """Let these partitions go, from within ``poll``; with ``is_lost`` they are gone already.

        What is IN_LOG is committed on the way out; the answer decides. The rest is another's.
        """
        self._see_reports()
        if not is_lost and self._commit is None and self._transactor is None:
            covered = self.pipeline.committable()
            covered.runs = [run for run in covered.runs if run.partition in partitions]
            covered.offsets = {n: at for n, at in covered.offsets.items() if n in partitions}
            if covered.offsets:
                self._send_commit(covered, {})
        self._starter.give_up(self.pipeline.revoked(partitions))
        self._late -= set(partitions)

    def _see_topics(self) -> None:
        """Partitions or settings have changed, or the messages are in another topic (R13)."""
        state, namespace = self._state, self._state.namespace
        former, facts = state.facts, namespace.facts()
        if facts is former:
            return
        state.facts = facts
        if facts.are_of_another_topic(former):
            self._starter.give_up(self.pipeline.revoked(self.pipeline.partitions()))
            self.reader.reread_topic(namespace.certain_until_s + 2 * IDENTITY_AGE_S)

    def _stay_or_leave(self) -> None:
        """A process that hangs must not keep unread messages from others (R5)."""
        now_ms = monotonic_ms()
        if self.demand is not None and time.monotonic() < self.demand.until_s:
            self.asked_ms = now_ms
            if self.reader.is_away:
                self.reader.group.join()
        idle_ms = now_ms - self.asked_ms
        is_busy = self.pipeline.is_open or self._transaction is not None
        if self.ready and not self._queue.is_at_most_once:
            self._release_old(now_ms)
        if idle_ms < self.reader.max_idle_ms or self.reader.is_away or is_busy:
            return
        _log.warning(
            "nothing was received for max.poll.interval.ms: the consumer leaves its group, and "
            "joins it again with the next receive",
            extra={
                "queue": self._queue.queue_id,
                "idle_s": idle_ms // 1000,
                "held": self._state.leases.open_count,
            },
        )
        self.release_ready()
        self.reader.group.leave()

    def _release_old(self, now_ms: int) -> None:
        """Nobody takes them, and no KEEPALIVE holds them longer: not seen, and not counted (R8)."""
        longest_ms = self._queue.max_lease_ms - self._queue.max_lease_ms // _BEFORE
        old: list[MarkersMessage] = []
        with self._state.lock:
            while self.ready and now_ms >= self.ready[0]._lease.begin_ms + longest_ms:
                old.append(self.ready.popleft())
        if old:
            self._ack_writer.release(old)

    # Ending.

    def release_ready(self) -> None:
        """Release what was not handed out, also what is put back meanwhile (R8)."""
        while self.ready:
            with self._state.lock:
                released = list(self.ready)
                self.ready.clear()
            self._ack_writer.release(released)

    def drain(self, timeout_s: float) -> None:
        """START nothing more, and see through what is under way; what is not in time runs out."""
        self._drain_s = time.monotonic() + timeout_s
        self._no_more.set()
        self._state.intake.ring()
        if self._thread.is_alive():
            self._is_drained.wait(timeout_s + 1.0)

    def _see_drained(self) -> None:
        if not self._no_more.is_set() or self._is_drained.is_set():
            return
        pipeline = self.pipeline
        if self._given_up and self._commit is None:
            # Perhaps the position was set back: it is committed once more, and that is the last.
            offsets = [each.partition for commit in self._given_up for each in commit.offsets]
            pipeline.commit_again(offsets)
            self._given_up = []
        is_open = pipeline.is_open or pipeline.is_set_back or self._transaction is not None
        if is_open and time.monotonic() < self._drain_s:
            return
        self._starter.give_up(list(pipeline.under_way()))
        self._is_drained.set()

    def end(self, timeout_s: float) -> None:
        """Leave the group and end the client; what Kafka keeps waiting ends behind us."""
        health.remove(self._loop)
        self._is_ending = True
        self._state.intake.ring()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning(
                "leaving the group takes long and goes on", extra={"queue": self._queue.queue_id}
            )
