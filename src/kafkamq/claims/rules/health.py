"""Whether a claimant keeps up with its partition; one that does not gives the claim up.

Once per heartbeat the position and the log's end are sampled, ten of each are kept, and a velocity
is their range divided by their number less one. A claimant is *behind* when two more heartbeats at
its velocity would not reach the end and the partition grows at least as fast; three times in a
row, and it releases. It is *stuck* when it has seen no message for an interval, did not move, and
there is something to read.

Source: Marshal's Go client, its health check (the rules are not in PROTOCOL.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

SAMPLES = 10
MAX_CYCLES_BEHIND = 3


class HealthVerdict(Enum):
    """What a health check found; everything but HEALTHY gives the claim up."""

    HEALTHY = "healthy"
    SILENT = "silent"  # its own last heartbeat is too old
    STUCK = "stuck"  # no message for an interval, though there are some
    BEHIND = "behind"  # too slow, for the third time in a row


@dataclass(frozen=True, slots=True)
class Health:
    """One check; velocities are offsets per heartbeat."""

    verdict: HealthVerdict
    consumer_velocity: float
    partition_velocity: float
    cycles_behind: int


class OffsetHistory:
    __slots__ = ("_next", "samples")

    def __init__(self) -> None:
        self.samples = [0] * SAMPLES
        self._next = 0

    def add(self, offset: int) -> None:
        self.samples[self._next] = offset
        self._next = (self._next + 1) % SAMPLES


def velocity(samples: Sequence[int]) -> float:
    """Range of the positive samples divided by their number less one."""
    known = [sample for sample in samples if sample > 0]
    if len(known) < 2:
        return 0.0
    return (max(known) - min(known)) / (len(known) - 1)


def check_health(
    *,
    position: int,
    latest_offset: int,
    positions: Sequence[int],
    latest_offsets: Sequence[int],
    message_age_ms: int,
    heartbeat_age_ms: int,
    interval_ms: int,
    cycles_behind: int,
    release_if_behind: bool = True,
    is_whole_topic: bool = False,
) -> Health:
    """Judge one heartbeat cycle."""
    consumer, partition = velocity(positions), velocity(latest_offsets)
    verdict = HealthVerdict.HEALTHY
    if heartbeat_age_ms > interval_ms:
        verdict = HealthVerdict.SILENT
    elif not release_if_behind:
        pass
    elif (
        message_age_ms > interval_ms
        and not consumer
        and (partition > 0 or latest_offset > position)
    ):
        verdict = HealthVerdict.STUCK
    elif is_whole_topic:
        pass
    elif position + int(consumer * 2) >= latest_offset or partition < consumer:
        cycles_behind = 0
    else:
        cycles_behind += 1
        if cycles_behind >= MAX_CYCLES_BEHIND:
            verdict = HealthVerdict.BEHIND
    return Health(verdict, consumer, partition, cycles_behind)


class HealthMonitor:
    """The samples and the count of one claim; its own heartbeats are watched elsewhere."""

    __slots__ = ("_interval_ms", "_is_whole_topic", "_latest", "_message_ms", "_own", "_release",
                 "cycles_behind")  # fmt: skip

    def __init__(
        self, monotonic_ms: int, *, interval_ms: int, release_if_behind: bool, is_whole_topic: bool
    ) -> None:
        self._interval_ms = interval_ms
        self._release = release_if_behind
        self._is_whole_topic = is_whole_topic
        self._own, self._latest = OffsetHistory(), OffsetHistory()
        self._message_ms = monotonic_ms
        self.cycles_behind = 0

    def on_messages(self, monotonic_ms: int) -> None:
        self._message_ms = monotonic_ms

    def check(self, position: int, latest_offset: int, monotonic_ms: int) -> HealthVerdict:
        self._own.add(position)
        self._latest.add(latest_offset)
        health = check_health(
            position=position,
            latest_offset=latest_offset,
            positions=self._own.samples,
            latest_offsets=self._latest.samples,
            message_age_ms=monotonic_ms - self._message_ms,
            heartbeat_age_ms=0,
            interval_ms=self._interval_ms,
            cycles_behind=self.cycles_behind,
            release_if_behind=self._release,
            is_whole_topic=self._is_whole_topic,
        )
        self.cycles_behind = health.cycles_behind
        return health.verdict
