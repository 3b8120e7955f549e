"""What waits for workers in one assigned partition: its shards, in line; pure.

A *lane* is one assignment of a partition: with the next one comes a new lane and a higher epoch, so
whatever belongs to an old lane is stale. A *shard* is work kept in order: one key's records, or all
of the partition's. A *run* is a piece of a shard in a worker's hands; while it is there, nothing
else of a serial shard is handed out. ``Scheduler`` (``shards``) is the only one that changes them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Protocol, TypeVar

from kafkamq.parallel.rules.offsets import OffsetTracker

__all__ = ["Lane", "LaneState", "Record", "Run", "Shard", "ShardState", "check_lanes"]


class Record(Protocol):
    """What the scheduler wants to know of a record; it hands back the same object."""

    @property
    def offset(self) -> int:
        """Its offset in its partition."""

    @property
    def key(self) -> Hashable:
        """Records with equal keys stay in order; None: it has no key."""


R = TypeVar("R", bound=Record)


class LaneState(Enum):
    """Whether work of a lane is handed out, and whether it counts."""

    OPEN = 0
    HELD = 1  # nothing is handed out; what is in flight counts
    CLOSED = 2  # revoked or lost: nothing counts any more


class ShardState(Enum):
    """Where a shard is; one that is nowhere has no records and is forgotten."""

    READY = 0  # in its lane's line
    OWNED = 1  # serial, and a worker has a run of it
    DELAYED = 2  # its first record is due later
    BLOCKED = 3  # its first record is above the lane's ceiling


_MAX_CUT_OFF = 512  # records that stay referenced in front of a long shard


@dataclass(slots=True, eq=False)
class Shard(Generic[R]):
    """Records in order, most of them not handed out yet."""

    lane: Lane[R]
    key: Hashable
    is_serial: bool
    records: list[R]
    start: int = 0  # of what waits; the records before it are in other hands
    state: ShardState = ShardState.READY

    def __len__(self) -> int:
        return len(self.records) - self.start

    def head(self) -> int:
        """The offset of the first record that waits."""
        return self.records[self.start].offset

    def count_up_to(self, offset: int, limit: int) -> int:
        """How many of the first ``limit`` records are not above ``offset``."""
        end = min(self.start + limit, len(self.records))
        return bisect_right(self.records, offset, self.start, end, key=_offset) - self.start

    def cut(self, count: int) -> list[R]:
        """Take the first ``count`` records, or all that there are."""
        records, start = self.records, self.start
        end = start + count
        if end >= len(records):
            self.records, self.start = [], 0
            return records[start:] if start else records
        taken = records[start:end]
        if end >= _MAX_CUT_OFF and end * 8 >= len(records):  # rarely, as moving the rest costs
            del records[:end]
            end = 0
        self.start = end
        return taken

    def put_back(self, records: list[R]) -> None:
        """What was taken last comes first again."""
        self.records = records + self.records[self.start :]
        self.start = 0


def _offset(record: Record) -> int:
    return record.offset


@dataclass(slots=True, eq=False)
class Run(Generic[R]):
    """A piece of a shard in a worker's hands, to be processed in its order."""

    shard: Shard[R]
    records: list[R]
    is_released: bool = False

    @property
    def lane(self) -> Lane[R]:
        """Where it belongs."""
        return self.shard.lane

    @property
    def is_serial(self) -> bool:
        """Whether its records are in order with others."""
        return self.shard.is_serial

    @property
    def is_stale(self) -> bool:
        """The partition has gone elsewhere: stop, whatever is done now does not count."""
        return self.shard.lane.state is LaneState.CLOSED

    def failures(self, record: R) -> int:
        """How often the record was tried before, and failed."""
        return self.shard.lane.failures.get(record.offset, 0)


@dataclass(slots=True, eq=False)
class Lane(Generic[R]):
    """One assignment of a partition; read it freely, only the scheduler changes it.

    Attributes:
        partition: The owner's name for the partition.
        epoch: Higher than that of every earlier lane.
        tracker: What of it is done.
        ceiling: Nothing above this offset is handed out; None: no ceiling.
        waiting_count: Records not in a worker's hands.
        in_flight_count: Records in a worker's hands.
        delayed_count: Shards that wait for a time.
    """

    partition: Hashable
    epoch: int
    tracker: OffsetTracker
    state: LaneState = LaneState.OPEN
    ceiling: int | None = None
    waiting_count: int = 0
    in_flight_count: int = 0
    delayed_count: int = 0
    is_in_line: bool = False
    serial: dict[Hashable, Shard[R]] = field(default_factory=dict)
    parallel: Shard[R] | None = None  # records without an order among them
    ready: deque[Shard[R]] = field(default_factory=deque)
    blocked: list[Shard[R]] = field(default_factory=list)
    failures: dict[int, int] = field(default_factory=dict)  # by offset, of what is open


def check_lanes(
    lanes: Collection[Lane[R]], delayed: Collection[Shard[R]], line: Collection[Lane[R]]
) -> None:
    """Assert what holds of all open lanes, of the shards that wait for a time, and of the line."""
    for lane in lanes:
        mine = [shard for shard in delayed if shard.lane is lane]
        idle = [*lane.ready, *lane.blocked, *mine]
        assert len(mine) == lane.delayed_count
        assert len({id(shard) for shard in idle}) == len(idle), "a shard is in one place"
        assert all(len(shard) for shard in idle), "what is in line has records"
        owned = [s for s in lane.serial.values() if s.state is ShardState.OWNED]
        assert {id(s) for s in lane.serial.values()} == {
            id(s) for s in [*owned, *idle] if s.is_serial
        }
        assert lane.waiting_count == sum(map(len, [*owned, *idle]))
        assert lane.parallel is None or lane.parallel in idle
        is_in_line = bool(lane.ready) and lane.state is LaneState.OPEN
        assert is_in_line == lane.is_in_line == (lane in line)
        for state, shards in (
            (ShardState.READY, lane.ready),
            (ShardState.BLOCKED, lane.blocked),
            (ShardState.DELAYED, mine),
        ):
            assert all(shard.state is state for shard in shards)
        assert all(lane.tracker.is_open(offset) for offset in lane.failures)
        lane.tracker.check()
    assert all(shard.lane.state is not LaneState.CLOSED for shard in delayed)
