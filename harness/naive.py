"""The rules of redelivery told as plainly as possible: the oracle for the real core.

Nothing here is quick. Every question folds the whole log again, and every record looks at every
entry. Each entry carries its own deadline, no renewal is ever postponed, nothing is stored away.
It is written from ``docs/protocol.md`` (R1-R4, R12-R20) and shares no code with
``markers/rules/redelivery.py`` but the values that both return.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from kafkamq.markers.rules.delivery import Carry, DueCause, Settle, row_order
from kafkamq.types import Marker, MarkerType, MessageId, Outcome, expand

Identity = tuple[bool, MessageId]
"""(of_schedule, message id)."""

Asked = tuple[type, bool, MessageId, int]
"""An action that was handed out: its kind, its identity and its start offset."""

_ENDED_FOR_MS = 60_000
_ENDING = (Outcome.ACK, Outcome.REDELIVERED, Outcome.DEAD_LETTERED, Outcome.ALREADY_ENDED)
_OF_TRACKERS = (Outcome.REDELIVERED, Outcome.DEAD_LETTERED, Outcome.ALREADY_ENDED)


class State(Enum):
    """Columns of the table of the rules."""

    HELD = "held"
    WAITING = "waiting"
    DUE = "due"


@dataclass(slots=True)
class NaiveEntry:
    """One message that is open."""

    state: State
    start_offset: int
    begin_ms: int
    deadline_ms: int  # of its lease or its waiting; once due: when it fell due
    timeout_ms: int = 0
    max_lease_ms: int = 0
    consumer_id: str = ""
    may_have_grace: bool = True
    to_carry: bool = False
    cause: DueCause = DueCause.LEASE_ENDED
    verdict_offset: int = -1

    def fall_due(self, cause: DueCause, deadline_ms: int) -> None:
        self.state = State.DUE
        self.cause = cause
        self.deadline_ms = deadline_ms
        self.to_carry = False


@dataclass(slots=True)
class NaiveState:
    """What the rules make of a log."""

    partition: int
    default_max_lease_ms: int
    carry_after_ms: int | None
    clock_ms: int | None = None  # None: no record yet that says the time
    last_ms: int | None = None
    next_offset: int = 0
    entries: dict[Identity, NaiveEntry] = field(default_factory=dict)
    ended: dict[tuple[bool, bytes, int, int, int], tuple[int, set[Identity]]] = field(
        default_factory=dict
    )
    late_verdicts: int = 0
    malformed: int = 0

    @property
    def now_ms(self) -> int:
        return self.clock_ms or 0

    def fold(self, offset: int, timestamp_ms: int, marker: Marker | None) -> None:
        self._move_clock(timestamp_ms)
        self.next_offset = offset + 1
        if marker is None:
            self.malformed += 1
            return
        for each in expand(marker):  # R27
            self._fold_one(offset, each)

    def _fold_one(self, offset: int, marker: Marker) -> None:
        if marker.type is MarkerType.START:
            self._start(offset, marker)
        elif marker.type is MarkerType.KEEPALIVE:
            self._keepalive(marker)
        elif marker.type is MarkerType.END:
            self._end(offset, marker)
        elif marker.type is MarkerType.SCHEDULE:
            self._schedule(offset, marker)

    # R1, R2, R3
    def _move_clock(self, timestamp_ms: int) -> None:
        step_ms = 0
        if timestamp_ms >= 0:
            if self.last_ms is not None:
                step_ms = max(0, timestamp_ms - self.last_ms)
                self.clock_ms = self.now_ms + step_ms
            elif self.clock_ms is None:
                self.clock_ms = timestamp_ms
            self.last_ms = timestamp_ms
        elif self.clock_ms is None:
            self.clock_ms = 0
        for (of_schedule, _), entry in self.entries.items():
            if entry.state is State.HELD:
                self._pass_held(entry, step_ms)
            elif entry.state is State.WAITING:
                self._pass_waiting(entry, of_schedule)
        for chunk, (ended_ms, _) in list(self.ended.items()):
            if self.now_ms > ended_ms + _ENDED_FOR_MS:  # R12
                del self.ended[chunk]

    def _pass_held(self, entry: NaiveEntry, step_ms: int) -> None:
        limit_ms = entry.begin_ms + entry.max_lease_ms
        if self.now_ms > limit_ms:
            entry.fall_due(DueCause.MAX_LEASE, min(entry.deadline_ms, limit_ms))
        elif self.now_ms > entry.deadline_ms:
            if entry.may_have_grace and 3 * step_ms > entry.timeout_ms:
                entry.may_have_grace = False
                entry.deadline_ms = self.now_ms + min(entry.timeout_ms // 2, 3000)
            else:
                entry.fall_due(DueCause.LEASE_ENDED, entry.deadline_ms)

    def _pass_waiting(self, entry: NaiveEntry, of_schedule: bool) -> None:
        if self.now_ms > entry.deadline_ms:
            cause = DueCause.SCHEDULED if of_schedule else DueCause.NACKED
            entry.fall_due(cause, entry.deadline_ms)
        elif of_schedule and self.carry_after_ms is not None:
            entry.to_carry |= self.now_ms > entry.begin_ms + self.carry_after_ms  # R19

    # the table
    def _start(self, offset: int, marker: Marker) -> None:
        if marker.message_id is None:
            return
        identity = (False, marker.message_id)
        deadline_ms = self.now_ms + marker.redeliver_after_ms
        entry = self.entries.get(identity)
        if entry is None:
            if self._has_ended(identity):
                self._end_again(identity, offset)
            else:
                self.entries[identity] = NaiveEntry(
                    State.HELD,
                    offset,
                    self.now_ms,
                    deadline_ms,
                    marker.redeliver_after_ms,
                    marker.max_lease_ms or self.default_max_lease_ms,
                    marker.consumer_id,
                )
        elif entry.state is State.HELD:
            entry.deadline_ms = deadline_ms
            entry.timeout_ms = marker.redeliver_after_ms
            entry.consumer_id = marker.consumer_id
            entry.may_have_grace = True

    def _keepalive(self, marker: Marker) -> None:
        if marker.message_id is not None:
            entry = self.entries.get((False, marker.message_id))
            if entry is not None and entry.state is State.HELD:
                entry.deadline_ms = self.now_ms + (marker.redeliver_after_ms or entry.timeout_ms)
                entry.consumer_id = marker.consumer_id
                entry.may_have_grace = True
        elif marker.consumer_id:
            for entry in self.entries.values():
                if entry.state is State.HELD and entry.consumer_id == marker.consumer_id:
                    until_ms = self.now_ms + (marker.redeliver_after_ms or entry.timeout_ms)
                    entry.deadline_ms = max(entry.deadline_ms, until_ms)
                    entry.may_have_grace = True

    def _end(self, offset: int, marker: Marker) -> None:
        if marker.message_id is None:
            return
        identity = (marker.of_schedule, marker.message_id)
        outcome = marker.outcome
        entry = self.entries.get(identity)
        if entry is not None and entry.state is State.DUE and outcome not in _OF_TRACKERS:
            self.late_verdicts += 1  # R9
        elif outcome in _ENDING:
            self._remember_end(identity)
        elif entry is None or entry.state is not State.HELD:
            pass
        elif outcome is Outcome.REJECT:
            entry.verdict_offset = offset
            entry.fall_due(DueCause.REJECTED, self.now_ms)
        elif outcome is Outcome.NACK:
            entry.verdict_offset = offset
            entry.state = State.WAITING
            entry.deadline_ms = self.now_ms + marker.redeliver_after_ms
        elif entry.consumer_id == marker.consumer_id:
            entry.fall_due(DueCause.RELEASED, self.now_ms)

    def _schedule(self, offset: int, marker: Marker) -> None:
        message_id = marker.message_id or MessageId(self.partition, offset)
        identity = (True, message_id)
        if self._has_ended(identity):
            self._end_again(identity, offset)
        if identity in self.entries and self.entries[identity].state is not State.WAITING:
            return
        self.entries[identity] = NaiveEntry(
            State.WAITING, offset, self.now_ms, self.now_ms + marker.redeliver_after_ms
        )

    # R12
    def _remember_end(self, identity: Identity) -> None:
        was_open = self.entries.pop(identity, None) is not None
        if was_open or not self._has_ended(identity):
            _, identities = self.ended.get(_chunk(identity), (0, set()))
            self.ended[_chunk(identity)] = (self.now_ms, identities | {identity})

    def _end_again(self, identity: Identity, offset: int) -> None:
        self.ended[_chunk(identity)][1].discard(identity)
        self.entries[identity] = NaiveEntry(
            State.DUE, offset, self.now_ms, self.now_ms, cause=DueCause.ALREADY_ENDED
        )

    def _has_ended(self, identity: Identity) -> bool:
        return identity in self.ended.get(_chunk(identity), (0, set()))[1]


def _chunk(identity: Identity) -> tuple[bool, bytes, int, int, int]:
    of_schedule, message_id = identity
    return (
        of_schedule,
        message_id.topic_id,
        message_id.leader_epoch,
        message_id.partition,
        message_id.offset // 4096,
    )


class NaiveTracker:
    """Has the methods of ``RedeliveryTracker``, and answers each by folding the log again."""

    def __init__(
        self,
        next_offset: int = 0,
        *,
        partition: int = 0,
        max_lease_ms: int = 43_200_000,
        carry_after_ms: int | None = None,
        engine: tuple[str, int] | None = None,
    ) -> None:
        self.records: list[tuple[int, int, Marker | None]] = []
        self.first_offset = next_offset
        self.partition = partition
        self.max_lease_ms = max_lease_ms
        self.carry_after_ms = carry_after_ms
        self.engine = engine
        self.is_live = engine is None
        self.asked: set[Asked] = set()

    def apply(self, offset: int, timestamp_ms: int, marker: Marker | None) -> None:
        """Note one record; what it means is found out when somebody asks."""
        self.records.append((offset, timestamp_ms, marker))
        if (
            not self.is_live
            and marker is not None
            and marker.type is MarkerType.TICK
            and (marker.consumer_id, marker.engine_epoch) == self.engine
        ):
            self.is_live = True  # R17
            self.asked.clear()  # R15

    def restart(self, engine: tuple[str, int] | None) -> None:
        """Another engine goes on with the same state: live from its own TICK on."""
        self.engine = engine
        self.is_live = engine is None

    def state(self) -> NaiveState:
        """Return the whole log, folded."""
        state = NaiveState(self.partition, self.max_lease_ms, self.carry_after_ms)
        state.next_offset = self.first_offset
        for offset, timestamp_ms, marker in self.records:
            state.fold(offset, timestamp_ms, marker)
        return state

    def wanted(self) -> list[Settle | Carry]:
        """Return what ``plan`` would return, one action for a message, without asking for it."""
        state = self.state()
        actions: list[Settle | Carry] = []
        for (of_schedule, message_id), entry in state.entries.items():
            if entry.state is State.DUE:
                actions.append(
                    Settle(
                        entry.start_offset,
                        message_id,
                        of_schedule,
                        entry.cause,
                        entry.begin_ms,
                        state.now_ms,
                        entry.deadline_ms,
                        entry.verdict_offset,
                    )
                )
            elif entry.to_carry:
                remaining_ms = entry.deadline_ms - state.now_ms
                actions.append(Carry(entry.start_offset, message_id, remaining_ms))
        actions = [action for action in actions if _asked(action) not in self.asked]
        return sorted(actions, key=row_order)

    def plan(self) -> list[Settle | Carry]:
        """Return what is due or to be carried and not asked for, in START order."""
        actions = self.wanted() if self.is_live else []
        self.ask(actions)
        return actions

    def ask(self, actions: Iterable[Settle | Carry]) -> None:
        """These actions are under way."""
        self.asked |= {_asked(action) for action in actions}

    def aborted(self, actions: Iterable[Settle | Carry]) -> None:
        """The transaction of these actions is known to have aborted."""
        self.asked -= {_asked(action) for action in actions}

    def committable_offset(self) -> int:
        """Smallest start offset of an open entry, else the next offset (R20)."""
        state = self.state()
        offsets = [entry.start_offset for entry in state.entries.values()]
        return min(offsets, default=state.next_offset)

    def in_progress(self) -> set[MessageId]:
        """Return messages with an entry."""
        return {message_id for of_schedule, message_id in self.state().entries if not of_schedule}

    def scheduled(self) -> set[MessageId]:
        """SCHEDULEs with an entry."""
        return {message_id for of_schedule, message_id in self.state().entries if of_schedule}


def _asked(action: Settle | Carry) -> Asked:
    return (type(action), action.of_schedule, action.message_id, action.start_offset)
