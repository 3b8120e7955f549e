"""Histories of messages, read from a markers topic: what the log says happened to each, and why.

A history begins with a START (or a SCHEDULE) and ends with an END that ends it. This file knows the
rules by itself (R1-R3, R12-R14, R19): it shares nothing with the trackers that it judges, and works
message by message instead of record by record.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kafkamq.config import Options
from kafkamq.errors import UnsupportedVersionError, WireError
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.types import Headers, Marker, MarkerType, MessageId, Outcome, expand

if TYPE_CHECKING:
    # A checker runs no code of what it checks.
    from kafkamq.transport.log_reader import Record

_BY_TRACKER = (Outcome.REDELIVERED, Outcome.DEAD_LETTERED, Outcome.ALREADY_ENDED)
_MAX_GRACE_MS = 3000
_MEMORY_MS = 60_000
_LOG_APPEND_TIME = 2


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One record of any topic, as a consumer gets it."""

    topic: str
    partition: int
    offset: int
    # The LogAppendTime; -1: any other kind of timestamp.
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


def record_of(message: Record) -> LogRecord:
    """Return a record that was consumed with confluent-kafka, for `check_logs`."""
    kind, timestamp_ms = message.timestamp()
    return LogRecord(
        message.topic(),
        message.partition(),
        message.offset(),
        timestamp_ms if kind == _LOG_APPEND_TIME else -1,
        message.key(),
        message.value(),
        tuple(message.headers() or ()),
    )


class Why(Enum):
    LEASE_ENDED = "its lease had ended"
    MAX_LEASE = "it was held longer than max_lease"
    NACKED = "it was nacked and its delay was over"
    RELEASED = "it was released"
    REJECTED = "it was rejected"
    SCHEDULED = "its delay was over"


class Ending(Enum):
    OPEN = "is open"
    ACKED = "was acked in time"
    CANCELLED = "was cancelled"
    REDELIVERED = "was redelivered"
    DEAD_LETTERED = "was dead-lettered"
    ALREADY_ENDED = "had ended before"


@dataclass(slots=True)
class MessageHistory:
    """What became of a message, START to END; positions are indices into ``Timeline.records``."""

    message_id: MessageId
    of_schedule: bool
    begin: int
    ending: Ending = Ending.OPEN
    end: int = -1
    why: Why | None = None
    due: int = -1
    deadline_ms: int = -1
    # The END that its START came behind (R12); -1: it is the first history.
    after: int = -1
    others: list[MessageHistory] = field(default_factory=list)
    late_at: list[int] = field(default_factory=list)

    @property
    def is_extra(self) -> bool:
        return self.after >= 0

    @property
    def is_explained(self) -> bool:
        """Return whether a tracker could settle it where it did: it was due before the END."""
        return self.why is not None and self.due < self.end


@dataclass(slots=True)
class _Lease:
    """What a walk along one history knows."""

    begin_ms: int
    deadline_ms: int
    timeout_ms: int
    max_lease_ms: int
    consumer_id: str
    is_waiting: bool = False
    is_armed: bool = True

    def limit_ms(self) -> int:
        if self.is_waiting:
            return self.deadline_ms
        return min(self.deadline_ms, self.begin_ms + self.max_lease_ms)


@dataclass
class Timeline:
    """One marker partition, with indices of what concerns whom."""

    partition: int
    default_max_lease_ms: int = Options.max_lease.default_ms
    offsets: list[int] = field(default_factory=list)
    # None: it cannot be decoded.
    records: list[Marker | None] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)
    clocks: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    of_message: dict[tuple[bool, MessageId], list[int]] = field(default_factory=dict)
    of_consumer: dict[str, list[int]] = field(default_factory=dict)
    engines: set[tuple[str, int]] = field(default_factory=set)
    starts_of_engines: list[int] = field(default_factory=list)
    last_ms: int = -1

    def add(self, record: LogRecord) -> None:
        at = len(self.records)
        now_ms = self.clocks[-1] if self.clocks else max(0, record.timestamp_ms)
        step_ms = 0
        if record.timestamp_ms >= 0:  # R1
            step_ms = max(0, record.timestamp_ms - self.last_ms) if self.last_ms >= 0 else 0
            self.last_ms = record.timestamp_ms
        self.offsets.append(record.offset)
        self.timestamps.append(record.timestamp_ms)
        self.steps.append(step_ms)
        self.clocks.append(now_ms + step_ms)
        try:
            marker = decode_marker(
                record.value, topic=record.topic, partition=record.partition, offset=record.offset
            )
        except UnsupportedVersionError:
            raise
        except WireError:
            self.records.append(None)
            return
        self.records.append(marker)
        if marker.type is MarkerType.TICK:
            engine = (marker.consumer_id, marker.engine_epoch)
            if engine not in self.engines:
                self.engines.add(engine)
                self.starts_of_engines.append(at)
        if marker.batches:
            # At one place in the log it says what one record for each would say (R27).
            for each in expand(marker):
                if each.message_id is not None:
                    key = marker.of_schedule, each.message_id
                    self.of_message.setdefault(key, []).append(at)
            return
        if marker.type is MarkerType.KEEPALIVE and marker.message_id is None:
            self.of_consumer.setdefault(marker.consumer_id, []).append(at)
            return
        message_id = marker.message_id
        of_schedule = marker.of_schedule
        if marker.type is MarkerType.SCHEDULE:
            of_schedule = True
            message_id = message_id or MessageId(self.partition, record.offset)
        if message_id is not None:
            self.of_message.setdefault((of_schedule, message_id), []).append(at)

    def marker(self, at: int) -> Marker:
        """Return the marker of an index that concerns a message."""
        marker = self.records[at]
        assert marker is not None, "indices of messages are of markers"
        return marker

    def before(self, history: MessageHistory) -> int:
        """Return the clock before a history's END: all that the tracker can have known."""
        return self.clocks[history.end - 1] if history.end > 0 else 0

    def was_remembered(self, history: MessageHistory) -> bool:
        """Return whether any tracker that was alive must have known the END before this history
        (R12).

        It did if the START came within 60 s of log time, and no engine started in between: each
        start shows by its TICK.
        """
        if self.clocks[history.begin] > self.clocks[history.after] + _MEMORY_MS:
            return False
        started = bisect_right(self.starts_of_engines, history.after)
        return started == bisect_left(self.starts_of_engines, history.end)

    # ---- histories

    def histories(self) -> Iterator[MessageHistory]:
        for of_schedule, message_id in self.of_message:
            yield from self.histories_of(message_id, of_schedule)

    def histories_of(
        self, message_id: MessageId, of_schedule: bool = False
    ) -> list[MessageHistory]:
        own = self.of_message.get((of_schedule, message_id), [])
        begins = MarkerType.SCHEDULE if of_schedule else MarkerType.START
        histories: list[MessageHistory] = []
        behind = 0
        while behind < len(own):
            starts = [i for i in range(behind, len(own)) if self.marker(own[i]).type is begins]
            if not starts:
                ends = [at for at in own[behind:] if self._ends(at)]
                histories += self._stray(message_id, of_schedule, histories, ends)
                break
            before = [at for at in own[behind : starts[0]] if self._ends(at)]
            histories += self._stray(message_id, of_schedule, histories, before)
            after = histories[-1].end if histories else -1
            history = self._best(message_id, of_schedule, own, starts, after)
            histories.append(history)
            if history.end < 0:
                break
            behind = own.index(history.end) + 1
        return histories

    def _ends(self, at: int) -> bool:
        marker = self.marker(at)
        ending = (Outcome.ACK, *_BY_TRACKER)
        return marker.type is MarkerType.END and marker.outcome in ending

    def _stray(
        self,
        message_id: MessageId,
        of_schedule: bool,
        histories: list[MessageHistory],
        ends: list[int],
    ) -> list[MessageHistory]:
        """ENDs without a START: an ACK ends what nobody knew, a tracker's has no reason."""
        result: list[MessageHistory] = []
        for at in ends:
            outcome = self.marker(at).outcome
            if outcome is Outcome.ALREADY_ENDED and (histories or result):
                continue
            # The END of its worker behind that START says it, too.
            if outcome in _BY_TRACKER or (not histories and not result):
                ending = _ending(outcome, of_schedule)
                result.append(MessageHistory(message_id, of_schedule, at, ending, at))
            else:
                (result or histories)[-1].late_at.append(at)
        return result

    def _best(
        self,
        message_id: MessageId,
        of_schedule: bool,
        own: list[int],
        starts: list[int],
        after: int,
    ) -> MessageHistory:
        """Return the history that begins with the first START; after an END, any that explains the
        next.

        A tracker that was started again between them knows only the later START (R12).
        """
        first = self._walk(message_id, of_schedule, own, starts[0], after)
        if not first.is_extra or first.ending is Ending.ACKED:
            return first
        others = [self._walk(message_id, of_schedule, own, start, after) for start in starts[1:]]
        others = [one for one in others if one.is_explained and one.end == first.end]
        if others and not first.is_explained:
            first = others.pop(0)
        first.others = others
        return first

    def _walk(
        self, message_id: MessageId, of_schedule: bool, own: list[int], first: int, after: int
    ) -> MessageHistory:
        """Follow a history from own[first] on to its end."""
        history = MessageHistory(message_id, of_schedule, own[first], after=after)
        lease = self._begin(own[first], of_schedule)
        at = own[first]
        for next_at in (*own[first + 1 :], len(self.records)):
            if history.why is None:
                self._pass_time(history, lease, at, next_at)
                if history.why is None:
                    history.deadline_ms = lease.limit_ms()
            at = next_at
            if at == len(self.records):
                break
            marker = self.marker(at)
            if marker.type is MarkerType.END and marker.outcome in _BY_TRACKER:
                history.ending, history.end = _ending(marker.outcome, of_schedule), at
                break
            if history.why is not None:
                if marker.type is MarkerType.END and marker.outcome is Outcome.ACK:
                    history.late_at.append(at)
            elif marker.type is MarkerType.END and marker.outcome is Outcome.ACK:
                history.ending, history.end = _ending(marker.outcome, of_schedule), at
                break
            else:
                lease = self._apply(history, lease, at)
        return history

    def _begin(self, at: int, of_schedule: bool) -> _Lease:
        marker, now_ms = self.marker(at), self.clocks[at]
        return _Lease(
            begin_ms=now_ms,
            deadline_ms=now_ms + marker.redeliver_after_ms,
            timeout_ms=marker.redeliver_after_ms,
            max_lease_ms=marker.max_lease_ms or self.default_max_lease_ms,
            consumer_id=marker.consumer_id,
            is_waiting=of_schedule,
        )

    def _apply(self, history: MessageHistory, lease: _Lease, at: int) -> _Lease:
        """A marker of the message itself, while it is held or waiting."""
        marker, now_ms = self.marker(at), self.clocks[at]
        if marker.type is MarkerType.SCHEDULE:
            history.begin = at
            return self._begin(at, True)
        if lease.is_waiting:
            return lease
        if marker.type is MarkerType.END:
            if marker.outcome is Outcome.REJECT:
                history.why, history.due, history.deadline_ms = Why.REJECTED, at, now_ms
            elif marker.outcome is Outcome.NACK:
                lease.is_waiting = True
                lease.deadline_ms = now_ms + marker.redeliver_after_ms
            elif marker.consumer_id == lease.consumer_id:
                history.why, history.due, history.deadline_ms = Why.RELEASED, at, now_ms
        elif marker.type is MarkerType.START:
            lease.timeout_ms = marker.redeliver_after_ms
            self._renew(lease, marker, now_ms + marker.redeliver_after_ms)
        elif marker.type is MarkerType.KEEPALIVE:
            self._renew(lease, marker, now_ms + (marker.redeliver_after_ms or lease.timeout_ms))
        return lease

    def _renew(self, lease: _Lease, marker: Marker, deadline_ms: int) -> None:
        lease.deadline_ms = deadline_ms
        lease.consumer_id = marker.consumer_id
        lease.is_armed = True

    def _pass_time(self, history: MessageHistory, lease: _Lease, at: int, until: int) -> None:
        """What the clock and the consumer's KEEPALIVEs do behind ``at``, ``until`` included.

        The clock of ``until`` counts, what the record says does not.
        """
        position = at + 1
        while position <= until and position < len(self.records):
            passed = bisect_right(self.clocks, lease.limit_ms(), position)
            renewal = self._next_renewal(lease, position, until)
            if passed <= min(renewal, until) and passed < len(self.records):
                if self._passes(history, lease, passed):
                    return
                position = passed
                if renewal != passed:
                    continue
            if renewal >= until:
                return
            marker = self.marker(renewal)
            until_ms = self.clocks[renewal] + (marker.redeliver_after_ms or lease.timeout_ms)
            lease.deadline_ms = max(lease.deadline_ms, until_ms)
            lease.is_armed = True
            position = renewal + 1

    def _next_renewal(self, lease: _Lease, position: int, until: int) -> int:
        if lease.is_waiting or not lease.consumer_id:
            return until
        renewals = self.of_consumer.get(lease.consumer_id, [])
        index = bisect_left(renewals, position)
        return renewals[index] if index < len(renewals) and renewals[index] < until else until

    def _passes(self, history: MessageHistory, lease: _Lease, at: int) -> bool:
        """The clock of record ``at`` is past the limit; False: it got a grace (R3)."""
        now_ms = self.clocks[at]
        history.deadline_ms = lease.limit_ms()
        if lease.is_waiting:
            history.why = Why.SCHEDULED if history.of_schedule else Why.NACKED
        elif now_ms > lease.begin_ms + lease.max_lease_ms:
            history.why = Why.MAX_LEASE
        elif lease.is_armed and 3 * self.steps[at] > lease.timeout_ms:
            lease.is_armed = False
            lease.deadline_ms = now_ms + min(lease.timeout_ms // 2, _MAX_GRACE_MS)
            return False
        else:
            history.why = Why.LEASE_ENDED
        history.due = at
        return True


def _ending(outcome: Outcome, of_schedule: bool) -> Ending:
    if outcome is Outcome.REDELIVERED:
        return Ending.REDELIVERED
    if outcome is Outcome.DEAD_LETTERED:
        return Ending.DEAD_LETTERED
    if outcome is Outcome.ALREADY_ENDED:
        return Ending.ALREADY_ENDED
    return Ending.CANCELLED if of_schedule else Ending.ACKED


def read_timelines(
    markers: Iterable[LogRecord], *, max_lease_ms: int = Options.max_lease.default_ms
) -> dict[int, Timeline]:
    """Return the records of a markers topic, in any order, by partition."""
    timelines: dict[int, Timeline] = {}
    for record in sorted(markers, key=lambda record: (record.partition, record.offset)):
        timeline = timelines.get(record.partition)
        if timeline is None:
            timeline = timelines[record.partition] = Timeline(record.partition, max_lease_ms)
        timeline.add(record)
    return timelines
