"""Claimants of one partition in a small world: one coordination log, one broker's clock, clients
that read late, pause, crash and start again, and writes that are late, lost or not acknowledged.

Nothing here decides: it moves records and time, performs the claimants' steps, and keeps account of
what was handed out, so that tests can check the account against the log.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kafkamq.claims.rules.claimant import Claimant
from kafkamq.claims.rules.log import Claim, ClaimLog
from kafkamq.claims.rules.steps import (
    ClaimantConfig,
    Delivery,
    End,
    Fetch,
    Finish,
    HandOut,
    LookUp,
    Phase,
    Stop,
    Write,
)
from kafkamq.types import MarshalRecord, MarshalType

INTERVAL_S = 60
GROUP, TOPIC = "gr", "t"
BATCH = 3


@dataclass
class Member:
    """One process of a client."""

    client: str
    instance: str
    log: ClaimLog
    monotonic_skew_ms: int
    estimate_error_s: float  # of the broker's time
    next_offset: int  # next record to read
    claimant: Claimant | None = None
    in_flight: deque[Write] = field(default_factory=deque)
    is_dead: bool = False
    fetch_offset: int = 0
    held: list[int] = field(default_factory=list)  # handed out, not committed
    has_batch: bool = False  # one was offered and not handed out
    ends: list[End] = field(default_factory=list)


class World:
    def __init__(self, delivery: Delivery, *, messages: int = 10**6) -> None:
        self.delivery = delivery
        self.now_s = 10_000.0
        self.skew_s = 0.0  # of the broker's clock
        self.records: list[tuple[float, MarshalRecord]] = []
        self.truth = ClaimLog("safe", INTERVAL_S)  # reads everything at once
        self.members: list[Member] = []
        self.ghosts: list[deque[Write]] = []  # writes of dead processes, still under way
        self.latest_offset = messages
        self.fetched = 0  # what anybody ever fetched lies before
        self.committed = -1
        self.fence = ""  # the instance whose committer came last
        self.started = 0
        self.crashes = 0
        self.takeovers = 0
        self.dropped = 0  # batches that were dropped with their claim, or died with their process
        self.done: set[int] = set()
        self.handed: list[int] = []  # at most once: every offset that was handed out
        self.batches: list[tuple[int, int]] = []
        self.tokens: dict[str, int] = {}  # by instance: the largest
        self.token = -1  # the largest that anybody worked under

    # ---- time

    def broker_s(self) -> float:
        return self.now_s + self.skew_s

    def monotonic_ms(self, member: Member) -> int:
        return round(self.now_s * 1000) + member.monotonic_skew_ms

    def estimate_s(self, member: Member) -> float:
        return self.broker_s() + member.estimate_error_s

    # ---- processes

    def start(
        self, client: str, *, reads_all: bool, monotonic_skew_ms: int, error_s: float
    ) -> None:
        """A new process; the client's former one must be dead."""
        assert all(m.is_dead for m in self.members if m.client == client)
        self.started += 1
        first, since_s = 0, None
        if not reads_all:
            since_s = self.broker_s() - 2 * INTERVAL_S - 1
            later = (i for i, (at_s, _) in enumerate(self.records) if at_s >= since_s)
            first = next(later, len(self.records))
        self.members = [m for m in self.members if not m.is_dead]
        member = Member(
            client,
            f"i{self.started}",
            ClaimLog("safe", INTERVAL_S, since_s=since_s),
            monotonic_skew_ms,
            error_s,
            first,
        )
        self.members.append(member)
        self.read(member)

    def crash(self, member: Member) -> None:
        member.is_dead = True
        self.crashes += 1
        self.drop_batch(member)
        if member.in_flight:
            self.ghosts.append(member.in_flight)

    def claim(self, member: Member) -> None:
        """Begin an attempt when there is none."""
        if member.claimant is None:
            config = ClaimantConfig(
                client=member.client,
                instance=member.instance,
                group=GROUP,
                topic=TOPIC,
                partition=0,
                delivery=self.delivery,
                interval_ms=INTERVAL_S * 1000,
                release_if_behind=False,
            )
            member.claimant = Claimant(member.log, config)
        self.plan(member)

    # ---- the log

    def append(self, write: Write) -> int:
        """The broker takes a write: the group's commit, then the record."""
        if write.commit_offset >= 0 and self.may_commit(write):
            self.committed = write.commit_offset
        offset = len(self.records)
        was_held = bool(self.true_claim().heartbeat_s)
        self.records.append((self.broker_s(), write.record))
        self.truth.apply(
            write.record, offset=offset, observed_at_s=0, broker_time_s=self.broker_s()
        )
        self.truth.check()
        is_claim = write.record.type is MarshalType.CLAIMING_PARTITION
        self.takeovers += is_claim and was_held and self.true_claim().token == offset
        return offset

    def may_commit(self, write: Write) -> bool:
        """At most once needs a committer that its successor fences; its own log is not enough."""
        return self.delivery is not Delivery.AT_MOST_ONCE or write.record.instance == self.fence

    def land(self, member: Member, *, is_acknowledged: bool = True) -> None:
        """The oldest write under way arrives."""
        if member.in_flight:
            if member.in_flight[0].must_commit and not self.may_commit(member.in_flight[0]):
                self.lose(member)
                return
            write = member.in_flight.popleft()
            offset = self.append(write)
            if member.claimant is not None:
                if is_acknowledged:
                    member.claimant.on_written(write.ticket, offset)
                else:
                    member.claimant.on_failed(write.ticket, self.monotonic_ms(member))

    def lose(self, member: Member) -> None:
        """The oldest write under way never arrives."""
        if member.in_flight:
            write = member.in_flight.popleft()
            if member.claimant is not None:
                member.claimant.on_failed(write.ticket, self.monotonic_ms(member))

    def give_up_waiting(self, member: Member) -> None:
        """The oldest write is late: its writer is told that nobody knows, and it arrives later."""
        if member.in_flight and member.claimant is not None:
            member.claimant.on_failed(member.in_flight[0].ticket, self.monotonic_ms(member))

    def land_ghost(self, number: int) -> None:
        """A dead process's write arrives."""
        ghost = self.ghosts[number % len(self.ghosts)]
        write = ghost.popleft()
        if not write.must_commit or self.may_commit(write):
            self.append(write)
        self.ghosts = [ghost for ghost in self.ghosts if ghost]

    def read(self, member: Member, count: int = 10**9) -> None:
        for _ in range(min(count, len(self.records) - member.next_offset)):
            at_s, record = self.records[member.next_offset]
            member.log.apply(record, offset=member.next_offset, observed_at_s=0, broker_time_s=at_s)
            member.next_offset += 1
        member.log.check()

    # ---- what claimants ask for

    def plan(self, member: Member, random_unit: float = 0.5) -> None:
        claimant = member.claimant
        if claimant is None:
            return
        monotonic_ms = self.monotonic_ms(member)
        steps = claimant.plan(monotonic_ms, self.estimate_s(member), random_unit=random_unit)
        for step in steps:
            if isinstance(step, Write):
                member.in_flight.append(step)
            elif isinstance(step, LookUp):
                self.fence = member.instance
                claimant.on_offsets(
                    0, self.latest_offset, self.committed, monotonic_ms=monotonic_ms
                )
            elif isinstance(step, Fetch):
                member.fetch_offset = step.offset
                self.check_token(member, claimant)
            elif isinstance(step, HandOut):
                assert monotonic_ms < claimant.lease_until_ms
                if claimant.take_batch(monotonic_ms):
                    self.batches.append((step.first_offset, step.next_offset))
                    self.handed.extend(range(step.first_offset, step.next_offset))
                    member.fetch_offset = step.next_offset
                    member.has_batch = False
            elif isinstance(step, Stop):
                if step.is_lost:
                    member.held.clear()
            elif isinstance(step, Finish):
                member.ends.append(step.reason)
                member.claimant = None
                member.held.clear()
                self.drop_batch(member)

    def drop_batch(self, member: Member) -> None:
        self.dropped += member.has_batch
        member.has_batch = False

    def check_token(self, member: Member, claimant: Claimant) -> None:
        assert claimant.token > self.token, "a later owner has a larger token"
        self.token = claimant.token

    def work(self, member: Member, count: int) -> None:
        """Fetch some messages, and hand them out (or offer them)."""
        claimant, monotonic_ms = member.claimant, self.monotonic_ms(member)
        if claimant is None:
            return
        first = member.fetch_offset
        following = min(first + count, self.latest_offset)
        if following <= first:
            return
        self.fetched = max(self.fetched, following)
        if self.delivery is Delivery.AT_MOST_ONCE:
            if claimant.wants_batch:
                # Some are only announced, until the application asks: these are never lost.
                is_wanted = count != 2
                claimant.offer(first, following, monotonic_ms, is_wanted=is_wanted)
                member.has_batch = is_wanted
            else:
                member.has_batch |= claimant.want_batch()
            self.plan(member)
        elif claimant.hand_out(range(first, following), monotonic_ms):
            member.held.extend(range(first, following))
            member.fetch_offset = following

    def finish_messages(self, member: Member, count: int, *, in_order: bool) -> None:
        """The application is done with some."""
        claimant = member.claimant
        for _ in range(min(count, len(member.held))):
            offset = member.held.pop(0 if in_order else -1)
            self.done.add(offset)
            if claimant is not None and claimant.phase in (Phase.OWNING, Phase.DRAINING):
                claimant.commit(offset)

    def release(self, member: Member, *, drain_s: float, keeps_claim: bool) -> None:
        if member.claimant is not None:
            member.claimant.release(
                self.monotonic_ms(member), drain_ms=round(drain_s * 1000), keeps_claim=keeps_claim
            )
            self.plan(member)

    def pause_group(self, seconds: int) -> None:
        expires_at_s = int(self.broker_s()) + seconds
        record = MarshalRecord(
            MarshalType.RELEASE_GROUP, 0, "adm", "adm", GROUP, expires_at_s=expires_at_s, version=0
        )
        self.append(Write(0, record))

    # ---- what must hold

    def true_claim(self) -> Claim:
        return self.truth.claim(GROUP, TOPIC, 0, now_s=self.broker_s())

    def live(self) -> list[Member]:
        """Who may hand out messages at this moment."""
        return [
            member
            for member in self.members
            if not member.is_dead
            and member.claimant is not None
            and member.claimant.is_live(self.monotonic_ms(member))
        ]

    def check(self) -> None:
        live = self.live()
        assert len(live) <= 1, "two own the partition at once"
        claim = self.true_claim()
        for member in live:
            # It may not have read yet that it was replaced; but then nobody works in its place.
            if claim.token == member.claimant.token:  # type: ignore[union-attr]
                assert (claim.client, claim.instance) == (member.client, member.instance)
        if self.delivery is Delivery.AT_MOST_ONCE:
            assert len(self.handed) == len(set(self.handed)), "an offset was handed out twice"
            lost = claim.offset - sum(offset < claim.offset for offset in self.handed)
            under_way = sum(member.has_batch for member in self.members)
            assert lost <= (self.dropped + under_way) * BATCH, "a batch was lost for no reason"
        else:
            missing = set(range(claim.offset)) - self.done
            assert not missing, "the position has passed what nobody did"

    def settle(self) -> None:
        """Faults stop: somebody gets everything done."""
        self.latest_offset = self.fetched + 5
        self.ghosts.clear()
        self.members = [member for member in self.members if not member.is_dead]
        for member in self.members:  # who believes that it is later than it is asks too early
            member.estimate_error_s = min(member.estimate_error_s, 0)
        if not self.members:
            self.start("a", reads_all=True, monotonic_skew_ms=0, error_s=0)
        for _ in range(40):
            self.now_s += 10
            for member in self.members:
                for _ in range(6):
                    while member.in_flight:
                        self.land(member)
                    self.read(member)
                    self.claim(member)
                    self.work(member, BATCH)
                    self.finish_messages(member, 10**6, in_order=True)
                    self.check()
        assert len(self.live()) == 1, "somebody owns it"
        assert self.true_claim().offset == self.latest_offset, "everything is done"
