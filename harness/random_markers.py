"""Random logs of one marker partition, for property tests: every kind of marker, bad clocks, holes.

Each seed draws its own habits (how many messages, which timeouts, how the time goes), so that a
few hundred seeds see quiet logs, busy ones, hanging workers and broker clocks that jump.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from kafkamq.types import Marker, MarkerType, MessageBatch, MessageId, Outcome

_TIMEOUTS_MS = (1, 3, 100, 1000, 5000, 10_000, 60_000, 3_600_000)
_BORDERS = (0, 1, 4094, 4095, 4096, 4097, 8191, 8192, 1 << 40)
_CHUNK = 4096
_REASONS = ("", "no stock", "broken")


@dataclass(frozen=True, slots=True)
class MarkerRecord:
    """One record of a marker partition as a tracker gets it: the arguments of ``apply``."""

    offset: int
    timestamp_ms: int  # -1: not LogAppendTime
    marker: Marker | None  # None: undecodable


class _Habits:
    """What one seed likes to do."""

    def __init__(self, rng: random.Random, partition: int, batch_rate: float) -> None:
        self.rng = rng
        self.partition = partition
        topic_ids = [b"", rng.randbytes(16), rng.randbytes(16)][: rng.randint(1, 3)]
        count = rng.choice((3, 10, 40, 200))
        near = rng.random() < 0.7
        self.messages = [
            MessageId(
                rng.randrange(3),
                rng.choice(_BORDERS) if near else rng.randrange(20_000),
                rng.choice(topic_ids),
                rng.choice((0, 1, 2)),
            )
            for _ in range(count)
        ]
        self.consumers = [f"c{number}" for number in range(rng.choice((1, 2, 5)))]
        self.timeouts = rng.sample(_TIMEOUTS_MS, rng.randint(1, 3))
        self.max_leases = [0, *rng.sample((2000, 15_000, 100_000), rng.randint(0, 2))]
        longest_ms = max(self.timeouts)
        self.steps = [0, 1, *(longest_ms // part for part in (50, 10, 4, 3, 2))]
        self.jumps = [longest_ms + 1, 3 * longest_ms, 60_000, 60_001, -longest_ms, -1]
        self.jump_rate = rng.choice((0.0, 0.01, 0.1))
        self.slowness = rng.choice((1, 10, 100))  # records in a longest timeout, about
        self.untimed_rate = rng.choice((0.0, 0.0, 0.1, 0.9))
        self.broken_rate = rng.choice((0.0, 0.02))
        self.hole_rate = rng.choice((0.0, 0.2))
        self.weights = [rng.choice((1, 3, 10)) for _ in range(6)]
        self.schedules: list[MessageId] = []
        self.started: list[tuple[MessageId, str]] = []  # the latest ones, with their consumers
        self.batch_rate = batch_rate
        self.sense = rng.random()  # how often a marker is about something that was STARTed

    def step_ms(self) -> int:
        jumps = self.rng.random() < self.jump_rate
        if jumps or self.rng.randrange(self.slowness) == 0:
            return self.rng.choice(self.jumps if jumps else self.steps)
        return self.rng.randrange(3)

    def marker(self, offset: int) -> Marker | None:
        if self.rng.random() < self.broken_rate:
            return None
        makers = (self.start, self.end, self.keepalive, self.schedule, self.end_of_schedule)
        kind = self.rng.choices(range(6), self.weights)[0]
        if kind == 5:
            return Marker(MarkerType.TICK, consumer_id="engine", engine_epoch=1)
        marker = makers[kind](offset)
        if kind < 3 and marker.message_id is not None and self.rng.random() < self.batch_rate:
            return replace(marker, message_id=None, batches=self.batches(marker.message_id))
        return marker

    def batches(self, message_id: MessageId) -> tuple[MessageBatch, ...]:
        """Some of its neighbours with a message, and maybe of another one; they may overlap."""
        others = (self.rng.choice(self.messages),) if self.rng.random() < 0.2 else ()
        found = []
        for one in (message_id, *others):
            room = _CHUNK - one.offset % _CHUNK
            length = min(room, self.rng.choice((1, 3, 10, 70)))
            bits = 1 | self.rng.getrandbits(length) | self.rng.getrandbits(length)
            place = one.partition, one.topic_id, one.leader_epoch, one.offset
            found.append(MessageBatch(*place, bits))
        return tuple(found)

    def held(self) -> tuple[MessageId, str]:
        """Return a message and a consumer, often one that holds it."""
        if self.started and self.rng.random() < self.sense:
            return self.rng.choice(self.started[-10:])
        return self.rng.choice(self.messages), self.rng.choice(self.consumers)

    def start(self, offset: int) -> Marker:
        message_id, consumer_id = self.rng.choice(self.messages), self.rng.choice(self.consumers)
        self.started.append((message_id, consumer_id))
        return Marker(
            MarkerType.START,
            message_id,
            self.rng.choice(self.timeouts),
            key=b"queue",
            value=b"%d" % offset,
            delivery_count=self.rng.randint(1, 3),
            consumer_id=consumer_id,
            max_lease_ms=self.rng.choice(self.max_leases),
        )

    def keepalive(self, offset: int) -> Marker:
        message_id, consumer_id = self.held()
        timeout_ms = self.rng.choice((0, 1, *self.timeouts))
        named = self.rng.choice((None, message_id))
        return Marker(MarkerType.KEEPALIVE, named, timeout_ms, consumer_id=consumer_id)

    def end(self, offset: int) -> Marker:
        outcome = self.rng.choice(tuple(Outcome))
        is_nack = outcome is Outcome.NACK
        message_id, consumer_id = self.held()
        return Marker(
            MarkerType.END,
            message_id,
            self.rng.choice((0, *self.timeouts)) if is_nack else 0,
            consumer_id=consumer_id,
            outcome=outcome,
            reason=self.rng.choice(_REASONS),
        )

    def schedule(self, offset: int) -> Marker:
        delay_ms = self.rng.choice((0, *self.timeouts))
        if self.schedules and self.rng.random() < 0.5:
            first = self.rng.choice(self.schedules)
            return Marker(MarkerType.SCHEDULE, first, delay_ms, b"queue", carried_forward=True)
        self.schedules.append(MessageId(self.partition, offset))
        return Marker(MarkerType.SCHEDULE, None, delay_ms, b"queue", b"later")

    def end_of_schedule(self, offset: int) -> Marker:
        first = self.rng.choice([MessageId(self.partition, 0), *self.schedules])
        outcome = self.rng.choice(tuple(Outcome))
        return Marker(MarkerType.END, first, outcome=outcome, of_schedule=True)


def random_markers(
    seed: int, count: int = 500, *, partition: int = 0, batch_rate: float = 0.0
) -> list[MarkerRecord]:
    """Return a random log of one marker partition; the same one for the same arguments.

    Args:
        seed: Names the log.
        count: How many records.
        partition: The marker partition that it is the log of; SCHEDULEs name it (R13).
        batch_rate: How many of the STARTs, KEEPALIVEs and ENDs are about several messages.
    """
    rng = random.Random(seed)
    habits = _Habits(rng, partition, batch_rate)
    offset = rng.choice((0, 0, 17, 1 << 33))
    timestamp_ms = rng.choice((0, 1, 1_700_000_000_000))
    records = []
    for _ in range(count):
        timestamp_ms = max(0, timestamp_ms + habits.step_ms())
        untimed = rng.random() < habits.untimed_rate
        records.append(MarkerRecord(offset, -1 if untimed else timestamp_ms, habits.marker(offset)))
        offset += 1 + (rng.random() < habits.hole_rate) * rng.randint(1, 3)
    return records
