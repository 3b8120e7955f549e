"""Attempts at each message, and fates of some (R34), are folded beside a tracker.

An attempt begins with the START that a tracker would track, and ends with the first END that names
its message: a worker's verdict, or the tracker's own where none came. What is open, and whether a
verdict came too late, is what ``RedeliveryTracker`` says of the same records; no rule is here.

A SCHEDULE is no attempt, but open like one: ``Attempts.open`` shows it too.

A verdict that is given elsewhere is judged by the log: its giver has seen neither the START nor the
renewals. ``Fates`` folds the partition from the START on with the tracker's own code, and keeps of
it what names the messages that it watches: a tracker of some messages, in a state as small as that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kafkamq.markers.rules.hold import DUE, HELD, NEVER, STATE, Hold
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.types import Headers, Marker, MarkerType, MessageId, Outcome, expand


@dataclass(slots=True)
class Attempt:
    """One attempt; times are the broker's, of its records."""

    message_id: MessageId
    key: bytes
    headers: Headers
    delivery_count: int
    message_timestamp_ms: int
    started_ms: int
    start_offset: int
    consumer_id: str
    starts: int = 1
    outcome: Outcome | None = None
    reason: str = ""
    delay_ms: int = 0
    is_late: bool = False
    ended_ms: int = 0
    end_offset: int = -1


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """An attempt, or a SCHEDULE, whose message a tracker still has to do with."""

    attempt: Attempt
    state: str
    consumer_id: str
    # Of the lease or the wait, by the partition's clock; negative: it is over.
    remaining_ms: int


class Attempts:
    """Folds attempts beside a tracker, which it owns; not thread-safe."""

    def __init__(self, tracker: RedeliveryTracker) -> None:
        self.tracker = tracker
        self.attempts: dict[MessageId, Attempt] = {}
        self.schedules: dict[MessageId, Attempt] = {}
        self._ended: list[Attempt] = []

    def apply(
        self, offset: int, timestamp_ms: int, log_time_ms: int, marker: Marker | None
    ) -> None:
        """Fold one record, in offset order, for each of its messages (R27); total.

        Args:
            timestamp_ms: Of the record, whatever its kind: what the attempt shows.
            log_time_ms: LogAppendTime; negative for any other kind: what moves the clock (R1).
            marker: None for a record that could not be decoded (R21).
        """
        tracker = self.tracker
        if marker is None:
            tracker.apply(offset, log_time_ms, None)
            return
        for number, each in enumerate(expand(marker)):
            late_before = tracker.late_verdicts
            if number:
                # The first one has moved the clock.
                tracker.fold(offset, each)
            else:
                tracker.apply(offset, log_time_ms, each)
            self._note(offset, timestamp_ms, each, tracker.late_verdicts > late_before)

    def _note(self, offset: int, timestamp_ms: int, marker: Marker, is_late: bool) -> None:
        kind, message_id = marker.type, marker.message_id
        if kind is MarkerType.SCHEDULE:
            self._schedule(offset, timestamp_ms, marker)
        elif message_id is None:
            return
        elif kind is MarkerType.START:
            self._start(message_id, offset, timestamp_ms, marker)
        elif kind is MarkerType.KEEPALIVE:
            attempt = self.attempts.get(message_id)
            if attempt is not None and self._is_held(message_id):
                attempt.consumer_id = marker.consumer_id
        elif kind is MarkerType.END:
            self._end(message_id, offset, timestamp_ms, marker, is_late)

    def take_ended(self) -> list[Attempt]:
        """Attempts that ended since the last call, in the order of their ends."""
        ended, self._ended = self._ended, []
        return ended

    def open(self) -> Iterator[OpenAttempt]:
        """Yield what a tracker still has to do with, by the partition's clock."""
        now_ms = self.tracker.clock_ms
        for of_schedule, found in ((False, self.attempts), (True, self.schedules)):
            for message_id, attempt in found.items():
                hold = self._hold(message_id, of_schedule)
                if hold is None:
                    continue
                until_ms = self.tracker.changes_at(hold, of_schedule)
                holder = hold.holder
                yield OpenAttempt(
                    attempt,
                    _state(hold, of_schedule),
                    attempt.consumer_id if holder is None else holder.consumer_id,
                    (hold.deadline_ms if hold.flags & DUE else until_ms) - now_ms,
                )

    def _start(self, message_id: MessageId, offset: int, at_ms: int, marker: Marker) -> None:
        attempt = self.attempts.get(message_id)
        if attempt is None:
            hold = self._hold(message_id)
            if hold is not None and hold.start_offset == offset and not hold.flags & DUE:
                # else a zombie's (R12)
                self.attempts[message_id] = _attempt(message_id, offset, at_ms, marker)
        elif self._is_held(message_id):
            attempt.starts += 1
            attempt.consumer_id = marker.consumer_id

    def _schedule(self, offset: int, at_ms: int, marker: Marker) -> None:
        message_id = marker.message_id or MessageId(self.tracker.partition, offset)
        hold = self._hold(message_id, True)
        if hold is not None and hold.start_offset == offset and not hold.flags & DUE:
            self.schedules[message_id] = _attempt(message_id, offset, at_ms, marker)

    def _end(
        self, message_id: MessageId, offset: int, at_ms: int, marker: Marker, is_late: bool
    ) -> None:
        if marker.of_schedule:
            if self._hold(message_id, True) is None:
                self.schedules.pop(message_id, None)
            return
        attempt = self.attempts.get(message_id)
        if attempt is None:
            return
        if marker.outcome is Outcome.RELEASE and self._is_held(message_id):
            return
        if attempt.outcome is None and marker.outcome is not Outcome.ALREADY_ENDED:  # R12
            attempt.outcome = marker.outcome
            attempt.reason = marker.reason
            attempt.delay_ms = marker.redeliver_after_ms
            attempt.is_late = is_late
            attempt.ended_ms = at_ms
            attempt.end_offset = offset
            self._ended.append(attempt)
        if self._hold(message_id) is None:
            del self.attempts[message_id]

    def _is_held(self, message_id: MessageId) -> bool:
        hold = self._hold(message_id)
        return hold is not None and hold.flags & STATE == HELD

    def _hold(self, message_id: MessageId, of_schedule: bool = False) -> Hold | None:
        return self.tracker.hold_of(message_id, of_schedule=of_schedule)


def _attempt(message_id: MessageId, offset: int, at_ms: int, marker: Marker) -> Attempt:
    return Attempt(
        message_id,
        marker.key,
        marker.headers,
        marker.delivery_count if marker.type is MarkerType.START else 0,
        marker.message_timestamp_ms,
        at_ms,
        offset,
        marker.consumer_id,
    )


def _state(hold: Hold, of_schedule: bool) -> str:
    if hold.flags & DUE:
        return "due"
    if hold.flags & STATE == HELD:
        return "held"
    return "scheduled" if of_schedule else "waiting"


_TICK = Marker(MarkerType.TICK)
_NOT_OPEN = -1


@dataclass(frozen=True, slots=True)
class Counted:
    """An END that counted: what it found open it ended, or gave back."""

    offset: int
    outcome: Outcome
    # The one that wrote it; empty: a tracker.
    consumer_id: str


@dataclass(slots=True)
class Fate:
    counted: list[Counted] = field(default_factory=list)

    @property
    def first(self) -> Counted | None:
        return self.counted[0] if self.counted else None

    def counts(self, offset: int) -> bool:
        return any(each.offset == offset for each in self.counted)


class Fates:
    """Folds one marker partition for the messages that it watches; not thread-safe."""

    def __init__(self, partition: int, next_offset: int, *, longest_ms: int = NEVER) -> None:
        """Folding begins at ``next_offset``: not behind any watched message's START.

        ``longest_ms`` is the trackers' (``RedeliveryTracker``).
        """
        self._tracker = RedeliveryTracker(next_offset, partition=partition, longest_ms=longest_ms)
        self._watched: dict[MessageId, Fate] = {}

    def watch(self, message_id: MessageId) -> Fate:
        """Follow this one from here on; its START is not read yet."""
        return self._watched.setdefault(message_id, Fate())

    def apply(self, offset: int, log_ms: int, marker: Marker | None) -> None:
        """Fold one committed record, in offset order; total.

        Args:
            log_ms: Its LogAppendTime; negative for any other kind (R1).
            marker: None for a record that could not be decoded (R21).
        """
        if offset < self._tracker.next_offset:
            return
        # The clock goes first (R2).
        self._tracker.apply(offset, log_ms, _TICK)
        if marker is None:
            return
        if marker.message_id is None and not marker.batches:
            if marker.type is MarkerType.KEEPALIVE:
                self._tracker.fold(offset, marker)
            return
        for message_id in self._named(marker):
            self._fold(offset, message_id, replace(marker, message_id=message_id, batches=()))

    def is_held(self, message_id: MessageId) -> bool:
        hold = self._tracker.hold_of(message_id)
        return hold is not None and hold.holder is not None

    def is_due(self, message_id: MessageId) -> bool:
        """Return whether its lease, or what it waited for, is over, and no END says so yet."""
        return _found(self._tracker.hold_of(message_id)) == DUE

    def held(self, message_id: MessageId) -> tuple[str, int]:
        """Return of what is held who holds it, and for how many ms from the last record on."""
        hold = self._tracker.hold_of(message_id)
        assert hold is not None, "it is open"
        assert hold.holder is not None, "it is held"
        left_ms = self._tracker.changes_at(hold) - self._tracker.clock_ms
        return hold.holder.consumer_id, left_ms

    def _named(self, marker: Marker) -> Iterator[MessageId]:
        if marker.of_schedule:
            return
        if marker.message_id is not None:
            if marker.message_id in self._watched:
                yield marker.message_id
            return
        for message_id in self._watched:
            if any(message_id in batch for batch in marker.batches):
                yield message_id

    def _fold(self, offset: int, message_id: MessageId, marker: Marker) -> None:
        tracker, fate = self._tracker, self._watched[message_id]
        before = _found(tracker.hold_of(message_id))
        tracker.fold(offset, marker)
        after = _found(tracker.hold_of(message_id))
        if marker.type is MarkerType.END and before != after:
            fate.counted.append(Counted(offset, marker.outcome, marker.consumer_id))


def _found(hold: Hold | None) -> int:
    return _NOT_OPEN if hold is None else hold.flags & STATE
