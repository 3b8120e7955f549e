"""Attempts: what became of each delivery of a message, folded from one marker partition.

An attempt begins with the START that a tracker would track, and ends with the first END that names
its message: a worker's verdict, or the tracker's own where none came. What is open, and whether a
verdict came too late, is what ``RedeliveryTracker`` says of the same records; no rule is here.

A SCHEDULE is no attempt, but open like one: ``Attempts.open`` shows it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kafkamq.markers.rules.chunks import chunk_key
from kafkamq.markers.rules.entry import DUE, HELD, STATE, Entry
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.types import Headers, Marker, MarkerType, MessageId, Outcome

__all__ = ["Attempt", "Attempts", "OpenAttempt"]


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
    consumer_id: str  # who STARTed or renewed it by name last
    starts: int = 1
    outcome: Outcome | None = None  # None: not ended
    reason: str = ""
    delay_ms: int = 0  # of a NACK
    is_late: bool = False  # the verdict came when the message was due already
    ended_ms: int = 0
    end_offset: int = -1


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """An attempt, or a SCHEDULE, whose message a tracker still has to do with."""

    attempt: Attempt
    state: str  # held, waiting, due or scheduled
    consumer_id: str  # who holds it, or held it last
    remaining_ms: int  # of the lease or the wait, by the partition's clock; negative: over


class Attempts:
    """Folds attempts beside a tracker, which it owns; not thread-safe."""

    def __init__(self, tracker: RedeliveryTracker) -> None:
        self.tracker = tracker
        self.attempts: dict[MessageId, Attempt] = {}  # until the tracker is done with the message
        self.schedules: dict[MessageId, Attempt] = {}
        self._ended: list[Attempt] = []

    def apply(
        self, offset: int, timestamp_ms: int, log_time_ms: int, marker: Marker | None
    ) -> None:
        """Fold one record, in offset order; total.

        Args:
            offset: Of the record.
            timestamp_ms: Of the record, whatever its kind: what the attempt shows.
            log_time_ms: LogAppendTime; negative for any other kind: what moves the clock (R1).
            marker: None for a record that could not be decoded (R21).
        """
        tracker = self.tracker
        late_before = tracker.late_verdicts
        tracker.apply(offset, log_time_ms, marker)
        if marker is None:
            return
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
            is_late = tracker.late_verdicts > late_before
            self._end(message_id, offset, timestamp_ms, marker, is_late)

    def take_ended(self) -> list[Attempt]:
        """Attempts that ended since the last call, in the order of their ends."""
        ended, self._ended = self._ended, []
        return ended

    def open(self) -> Iterator[OpenAttempt]:
        """What a tracker still has to do with, by the partition's clock."""
        now_ms = self.tracker.clock_ms
        for of_schedule, found in ((False, self.attempts), (True, self.schedules)):
            for message_id, attempt in found.items():
                entry = self._entry(message_id, of_schedule)
                if entry is None:
                    continue
                until_ms = self.tracker.changes_at(entry, of_schedule)
                holder = entry.holder
                yield OpenAttempt(
                    attempt,
                    _state(entry, of_schedule),
                    attempt.consumer_id if holder is None else holder.consumer_id,
                    (entry.deadline_ms if entry.flags & DUE else until_ms) - now_ms,
                )

    def _start(self, message_id: MessageId, offset: int, at_ms: int, marker: Marker) -> None:
        attempt = self.attempts.get(message_id)
        if attempt is None:
            entry = self._entry(message_id)
            if entry is not None and entry.start_offset == offset:  # else a zombie's (R12)
                self.attempts[message_id] = _attempt(message_id, offset, at_ms, marker)
        elif self._is_held(message_id):
            attempt.starts += 1
            attempt.consumer_id = marker.consumer_id

    def _schedule(self, offset: int, at_ms: int, marker: Marker) -> None:
        message_id = marker.message_id or MessageId(self.tracker.partition, offset)
        entry = self._entry(message_id, True)
        if entry is not None and entry.start_offset == offset:
            self.schedules[message_id] = _attempt(message_id, offset, at_ms, marker)

    def _end(
        self, message_id: MessageId, offset: int, at_ms: int, marker: Marker, is_late: bool
    ) -> None:
        if marker.of_schedule:
            if self._entry(message_id, True) is None:
                self.schedules.pop(message_id, None)
            return
        attempt = self.attempts.get(message_id)
        if attempt is None:
            return
        if marker.outcome is Outcome.RELEASE and self._is_held(message_id):
            return  # not by its holder
        if attempt.outcome is None:
            attempt.outcome = marker.outcome
            attempt.reason = marker.reason
            attempt.delay_ms = marker.redeliver_after_ms
            attempt.is_late = is_late
            attempt.ended_ms = at_ms
            attempt.end_offset = offset
            self._ended.append(attempt)
        if self._entry(message_id) is None:
            del self.attempts[message_id]

    def _is_held(self, message_id: MessageId) -> bool:
        entry = self._entry(message_id)
        return entry is not None and entry.flags & STATE == HELD

    def _entry(self, message_id: MessageId, of_schedule: bool = False) -> Entry | None:
        chunk, entries = self.tracker.table.find(chunk_key(message_id, of_schedule))
        return entries.get(chunk.slot_of(message_id))


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


def _state(entry: Entry, of_schedule: bool) -> str:
    if entry.flags & DUE:
        return "due"
    if entry.flags & STATE == HELD:
        return "held"
    return "scheduled" if of_schedule else "waiting"
