"""A worker's leases against trackers that fold what it writes, driven by Hypothesis.

The worker's marks go through a log that may stand still (an outage) and whose delivery reports may
come late. Whatever happens: a lease that is certain by log time stands at the tracker too (R9), so
does one that the worker's own clock lets it work on (R5),
what the worker forgot is never kept alive by it (R5, R7), and a verdict that it takes for timely
was accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.examples import examples

from kafkamq.markers.rules.hold import DUE
from kafkamq.markers.rules.leases import Lease, Leases, LeaseState, Refusal, Renewal
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.types import Marker, MarkerType, MessageId, Outcome

MARKER_PARTITIONS = 2
MESSAGE_PARTITIONS = 3
MONOTONIC = 7_000_000  # the two clocks differ by this
OUTAGES = st.sampled_from([False, False, False, True])
STANDSTILLS = st.sampled_from([300, 900, 1000, 2000])
STEPS = st.sampled_from([0, 1, 100, 330, 334, 1000, 2500, 20_000, 61_000])


@dataclass
class Known:
    """What the test remembers of one delivery."""

    lease: Lease
    offset: int
    has_verdict: bool = False
    accepted: bool | None = None  # whether the tracker took its END
    in_time: bool | None = None  # whether the worker believes it was

    @property
    def message_id(self) -> MessageId:
        return MessageId(self.lease.partition, self.offset)

    @property
    def is_held(self) -> bool:
        return self.lease.holds(self.offset)


@dataclass
class Written:
    """A marker on its way: into the log, then back as a delivery report."""

    partition: int
    marker: Marker
    report: Callable[[int], None] | None = None  # called with the log time
    log_ms: int = -1
    forgotten: tuple[Known, ...] = ()  # LOST when it was written: it must not renew these
    settled: tuple[Known, ...] = ()  # whose END it is


class LeasesMachine(RuleBasedStateMachine):
    """One worker, two marker partitions."""

    @initialize(
        timeout_ms=st.sampled_from([1000, 1000, 3000]),
        max_lease_ms=st.sampled_from([43_200_000, 5000]),
        is_batched=st.booleans(),
    )
    def begin(self, timeout_ms: int, max_lease_ms: int, is_batched: bool) -> None:
        self.timeout_ms, self.max_lease_ms = timeout_ms, max_lease_ms
        self.log_ms = 1_000_000
        self.ids = 0
        self.leases = Leases(
            self.fresh_id(),
            redelivery_timeout_ms=timeout_ms,
            max_lease_ms=max_lease_ms,
            batch_markers=is_batched,
        )
        self.is_batched = is_batched
        self.trackers = [RedeliveryTracker(partition=p) for p in range(MARKER_PARTITIONS)]
        self.queued: list[Written] = []  # the producer's queue while Kafka is away
        self.reports: list[Written] = []  # in the log, not reported
        self.is_down = False
        self.known: list[Known] = []
        self.batch: list[Lease] = []
        self.met_zombies: set[int] = set()
        self.extended: set[int] = set()
        self.failed: list[MessageId] = []  # polled again after the seek
        self.next_offset = 0
        self.renewed_ms = self.log_ms
        self.tick()

    # The shell's part.

    def fresh_id(self) -> str:
        self.ids += 1
        return f"worker-{self.ids}"

    @property
    def now_ms(self) -> int:
        return self.log_ms + MONOTONIC

    def write(
        self,
        partition: int,
        marker: Marker,
        report: Callable[[int], None] | None = None,
        settled: tuple[Known, ...] = (),
    ) -> None:
        newest = {known.message_id: known for known in self.known}
        forgotten = tuple(
            known
            for known in newest.values()
            if known.lease.state is LeaseState.LOST
            and not known.has_verdict
            and known.lease.marker_partition == partition
        )
        self.queued.append(Written(partition, marker, report, forgotten=forgotten, settled=settled))
        if not self.is_down:
            self.append_queued()

    def append_queued(self) -> None:
        for written in self.queued:
            tracker, marker = self.trackers[written.partition], written.marker
            # A TICK first: what the clock does is no doing of the marker (R2).
            tracker.apply(tracker.next_offset, self.log_ms, Marker(MarkerType.TICK))
            before = [self.deadline(known) for known in written.forgotten]
            for known in written.settled:
                known.accepted = self.deadline(known) is not None
            tracker.apply(tracker.next_offset, self.log_ms, marker)
            if marker.type is MarkerType.KEEPALIVE:  # R5, R7
                assert before == [self.deadline(known) for known in written.forgotten], marker
            written.log_ms = self.log_ms
            self.reports.append(written)
        self.queued.clear()

    def tick(self) -> None:
        """Time passes in the log only with records."""
        if self.is_down:
            return
        for tracker in self.trackers:
            tracker.apply(tracker.next_offset, self.log_ms, Marker(MarkerType.TICK))

    def serve(self) -> None:
        """Delivery reports reach the worker."""
        reports, self.reports = self.reports, []
        for written in reports:
            if written.report is not None:
                written.report(written.log_ms)
        self.renew_id()

    def renew_id(self) -> None:
        if self.leases.id_is_spent:
            self.leases.change_id(self.fresh_id())

    def deadline(self, known: Known) -> int | None:
        """Until when the tracker lets the message be held; None: not held there."""
        tracker = self.trackers[known.lease.marker_partition]
        hold = tracker.hold_of(known.message_id)
        if hold is None or hold.flags & DUE:
            return None
        return tracker.changes_at(hold)

    def held(self) -> list[Known]:
        return [known for known in self.known if known.is_held]

    # Rules: what a worker does.

    @precondition(lambda self: not self.batch)
    @rule(count=st.integers(1, 5), again=st.booleans(), together=st.booleans())
    def start(self, count: int, again: bool, together: bool) -> None:
        ids = []
        if again and self.failed:
            ids, self.failed = self.failed[:count], self.failed[count:]
        else:
            for _ in range(count):  # three of a partition in a row
                ids.append(MessageId(self.next_offset // 3 % MESSAGE_PARTITIONS, self.next_offset))
                self.next_offset += 1
        self.renew_id()
        # It is in the log, its lease over: a tracker answers for it.
        left = [each for each in ids if not self.leases.is_lapsed(each, self.now_ms)]
        runs = [list(run) for _, run in groupby(left, lambda each: each.partition)]
        for run in runs if together and self.is_batched else [[each] for each in left]:
            self.start_run(run[0].partition, sorted(each.offset for each in run))

    def start_run(self, partition: int, offsets: list[int]) -> None:
        route = partition % MARKER_PARTITIONS
        lease = self.leases.start(partition, offsets, (b"", 0), route)
        self.known += [Known(lease, offset) for offset in offsets]
        self.batch.append(lease)
        written_ms = self.now_ms
        self.write(
            route,
            Marker(
                MarkerType.START,
                None if len(offsets) > 1 else MessageId(partition, *offsets),
                self.timeout_ms,
                consumer_id=self.leases.consumer_id,
                max_lease_ms=self.max_lease_ms,
                batches=(lease.batch(),) if len(offsets) > 1 else (),
            ),
            lambda log_ms: self.leases.started(lease, written_ms, log_ms),
        )

    @precondition(lambda self: self.batch)
    @rule()
    def commit(self) -> None:
        self.serve()
        if all(lease.state is LeaseState.STARTED for lease in self.batch):
            self.leases.committed(self.batch, self.now_ms)
            self.renew_id()
            self.batch = []

    @precondition(lambda self: self.batch)
    @rule()
    def fail(self) -> None:
        self.leases.failed(self.batch)
        self.renew_id()
        self.failed += [each for lease in self.batch for each in lease.message_ids()]
        self.batch = []

    @rule()
    def reports_come(self) -> None:
        self.serve()

    @rule(pick=st.integers(0, 50), is_plain=st.booleans())
    def acknowledge(self, pick: int, is_plain: bool) -> None:
        """Give a verdict as most ACKs do, or as other verdicts."""
        held = self.held()
        if not held:
            return
        known = held[pick % len(held)]
        lease, offset = known.lease, known.offset
        is_in_time = self.now_ms < lease.deadline_ms
        if is_plain and is_in_time:
            lease.held.remove(offset)
            self.leases.note(lease)
        else:
            part = self.leases.acknowledge(lease, offset, self.now_ms)
            assert isinstance(part, Lease) == is_in_time
            self.renew_id()
        known.has_verdict = is_in_time
        if is_in_time:
            refusal = self.leases.acknowledge(lease, offset, self.now_ms)
            assert refusal is Refusal.ACKNOWLEDGED_BEFORE

    @rule()
    def write_ends(self) -> None:
        parts = self.leases.collect()
        self.leases.collected()
        for part in parts:
            offsets = set(part.offsets)
            known = tuple(
                each
                for each in self.known
                if each.has_verdict and each.offset in offsets and each.accepted is None
            )
            assert len(known) == len(offsets)

            def reported(log_ms: int, part: Lease = part, known: tuple[Known, ...] = known) -> None:
                is_in_time = self.leases.ended(part, log_ms)
                for each in known:
                    each.in_time = is_in_time

            end = Marker(MarkerType.END, consumer_id=part.holder_id, outcome=Outcome.ACK)
            end.batches = (part.batch(),)
            self.write(part.marker_partition, end, reported, settled=known)

    @rule(pick=st.integers(0, 50), extension_ms=st.sampled_from([1, 4000, 90_000]))
    def extend(self, pick: int, extension_ms: int) -> None:
        held = self.held()
        if not held:
            return
        known = held[pick % len(held)]
        lease, offset = known.lease, known.offset
        if len(lease.offsets) > 1 and self.leases.may_hand_out(lease, self.now_ms):
            own = self.leases.apart(lease, [offset])
            lease.uncollected.discard(offset)
            lease.held.remove(offset)
            self.leases.keep(own)
            known.lease = own
        self.extended.add(id(known))
        renewal = self.leases.extend(known.lease, extension_ms, self.now_ms)
        self.renew_id()
        if renewal is not None:
            self.keep_alive(renewal)

    @rule(partition=st.integers(0, MESSAGE_PARTITIONS - 1))
    def gain(self, partition: int) -> None:
        self.leases.gained_partition(partition, self.now_ms)

    @rule(pick=st.integers(0, 50))
    def zombie_start(self, pick: int) -> None:
        """R7: the delayed START of an older owner, within 60 s of the change of owners.

        Not of what was extended: it would end that early, and who is paused then is not told that
        its verdict came late (a limit of R9 that docs/protocol.md names).
        """
        held = [known for known in self.held() if id(known) not in self.extended]
        if not held:
            return
        known = held[pick % len(held)]
        self.met_zombies.add(id(known))
        self.leases.gained_partition(known.lease.partition, self.now_ms)
        self.write(
            known.lease.marker_partition,
            Marker(MarkerType.START, known.message_id, self.timeout_ms, consumer_id="zombie"),
        )

    def keep_alive(self, renewal: Renewal) -> None:
        self.write(
            renewal.marker_partition,
            Marker(
                MarkerType.KEEPALIVE,
                renewal.message_id,
                renewal.redeliver_after_ms,
                consumer_id=renewal.consumer_id,
                batches=renewal.batches,
            ),
            lambda log_ms: self.leases.renewed(renewal, self.now_ms, log_ms),
        )

    @precondition(lambda self: not self.batch)
    @rule(count=st.integers(1, 5))
    def receive(self, count: int) -> None:
        """Nothing goes wrong: STARTs, their reports, the commit."""
        self.start(count=count, again=True, together=True)
        self.commit()

    @rule(step_ms=STEPS, serve=st.booleans(), outage=OUTAGES)
    def pass_time(self, step_ms: int, serve: bool, outage: bool) -> None:
        """The keeper beats at T/3 whatever else happens, an outage of Kafka included."""
        self.is_down = outage
        self._pass(step_ms, serve)
        if outage:
            self.is_down = False
            self.append_queued()
            self.tick()

    def _pass(self, step_ms: int, serve: bool) -> None:
        end_ms = self.log_ms + step_ms
        while self.log_ms < end_ms:
            self.log_ms = min(end_ms, self.renewed_ms + self.timeout_ms // 3)
            self.tick()
            if self.log_ms >= self.renewed_ms + self.timeout_ms // 3:
                self.renewed_ms = self.log_ms
                self.leases.expire(self.now_ms)
                self.renew_id()
                for renewal in self.leases.plan_renewals(self.now_ms):
                    self.keep_alive(renewal)
            if serve:
                self.serve()

    @rule(step_ms=STANDSTILLS)
    def stand_still(self, step_ms: int) -> None:
        """The process is paused: nothing is written or served until it goes on, then it beats."""
        self.log_ms += step_ms
        self.tick()
        self.renewed_ms = max(self.renewed_ms, self.log_ms - self.timeout_ms // 3)

    # What must hold.

    @invariant()
    def core_is_sound(self) -> None:
        if hasattr(self, "leases"):
            self.leases.check()

    @invariant()
    def certain_leases_stand(self) -> None:
        """R9: while log time has not passed what the worker knows, the tracker holds it."""
        for known in getattr(self, "known", ()):
            if known.is_held and self.log_ms <= known.lease.log_deadline_ms:
                assert self.deadline(known) is not None, known

    @invariant()
    def what_the_worker_holds_stands(self) -> None:
        """By its own clock, however late reports are served; but for an older owner's START."""
        for known in getattr(self, "known", ()):
            if not known.is_held or self.now_ms >= known.lease.deadline_ms:
                continue
            if id(known) not in self.met_zombies:
                assert self.deadline(known) is not None, known

    @invariant()
    def timely_verdicts_were_accepted(self) -> None:
        for known in getattr(self, "known", ()):
            if known.in_time and known.accepted is not None:
                assert known.accepted, known


LeasesMachine.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None
)
TestLeases = LeasesMachine.TestCase


# ---- what was found


def check(machine: LeasesMachine) -> None:
    machine.core_is_sound()
    machine.certain_leases_stand()
    machine.what_the_worker_holds_stands()
    machine.timely_verdicts_were_accepted()


def test_of_keepalives_that_an_outage_writes_at_once_the_last_one_counts() -> None:
    machine = LeasesMachine()
    machine.begin(timeout_ms=1000, max_lease_ms=43_200_000, is_batched=False)
    machine.receive(count=2)
    machine.extend(pick=0, extension_ms=4000)
    machine.pass_time(step_ms=2500, serve=True, outage=True)
    machine.reports_come()
    for step_ms in (900, 900, 300):
        machine.stand_still(step_ms=step_ms)
        check(machine)


def test_a_keepalive_renews_no_message_that_was_acked_before_and_so_is_not_named() -> None:
    machine = LeasesMachine()
    machine.begin(timeout_ms=1000, max_lease_ms=43_200_000, is_batched=True)
    machine.receive(count=2)
    machine.acknowledge(pick=0, is_plain=True)
    machine.gain(partition=0)
    machine.stand_still(step_ms=900)
    machine.pass_time(step_ms=334, serve=False, outage=False)
    machine.write_ends()
    machine.reports_come()
    check(machine)
    assert [each.in_time for each in machine.known if each.has_verdict] == [False]
