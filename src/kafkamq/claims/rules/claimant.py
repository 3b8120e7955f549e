"""One attempt to claim one partition, and what follows when it succeeds.

A claimant reads the coordination log through a ``ClaimLog`` that its shell keeps up to date, and
asks for one write at a time. It believes nothing before it has read it back:

- C1 Claim: write ClaimingPartition, read it back; it is ours if the log says so. Look up the
  position, heartbeat at once, read that back, then fetch.
- C2 A heartbeat counts for ``lease_ms`` from the moment before it was *sent*, by the process's
  monotonic clock, and only once it was read back. The lease ends an interval before anybody
  else may claim; so clocks may be wrong by an interval. When it has ended nothing is handed out
  any more, whatever the log says: the claim is given up.
- C3 Release: stop, let verdicts come in for a while, write the position, read it back. What is
  not known to be ours is not released, so that a late release moves nobody's position.
- C4 Restart: a fresh claim of the same client is taken over by a heartbeat that is read back; it
  begins where the log says at that point, however far the former instance came meanwhile.
- C5 At least once: the heartbeat's offset is the first one that is not committed.
- C6 At most once: write ClaimingMessages, read it back under a claim that still holds, heartbeat
  with the position behind the batch, read that back, and only then hand the batch out. A release
  gives back what was not taken by then.
- C7 It gives the claim up when its group is paused, when it falls behind, and, beside clients that
  go by other rules, when one of these heartbeats on the partition.

A shell calls ``plan`` whenever something has happened and at ``wake_ms`` at the latest, performs
the steps in their order and answers. Writes of a claimant keep their order in the log (one
idempotent producer). All times are arguments: ``monotonic_ms`` of the process, ``now_s`` of the
broker (``safe`` rules) or of the observer (``peer`` rules).

Once per heartbeat the position and the log's end are sampled, ten of each are kept, and a velocity
is their range divided by their number less one. A claimant is *behind* when two more heartbeats at
its velocity would not reach the end and the partition grows at least as fast; three times in a
row, and it releases. It is *stuck* when it has seen no message for an interval, did not move, and
there is something to read. That its own heartbeats are late is seen by its lease (C2).

Sources: Marshal PROTOCOL.md, "Partition Assignment for Consumption", "Consumption" and "At Least
Once (ALO)"; start and health check are as in its Go client.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kafkamq.claims.rules.log import Claim, ClaimLog, ClaimState
from kafkamq.claims.rules.steps import (
    HOLDING,
    ClaimantConfig,
    Delivery,
    End,
    Fetch,
    Finish,
    HandOut,
    LookUp,
    Phase,
    Step,
    Stop,
    Write,
)
from kafkamq.errors import LeaseLostError, StateError
from kafkamq.types import MarshalType

SAMPLES = 10
MAX_CYCLES_BEHIND = 3


class DeliveredOffsets:
    """Offsets that were handed out and not all committed; the position is the first gap.

    Offsets come in rising order and may leave holes, as compaction and transactions do: then the
    position is behind the last committed one.
    """

    __slots__ = ("_committed", "_delivered", "_open", "position")

    def __init__(self, position: int) -> None:
        self.position = position
        self._delivered: deque[int] = deque()
        self._open: set[int] = set()
        self._committed: set[int] = set()

    @property
    def outstanding(self) -> int:
        return len(self._open)

    @property
    def tracked(self) -> int:
        """Handed out and not passed by the position."""
        return len(self._delivered)

    def deliver(self, offsets: Iterable[int]) -> None:
        for offset in offsets:
            last = self._delivered[-1] if self._delivered else self.position - 1
            if offset <= last:
                raise StateError(f"offset {offset} was handed out before, {last + 1} is the next")
            self._delivered.append(offset)
            self._open.add(offset)

    def commit(self, offset: int) -> bool:
        """Note what is done; False: it was not handed out, or the position has passed it."""
        if offset in self._open:
            self._open.remove(offset)
            self._committed.add(offset)
            return True
        return offset in self._committed

    def forget(self, offset: int) -> None:
        """No verdict will come: it is not outstanding, and the position does not pass it."""
        self._open.discard(offset)

    def advance(self) -> bool:
        """Move the position to the first gap; False: it did not move."""
        before = self.position
        while self._delivered and self._delivered[0] in self._committed:
            offset = self._delivered.popleft()
            self._committed.remove(offset)
            self.position = offset + 1
        return self.position != before


def start_position(
    *,
    coordination_offset: int,
    committed_offset: int,
    earliest_offset: int,
    latest_offset: int | None = None,
    take_larger: bool = False,
) -> Fetch:
    """Return where a new owner begins, and how far the known position lies outside of the log.

    The coordination log's offset when it is known (> 0), else Kafka's committed one, else the
    log's start; never before that. Beyond the log's end it is clamped to the end.
    """
    known = coordination_offset if coordination_offset > 0 else committed_offset
    if take_larger:
        known = max(known, committed_offset)
    known = max(known, 0)
    start = max(known, earliest_offset)
    beyond = 0
    if latest_offset is not None and start > max(latest_offset, earliest_offset):
        beyond = start - latest_offset
        start = max(latest_offset, earliest_offset)
    deleted = earliest_offset - known if 0 < known < earliest_offset else 0
    return Fetch(start, deleted, beyond)


def velocity(samples: Collection[int]) -> float:
    known = [sample for sample in samples if sample > 0]
    if len(known) < 2:
        return 0.0
    return (max(known) - min(known)) / (len(known) - 1)


class Health:
    """The samples of one claim; velocities are offsets per heartbeat."""

    __slots__ = ("_config", "cycles_behind", "latest_offsets", "message_ms", "positions")

    def __init__(self, config: ClaimantConfig, monotonic_ms: int) -> None:
        self.positions: deque[int] = deque(maxlen=SAMPLES)
        self.latest_offsets: deque[int] = deque(maxlen=SAMPLES)
        self.cycles_behind = 0
        self.message_ms = monotonic_ms
        self._config = config

    def sample(self, position: int, latest_offset: int) -> None:
        self.positions.append(position)
        self.latest_offsets.append(latest_offset)

    def judge(self, position: int, latest_offset: int, monotonic_ms: int) -> End | None:
        """Return why the claim is to be given up; once per heartbeat."""
        config = self._config
        consumer, partition = velocity(self.positions), velocity(self.latest_offsets)
        if not config.release_if_behind:
            return None
        is_silent = monotonic_ms - self.message_ms > config.interval_ms
        if is_silent and not consumer and (partition > 0 or latest_offset > position):
            return End.STUCK
        if config.is_whole_topic:
            return None
        if position + int(consumer * 2) >= latest_offset or partition < consumer:
            self.cycles_behind = 0
            return None
        self.cycles_behind += 1
        return End.BEHIND if self.cycles_behind >= MAX_CYCLES_BEHIND else None


def may_reclaim(config: ClaimantConfig, claim: Claim) -> bool:
    """C4: fresh only, though the Go client takes over any claim that holds."""
    return (
        config.reclaim
        and claim.client == config.client
        and claim.state is ClaimState.FRESH
        and not claim.rivals
    )


@dataclass(slots=True)
class ClaimBatch:
    """At most once: what is to be handed out; it is announced, then committed."""

    first_offset: int
    next_offset: int
    is_wanted: bool = True
    is_announced: bool = False
    is_sent: bool = False


@dataclass(slots=True)
class PendingWrite:
    ticket: int
    type: MarshalType
    sent_ms: int
    position: int = 0
    offset: int = -1


class Claimant:
    """Holds one partition for one instance of a client, or tries to."""

    def __init__(
        self, log: ClaimLog, config: ClaimantConfig, *, peers: ClaimLog | None = None
    ) -> None:
        self.config = config
        self.phase = Phase.SEEKING
        # -1: the claim is not ours.
        self.token = -1
        self.lateness_ms = 0
        self.confirmed_position = -1
        self._log = log
        self._peers = peers
        self._steps: list[Step] = []
        self._tickets = 0
        self._pending: PendingWrite | None = None
        self._retry_ms = -(2**62)
        self._offsets = DeliveredOffsets(0)
        self._start: Fetch | None = None
        self._health: Health | None = None
        self._batch: ClaimBatch | None = None
        # The offset that C6 let be handed out, and nobody took.
        self._untaken_offset: int | None = None
        # Only what stands from here on in the log is of this attempt.
        self._since_offset = 0
        self._is_restart = False  # C4
        self._is_looking = False
        self._looked_ms = 0
        self._lease_from_ms = 0
        self._next_beat_ms = 0
        self._end: End | None = None
        self._keeps_claim = False
        self._release_offset: int | None = None
        self._drain_until_ms = 0
        self._give_up_ms = 0
        log.trust(config.instance)

    # ---- views

    @property
    def position(self) -> int:
        """Next offset to consume; -1 while it is not known."""
        return -1 if self._start is None else self._offsets.position

    @property
    def outstanding(self) -> int:
        """Return how many messages were handed out and have no verdict (at least once)."""
        return self._offsets.outstanding

    @property
    def wants_batch(self) -> bool:
        """At most once: ``offer`` may be called."""
        return self._is_at_most_once and self.phase is Phase.OWNING and self._batch is None

    @property
    def _is_at_most_once(self) -> bool:
        return self.config.delivery is Delivery.AT_MOST_ONCE

    @property
    def lease_until_ms(self) -> int:
        """Return when the right to hand out ends, by the monotonic clock (C2)."""
        return self._lease_from_ms + self.config.lease_ms

    def is_live(self, monotonic_ms: int) -> bool:
        """Messages may be handed out at this moment (C2)."""
        return self.phase is Phase.OWNING and monotonic_ms < self.lease_until_ms

    def wake_ms(self) -> int | None:
        """Return when ``plan`` is due if nothing happens; None: there is nothing to do."""
        phase, times = self.phase, []
        if phase is Phase.OVER:
            return None
        if phase is Phase.LOOKING:
            if not self._is_looking:
                times.append(self._retry_ms)
        elif self._pending is None:
            batch = self._batch
            is_pressing = batch is not None and (batch.is_wanted or not batch.is_announced)
            is_idle = phase in (Phase.OWNING, Phase.DRAINING) and not is_pressing
            times.append(max(self._retry_ms, self._next_beat_ms) if is_idle else self._retry_ms)
        if phase is Phase.CLAIMING or phase in HOLDING:
            times.append(self.lease_until_ms)
        if phase is Phase.DRAINING:
            times.append(self._drain_until_ms)
        if phase is Phase.RELEASING:
            times.append(self._give_up_ms)
        return min(times, default=None)

    # ---- what the shell reports

    def on_written(self, ticket: int, offset: int) -> None:
        """The write stands at ``offset`` in the coordination partition."""
        if self._pending is not None and self._pending.ticket == ticket:
            self._pending.offset = offset

    def on_failed(self, ticket: int, monotonic_ms: int) -> None:
        """The write failed, or nobody knows: it may be in the log all the same. It is repeated."""
        if self._pending is not None and self._pending.ticket == ticket:
            self._pause(monotonic_ms)
            self._next_beat_ms = monotonic_ms

    def on_offsets(
        self, earliest_offset: int, latest_offset: int, committed_offset: int, *, monotonic_ms: int
    ) -> None:
        """Answer to ``LookUp``; a negative ``committed_offset``: none."""
        self._is_looking = False
        if self.phase is Phase.LOOKING:
            start = start_position(
                coordination_offset=self._coordination_offset(self._claim(0.0)),
                committed_offset=committed_offset,
                earliest_offset=earliest_offset,
                latest_offset=latest_offset,
                take_larger=self._is_at_most_once,
            )
            self._begin_at(start)
            self.phase = Phase.STARTING
            self._clear(monotonic_ms)
        elif self.phase is Phase.OWNING and self._health is not None:
            self._offsets.advance()
            self._health.sample(self.position, latest_offset)
            reason = self._health.judge(self.position, latest_offset, monotonic_ms)
            if reason is not None:  # C7
                self.release(monotonic_ms, drain_ms=self.config.patience_ms, reason=reason)

    def on_lookup_failed(self, monotonic_ms: int) -> None:
        """Answer to ``LookUp``; a claim that has not begun asks again."""
        self._is_looking = False
        if self.phase is Phase.LOOKING:
            self._pause(monotonic_ms)

    def hand_out(self, offsets: Sequence[int], monotonic_ms: int) -> bool:
        """At least once: these messages go to the application now; False: they may not."""
        if not self.is_live(monotonic_ms):
            return False
        self._offsets.deliver(offsets)
        self._saw_messages(monotonic_ms)
        return True

    def commit(self, offset: int) -> None:
        """At least once: the message is done."""
        if self.phase not in (Phase.OWNING, Phase.DRAINING):
            reason = "" if self._end is None else f" ({self._end.value})"
            raise LeaseLostError(
                f"{self.config.topic}[{self.config.partition}] is not claimed any more{reason}:"
                f" offset {offset} cannot be committed, its message may be with another consumer"
            )
        if not self._offsets.commit(offset):
            raise StateError(f"offset {offset} was not handed out, or is committed already")

    def forget(self, offset: int) -> None:
        """At least once: no verdict will come, so a release does not wait for it (C3)."""
        self._offsets.forget(offset)

    def offer(
        self, first_offset: int, next_offset: int, monotonic_ms: int, *, is_wanted: bool = True
    ) -> None:
        """At most once: a batch was fetched; ``HandOut`` says when it may be used.

        With ``is_wanted=False`` it is only announced, and may still be repeated after a crash,
        until ``want_batch`` commits it.
        """
        if not self.wants_batch:
            raise StateError("a batch is offered while none is wanted")
        if not self.position <= first_offset < next_offset:
            raise StateError(
                f"a batch from {first_offset} to {next_offset} is offered at {self.position}"
            )
        self._batch = ClaimBatch(first_offset, next_offset, is_wanted)
        self._saw_messages(monotonic_ms)

    def want_batch(self) -> bool:
        """At most once: the application waits for the offered batch; False: there is none."""
        if self._batch is not None:
            self._batch.is_wanted = True
        return self._batch is not None

    def take_batch(self, monotonic_ms: int) -> bool:
        """At most once: what ``HandOut`` named goes to the application now; False: it may not."""
        if not self.is_live(monotonic_ms):
            return False
        self._untaken_offset = None
        return True

    def read(self, monotonic_ms: int) -> None:
        """Its messages are read from now on: only now may it be too slow."""
        self._health = Health(self.config, monotonic_ms)

    def _saw_messages(self, monotonic_ms: int) -> None:
        if self._health is not None:
            self._health.message_ms = monotonic_ms

    def beat_soon(self, monotonic_ms: int) -> None:
        """Write the position at the next ``plan``, rather than at the next heartbeat's turn.

        ``position`` is up to date after this, also while another write is under way.
        """
        self._offsets.advance()
        self._next_beat_ms = min(self._next_beat_ms, monotonic_ms)

    def release(
        self,
        monotonic_ms: int,
        *,
        drain_ms: int = 0,
        reason: End = End.RELEASED,
        keeps_claim: bool = False,
        offset: int | None = None,
    ) -> None:
        """Give the partition back (C3); what is under way is awaited."""
        if self._end is not None:
            self._drain_until_ms = min(self._drain_until_ms, monotonic_ms + drain_ms)
            return
        self._end = End.KEPT if keeps_claim else reason
        self._keeps_claim = keeps_claim
        self._release_offset = offset
        if self.phase is Phase.OWNING:
            self.phase = Phase.DRAINING
            if self._batch is not None and not self._batch.is_wanted:
                self._batch = None
            self._drain_until_ms = monotonic_ms + drain_ms
            self._steps.append(Stop(self._end, is_lost=False))
        elif self.token >= 0:
            self._begin_release(monotonic_ms)
        elif self.phase not in (Phase.CLAIMING, Phase.STARTING):
            self._finish(self._end)

    # ---- what to do

    def plan(
        self,
        monotonic_ms: int,
        now_s: float,
        *,
        random_unit: float = 0.5,
        wall_s: float | None = None,
    ) -> list[Step]:
        """Return the steps to perform now; each is named once."""
        claim = self._claim(now_s)
        self._observe(claim, monotonic_ms, now_s)
        is_idle = not self._offsets.outstanding and self._batch is None
        is_drained = is_idle or monotonic_ms >= self._drain_until_ms
        if self.phase is Phase.DRAINING and is_drained:
            self._begin_release(monotonic_ms)
        can_write = self._can_write(monotonic_ms)
        if self.phase is Phase.LOOKING:
            if not self._is_looking and monotonic_ms >= self._retry_ms:
                self._look_up(monotonic_ms)
        elif not can_write:
            pass
        elif self.phase is Phase.SEEKING:
            self._seek(claim, monotonic_ms, now_s, now_s if wall_s is None else wall_s)
        elif self._end is not None and self.token < 0:
            # It was released before anything was ours; what was written is awaited.
            pass
        elif self.phase is Phase.CLAIMING:
            # What became of the first write is not known.
            self._write(MarshalType.CLAIMING_PARTITION, monotonic_ms, now_s)
        elif self.phase is Phase.STARTING:
            if self.token >= 0 or self._may_reclaim(claim, now_s):
                self._beat(self.position, monotonic_ms, now_s, random_unit)
            else:
                # It was fresh when the look-up began (C4).
                self._give_up(End.REFUSED, monotonic_ms)
        elif self.phase in (Phase.OWNING, Phase.DRAINING):
            self._go_on(monotonic_ms, now_s, random_unit)
        if self.phase is Phase.RELEASING:
            self._release(claim, monotonic_ms, now_s)
        steps = self._steps.copy()
        self._steps.clear()
        return steps

    def _seek(self, claim: Claim, monotonic_ms: int, now_s: float, wall_s: float) -> None:
        config = self.config
        is_orphan = (claim.client, claim.instance) == (config.client, config.instance)
        if not config.ignores_pause and self._log.is_paused(config.group, now_s=now_s):
            self._finish(End.PAUSED)
        elif is_orphan:
            # An attempt left it that ended before its claim was read back.
            self._write(MarshalType.RELEASING_PARTITION, monotonic_ms, now_s, offset=claim.offset)
        elif claim.is_claimable and (
            self._peers is None or self._claim(wall_s, self._peers).is_claimable
        ):  # C1
            self._begin(Phase.CLAIMING, monotonic_ms)
            self._write(MarshalType.CLAIMING_PARTITION, monotonic_ms, now_s)
        elif self._may_reclaim(claim, now_s):  # C4
            self._is_restart = True
            self._begin(Phase.LOOKING, monotonic_ms)
            self._look_up(monotonic_ms)
        else:
            self._finish(End.HELD)

    def _begin(self, phase: Phase, monotonic_ms: int) -> None:
        self.phase = phase
        self._since_offset = self._log.next_offset
        self._lease_from_ms = monotonic_ms

    def _may_reclaim(self, claim: Claim, now_s: float) -> bool:
        return may_reclaim(self.config, claim) and self._log.is_ready(now_s=now_s)

    def _coordination_offset(self, claim: Claim) -> int:
        """Return where to begin: of two offsets the larger loses messages, the smaller repeats."""
        return claim.max_offset if self._is_at_most_once else claim.offset

    def _begin_at(self, start: Fetch) -> None:
        self._start = start
        self._offsets = DeliveredOffsets(start.offset)

    # ---- what the log says

    def _observe(self, claim: Claim, monotonic_ms: int, now_s: float) -> None:
        is_read = self._is_read()
        if self.phase is Phase.SEEKING:
            if is_read:
                self._clear(monotonic_ms)
        elif self.phase is Phase.CLAIMING or (self.phase in HOLDING and self.token < 0):
            self._observe_attempt(claim, monotonic_ms, is_read=is_read)
        elif self.phase in HOLDING and self._still_holds(claim, monotonic_ms, now_s) and is_read:
            self._confirm(claim, monotonic_ms)

    def _observe_attempt(self, claim: Claim, monotonic_ms: int, *, is_read: bool) -> None:
        is_ours = self._is_ours(claim) and claim.token >= self._since_offset
        if self._is_restart:
            is_ours = is_ours and is_read  # C4
        if is_ours:
            self.token = claim.token
            if self._end is not None:
                self._begin_release(monotonic_ms)
            elif self._is_restart:
                reached = self._coordination_offset(claim)
                if reached > self.position:
                    self._begin_at(Fetch(reached))
                self._confirm(claim, monotonic_ms)
            else:
                self.phase = Phase.LOOKING
                self._clear(monotonic_ms)
        elif is_read:
            self._give_up(self._end or End.REFUSED, monotonic_ms)
        elif monotonic_ms >= self.lease_until_ms:
            self._give_up(self._end or End.TIMED_OUT, monotonic_ms)

    def _still_holds(self, claim: Claim, monotonic_ms: int, now_s: float) -> bool:
        if not claim.is_certain:
            self._give_up(End.UNCERTAIN, monotonic_ms)
        elif claim.token != self.token:
            self._give_up(End.TAKEN, monotonic_ms)
        elif not self._is_ours(claim) or monotonic_ms >= self.lease_until_ms:  # C2
            self._give_up(End.EXPIRED, monotonic_ms)
        elif self.config.yields_to_rivals and claim.rival_at > self.token:  # C7
            self._give_up(End.RIVAL, monotonic_ms)
        elif not self.config.ignores_pause and self._log.is_paused(
            self.config.group, now_s=now_s
        ):  # C7
            self.release(monotonic_ms, drain_ms=self.config.patience_ms, reason=End.PAUSED)
        return self.phase in HOLDING

    def _confirm(self, claim: Claim, monotonic_ms: int) -> None:
        """The pending write was read back, and the partition is ours."""
        pending = self._pending
        assert pending is not None, "only a write is confirmed"
        self._clear(monotonic_ms)
        if pending.type is MarshalType.CLAIMING_MESSAGES:
            if claim.intent_at != pending.offset:
                # The claim did not hold at that record (C6).
                self._give_up(End.EXPIRED, monotonic_ms)
            elif self._batch is not None:
                self._batch.is_announced = True
            return
        self._lease_from_ms = pending.sent_ms  # C2
        self.confirmed_position = pending.position
        if self.phase is Phase.STARTING:
            self._own(monotonic_ms)
        elif monotonic_ms < self.lease_until_ms:
            batch = self._batch
            if batch is not None and batch.is_announced and batch.is_sent:  # C6
                self._batch = None
                self._offsets = DeliveredOffsets(batch.next_offset)
                self._untaken_offset = batch.first_offset
                self._steps.append(HandOut(batch.first_offset, batch.next_offset))

    def _own(self, monotonic_ms: int) -> None:
        assert self._start is not None, "its position was looked up"
        self.phase = Phase.OWNING
        if not self.config.is_whole_topic:
            self.read(monotonic_ms)
        self._steps.append(self._start)

    def _claim(self, now_s: float, log: ClaimLog | None = None) -> Claim:
        log, config = log or self._log, self.config
        return log.claim(config.group, config.topic, config.partition, now_s=now_s)

    def _is_ours(self, claim: Claim) -> bool:
        owner = (self.config.client, self.config.instance)
        return claim.is_certain and (claim.client, claim.instance) == owner

    # ---- work

    def _go_on(self, monotonic_ms: int, now_s: float, random_unit: float) -> None:
        self._offsets.advance()  # C5
        batch = self._batch
        if batch is not None and not batch.is_announced:  # C6
            self._write(
                MarshalType.CLAIMING_MESSAGES, monotonic_ms, now_s, offset=batch.next_offset
            )
        elif batch is not None and batch.is_wanted:
            batch.is_sent = True
            self._beat(batch.next_offset, monotonic_ms, now_s, random_unit, must_commit=True)
        elif monotonic_ms >= self._next_beat_ms:
            self.lateness_ms = monotonic_ms - self._next_beat_ms
            self._beat(self.position, monotonic_ms, now_s, random_unit)
            is_due = monotonic_ms - self._looked_ms >= self.config.interval_ms // 4
            if is_due and not self._is_looking and self.phase is Phase.OWNING:
                # A flush is a heartbeat, and no check (C7).
                self._look_up(monotonic_ms)

    def _beat(
        self,
        offset: int,
        monotonic_ms: int,
        now_s: float,
        random_unit: float,
        *,
        must_commit: bool = False,
    ) -> None:
        quarter_ms = self.config.interval_ms // 4
        self._next_beat_ms = monotonic_ms + quarter_ms + int(quarter_ms * random_unit)
        self._write(
            MarshalType.HEARTBEAT,
            monotonic_ms,
            now_s,
            offset=offset,
            commit_offset=offset,
            must_commit=must_commit,
        )

    def _look_up(self, monotonic_ms: int) -> None:
        self._is_looking = True
        self._looked_ms = monotonic_ms
        self._steps.append(LookUp())

    # ---- writing, one record at a time

    def _can_write(self, monotonic_ms: int) -> bool:
        return self._pending is None and monotonic_ms >= self._retry_ms

    def _is_read(self) -> bool:
        """Return whether the pending write stands in the log, which was read up to it."""
        return self._pending is not None and 0 <= self._pending.offset < self._log.next_offset

    def _pause(self, monotonic_ms: int) -> None:
        self._pending = None
        self._retry_ms = monotonic_ms + self.config.retry_ms

    def _clear(self, monotonic_ms: int) -> None:
        self._pending = None
        self._retry_ms = monotonic_ms

    def _write(
        self,
        type: MarshalType,
        monotonic_ms: int,
        now_s: float,
        *,
        offset: int = 0,
        commit_offset: int = -1,
        must_commit: bool = False,
    ) -> None:
        self._tickets += 1
        self._pending = PendingWrite(self._tickets, type, monotonic_ms, offset)
        record = self.config.record(type, now_s, offset)
        self._steps.append(Write(self._tickets, record, commit_offset, must_commit))

    # ---- the end

    def _give_up(self, reason: End, monotonic_ms: int) -> None:
        """Hand nothing more out of a partition that is lost, or may be, and let others have it."""
        self._end = reason
        self._keeps_claim = False
        self._release_offset = None
        if self.phase in (Phase.OWNING, Phase.DRAINING):
            self._steps.append(Stop(reason, is_lost=True))
        if self.token >= 0 and reason is not End.TAKEN:
            self._begin_release(monotonic_ms)
        else:  # C3
            self._finish(reason)

    def _begin_release(self, monotonic_ms: int) -> None:
        self.phase = Phase.RELEASING
        self._batch = None
        self._clear(monotonic_ms)
        self._give_up_ms = monotonic_ms + self.config.lease_ms
        if self._keeps_claim:
            self._give_up_ms = min(self._give_up_ms, self.lease_until_ms)  # C2

    def _release(self, claim: Claim, monotonic_ms: int, now_s: float) -> None:
        assert self._end is not None, "it ends for a reason"
        pending = self._pending
        if pending is not None and self._is_read():
            at = claim.renewed_at if self._keeps_claim else claim.released_at
            is_confirmed = at == pending.offset
            if is_confirmed:
                self.confirmed_position = max(self.confirmed_position, pending.position)
            self._finish(self._end, is_confirmed=is_confirmed)
        elif monotonic_ms >= self._give_up_ms:
            self._finish(self._end)
        elif self._can_write(monotonic_ms):
            self._offsets.advance()
            given = self._release_offset  # C6
            given = self._untaken_offset if given is None else given
            offset = self.position if given is None else given
            # After its lease another may hold it, whose commits must not be undone.
            commits = offset >= 0 and monotonic_ms < self.lease_until_ms
            type = MarshalType.HEARTBEAT if self._keeps_claim else MarshalType.RELEASING_PARTITION
            self._write(
                type,
                monotonic_ms,
                now_s,
                offset=claim.offset if offset < 0 else offset,
                commit_offset=offset if commits else -1,
                must_commit=commits and given is not None,
            )

    def _finish(self, reason: End, *, is_confirmed: bool = False) -> None:
        self._end = reason
        self.phase = Phase.OVER
        self._pending = None
        self._steps.append(Finish(reason, self.position if self.token >= 0 else -1, is_confirmed))
