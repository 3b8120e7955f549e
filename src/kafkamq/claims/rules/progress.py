"""How far a claimant is: where it begins, what is done up to the first gap, whether it keeps up.

Once per heartbeat the position and the log's end are sampled, ten of each are kept, and a velocity
is their range divided by their number less one. A claimant is *behind* when two more heartbeats at
its velocity would not reach the end and the partition grows at least as fast; three times in a
row, and it releases. It is *stuck* when it has seen no message for an interval, did not move, and
there is something to read. That its own heartbeats are late is seen by its lease (C2).

Sources: Marshal PROTOCOL.md, "At Least Once (ALO)"; start and health check are as in its Go client.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kafkamq.claims.rules.steps import ClaimantConfig, End
from kafkamq.errors import StateError

SAMPLES = 10
MAX_CYCLES_BEHIND = 3


class DeliveredOffsets:
    """Offsets that were handed out and not all committed; the position is the first gap.

    Offsets come in rising order and may leave holes, as compaction and transactions do: then the
    position is behind the last committed one.
    """

    __slots__ = ("_committed", "_delivered", "_open", "position")

    def __init__(self, position: int) -> None:
        self.position = position  # next offset to consume: what a heartbeat says
        self._delivered: deque[int] = deque()  # rising; what the position has not passed
        self._open: set[int] = set()  # of these: not committed
        self._committed: set[int] = set()  # of these: committed

    @property
    def outstanding(self) -> int:
        return len(self._open)

    @property
    def tracked(self) -> int:
        """Handed out and not passed by the position."""
        return len(self._delivered)

    def deliver(self, offsets: Iterable[int]) -> None:
        """Take note of messages that are handed out."""
        for offset in offsets:
            last = self._delivered[-1] if self._delivered else self.position - 1
            if offset <= last:
                raise StateError(f"offset {offset} was handed out before, {last + 1} is the next")
            self._delivered.append(offset)
            self._open.add(offset)

    def commit(self, offset: int) -> bool:
        """It is done; False: it was not handed out, or the position has passed it."""
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


@dataclass(frozen=True, slots=True)
class StartPosition:
    """Where to begin, and how far off the log what was known is."""

    offset: int
    deleted: int = 0  # messages between the known position and the log's start
    beyond: int = 0  # how far the known position lies behind the log's end


def start_position(
    *,
    coordination_offset: int,
    committed_offset: int,
    earliest_offset: int,
    latest_offset: int | None = None,
    take_larger: bool = False,
) -> StartPosition:
    """Where a new owner begins.

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
    return StartPosition(start, deleted, beyond)


def velocity(samples: Collection[int]) -> float:
    """Range of the positive samples divided by their number less one."""
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
        self.message_ms = monotonic_ms  # when the last message came
        self._config = config

    def sample(self, position: int, latest_offset: int) -> None:
        self.positions.append(position)
        self.latest_offsets.append(latest_offset)

    def judge(self, position: int, latest_offset: int, monotonic_ms: int) -> End | None:
        """Why the claim is to be given up; once per heartbeat."""
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
