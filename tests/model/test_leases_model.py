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

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.examples import examples

from kafkamq.markers.rules.hold import DUE
from kafkamq.markers.rules.leases import Acknowledgement, Lease, Leases, LeaseState, Renewal
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.types import Marker, MarkerType, MessageId, Outcome

MARKER_PARTITIONS = 2
MESSAGE_PARTITIONS = 3
MONOTONIC = 7_000_000  # the two clocks differ by this
OUTAGES = st.sampled_from([False, False, False, True])
STANDSTILLS = st.sampled_from([300, 900, 1000, 2000])
STEPS = st.sampled_from([0, 1, 100, 330, 334, 1000, 2500, 20_000, 61_000])


@dataclass
class Written:
    """A marker on its way: into the log, then back as a delivery report."""

    partition: int
    marker: Marker
    report: Callable[[int], None] | None = None  # called with the log time
    log_ms: int = -1
    forgotten: tuple[Lease, ...] = ()  # LOST when it was written: it must not renew these


@dataclass
class Known:
    """What the test remembers of one lease."""

    lease: Lease
    accepted: bool | None = None  # whether the tracker took its END
    in_time: bool | None = None  # whether the worker believes it was


class LeasesMachine(RuleBasedStateMachine):
    """One worker, two marker partitions."""

    @initialize(
        timeout_ms=st.sampled_from([1000, 1000, 3000]),
        max_lease_ms=st.sampled_from([43_200_000, 5000]),
    )
    def begin(self, timeout_ms: int, max_lease_ms: int) -> None:
        self.timeout_ms, self.max_lease_ms = timeout_ms, max_lease_ms
        self.log_ms = 1_000_000
        self.ids = 0
        self.leases = Leases(
            self.fresh_id(), redelivery_timeout_ms=timeout_ms, max_lease_ms=max_lease_ms
        )
        self.trackers = [RedeliveryTracker(partition=p) for p in range(MARKER_PARTITIONS)]
        self.queued: list[Written] = []  # the producer's queue while Kafka is away
        self.reports: list[Written] = []  # in the log, not reported
        self.is_down = False
        self.known: dict[int, Known] = {}
        self.settled: dict[MessageId | None, Known] = {}
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
        self, partition: int, marker: Marker, report: Callable[[int], None] | None = None
    ) -> None:
        newest = {known.lease.message_id: known.lease for known in self.known.values()}
        forgotten = tuple(
            known.lease
            for known in self.known.values()
            if known.lease.state is LeaseState.LOST
            and known.lease.marker_partition == partition
            and newest[known.lease.message_id] is known.lease
        )
        self.queued.append(Written(partition, marker, report, forgotten=forgotten))
        if not self.is_down:
            self.append_queued()

    def append_queued(self) -> None:
        for written in self.queued:
            tracker, marker = self.trackers[written.partition], written.marker
            # A TICK first: what the clock does is no doing of the marker (R2).
            tracker.apply(tracker.next_offset, self.log_ms, Marker(MarkerType.TICK))
            before = [self.deadline(lease) for lease in written.forgotten]
            if marker.type is MarkerType.END:
                known = self.settled[marker.message_id]
                known.accepted = self.deadline(known.lease) is not None
            tracker.apply(tracker.next_offset, self.log_ms, marker)
            if marker.type is MarkerType.KEEPALIVE:  # R5, R7
                assert before == [self.deadline(lease) for lease in written.forgotten], marker
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

    def deadline(self, lease: Lease) -> int | None:
        """Until when the tracker lets the message be held; None: not held there."""
        tracker = self.trackers[lease.marker_partition]
        hold = tracker.hold_of(lease.message_id)
        if hold is None or hold.flags & DUE:
            return None
        return tracker.changes_at(hold)

    # Rules: what a worker does.

    @precondition(lambda self: not self.batch)
    @rule(count=st.integers(1, 3), again=st.booleans())
    def start(self, count: int, again: bool) -> None:
        ids = []
        if again and self.failed:
            ids, self.failed = self.failed[:count], self.failed[count:]
        else:
            for _ in range(count):
                ids.append(MessageId(self.next_offset % MESSAGE_PARTITIONS, self.next_offset))
                self.next_offset += 1
        self.renew_id()
        for message_id in ids:
            if self.leases.is_lapsed(message_id, self.now_ms):
                continue  # its START is in the log; a tracker answers for it
            lease = self.leases.start(message_id, message_id.offset % MARKER_PARTITIONS)
            self.known[id(lease)] = Known(lease)
            self.batch.append(lease)
            written_ms = self.now_ms
            self.write(
                lease.marker_partition,
                Marker(
                    MarkerType.START,
                    message_id,
                    self.timeout_ms,
                    consumer_id=self.leases.consumer_id,
                    max_lease_ms=self.max_lease_ms,
                ),
                lambda log_ms, lease=lease, at=written_ms: self.leases.started(lease, at, log_ms),
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
        self.failed += [lease.message_id for lease in self.batch]
        self.batch = []

    @rule()
    def reports_come(self) -> None:
        self.serve()

    @rule(pick=st.integers(0, 50))
    def acknowledge(self, pick: int) -> None:
        held = [k for k in self.known.values() if k.lease.state is LeaseState.HELD]
        if not held:
            return
        known = held[pick % len(held)]
        lease = known.lease
        deadline_ms = lease.deadline_ms
        acknowledgement = self.leases.acknowledge(lease, self.now_ms)
        assert (acknowledgement is Acknowledgement.WRITE) == (self.now_ms < deadline_ms)
        self.renew_id()
        if acknowledgement is not Acknowledgement.WRITE:
            return
        assert self.leases.acknowledge(lease, self.now_ms) is Acknowledgement.ACKNOWLEDGED_BEFORE

        def reported(log_ms: int) -> None:
            known.in_time = self.leases.ended(lease, log_ms)

        self.settled[lease.message_id] = known
        marker = Marker(MarkerType.END, lease.message_id, consumer_id=lease.holder_id)
        marker.outcome = Outcome.ACK
        self.write(lease.marker_partition, marker, reported)

    @rule(pick=st.integers(0, 50), extension_ms=st.sampled_from([1, 4000, 90_000]))
    def extend(self, pick: int, extension_ms: int) -> None:
        held = [k.lease for k in self.known.values() if k.lease.state is LeaseState.HELD]
        if not held:
            return
        lease = held[pick % len(held)]
        self.extended.add(id(lease))
        renewal = self.leases.extend(lease, extension_ms, self.now_ms)
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
        its verdict came late (a limit of R9 that docs/guarantees.md names).
        """
        held = [k.lease for k in self.known.values() if k.lease.state is LeaseState.HELD]
        held = [lease for lease in held if id(lease) not in self.extended]
        if not held:
            return
        lease = held[pick % len(held)]
        self.met_zombies.add(id(lease))
        self.leases.gained_partition(lease.message_id.partition, self.now_ms)
        self.write(
            lease.marker_partition,
            Marker(MarkerType.START, lease.message_id, self.timeout_ms, consumer_id="zombie"),
        )

    def keep_alive(self, renewal: Renewal) -> None:
        self.write(
            renewal.marker_partition,
            Marker(
                MarkerType.KEEPALIVE,
                renewal.message_id,
                renewal.redeliver_after_ms,
                consumer_id=renewal.consumer_id,
            ),
            lambda log_ms: self.leases.renewed(renewal, self.now_ms, log_ms),
        )

    @precondition(lambda self: not self.batch)
    @rule(count=st.integers(1, 3))
    def receive(self, count: int) -> None:
        """Nothing goes wrong: STARTs, their reports, the commit."""
        self.start(count=count, again=True)
        self.commit()

    @rule(step_ms=STEPS, serve=st.booleans(), outage=OUTAGES)
    def pass_time(self, step_ms: int, serve: bool, outage: bool) -> None:
        """The lease renewer beats at T/3 whatever else happens, an outage of Kafka included."""
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
        for known in getattr(self, "known", {}).values():
            lease = known.lease
            if lease.state is not LeaseState.HELD or self.log_ms > lease.log_deadline_ms:
                continue
            assert self.deadline(lease) is not None, lease

    @invariant()
    def what_the_worker_holds_stands(self) -> None:
        """By its own clock, however late reports are served; but for an older owner's START."""
        for known in getattr(self, "known", {}).values():
            lease = known.lease
            if lease.state is not LeaseState.HELD or self.now_ms >= lease.deadline_ms:
                continue
            if id(lease) not in self.met_zombies:
                assert self.deadline(lease) is not None, lease

    @invariant()
    def timely_verdicts_were_accepted(self) -> None:
        for known in getattr(self, "known", {}).values():
            if known.in_time and known.accepted is not None:
                assert known.accepted, known.lease


LeasesMachine.TestCase.settings = settings(
    max_examples=examples(300), stateful_step_count=40, deadline=None
)
TestLeases = LeasesMachine.TestCase
