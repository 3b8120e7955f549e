"""The redelivery core against the naive model, driven by Hypothesis.

After each step the two must tell the same: what is open, due and scheduled, each deadline, the
position, the late verdicts. On the way the tracker crashes and refolds its log, goes through a
state store, and changes its engine.
"""

from __future__ import annotations

import copy
from dataclasses import replace

from harness.agreement import StateStore
from harness.naive import Identity, NaiveState, NaiveTracker, State
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tests.examples import examples

from kafkamq.markers.rules.delivery import Carry, DueCause, Settle, each_message, row_order
from kafkamq.markers.rules.hold import CHUNK_OFFSETS, DUE, NEVER
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.types import Marker, MarkerType, MessageBatch, MessageId, Outcome, expand

PARTITION = 3
TOPIC = bytes(range(16))
MESSAGES = st.sampled_from(
    [
        MessageId(0, 0),
        MessageId(0, 1),
        MessageId(0, CHUNK_OFFSETS - 1),
        MessageId(0, CHUNK_OFFSETS),
        MessageId(1, CHUNK_OFFSETS, TOPIC),
        MessageId(0, 1, TOPIC, 2),
        MessageId(0, 1, TOPIC, 3),
    ]
)
# They overlap each other and the messages, cross pages, and end with their chunk.
BATCHES = st.sampled_from(
    [
        MessageBatch(0, b"", 0, 0, 0b11),
        MessageBatch(0, b"", 0, 0, 0b1011),
        MessageBatch(0, b"", 0, 1, 0b110),
        MessageBatch(0, b"", 0, 62, 0b1111),
        MessageBatch(0, b"", 0, 63, 1 << 64 | 0b10),
        MessageBatch(0, b"", 0, 0, (1 << 66) - 1),
        MessageBatch(0, b"", 0, CHUNK_OFFSETS - 3, 0b111),
        MessageBatch(0, TOPIC, 2, 0, 0b111),
    ]
)
CONSUMERS = st.sampled_from(["a", "a", "b", "c", ""])
TIMEOUTS = st.sampled_from([3000, 3000, 900, 1, 60_000])
DELAYS = st.sampled_from([0, 1, 1000, 3000, 20_000])
STEPS = st.sampled_from([0, 0, 0, 1, 250, 250, 999, 1000, 1001, 3001, 20_001, 60_001, -1, -7000])
TIMED = st.sampled_from([True, True, True, True, True, False])
HOLES = st.sampled_from([1, 1, 1, 2, 5])
ENDING = (Outcome.ACK, Outcome.REDELIVERED, Outcome.DEAD_LETTERED, Outcome.ALREADY_ENDED)


class Redelivery(RuleBasedStateMachine):
    """One marker partition."""

    @initialize(
        carry_after_ms=st.sampled_from([None, None, 2000, 15_000]),
        max_lease_ms=st.sampled_from([43_200_000, 5000]),
        has_engine=st.booleans(),
        first_offset=st.sampled_from([0, 500]),
    )
    def begin(
        self,
        carry_after_ms: int | None,
        max_lease_ms: int,
        has_engine: bool,
        first_offset: int,
    ) -> None:
        self.time_ms = 10_000_000
        self.offset = first_offset
        self.epoch = 0
        self.has_engine = has_engine
        self.carry_after_ms = carry_after_ms
        self.max_lease_ms = max_lease_ms
        self.under_way: list[Settle | Carry] = []
        self.planned: list[Settle | Carry] = []
        self.schedules = [MessageId(PARTITION, 0)]
        self.start_trackers(first_offset)

    def start_trackers(self, next_offset: int) -> None:
        self.tracker = RedeliveryTracker(
            next_offset,
            partition=PARTITION,
            max_lease_ms=self.max_lease_ms,
            carry_after_ms=NEVER if self.carry_after_ms is None else self.carry_after_ms,
            engine=self.next_engine(),
        )
        self.naive = NaiveTracker(
            next_offset,
            partition=PARTITION,
            max_lease_ms=self.max_lease_ms,
            carry_after_ms=self.carry_after_ms,
            engine=self.tracker.engine,
        )
        self.store = StateStore()

    def next_engine(self) -> tuple[str, int] | None:
        self.epoch += 1
        return ("engine", self.epoch) if self.has_engine else None

    def write(self, marker: Marker | None, step_ms: int, timed: bool, hole: int = 1) -> int:
        offset = self.offset
        self.offset += hole
        self.time_ms += step_ms
        timestamp_ms = self.time_ms if timed else -1
        self.tracker.apply(offset, timestamp_ms, marker)
        self.naive.apply(offset, timestamp_ms, marker)
        return offset

    # ---- records

    @rule(
        message_id=MESSAGES,
        consumer_id=CONSUMERS,
        timeout_ms=TIMEOUTS,
        max_lease_ms=st.sampled_from([0, 0, 4000]),
        step_ms=STEPS,
        timed=TIMED,
        hole=HOLES,
    )
    def start(
        self,
        message_id: MessageId,
        consumer_id: str,
        timeout_ms: int,
        max_lease_ms: int,
        step_ms: int,
        timed: bool,
        hole: int,
    ) -> None:
        marker = Marker(
            MarkerType.START,
            message_id,
            timeout_ms,
            consumer_id=consumer_id,
            max_lease_ms=max_lease_ms,
        )
        self.write(marker, step_ms, timed, hole)

    @rule(
        message_id=st.one_of(st.none(), MESSAGES),
        consumer_id=CONSUMERS,
        timeout_ms=st.one_of(st.just(0), TIMEOUTS),
        step_ms=STEPS,
        timed=TIMED,
    )
    def keepalive(
        self,
        message_id: MessageId | None,
        consumer_id: str,
        timeout_ms: int,
        step_ms: int,
        timed: bool,
    ) -> None:
        marker = Marker(MarkerType.KEEPALIVE, message_id, timeout_ms, consumer_id=consumer_id)
        self.write(marker, step_ms, timed)

    @rule(
        message_id=MESSAGES,
        outcome=st.sampled_from(Outcome),
        consumer_id=CONSUMERS,
        delay_ms=DELAYS,
        step_ms=STEPS,
        timed=TIMED,
    )
    def end(
        self,
        message_id: MessageId,
        outcome: Outcome,
        consumer_id: str,
        delay_ms: int,
        step_ms: int,
        timed: bool,
    ) -> None:
        marker = Marker(
            MarkerType.END, message_id, delay_ms, consumer_id=consumer_id, outcome=outcome
        )
        self.write(marker, step_ms, timed)

    @rule(
        kind=st.sampled_from([MarkerType.START, MarkerType.KEEPALIVE, MarkerType.END]),
        batches=st.lists(BATCHES, min_size=1, max_size=2).map(tuple),
        outcome=st.sampled_from(Outcome),
        consumer_id=CONSUMERS,
        timeout_ms=TIMEOUTS,
        step_ms=STEPS,
        timed=TIMED,
    )
    def batch(
        self,
        kind: MarkerType,
        batches: tuple[MessageBatch, ...],
        outcome: Outcome,
        consumer_id: str,
        timeout_ms: int,
        step_ms: int,
        timed: bool,
    ) -> None:
        """R27: it means a record for each of its messages."""
        marker = Marker(
            kind, None, timeout_ms, consumer_id=consumer_id, outcome=outcome, batches=batches
        )
        self.write(marker, step_ms, timed)

    @precondition(lambda self: self.ended())
    @rule(
        data=st.data(),
        timeout_ms=TIMEOUTS,
        step_ms=st.sampled_from([0, 1, 1000]),
        crashes=st.booleans(),
    )
    def late_start(self, data: st.DataObject, timeout_ms: int, step_ms: int, crashes: bool) -> None:
        """A worker stood still: its START names what has ended, and maybe a neighbour."""
        one = data.draw(st.sampled_from(self.ended()))
        bits = data.draw(st.sampled_from([0b1, 0b11])) if (one.offset + 1) % CHUNK_OFFSETS else 1
        batch = MessageBatch(one.partition, *one.log, one.offset, bits)
        start = Marker(MarkerType.START, None, timeout_ms, consumer_id="late", batches=(batch,))
        self.write(start, step_ms, True)
        if crashes:
            self.crash()

    def ended(self) -> list[MessageId]:
        """Messages that a tracker remembers."""
        ends = self.naive.state().ended.values() if hasattr(self, "naive") else ()
        found = {one for _, ones in ends for of_schedule, one in ones if not of_schedule}
        return sorted(found, key=lambda one: (one.partition, one.offset, one.log))

    @rule(data=st.data(), delay_ms=DELAYS, carried=st.booleans(), step_ms=STEPS, timed=TIMED)
    def schedule(
        self, data: st.DataObject, delay_ms: int, carried: bool, step_ms: int, timed: bool
    ) -> None:
        first = data.draw(st.sampled_from(self.schedules)) if carried else None
        marker = Marker(MarkerType.SCHEDULE, first, delay_ms, carried_forward=carried)
        offset = self.write(marker, step_ms, timed)
        if not carried:
            self.schedules.append(MessageId(PARTITION, offset))

    @rule(data=st.data(), outcome=st.sampled_from(Outcome), step_ms=STEPS, timed=TIMED)
    def end_of_schedule(
        self, data: st.DataObject, outcome: Outcome, step_ms: int, timed: bool
    ) -> None:
        first = data.draw(st.sampled_from(self.schedules))
        marker = Marker(MarkerType.END, first, 1000, outcome=outcome, of_schedule=True)
        self.write(marker, step_ms, timed)

    @rule(behind=st.sampled_from([0, 0, 1]), step_ms=STEPS, timed=TIMED)
    def tick(self, behind: int, step_ms: int, timed: bool) -> None:
        epoch = self.epoch - behind
        marker = Marker(MarkerType.TICK, consumer_id="engine", engine_epoch=epoch)
        self.write(marker, step_ms, timed)

    @rule(step_ms=STEPS)
    def undecodable(self, step_ms: int) -> None:
        self.write(None, step_ms, True)

    # ---- the shell

    @rule(limit=st.sampled_from([1, 2, 50_000]))
    def plan(self, limit: int) -> None:
        wanted = self.naive.wanted() if self.naive.is_live else []
        planned = list(self.tracker.plan(limit))
        assert planned == sorted(planned, key=row_order)
        actions = sorted(each_message(planned), key=row_order)
        assert len(actions) == min(limit, len(wanted))
        assert actions == [action for action in wanted if action in actions]
        self.naive.ask(actions)
        self.under_way += actions
        self.planned = planned

    @rule()
    def abort(self) -> None:
        """The transaction of the last plan aborts, whatever became of its messages since."""
        self.tracker.aborted(self.planned)
        aborted = each_message(self.planned)
        self.naive.aborted(aborted)
        self.under_way = [action for action in self.under_way if action not in aborted]
        self.planned = []

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), step_ms=STEPS, aborts=st.booleans())
    def transaction(self, data: st.DataObject, step_ms: int, aborts: bool) -> None:
        """Some of what was asked for is carried out, or its transaction aborts."""
        indices = st.integers(0, len(self.under_way) - 1)
        chosen = data.draw(st.sets(indices, min_size=1, max_size=3))
        actions = [self.under_way[index] for index in chosen]
        self.under_way = [action for action in self.under_way if action not in actions]
        if aborts:
            self.tracker.aborted(actions)
            self.naive.aborted(actions)
            return
        for action in actions:
            if isinstance(action, Carry):
                marker = Marker(
                    MarkerType.SCHEDULE,
                    action.message_id,
                    action.remaining_ms,
                    carried_forward=True,
                )
            else:
                marker = Marker(
                    MarkerType.END,
                    action.message_id,
                    outcome=Outcome.REDELIVERED,
                    of_schedule=action.of_schedule,
                )
            self.write(marker, step_ms, True)

    @rule()
    def crash(self) -> None:
        """A restart from the committed offset loses nothing (R20), but for R12's memory."""
        before, records = self.naive.state(), self.naive.records
        resume = self.tracker.committable_offset()
        self.start_trackers(resume)
        self.under_way = []
        self.planned = []
        for offset, timestamp_ms, marker in records:
            if offset >= resume:
                self.tracker.apply(offset, timestamp_ms, marker)
                self.naive.apply(offset, timestamp_ms, marker)
        after = self.naive.state()
        after.next_offset = max(after.next_offset, resume)
        assert_rebuilt(before, after, records, resume)

    @rule(changes_engine=st.booleans())
    def through_the_store(self, changes_engine: bool) -> None:
        self.store.save(self.tracker)
        engine = self.tracker.engine
        if changes_engine:
            engine = self.next_engine()
            if engine is not None:
                self.naive.restart(engine)
        self.tracker = self.store.restore(
            partition=PARTITION,
            max_lease_ms=self.max_lease_ms,
            carry_after_ms=NEVER if self.carry_after_ms is None else self.carry_after_ms,
            engine=engine,
        )

    @rule()
    def save(self) -> None:
        """The tracker goes on after its state was written."""
        self.store.save(self.tracker)

    # ---- what must hold

    @invariant()
    def the_same(self) -> None:
        if not hasattr(self, "tracker"):
            return
        tracker, state = self.tracker, self.naive.state()
        assert tracker.clock_ms == state.now_ms
        assert tracker.is_live == self.naive.is_live
        if self.naive.records:
            assert tracker.next_offset == state.next_offset
        assert tracker.late_verdicts == state.late_verdicts
        assert tracker.malformed == state.malformed
        assert tracker.committable_offset() == self.naive.committable_offset()
        probe = copy.deepcopy(tracker)  # so that looking does not load what lies in the store
        assert probe.next_wake().has_due == any(
            entry.state is State.DUE or entry.to_carry for entry in state.entries.values()
        )
        wanted = self.naive.wanted() if self.naive.is_live else []
        assert sorted(each_message(probe.plan()), key=row_order) == wanted
        assert probe.open_count() == len(state.entries)
        probe.check()
        assert changes(probe) == naive_changes(state, self.carry_after_ms)


def changes(tracker: RedeliveryTracker) -> dict[Identity, int]:
    """When each entry changes by itself, for those that do."""
    found = {}
    for of_schedule, opened in ((False, tracker.in_progress()), (True, tracker.scheduled())):
        for message_id in opened:
            hold = tracker.hold_of(message_id, of_schedule=of_schedule)
            assert hold is not None
            if not hold.flags & DUE:
                found[of_schedule, message_id] = tracker.changes_at(hold, of_schedule)
    return found


def naive_changes(state: NaiveState, carry_after_ms: int | None) -> dict[Identity, int]:
    result = {}
    for identity, entry in state.entries.items():
        at_ms = entry.deadline_ms
        if entry.state is State.HELD:
            at_ms = min(at_ms, entry.begin_ms + entry.max_lease_ms)
        elif identity[0] and carry_after_ms is not None and not entry.to_carry:
            at_ms = min(at_ms, entry.begin_ms + carry_after_ms)
        if entry.state is not State.DUE:
            result[identity] = at_ms
    return result


def assert_rebuilt(
    before: NaiveState,
    after: NaiveState,
    records: list[tuple[int, int, Marker | None]],
    resume: int,
) -> None:
    """What was open is open again and ends at the same place of the log."""
    ended_once: set[Identity] = {
        (marker.of_schedule, marker.message_id)
        for _, _, record in records
        if record is not None
        for marker in expand(record)
        if marker.type is MarkerType.END
        and marker.outcome in ENDING
        and marker.message_id is not None
    }
    behind = [timestamp_ms for offset, timestamp_ms, _ in records if offset >= resume]
    has_clock = not behind or behind[0] >= 0  # R1: else the first difference is not known
    shift_ms = after.now_ms - before.now_ms
    for identity in (after.entries.keys() - before.entries.keys()) if has_clock else ():  # R12, R20
        is_ended = identity in ended_once and (
            after.entries[identity].cause is DueCause.ALREADY_ENDED
        )
        assert is_ended, f"{identity} was not open"
    for identity in (before.entries.keys() | after.entries.keys()) - ended_once:
        assert identity in after.entries, f"{identity} is lost"
        if has_clock:
            old, new = before.entries[identity], after.entries[identity]
            moved = replace(
                old, begin_ms=old.begin_ms + shift_ms, deadline_ms=old.deadline_ms + shift_ms
            )
            assert new == moved


TestRedeliveryModel = Redelivery.TestCase
TestRedeliveryModel.settings = settings(
    max_examples=examples(120),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
