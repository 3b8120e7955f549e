"""Reads one queue's messages off the shared topic: filter, rebalances, lost positions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, groupby, repeat
from queue import SimpleQueue
from time import monotonic
from typing import TypeVar, cast

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import BrokerError, DataLossError, KafkaMQError
from kafkamq.markers.membership import max_idle_ms, open_member
from kafkamq.markers.message import MarkersAcknowledger, MarkersMessage, messages_of
from kafkamq.markers.positions import Positions
from kafkamq.markers.rules.batching import MessageSet
from kafkamq.markers.rules.leases import Overtaken
from kafkamq.markers.rules.pipeline import MAX_AGE_MS, Pipeline, Run
from kafkamq.markers.state import ConsumerState
from kafkamq.queue.names import group_of_workers
from kafkamq.queue.wire.headers import ID
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.commits import GroupOffsets, PendingCommit
from kafkamq.transport.errors import is_retriable
from kafkamq.transport.follower import COMMITTED
from kafkamq.transport.job_thread import JobThread
from kafkamq.transport.record import LOG_APPEND_TIME, Record, take_only
from kafkamq.types import PartitionId

# The records of a poll, at least and where few or none are our own.
MIN_POLL = 100
MAX_POLL = 10_000
FULL_MS = MAX_AGE_MS
_ASK_AGAIN_S = 0.1
_LOOK_AGAIN_S = 5.0
_LOOK_FOR_S = 15.0
# In place of the position of a partition that is to be read from another place.
# It is read from what is committed, or from its start, whatever is committed.
_UNKNOWN = -1
_FROM_START = -10
_log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
Question = Callable[["Helper"], Answer]
Heard = Callable[["Answer | None", "KafkaMQError | None"], None]


@dataclass(slots=True)
class _Places:
    """It says where partitions are to be read whose position is not in the log, as brokers told.

    Attributes:
        committed: By the group; negative: nothing.
        bounds: Of their logs, where a broker said them.
        kept: Where the ledger has the group, of those for which Kafka has nothing.
        started: What is STARTed behind these.
        failure: Why a partition is missing, of one of these.
    """

    committed: dict[int, int] = field(default_factory=dict)
    bounds: dict[int, tuple[int, int]] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)
    started: MessageSet = field(default_factory=MessageSet)
    failure: KafkaMQError | None = None


class _Owner:
    """Stands between a client's call-backs and the reader, which may have another client by now."""

    def __init__(self, reader: MessageReader) -> None:
        self.reader: MessageReader | None = reader

    def assigned(self, places: Sequence[PartitionId]) -> Mapping[PartitionId, int]:
        if self.reader is not None:
            self.reader.assigned(places)
        return dict.fromkeys(places, COMMITTED)

    def revoked(self, places: Sequence[PartitionId], *, is_lost: bool) -> None:
        if self.reader is not None:
            self.reader.revoked([number for _, number in places], is_lost=is_lost)


class MessageReader:
    """Owns the Kafka consumer of one worker and fills its pipeline; the intake's thread alone."""

    def __init__(
        self,
        state: ConsumerState,
        pipeline: Pipeline[MarkersMessage],
        on_revoked: Callable[[Sequence[int], bool], None],
        ack_writer: MarkersAcknowledger,
        helper: Helper,
    ) -> None:
        """``ack_writer`` is for the messages; ``helper`` asks what brokers are to be asked."""
        self._state = state
        self._config, self._queue = state.namespace.config, state.queue
        self._pipeline = pipeline
        self._on_revoked = on_revoked
        self._ack_writer = ack_writer
        self._helper = helper
        self._topic = self._config.message_topic
        self._key = self._queue.queue_id.encode()
        self._prefix = self._key + b"\0"
        self._unplaced: dict[int, int] = {}
        self._is_asking = False
        self._place_s = 0.0
        self.starts: dict[int, int] = {}
        """Where partitions begin of which nothing is committed: to be committed first."""
        self._gained_s: dict[int, float] = {}
        self._polled_per_own = 1.0
        self._fresh: set[int] = set()
        self._looking: dict[int, float] = {}
        self._look_s = 0.0
        self._paused: set[PartitionId] = set()
        self._full_ms = 0
        self.positions = Positions(
            self._config, group_of_workers(self._config, self._queue), self._queue.queue_id
        )
        # Whether a transaction is under way, which alone decides what is committed.
        self.is_in_transaction: Callable[[], bool] = lambda: False
        self._connect()
        self.max_idle_ms = max_idle_ms(self.group.settings)

    def _connect(self) -> None:
        self._owner = _Owner(self)
        self.group = open_member(self._config, self._queue, self._owner)
        self.group.join()

    # Reading.

    def poll(self, room: int, timeout_s: float) -> int:
        """Poll once and keep what is the queue's own; returns early when something came.

        Args:
            room: Own messages that can be used now: bounds what is polled (back-pressure). 0: one
                record is taken all the same, and after 20 s nothing more is fetched. Not at once: a
                pause throws away what was fetched ahead.
            timeout_s: Longest wait.

        Returns:
            Records that came, those of other queues included.

        Raises:
            BrokerError: What no waiting can mend.
            DataLossError: A position lies outside the log.
        """
        polled_ms = monotonic_ms()
        self._make_room(room, polled_ms)
        size = 1
        if room:
            size = max(MIN_POLL, min(MAX_POLL, round(room * self._polled_per_own)))
        try:
            records = self.group.poll(size, timeout_s)
        except BrokerError as error:
            if not error.is_fatal or self.group.watch.has_ended:
                raise
            self.rebuild()
            return 0
        if records:
            self._take(records, polled_ms)
        if self.group.ends:
            self._see_ends()
        for (_, partition), offset in self.group.outside.items():
            self._unplaced.setdefault(partition, _UNKNOWN if offset < 0 else offset)
        if self._unplaced:
            self._place()
        return len(records)

    def _make_room(self, room: int, now_ms: int) -> None:
        # A look is over soon; what waits for a leader may wait for long.
        late = self._places(set(self._pipeline.waiting).difference(self._looking))
        self._full_ms = 0 if room else self._full_ms or now_ms
        is_full = bool(self._full_ms) and now_ms - self._full_ms >= FULL_MS
        if not is_full and not self._paused and not late:
            return
        paused = self.group.places & set(self.group.places if is_full else late)
        if paused - self._paused:
            self.group.pause(paused - self._paused)
        if self._paused - paused:
            self.group.resume(self._paused - paused)
        self._paused = set(paused)

    def _take(self, records: Sequence[Record], polled_ms: int) -> None:
        runs: list[Run[MarkersMessage]] = []
        first: dict[int, int] = {}
        following: dict[int, int] = {}
        end = own = 0
        for partition, group in groupby(map(Record.partition, records)):
            assert partition is not None, "records have a partition"
            begin, end = end, end + len(list(group))
            # Read on from a place that is given up, or of what went within the poll.
            if partition in self._unplaced or partition not in self._gained_s:
                continue
            first.setdefault(partition, _offset_of(records[begin]))
            following[partition] = _offset_of(records[end - 1]) + 1
            run = self._run(partition, records[begin:end], polled_ms)
            if run.messages:
                runs.append(run)
                own += len(run.messages)
        self._pipeline.polled(
            runs,
            first_offsets=first,
            next_offsets=following,
            count=len(records),
        )
        self._note_begun(first)
        if self._fresh:
            self._look_behind(runs)
        # Else nothing is known: all of it is read again, or it is one record of any queue.
        if following and len(records) > 1:
            self._polled_per_own = len(records) / own if own else MAX_POLL

    def _note_begun(self, first: Mapping[int, int]) -> None:
        """The ledger is to have every partition's position, also where nothing is committed again.

        What is in front of the first record that is read is committed, or not in the log.
        """
        new = {number: at for number, at in first.items() if not self.positions.is_known(number)}
        if new:
            self.note(new)

    def note(self, offsets: Mapping[int, int]) -> None:
        self.positions.note(offsets, self._state.facts.message_topic_id)

    # What a former owner had begun.

    def _look_behind(self, runs: Iterable[Run[MarkersMessage]]) -> None:
        """What a former owner STARTed and did not commit is a tracker's, or soon may be (R5).

        Until that is known, nothing of these partitions is STARTed.
        """
        first = {run.partition: run for run in reversed(list(runs)) if run.partition in self._fresh}
        old = {number: run.offsets[0] for number, run in first.items() if self._may_be_begun(run)}
        self._fresh.difference_update(first.keys() - old.keys())
        new = old.keys() - self._looking.keys()
        if not new or monotonic() < self._look_s:
            # A look has failed just now; these may be STARTed.
            return
        times = [first[number].messages[0]._record.timestamp() for number in new]
        since_ms = min(time_ms if kind == LOG_APPEND_TIME else 0 for kind, time_ms in times)
        asked = {number: old[number] for number in new}
        for number in asked:
            self._pipeline.wait(number, "look")
            self._looking[number] = self._gained_s[number]
        self._helper.ask(
            lambda _: self.positions.overtaken(asked, since_ms),
            partial(self._has_looked, {number: self._gained_s[number] for number in asked}),
        )

    def _has_looked(
        self,
        asked: Mapping[int, float],
        found: Overtaken | None,
        failure: KafkaMQError | None,
    ) -> None:
        found = Overtaken() if found is None else found
        if found.starts or found.redelivered:
            _log.info(
                "a former owner had STARTed messages: what it cannot finish comes again",
                extra={
                    "queue": self._queue.queue_id,
                    "started": len(found.starts),
                    "redelivered": len(found.redelivered),
                },
            )
            state = self._state
            # A marker may be newer than the clock.
            now_ms = max(state.now_ms(), found.latest_ms)
            with state.lock:
                state.leases.answered(found.redelivered)
                state.leases.overtaken(found.starts, monotonic_ms(), now_ms)
        if not found.is_whole:
            self._look_s = monotonic() + _LOOK_AGAIN_S
        since_s = monotonic() - _LOOK_FOR_S
        for number, gained_s in asked.items():
            if self._looking.get(number) != gained_s or self._gained_s.get(number) != gained_s:
                continue
            del self._looking[number]
            self._pipeline.go_on(number, "look")
            if found.is_whole or gained_s < since_s:
                self._fresh.discard(number)

    def _may_be_begun(self, run: Run[MarkersMessage]) -> bool:
        """Return whether a former owner may have STARTed its first, and ours may come too late."""
        kind, time_ms = run.messages[0]._record.timestamp()
        now_ms = self._state.broker_ms()
        if kind != LOG_APPEND_TIME or now_ms is None:
            return True
        owned_ms = (monotonic() - self._gained_s.get(run.partition, monotonic())) * 1000
        age_ms = now_ms - time_ms
        return age_ms >= owned_ms and age_ms + MAX_AGE_MS >= self._queue.redelivery_timeout_ms

    # Records and messages.

    def _run(
        self, partition: int, records: Sequence[Record], polled_ms: int
    ) -> Run[MarkersMessage]:
        if self._queue.topic:
            return self._run_of_topic(partition, records, polled_ms)
        keys = list(map(Record.key, records))
        if keys.count(self._key) < len(keys):
            # There are few keys: most records have the key of a queue.
            own = set(filter(self._is_own, set(keys)))
            records = list(compress(records, map(own.__contains__, keys)))
        offsets = list(map(_offset_of, records))
        headers, others = take_only(ID, records)
        messages = list(
            map(MarkersMessage, repeat(self._ack_writer), records, offsets, headers),
        )
        special = [messages[at] for at in others]
        for message in special:
            message.read()
        is_plain = all(message._count == 1 and not message._expiry_ms for message in special)
        return Run(partition, offsets, messages, polled_ms, is_plain)

    def _run_of_topic(
        self, partition: int, records: Sequence[Record], polled_ms: int
    ) -> Run[MarkersMessage]:
        messages = messages_of(self._ack_writer, records, self._state.facts.stamp)
        is_plain = all(message._count == 1 and not message._expiry_ms for message in messages)
        return Run(partition, [each.offset for each in messages], messages, polled_ms, is_plain)

    def _is_own(self, key: bytes | None) -> bool:
        return key == self._key or (key is not None and key.startswith(self._prefix))

    def _see_ends(self) -> None:
        """Pass what no record is polled of: control records of transactions.

        A position in front of them would be outside of the log when all of it is deleted.
        """
        polled = self._pipeline.positions()
        reached = {number: end for (_, number), end in self.group.ends.items()}
        ends = {
            number: end
            for number, end in reached.items()
            if number not in self._unplaced and end > polled.get(number, end)
        }
        self._pipeline.polled([], first_offsets={}, next_offsets=ends, count=len(ends))
        self._note_begun({number: end for number, end in reached.items() if number not in polled})

    def rebuild(self) -> None:
        """Make a new client after a fatal error; it reads from what is committed."""
        old, self._owner.reader = self.group, None
        self.revoked(list(self._gained_s), is_lost=True)
        self._paused.clear()
        self._connect()
        self._helper.ask(lambda _: old.close(), lambda *_: None)

    # Positions.

    def _place(self) -> None:
        """Place partitions whose position is not in the log: a new group's, or data was lost."""
        for partition in self._unplaced.keys() - self._gained_s.keys():
            del self._unplaced[partition]
        # A transaction was given up, perhaps before its offsets were sent: ask after it.
        is_early = self._is_asking or monotonic() < self._place_s or self.is_in_transaction()
        wanted = {n: at for n, at in self._unplaced.items() if n not in self.starts}
        if is_early or not wanted:
            return
        self._is_asking = True
        self._helper.ask(
            partial(self._find_places, wanted),
            partial(self._found_places, wanted, dict(self._gained_s)),
        )

    def _find_places(self, wanted: Mapping[int, int], helper: Helper) -> _Places:
        found, client = _Places(), helper.client
        committed = client.committed(self._places(wanted))
        found.committed = {number: at for (_, number), at in committed.items()}
        nowhere = [number for number, at in found.committed.items() if at < 0]
        if any(wanted[number] >= 0 for number in nowhere):
            # Was it deleted, and what the group had committed with it? The intake finds out.
            self._state.namespace.ask_again()
        lost = [number for number in nowhere if wanted[number] != _FROM_START]
        if lost:
            kept = self.positions.find(lost, self._state.facts.message_topic_id)
            if kept:
                found.started = self.positions.started_since(kept)
            found.kept = {number: position.offset for number, position in kept.items()}
        for number in wanted:
            try:
                found.bounds[number] = client.bounds((self._topic, number))
            except KafkaMQError as error:  # noqa: PERF203 - the others are led, perhaps
                found.failure = error
        return found

    def _found_places(
        self,
        wanted: Mapping[int, int],
        gained_s: Mapping[int, float],
        found: _Places | None,
        failure: KafkaMQError | None,
    ) -> None:
        self._is_asking = False
        is_another = self._state.namespace.facts() is not self._state.facts
        if found is not None:
            failure = found.failure
            with self._state.lock:
                self._state.leases.answered(found.started)
            for number, (low, high) in found.bounds.items():
                same = self._gained_s.get(number) == gained_s.get(number) is not None
                if same and self._unplaced.get(number) == wanted[number] and not is_another:
                    self._place_one(number, found, low, high)
        if failure is not None:
            # The group moves on, or a broker is not ready: it is asked again.
            self._place_s = monotonic() + _ASK_AGAIN_S
            if not is_retriable(failure):
                raise failure
            _log.info("where to read is not known yet", extra={"error": str(failure)})

    def _place_one(self, partition: int, found: _Places, low: int, high: int) -> None:
        """Read a partition from where it is to be read; a new one is committed first."""
        position, committed = self._unplaced[partition], found.committed[partition]
        is_new = committed < 0 or position == _FROM_START
        if position == _FROM_START:
            start = low
        elif is_new:
            # It is read from its start, unless Kafka dropped the group's offsets.
            start = found.kept.get(partition, low)
        else:
            start = position if position >= 0 else committed
        if not low <= start <= high:
            # Else a former owner has committed meanwhile.
            self._place_s = monotonic() + _ASK_AGAIN_S
            report_loss(self._config, self._queue, partition, start, low, high)
            # Behind the log's end: at most once, what is there may have been handed out.
            start = high if start > high and self._queue.is_at_most_once else low
            self._pipeline.skipped_to(partition, start)
        elif is_new:
            self.starts[partition] = start
            return
        self._read_from(partition, start)

    def started_at(self, partition: int, start: int) -> None:
        if self.starts.get(partition) == start:
            del self.starts[partition]
            self._pipeline.placed(partition, start)
            self._read_from(partition, start)

    def _read_from(self, partition: int, start: int) -> None:
        self.group.place(self._at({partition: start}), others=self._at(self._pipeline.positions()))
        self._unplaced.pop(partition, None)

    def _places(self, numbers: Iterable[int]) -> list[PartitionId]:
        return [(self._topic, number) for number in numbers]

    def _at(self, offsets: Mapping[int, int]) -> dict[PartitionId, int]:
        return {(self._topic, number): offset for number, offset in offsets.items()}

    def begin_commit(self, offsets: Mapping[int, int]) -> PendingCommit:
        return self.group.begin(self._at(offsets))

    def seek(self, offsets: Mapping[int, int]) -> None:
        there = {n: at for n, at in offsets.items() if n not in self._unplaced}
        refused = self.group.seek(self._at(there))
        self._unplaced.update({number: offset for (_, number), offset in refused.items()})

    def ask_again(self, partitions: Iterable[int]) -> None:
        """Read these again from what the group has committed, which only it knows."""
        for number in partitions:
            if number in self._gained_s:
                self._unplaced[number] = _UNKNOWN

    def reread_topic(self, gained_before_s: float) -> None:
        """The topic is another one: positions in the former one are not in this one (R13).

        What was committed in it since then may be such a position, so it is read from its start;
        but not where another member has, who knew.

        Args:
            gained_before_s: Partitions that are ours since then (monotonic) nobody has read again.
        """
        _log.warning("the topic was recreated", extra={"topic": self._topic})
        self.starts.clear()
        for partition, gained_s in self._gained_s.items():
            self._unplaced[partition] = _FROM_START if gained_s < gained_before_s else _UNKNOWN

    # Membership.

    def assigned(self, places: Sequence[PartitionId]) -> None:
        """These are ours from now on (R7's 60 s begin): they are read where the group is."""
        state, partitions = self._state, [number for _, number in places]
        self._gained_s.update(dict.fromkeys(partitions, monotonic()))
        if not self._queue.exactly_once:
            # Against an older owner's delayed START, which no transaction of its can hold any more.
            with state.lock:
                for partition in partitions:
                    state.leases.gained_partition(partition, monotonic_ms())
            if not self._queue.is_at_most_once:
                self._fresh.update(partitions)
        _log.info(
            "partitions were assigned",
            extra={"queue": self._queue.queue_id, "partitions": partitions},
        )

    def revoked(self, partitions: Sequence[int], *, is_lost: bool) -> None:
        """These are another member's soon, or already; leases of what is held stay."""
        self._on_revoked(partitions, is_lost)
        self.positions.forget(partitions)
        for number in partitions:
            for known in (self._unplaced, self._gained_s, self._looking, self.starts):
                known.pop(number, None)
            self._fresh.discard(number)
            self._paused.discard((self._topic, number))
        state = self._state
        with state.lock:
            for number in partitions:
                state.leases.lost_partition(number, monotonic_ms())
        _log.info(
            "partitions were revoked",
            extra={"queue": self._queue.queue_id, "partitions": list(partitions)},
        )

    @property
    def is_away(self) -> bool:
        return not self.group.is_joined

    def close(self) -> None:
        """Leave the group; it takes as long as the brokers take."""
        self.group.close()


# In C, as there are many: of a consumed record it is never None.
_offset_of: Callable[[Record], int] = cast("Callable[[Record], int]", Record.offset)


def report_loss(
    config: ServiceConfig, queue: QueueConfig, partition: int, position: int, low: int, high: int
) -> None:
    """Say that the messages' log, from ``low`` to ``high``, does not have the position."""
    where = f"{config.message_topic}[{partition}] of queue {queue.queue_id!r}"
    if position < low:
        text = (
            f"{low - position} messages of {where} are gone: they were deleted (retention) "
            f"before they were read; the position is {position}, the log starts at {low}"
        )
    else:
        text = (
            f"the position {position} of {where} is beyond the log's end {high}: the topic "
            "was truncated or recreated"
        )
    if queue.on_data_loss == "raise":
        raise DataLossError(
            f"{text}; go on at the log's start with on_data_loss='skip', or set the offsets of "
            f"group {group_of_workers(config, queue)}",
            code="OFFSET_OUT_OF_RANGE",
        )
    _log.warning("messages were lost and are skipped", extra={"error": text})


class Helper:
    """One question after the other; the thread and the second client are made when needed.

    Questions run in the thread. What is to be done with an answer runs in ``see_answers``, which
    the owner calls.
    """

    def __init__(
        self, name: str, open_client: Callable[[], GroupOffsets], wake: Callable[[], None]
    ) -> None:
        """``wake`` is called when an answer is there."""
        self._open_client = open_client
        self._wake = wake
        self._client: GroupOffsets | None = None
        self._answers: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = JobThread(name)

    def ask(self, question: Question[Answer], heard: Heard[Answer]) -> None:
        """Ask, behind what was asked before; ``heard`` gets the answer, or why there is none."""

        def run() -> None:
            answer: Answer | None = None
            failure: KafkaMQError | None = None
            try:
                answer = question(self)
            except KafkaMQError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - who asked waits for an answer
                _log.exception("a question to the brokers failed")
                failure = KafkaMQError(f"a question to the brokers failed: {error!r}")
            self._answers.put(lambda: heard(answer, failure))
            self._wake()

        self._thread.add(run)

    @property
    def client(self) -> GroupOffsets:
        """Return what knows the group's offsets without being a member; for questions alone."""
        if self._client is None:
            self._client = self._open_client()
        return self._client

    def see_answers(self) -> None:
        while not self._answers.empty():
            self._answers.get()()

    def end(self) -> None:
        """End the thread behind the present question, and its client; does not wait."""
        self._thread.end(self._close_client)

    def _close_client(self) -> None:
        if self._client is not None:
            self._client.close()
