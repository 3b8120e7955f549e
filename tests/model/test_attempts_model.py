"""``Attempts`` against attempts that are looked up in the whole log, driven by Hypothesis.

The model asks ``NaiveState`` after each record what is open, and then finds each attempt's story by
looking through the log from its START on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from harness.naive import Identity, NaiveEntry, NaiveState, State
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.examples import examples

from kafkamq.markers.rules.attempts import Attempt, Attempts, OpenAttempt
from kafkamq.markers.rules.delivery import DueCause
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.types import Marker, MarkerType, MessageId, Outcome

PARTITION = 1
SCHEDULE = MarkerType.SCHEDULE
MAX_LEASE_MS = 5000
MESSAGES = st.sampled_from([MessageId(0, 4095), MessageId(2, 7, b"t" * 16, 3)])
CONSUMERS = st.sampled_from(["a", "b"])
TIMEOUTS = st.sampled_from([100, 1000, 4000])
TIMED = st.sampled_from([True, True, True, False])
STEPS = st.sampled_from([0, 0, 1, 40, 400, 2000, 61_000])
OUTCOMES = st.sampled_from([*Outcome, Outcome.RELEASE])
STARTS = st.builds(
    Marker,
    st.just(MarkerType.START),
    MESSAGES,
    TIMEOUTS,
    consumer_id=CONSUMERS,
    key=st.sampled_from([b"q", b"q\0k"]),
    delivery_count=st.integers(1, 3),
    message_timestamp_ms=st.integers(1, 3),
    max_lease_ms=st.sampled_from([0, 3000]),
)
KEEPALIVES = st.builds(
    Marker,
    st.just(MarkerType.KEEPALIVE),
    st.one_of(st.none(), MESSAGES),
    st.sampled_from([0, 1000]),
    consumer_id=CONSUMERS,
)
ENDS = st.builds(
    Marker,
    st.just(MarkerType.END),
    MESSAGES,
    TIMEOUTS,
    consumer_id=CONSUMERS,
    outcome=OUTCOMES,
    reason=st.sampled_from(["", "no stock"]),
)
OTHERS = st.one_of(
    st.builds(Marker, st.just(SCHEDULE), st.none(), TIMEOUTS, consumer_id=CONSUMERS),
    st.just(Marker(MarkerType.TICK)),
    st.none(),
)


@dataclass(frozen=True)
class Record:
    """One record of the markers log, and what stands open behind it."""

    offset: int
    at_ms: int
    log_ms: int
    marker: Marker | None
    open: dict[Identity, NaiveEntry]
    is_late: bool

    def is_held(self, message_id: MessageId) -> bool:
        entry = self.open.get((False, message_id))
        return entry is not None and entry.state is State.HELD


class Model:
    """Every question looks through the whole log again."""

    def __init__(self, records: list[tuple[int, int, int, Marker | None]], first: int) -> None:
        self.state = NaiveState(PARTITION, MAX_LEASE_MS, None)
        self.state.next_offset = first
        self.records: list[Record] = []
        for offset, at_ms, log_ms, marker in records:
            before = self.state.late_verdicts
            self.state.fold(offset, log_ms, marker)
            is_open = {key: NaiveEntry(**asdict(e)) for key, e in self.state.entries.items()}
            is_late = self.state.late_verdicts > before
            self.records.append(Record(offset, at_ms, log_ms, marker, is_open, is_late))

    def attempts(self) -> list[Attempt]:
        """One for each START that opened an entry."""
        return [
            self._attempt(record.marker, record.marker.message_id, index)
            for index, record in enumerate(self.records)
            if record.marker is not None
            and record.marker.type is MarkerType.START
            and record.marker.message_id is not None
            and (False, record.marker.message_id) in record.open
            and record.open[False, record.marker.message_id].start_offset == record.offset
            and record.open[False, record.marker.message_id].cause is not DueCause.ALREADY_ENDED
        ]

    def _attempt(self, start: Marker, message_id: MessageId, index: int) -> Attempt:
        first = self.records[index]
        found = Attempt(
            message_id,
            start.key,
            start.headers,
            start.delivery_count,
            start.message_timestamp_ms,
            first.at_ms,
            first.offset,
            start.consumer_id,
        )
        for record, marker in self._story(message_id, index):
            if marker.type is MarkerType.END:
                if marker.outcome is Outcome.RELEASE and record.is_held(message_id):
                    continue  # another's: it stays as it was
                if marker.outcome is Outcome.ALREADY_ENDED:
                    continue  # R12: no verdict
                found.outcome = marker.outcome
                found.reason = marker.reason
                found.delay_ms = marker.redeliver_after_ms
                found.is_late = record.is_late
                found.ended_ms = record.at_ms
                found.end_offset = record.offset
                break
            if record.is_held(message_id) and marker.type is not MarkerType.TICK:
                found.starts += marker.type is MarkerType.START
                found.consumer_id = marker.consumer_id
        return found

    def _story(self, message_id: MessageId, index: int) -> Iterator[tuple[Record, Marker]]:
        """What is said of it by name, while its entry stands."""
        for record in self.records[index + 1 :]:
            marker = record.marker
            if marker is not None and marker.message_id == message_id and not marker.of_schedule:
                yield record, marker
            if (False, message_id) not in record.open:
                return

    def open(self) -> dict[Identity, tuple[str, str, int]]:
        """State, holder and what remains."""
        names = {State.HELD: "held", State.DUE: "due", State.WAITING: "waiting"}
        found = {}
        for identity, entry in self.state.entries.items():
            if entry.cause is DueCause.ALREADY_ENDED:
                continue  # it was no attempt
            is_waiting_schedule = identity[0] and entry.state is State.WAITING
            until_ms = entry.deadline_ms
            if entry.state is State.HELD:
                until_ms = min(until_ms, entry.begin_ms + entry.max_lease_ms)
            found[identity] = (
                "scheduled" if is_waiting_schedule else names[entry.state],
                self._writer(entry.start_offset) if identity[0] else entry.consumer_id,
                until_ms - self.state.now_ms,
            )
        return found

    def _writer(self, offset: int) -> str:
        (marker,) = [record.marker for record in self.records if record.offset == offset]
        return "" if marker is None else marker.consumer_id


class AttemptsMachine(RuleBasedStateMachine):
    """One marker partition."""

    @initialize(first=st.sampled_from([0, 500]))
    def begin(self, first: int) -> None:
        self.records: list[tuple[int, int, int, Marker | None]] = []
        self.time_ms = 10_000_000
        self.offset = first
        self.start_fold(first)

    def start_fold(self, first: int) -> None:
        self.first = first
        tracker = RedeliveryTracker(first, partition=PARTITION, max_lease_ms=MAX_LEASE_MS)
        self.attempts = Attempts(tracker)
        self.ended: list[Attempt] = []

    @rule(marker=STARTS, step_ms=STEPS, timed=TIMED)
    def start(self, marker: Marker, step_ms: int, timed: bool) -> None:
        self.write(marker, step_ms, timed)

    @rule(marker=KEEPALIVES, step_ms=STEPS)
    def keepalive(self, marker: Marker, step_ms: int) -> None:
        self.write(marker, step_ms, True)

    @rule(marker=ENDS, step_ms=STEPS)
    def end(self, marker: Marker, step_ms: int) -> None:
        self.write(marker, step_ms, True)

    @rule(marker=OTHERS, step_ms=STEPS)
    def other(self, marker: Marker | None, step_ms: int) -> None:
        self.write(marker, step_ms, True)

    def write(self, marker: Marker | None, step_ms: int, timed: bool) -> None:
        self.time_ms += step_ms
        record = (self.offset, self.time_ms, self.time_ms if timed else -1, marker)
        self.offset += 1
        self.records.append(record)
        self.attempts.apply(*record)

    @precondition(
        lambda self: any(marker and marker.type is SCHEDULE for *_, marker in self.records)
    )
    @rule(data=st.data(), step_ms=STEPS, outcome=OUTCOMES)
    def end_of_schedule(self, data: st.DataObject, step_ms: int, outcome: Outcome) -> None:
        scheduled = [offset for offset, _, _, m in self.records if m and m.type is SCHEDULE]
        offset = data.draw(st.sampled_from(scheduled))
        end = Marker(
            MarkerType.END, MessageId(PARTITION, offset), 100, outcome=outcome, of_schedule=True
        )
        self.write(end, step_ms, True)

    @rule()
    def crash(self) -> None:
        """A fold that begins where a tracker commits knows of each open message what it knew."""
        ended = {
            marker.message_id
            for _, _, _, marker in self.records
            if marker is not None and marker.type is MarkerType.END
            if marker.outcome.name in ("ACK", "REDELIVERED", "DEAD_LETTERED", "ALREADY_ENDED")
        }
        before = {one: each for one, each in self.attempts.attempts.items() if one not in ended}
        resume = self.attempts.tracker.committable_offset()
        self.records = [record for record in self.records if record[0] >= resume]
        self.start_fold(resume)
        for record in self.records:
            self.attempts.apply(*record)
        after = self.attempts.attempts
        if all(log_ms >= 0 for _, _, log_ms, _ in self.records[:1]):  # R1: its clock is known
            assert {one: each for one, each in after.items() if one not in ended} == before

    @invariant()
    def the_same(self) -> None:
        if not hasattr(self, "attempts"):
            return
        model = Model(self.records, self.first)
        expected = model.attempts()
        ended = [attempt for attempt in expected if attempt.outcome is not None]
        ended.sort(key=lambda attempt: attempt.end_offset)
        self.ended += self.attempts.take_ended()
        assert self.ended == ended
        is_open = model.open()
        assert {(False, one) for one in self.attempts.attempts} == {k for k in is_open if not k[0]}
        assert {(True, one) for one in self.attempts.schedules} == {k for k in is_open if k[0]}
        assert dict(map(_shown, self.attempts.open())) == is_open
        by_start = {attempt.start_offset: attempt for attempt in expected}
        for attempt in self.attempts.attempts.values():
            assert attempt == by_start[attempt.start_offset]


def _shown(each: OpenAttempt) -> tuple[Identity, tuple[str, str, int]]:
    of_schedule = each.attempt.delivery_count == 0
    identity = (of_schedule, each.attempt.message_id)
    return identity, (each.state, each.consumer_id, each.remaining_ms)


TestAttemptsModel = AttemptsMachine.TestCase
TestAttemptsModel.settings = settings(
    max_examples=examples(60),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
