"""What a seed draws for members that claim partitions, or ranges of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from enum import Enum

from harness.simulation.limits import Faults


class ClaimUse(Enum):
    """What a member asks for."""

    AT_LEAST_ONCE = "at-least-once"
    FENCED = "fenced"  # at least once, and each message has an output in a transaction
    AT_MOST_ONCE = "at-most-once"
    RANGES = "ranges"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimLimits:
    """What a seed draws; give your own to ``simulate_claims`` to look at one situation."""

    faults: Faults = field(default_factory=Faults)
    preempt_every: int = 30
    chaos_ms: int = 15_000
    restart_ms: int = 3000
    use: ClaimUse = ClaimUse.AT_LEAST_ONCE
    interval_ms: int = 1000  # between heartbeats
    partitions: int = 2
    coordination_partitions: int = 1
    members: int = 2
    messages: int = 40
    work_ms: int = 100  # of a message, at most
    slow_share: float = 0.0  # of messages, that take longer than an interval
    batch: int = 5  # messages of a batch; offsets of a range
    mode: str = "balanced"  # or greedy, topic
    max_claims: int | None = None
    reclaims: bool = True  # takes up what the same client held
    releases_if_behind: bool = True
    keeps_share: float = 0.0  # of closed members that leave their claims for their next start
    closes: int = 0  # of members, which start again under their names
    joins: int = 0  # members that come later
    flushes: float = 0.05  # of messages after which positions are written at once
    group_pauses: int = 0  # of the group, by an operator
    deletions: int = 0  # the start of a log goes


def draw_claims(seed: int) -> ClaimLimits:
    """Return what a seed is like."""
    rng = random.Random(f"claim limits {seed}")
    calm = rng.random() < 0.15
    use = rng.choice(tuple(ClaimUse))
    interval_ms = rng.choice((500, 1000, 2000))
    mode = rng.choice(("balanced", "balanced", "greedy", "topic"))
    partitions = rng.randint(1, 4)
    members = rng.choice((1, 2, 3))
    faults = Faults() if calm else _draw_faults(rng, interval_ms)
    # Heartbeats come in time: of ranges each record is a request, and with transactions the
    # partitions of a whole topic are seldom all held at the same moment.
    has_fences = use in (ClaimUse.FENCED, ClaimUse.AT_MOST_ONCE)
    if interval_ms < (2000 if use is ClaimUse.RANGES else 1000 * (has_fences and mode == "topic")):
        faults = replace(faults, latency_ms=min(10, faults.latency_ms))
    may_limit = mode == "topic" or members >= partitions  # or nobody would claim the rest
    return ClaimLimits(
        faults=faults,
        preempt_every=rng.choice((0, 5, 30, 200)),
        chaos_ms=rng.choice((4000, 8000, 12_000)),
        use=use,
        interval_ms=interval_ms,
        partitions=partitions,
        coordination_partitions=rng.choice((1, 3)),
        members=members,
        messages=rng.choice((10, 30, 60)),
        work_ms=rng.choice((0, 20, 200)),
        slow_share=rng.choice((0.0, 0.0, 0.05)),
        batch=rng.choice((1, 3, 10)),
        mode=mode,
        max_claims=rng.choice((None, 1)) if may_limit else None,
        reclaims=rng.random() < 0.8,
        releases_if_behind=rng.random() < 0.5,
        keeps_share=rng.choice((0.0, 0.5)),
        closes=rng.choice((0, 1, 3)),
        joins=rng.choice((0, 0, 1)),
        flushes=rng.choice((0.0, 0.05)),
        group_pauses=rng.choice((0, 0, 0, 1)),
        deletions=0 if calm else rng.choice((0, 0, 0, 1)),
    )


def _draw_faults(rng: random.Random, interval_ms: int) -> Faults:
    """Without steps of the brokers' clock: a claim's age is by it."""
    return Faults(
        kill_every=rng.choice((0, 0, 500, 3000)),
        freeze_every=rng.choice((0, 500, 3000)),
        max_freeze_ms=rng.choice((interval_ms, 3 * interval_ms, 6 * interval_ms)),
        latency_ms=rng.choice((0, 5, 100)),
        lost_reply_rate=rng.choice((0.0, 0.0, 0.002, 0.02)),
        full_queue_rate=rng.choice((0.0, 0.0, 0.05)),
        refusal_rate=rng.choice((0.0, 0.0, 0.02)),
        fatal_errors=rng.choice((0, 0, 0, 3)),
        outages=rng.choice((0, 0, 1, 2)),
        max_outage_ms=rng.choice((interval_ms, 3 * interval_ms, 12_000)),
    )
