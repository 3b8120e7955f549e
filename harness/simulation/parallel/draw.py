"""What a seed draws for a group of parallel consumers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum

from harness.simulation.limits import Faults

TAKE_MS = 50  # until the next result of a stream is asked for, at most


class Use(Enum):
    """What the application does with the consumer."""

    POLL = "poll"
    PRODUCE = "produce"  # poll_and_produce
    STREAM = "stream"


class Manner(Enum):
    """What handling a record is like; it stands in its value."""

    QUICK = "quick"
    SLOW = "slow"  # longer than a revocation waits
    FAILS = "fails"  # the first attempts raise
    NACKS = "nacks"  # the first attempts ask for another one
    REJECTS = "rejects"
    HOPELESS = "hopeless"  # raises every time
    POISON = "poison"  # the first attempt kills the process, a few times in all
    LARGE = "large"  # its result is larger than Kafka takes

    def value_of(self, number: int) -> bytes:
        return b"%s %d" % (self.value.encode(), number)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLimits:
    """What a seed draws; give your own to ``simulate_parallel`` to look at one situation."""

    faults: Faults = field(default_factory=Faults)
    preempt_every: int = 30
    chaos_ms: int = 15_000
    restart_ms: int = 3000
    protocol: str = "cooperative"  # or eager, consumer (KIP-848)
    heartbeat_ms: int = 5000  # of the group, in the consumer protocol
    partitions: int = 2
    members: int = 2
    records: int = 60
    keys: int = 5  # 0: records have none
    manners: tuple[tuple[Manner, float], ...] = ((Manner.QUICK, 1.0),)
    work_ms: int = 200  # of a handler, at most; one that is quick is given many records at once
    slow_ms: int = 4000
    use: Use = Use.POLL
    ordering: str = "key"
    null_keys: str = "serial"
    mode: str = "asynchronous"
    concurrency: int = 3
    batch_size: int = 0
    max_attempts: int | None = None
    on_exhausted: str = "dead-letter"
    parks_stalled: bool = False
    commit_interval_ms: int = 500
    revoke_timeout_ms: int = 1000
    max_open: int = 10_000
    metadata_bytes: int = 4096  # that the broker takes with an offset
    pauses: int = 0  # of a consumer, by its user
    closes: int = 0  # of members, which are replaced
    joins: int = 0  # members that come later, and stay
    deletions: int = 0  # the start of a log goes
    truncations: int = 0  # the end of a log goes, or all of it
    new_partitions: int = 0

    @property
    def gives_up(self) -> bool:
        """Return whether a record may be given up."""
        return self.max_attempts is not None

    @property
    def is_quicker_than_revocations(self) -> bool:
        """Return whether a revocation waits for all that is in flight; what takes longer comes
        again.
        """
        takes_ms = self.work_ms * max(1, self.batch_size)
        if self.use is Use.STREAM:  # one result after the other
            takes_ms += TAKE_MS * self.concurrency
        return takes_ms < self.revoke_timeout_ms

    @property
    def is_transactional(self) -> bool:
        """Results and offsets in one transaction."""
        return self.mode == "transactional"


def draw_parallel(seed: int) -> ParallelLimits:
    """Return what a seed is like."""
    rng = random.Random(f"parallel limits {seed}")
    calm = rng.random() < 0.15
    use = rng.choice((Use.POLL, Use.POLL, Use.PRODUCE, Use.STREAM))
    modes = ("asynchronous", "asynchronous", "synchronous")
    mode = rng.choice((*modes, "transactional", "transactional") if use is Use.PRODUCE else modes)
    max_attempts = rng.choice((None, 1, 2, 4))
    gives_up = max_attempts is not None
    others = [Manner.SLOW, Manner.FAILS, Manner.NACKS, Manner.POISON]
    others += [Manner.REJECTS, Manner.HOPELESS] if gives_up else []
    others += [Manner.LARGE] if gives_up and use is Use.PRODUCE else []
    manners = tuple((manner, rng.choice((0.0, 0.0, 0.05, _most(manner)))) for manner in others)
    records = rng.choice((10, 40, 120))
    may_repeat = not calm and mode != "transactional"  # what is done, is done again
    return ParallelLimits(
        faults=Faults() if calm else _draw_faults(rng, may_repeat=may_repeat),
        preempt_every=rng.choice((0, 5, 30, 200)),
        chaos_ms=rng.choice((5000, 10_000, 20_000)),
        protocol=rng.choice(("eager", "cooperative", "cooperative", "consumer")),
        heartbeat_ms=random.Random(f"heartbeat {seed}").choice((500, 5000)),
        partitions=rng.randint(1, 4),
        members=rng.choice((1, 1, 2, 3)),
        records=records,
        keys=rng.choice((0, 1, 3, 20)),
        manners=((Manner.QUICK, 1.0), *manners),
        work_ms=rng.choice((0, 5, 200)),
        slow_ms=rng.choice((500, 4000) if records > 40 else (500, 4000, 12_000)),
        use=use,
        ordering=rng.choice(("key", "key", "partition", "unordered")),
        null_keys=rng.choice(("serial", "parallel")),
        mode=mode,
        concurrency=rng.choice((1, 2, 4)),
        batch_size=rng.choice((0, 0, 3)) if use is Use.POLL else 0,
        max_attempts=max_attempts,
        on_exhausted=rng.choice(("dead-letter", "dead-letter", "skip")),
        parks_stalled=gives_up and rng.random() < 0.1,
        commit_interval_ms=rng.choice((50, 500, 2000)),
        revoke_timeout_ms=rng.choice((100, 1000, 3000)),
        max_open=rng.choice((2, 10, 10_000)),
        metadata_bytes=4096 if mode == "transactional" else rng.choice((4096, 4096, 4096, 8)),
        pauses=rng.choice((0, 0, 2)),
        closes=rng.choice((0, 1, 3)),
        joins=rng.choice((0, 0, 1)),
        deletions=rng.choice((0, 0, 0, 2)) if may_repeat else 0,
        truncations=rng.choice((0, 0, 1, 2)) if may_repeat else 0,
        new_partitions=rng.choice((0, 0, 1)),
    )


def _most(manner: Manner) -> float:
    """Return how many records may be so; a large result costs everybody's transaction."""
    return 0.05 if manner is Manner.LARGE else 0.2


def _draw_faults(rng: random.Random, *, may_repeat: bool) -> Faults:
    return Faults(
        kill_every=rng.choice((0, 0, 300, 3000)),
        freeze_every=rng.choice((0, 0, 1000, 5000)),
        max_freeze_ms=rng.choice((2000, 12_000, 40_000)),
        latency_ms=rng.choice((0, 5, 100)),
        lost_reply_rate=rng.choice((0.0, 0.0, 0.002, 0.02)),
        full_queue_rate=rng.choice((0.0, 0.0, 0.05)),
        refusal_rate=rng.choice((0.0, 0.0, 0.02)),
        fatal_errors=rng.choice((0, 0, 0, 3)),
        outages=rng.choice((0, 0, 1, 2)),
        max_outage_ms=rng.choice((2000, 12_000, 25_000)),
        clock_steps=rng.choice((0, 0, 2)),
        lost_offsets=rng.choice((0, 0, 0, 1)) if may_repeat else 0,
    )
