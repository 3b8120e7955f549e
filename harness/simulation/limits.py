"""What a seed draws: how large a namespace is, what its handlers do, and what goes wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from kafkamq.config import Backoff


class Behaviour(Enum):
    """What handling a message is like; it stands in the payload, so that copies keep it."""

    QUICK = "quick"
    SLOW = "slow"  # longer than its redelivery timeout
    EXTENDS = "extends"  # asks for more time itself
    NACKS = "nacks"  # every time
    REJECTS = "rejects"
    FAILS = "fails"  # raises, each time but the last
    POISON = "poison"  # kills the process that handles it
    HANGS = "hangs"  # the first delivery never ends
    DELAYS = "delays"  # nacks the first delivery, with a delay

    def payload(self, number: int) -> bytes:
        return b"%s %d" % (self.value.encode(), number)

    @classmethod
    def of(cls, payload: bytes | None) -> Behaviour:
        """Return what a payload says."""
        return cls((payload or b"quick").split(b" ")[0].decode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often things go wrong. Rates are per turn of a thread, or per request."""

    kill_every: int = 0  # turns; 0: never
    freeze_every: int = 0
    interrupt_every: int = 0  # of an application inside of a call
    max_freeze_ms: int = 30_000
    latency_ms: int = 5
    lost_reply_rate: float = 0.0  # done, and the answer never comes
    full_queue_rate: float = 0.0  # of writes: the client's queue is full
    refusal_rate: float = 0.0  # of questions: another broker is to be asked
    fatal_errors: int = 0  # a producer is unusable from then on
    outages: int = 0
    max_outage_ms: int = 20_000
    clock_steps: int = 0
    task_loss_rate: float = 0.0  # of a batch's tasks
    lost_offsets: int = 0  # times that Kafka drops what an idle group has committed
    write_error_rate: float = 0.0  # of writes: the broker refuses them for good
    fetch_ms: int = 0  # the first fetch of a place takes up to so long, also when all else is well
    commit_ms: int = 0  # a commit of offsets takes up to so long
    stale_ms: int = 0  # for so long, from the start, some brokers have not heard of all partitions
    copy_ms: int = 0  # a tracker's copy takes so long, also when all else is well
    no_ids_ms: int = 0  # for so long some brokers do not tell topics' ids

    @property
    def delays_answers(self) -> bool:
        """Say whether what was written may have no answer for long, or not be written for long."""
        rates = self.lost_reply_rate, self.full_queue_rate, self.write_error_rate
        return bool(self.outages or self.fatal_errors or self.commit_ms or any(rates))


class Situation(Protocol):
    """What a run of any kind draws."""

    @property
    def faults(self) -> Faults:
        """Return what goes wrong."""

    @property
    def preempt_every(self) -> int:
        """Places that need not wait, per turn that is taken away there; 0: none is."""

    @property
    def chaos_ms(self) -> int:
        """Return for how long faults happen."""

    @property
    def restart_ms(self) -> int:
        """Return how long it takes at most until a dead process is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    redelivery_timeout_ms: int = 3000
    max_deliveries: int = 3
    max_lease_ms: int = 60_000
    handlers: int = 4
    max_in_flight: int = 20
    receive_buffer: int = 10
    receive_many: int = 1  # messages of one call
    exactly_once: bool = False
    batch_markers: bool = False
    single_share: float = 0.0  # of workers that write single markers nevertheless
    deadly_share: float = 0.0  # of verdicts given together, behind which the process is killed
    backoff: Backoff = field(default_factory=lambda: Backoff(first=0.5, max=8.0))
    wait_share: float = 0.3  # of acks that wait for their confirmation
    idle_ms: int = 0  # what the application does between two receives takes up to so long
    idle_share: float = 0.0  # of receives
    max_idle_ms: int = 300_000  # then it keeps nothing from others: max.poll.interval.ms


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerSettings:
    max_actions: int = 50_000  # of one transaction
    max_silence_ms: int = 1000
    position_interval_ms: int = 10_000
    poll_ms: int = 20
    trigger_ms: int = 1000  # of one that works in batches
    batch_share: float = 0.0  # of starts that work in batches, as on Spark


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a seed draws; give your own to ``simulate`` to look at one situation."""

    faults: Faults = field(default_factory=Faults)
    preempt_every: int = 30  # places that need not wait, per turn that is taken away there
    chaos_ms: int = 30_000  # while faults happen
    partitions: int = 2
    marker_partitions: int = 2
    workers: int = 2
    messages: int = 40
    delayed_share: float = 0.1
    cancelled_share: float = 0.3  # of the delayed ones
    is_due_together: bool = False  # the delayed ones are due at one time
    ttl_share: float = 0.0
    large_share: float = 0.0  # of messages: STARTs refer to them
    behaviours: tuple[tuple[Behaviour, float], ...] = ((Behaviour.QUICK, 1.0),)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    tracker: TrackerSettings = field(default_factory=TrackerSettings)
    trackers: int = 1  # at a time
    stand_by: bool = False  # trackers take over only when they are chosen (R36)
    tracker_starts: int = 1  # in all; the later ones join, or take over
    retention_ms: int = 604_800_000  # of markers
    are_far_apart: bool = False  # each message that is due costs a fetch of its own
    restart_ms: int = 3000  # until a dead process is started again
    close_share: float = 0.0  # of workers that are closed and replaced in between
    deletions: int = 0  # times that messages are deleted that workers have STARTed
    new_marker_partitions: int = 0
    invented_every_ms: int = 0  # a START that names what does not exist, to the end; 0: none
    settlers: int = 0  # processes that give verdicts by token
    handed_share: float = 0.0  # of deliveries whose tokens are passed on to them


_OF_BATCHES = (Behaviour.DELAYS,)
MAX_IDLE_MS = 12_000  # a session may not be longer
_UNUSUAL = tuple(each for each in Behaviour if each not in (Behaviour.QUICK, *_OF_BATCHES))


def draw_limits(seed: int) -> Limits:
    """Return what a seed is like."""
    limits, rng = _draw_limits(seed), random.Random(f"batches {seed}")
    faults, is_calm = limits.faults, limits.faults == Faults()
    if rng.random() >= 0.5:
        # Positions that Kafka drops and the ledger has not yet may lie in what is deleted.
        deletions = 0 if is_calm or faults.lost_offsets else rng.choice((0, 0, 1, 5))
        delays = Behaviour.DELAYS, rng.choice((0.0, 0.1, 0.5))
        limits = replace(
            limits,
            worker=replace(
                limits.worker,
                batch_markers=True,
                single_share=rng.choice((0.0, 0.0, 0.5)),
                deadly_share=0.0 if is_calm else rng.choice((0.0, 0.1)),
            ),
            deletions=deletions,
            behaviours=(*limits.behaviours, delays),
            new_marker_partitions=0 if is_calm else rng.choice((0, 0, 0, 1)),
        )
    if limits.are_far_apart and rng.random() < 0.5:
        limits = replace(limits, is_due_together=True, delayed_share=0.5, messages=30)
    rng = random.Random(f"inventions {seed}")
    if rng.random() < 0.2:
        limits = replace(limits, invented_every_ms=rng.choice((2000, 15_000)))
    rng = random.Random(f"standby {seed}")
    if limits.tracker.batch_share and rng.random() < 0.4:
        limits = replace(limits, stand_by=True, trackers=rng.choice((1, 2, 3)))
        # Where each START costs a fetch of two seconds, more than this is more than can be read.
        least_ms = 15_000 if limits.are_far_apart else 0
        limits = replace(limits, invented_every_ms=max(least_ms, rng.choice((2000, 15_000))))
    return _draw_applications(seed, limits)


def _draw_applications(seed: int, limits: Limits) -> Limits:
    """Return those that are slow or interrupted; and settling that cannot take all at once."""
    rng = random.Random(f"applications {seed}")
    if rng.random() < 0.2:
        faults = replace(limits.faults, interrupt_every=rng.choice((0, 50, 300)))
        idle_ms, idle_share = rng.choice((40_000, 120_000)), rng.choice((0.02, 0.2))
        slow = replace(
            limits.worker, idle_ms=idle_ms, idle_share=idle_share, max_idle_ms=MAX_IDLE_MS
        )
        limits = replace(limits, worker=slow, faults=faults)
    if limits.large_share and limits.messages > 5 and rng.random() < 0.3:
        limits = replace(limits, faults=replace(limits.faults, copy_ms=1500))
    return limits


def draw_token_limits(seed: int) -> Limits:
    """Draw the same with settlers, who get the tokens of some or most deliveries (R34)."""
    limits, rng = draw_limits(seed), random.Random(f"tokens {seed}")
    share = rng.choice((0.3, 0.9))
    return replace(limits, settlers=rng.choice((1, 2, 3)), handed_share=share, deletions=0)


def _draw_limits(seed: int) -> Limits:
    rng = random.Random(f"limits {seed}")
    calm = rng.random() < 0.1
    timeout_ms = rng.choice((1000, 2000, 3000, 6000))
    max_lease_ms = rng.choice((2 * timeout_ms, 20_000))
    behaviours = tuple((behaviour, rng.choice((0.0, 0.0, 0.05, 0.15))) for behaviour in _UNUSUAL)
    faults = Faults() if calm else _draw_faults(rng, timeout_ms)
    if faults.fetch_ms:  # a plan has parts by time (R16): some of them fail
        faults = replace(faults, write_error_rate=max(0.1, faults.write_error_rate))
    return Limits(
        faults=faults,
        preempt_every=rng.choice((0, 5, 30, 200)),
        chaos_ms=rng.choice((5000, 15_000, 30_000)) * (2 if faults.fetch_ms else 1),
        partitions=rng.randint(2 if faults.commit_ms else 1, 3),
        marker_partitions=rng.randint(1, 3),
        workers=rng.choice((2, 3) if faults.commit_ms else (1, 1, 2, 3)),
        messages=rng.choice((5, 15, 30)),
        delayed_share=rng.choice((0.0, 0.1, 0.5)),
        ttl_share=rng.choice((0.0, 0.1)),
        large_share=rng.choice((0.0, 1.0) if faults.fetch_ms else (0.0, 0.0, 1.0)),
        behaviours=((Behaviour.QUICK, 1.0), *behaviours),
        worker=WorkerSettings(
            redelivery_timeout_ms=timeout_ms,
            max_deliveries=rng.choice((1, 2, 3, 5)),
            max_lease_ms=max_lease_ms,
            handlers=rng.randint(1, 4),
            max_in_flight=rng.choice((1, 10, 50)),
            receive_buffer=rng.choice((1, 10, 100)),
            receive_many=rng.choice((1, 1, 5)),
            exactly_once=rng.random() < 0.25,
            wait_share=rng.choice((0.3, 1.0)),
        ),
        tracker=TrackerSettings(
            max_actions=max(rng.choice((1, 3, 50_000)), 50_000 if faults.fetch_ms else 1),
            position_interval_ms=rng.choice((1000, 10_000)),
            poll_ms=rng.choice((20, 100, 300)),
            trigger_ms=rng.choice((500, 1000, 3000)),
            batch_share=rng.choice((0.0, 0.0, 0.3, 1.0)),
        ),
        trackers=rng.choice((1, 1, 2)),
        tracker_starts=1 if calm else rng.randint(1, 3),
        are_far_apart=faults.fetch_ms > 0,
        retention_ms=rng.choice((604_800_000, 2 * max_lease_ms + 20_000)),
        close_share=rng.choice((0.5, 1.0) if faults.commit_ms else (0.0, 0.5, 1.0)),
    )


def _draw_faults(rng: random.Random, timeout_ms: int) -> Faults:
    return Faults(
        kill_every=rng.choice((0, 300, 3000)),
        freeze_every=rng.choice((0, 1000, 5000)),
        max_freeze_ms=rng.choice((timeout_ms, 5 * timeout_ms, 40_000)),
        latency_ms=rng.choice((0, 5, 100)),
        lost_reply_rate=rng.choice((0.0, 0.002, 0.02)),
        full_queue_rate=rng.choice((0.0, 0.0, 0.01, 0.1)),
        refusal_rate=rng.choice((0.0, 0.0, 0.02)),
        fatal_errors=rng.choice((0, 0, 5, 30)),
        outages=rng.choice((0, 0, 1, 3)),
        max_outage_ms=rng.choice((2000, 12_000, 40_000)),
        clock_steps=rng.choice((0, 0, 1, 3)),
        task_loss_rate=rng.choice((0.0, 0.05)),
        lost_offsets=rng.choice((0, 0, 0, 1)),
        write_error_rate=rng.choice((0.0, 0.0, 0.02, 0.2)),
        fetch_ms=rng.choice((0, 0, 0, 4000)),
        commit_ms=rng.choice((0, 0, 4000)),
        stale_ms=rng.choice((0, 0, 15_000)),
        no_ids_ms=rng.choice((0, 0, 0, 20_000)),
    )
