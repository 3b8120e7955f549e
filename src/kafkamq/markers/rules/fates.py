"""What became of some messages of a marker partition, as a tracker folds it (R34); pure.

A verdict that is given elsewhere is judged by the log: its giver has seen neither the START nor the
renewals. ``Fates`` folds the partition from the START on with the tracker's own code, and keeps of
it what names the messages that it watches: a tracker of some messages, in a state as small as that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kafkamq.markers.rules.hold import DUE, NEVER, STATE, Hold
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.types import Marker, MarkerType, MessageId, Outcome

_TICK = Marker(MarkerType.TICK)
_NOT_OPEN = -1  # in place of a hold's state


@dataclass(frozen=True, slots=True)
class Counted:
    """An END that counted: what it found open it ended, or gave back."""

    offset: int
    outcome: Outcome
    consumer_id: str  # who wrote it; of a tracker's: empty


@dataclass(slots=True)
class Fate:
    """One watched message."""

    is_started: bool = False  # a START was read that a tracker takes in
    counted: list[Counted] = field(default_factory=list)  # in the order of the log

    @property
    def first(self) -> Counted | None:
        """What decided; None: nothing yet."""
        return self.counted[0] if self.counted else None

    def counts(self, offset: int) -> bool:
        """Whether the END at this offset did."""
        return any(each.offset == offset for each in self.counted)


class Fates:
    """Folds one marker partition for the messages that it watches; not thread-safe."""

    def __init__(self, partition: int, next_offset: int, *, longest_ms: int = NEVER) -> None:
        """Folding begins at ``next_offset``: not behind any watched message's START.

        ``longest_ms`` is the trackers' (``RedeliveryTracker``).
        """
        self._tracker = RedeliveryTracker(next_offset, partition=partition, longest_ms=longest_ms)
        self._watched: dict[MessageId, Fate] = {}

    @property
    def next_offset(self) -> int:
        """Where to read on."""
        return self._tracker.next_offset

    @property
    def watched(self) -> tuple[MessageId, ...]:
        """Whose fate it follows."""
        return tuple(self._watched)

    def watch(self, message_id: MessageId) -> Fate:
        """Follow this one from here on; its START is not read yet."""
        return self._watched.setdefault(message_id, Fate())

    def drop(self, message_id: MessageId) -> None:
        """Stop following a message."""
        self._watched.pop(message_id, None)

    def apply(self, offset: int, log_ms: int, marker: Marker | None) -> None:
        """Fold one committed record, in offset order; total.

        Args:
            offset: Of the record.
            log_ms: Its LogAppendTime; negative for any other kind (R1).
            marker: None for a record that could not be decoded (R21).
        """
        if offset < self._tracker.next_offset:
            return
        self._tracker.apply(offset, log_ms, _TICK)  # R2: the clock first
        if marker is None:
            return
        if marker.message_id is None and not marker.batches:
            if marker.type is MarkerType.KEEPALIVE:
                self._tracker.fold(offset, marker)
            return
        for message_id in self._named(marker):
            self._fold(offset, message_id, replace(marker, message_id=message_id, batches=()))

    def is_held(self, message_id: MessageId) -> bool:
        """Whether a worker's verdict on it would count now."""
        hold = self._tracker.hold_of(message_id)
        return hold is not None and hold.holder is not None

    def is_due(self, message_id: MessageId) -> bool:
        """Whether its lease has ended, or what it waited for is over, and no END says so yet."""
        return _state(self._tracker.hold_of(message_id)) == DUE

    def held(self, message_id: MessageId) -> tuple[str, int]:
        """Of what is held: who holds it, and for how many ms from the last record on."""
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
            for batch in marker.batches:
                bit = message_id.offset - batch.base_offset
                if (
                    bit >= 0
                    and batch.partition == message_id.partition
                    and batch.bits >> bit & 1
                    and (batch.topic_id, batch.leader_epoch) == message_id.log
                ):
                    yield message_id
                    break

    def _fold(self, offset: int, message_id: MessageId, marker: Marker) -> None:
        tracker, fate = self._tracker, self._watched[message_id]
        before = _state(tracker.hold_of(message_id))
        tracker.fold(offset, marker)
        after = _state(tracker.hold_of(message_id))
        if marker.type is MarkerType.START:
            fate.is_started = fate.is_started or after != _NOT_OPEN
        elif marker.type is MarkerType.END and before != after:
            fate.counted.append(Counted(offset, marker.outcome, marker.consumer_id))


def _state(hold: Hold | None) -> int:
    return _NOT_OPEN if hold is None else hold.flags & STATE
