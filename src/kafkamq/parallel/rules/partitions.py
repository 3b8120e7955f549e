"""What waits for workers in one assigned partition: its shards, in line; pure.

A ``PartitionState`` is of one assignment: the next one brings a new state and a higher epoch, so
whatever belongs to an old one is stale. A *shard* is work kept in order: one key's records, or all
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


class Record(Protocol):
    """What the scheduler wants to know of a record; it hands back the same object."""

    @property
    def offset(self) -> int:
        """Its offset in its partition."""

    @property
    def key(self) -> Hashable:
        """Records with equal keys stay in order; None: it has no key."""


R = TypeVar("R", bound=Record)


class Ordering(Enum):
    """The order that is kept among records."""

    UNORDERED = "unordered"
    KEY = "key"
    PARTITION = "partition"


class NullKeys(Enum):
    """How records without a key are handed out by key."""

    SERIAL = "serial"  # as if they had one key in common
    PARALLEL = "parallel"  # in no order


class PartitionPhase(Enum):
    """Whether work of a partition is handed out, and whether it counts."""

    OPEN = 0
    HELD = 1  # nothing is handed out; what is in flight counts
    CLOSED = 2  # revoked or lost: nothing counts any more


class ShardState(Enum):
    """Where a shard is; one that is nowhere has no records and is forgotten."""

    READY = 0  # in its partition's line
    OWNED = 1  # serial, and a worker has a run of it, perhaps of an earlier assignment
    DELAYED = 2  # its first record is due later
    BLOCKED = 3  # its first record is above the partition's ceiling


_MAX_CUT_OFF = 512  # records that stay referenced in front of a long shard


@dataclass(slots=True, eq=False)
class Shard(Generic[R]):
    """Records in order, most of them not handed out yet."""

    partition: PartitionState[R]
    key: Hashable
    is_serial: bool
    records: list[R]
    start: int = 0  # of what waits; the records before it are in other hands
    state: ShardState = ShardState.READY

    def __len__(self) -> int:
        return len(self.records) - self.start

    def head(self) -> int:
        return self.records[self.start].offset

    def count_up_to(self, offset: int, limit: int) -> int:
        """How many of the first ``limit`` records are not above ``offset``."""
        end = min(self.start + limit, len(self.records))
        return bisect_right(self.records, offset, self.start, end, key=_offset) - self.start

    def cut(self, count: int) -> list[R]:
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
    """A piece of a shard in a worker's hands, to be processed in its order; and what became of it.

    It is passed once, from who calls handlers to who publishes results to the scheduler. What is to
    be tried again and what was returned is its worker's to write. Records are taken back from its
    end under the scheduler's lock. What is behind its end is not published.
    """

    shard: Shard[R]
    records: list[R]
    is_released: bool = False
    end: int | None = None  # how many records from its front were tried; None: all
    # What is to be tried again, in order, with the times (monotonic ms) of the next attempts.
    failed: list[tuple[R, int]] | None = None
    outputs: list[tuple[R, object]] | None = None  # what handlers returned, until it is published

    @property
    def partition(self) -> PartitionState[R]:
        return self.shard.partition

    @property
    def is_serial(self) -> bool:
        """Whether its records are in order with others."""
        return self.shard.is_serial

    @property
    def is_stale(self) -> bool:
        """The partition has gone elsewhere: stop, whatever is done now does not count."""
        return self.shard.partition.phase is PartitionPhase.CLOSED

    def is_behind(self, record: R) -> bool:
        """Whether it is behind the run's end."""
        return self.end is not None and record in self.records[self.end :]

    def put_off(self, record: R, due_ms: int) -> None:
        """A record whose result could not be published is tried again then.

        In order, what was processed behind it is processed again, behind it.
        """
        again = (record, due_ms)
        if not self.is_serial:
            self.failed = sorted([*(self.failed or ()), again], key=lambda each: each[0].offset)
            return
        self.end, self.failed = 1 + self.records.index(record), [again]
        self.outputs = [each for each in self.outputs or () if not self.is_behind(each[0])]

    def failures(self, record: R) -> int:
        """How often the record was tried before, and failed."""
        return self.shard.partition.failures.get(record.offset, 0)


@dataclass(slots=True, eq=False)
class PartitionState(Generic[R]):
    """One assignment of a partition; read it freely, only the scheduler changes it."""

    place: Hashable  # the owner's name for the partition
    epoch: int  # higher than that of every earlier assignment
    tracker: OffsetTracker  # what of it is done
    phase: PartitionPhase = PartitionPhase.OPEN
    ceiling: int | None = None  # nothing above this offset is handed out; None: no ceiling
    waiting_count: int = 0  # records not in a worker's hands
    in_flight_count: int = 0  # records in a worker's hands, or kept behind their runs
    is_in_line: bool = False
    serial: dict[Hashable, Shard[R]] = field(default_factory=dict)
    parallel: Shard[R] | None = None  # records without an order among them
    ready: deque[Shard[R]] = field(default_factory=deque)
    blocked: list[Shard[R]] = field(default_factory=list)
    delayed: list[tuple[int, int, Shard[R]]] = field(default_factory=list)  # heap: due, number
    loose: set[Run[R]] = field(default_factory=set)  # in workers' hands, in no order
    failures: dict[int, int] = field(default_factory=dict)  # by offset, of what is open

    def at_work(self) -> dict[Hashable, Shard[R]]:
        """Keys whose runs workers have, and offsets of what they have in no order."""
        found = {
            key: shard for key, shard in self.serial.items() if shard.state is ShardState.OWNED
        }
        for run in self.loose:
            found.update(dict.fromkeys([record.offset for record in run.records], run.shard))
        return found

    def clear(self) -> None:
        """Forget all that was not done."""
        self.waiting_count = self.in_flight_count = 0
        self.parallel = None
        for collection in (self.serial, self.ready, self.blocked, self.delayed, self.failures):
            collection.clear()
        self.loose.clear()

    def forget(self, shard: Shard[R]) -> None:
        if shard.state is ShardState.READY:
            self.ready = deque(other for other in self.ready if other is not shard)
        elif shard.state is ShardState.BLOCKED:
            self.blocked = [other for other in self.blocked if other is not shard]
        if shard is self.parallel:
            self.parallel = None
        if shard.is_serial:
            del self.serial[shard.key]


def check_partitions(
    partitions: Collection[PartitionState[R]], line: Collection[PartitionState[R]]
) -> None:
    """Assert what holds of all open partitions, and of the line."""
    for partition in partitions:
        mine = [shard for _, _, shard in partition.delayed]
        idle = [*partition.ready, *partition.blocked, *mine]
        assert len({id(shard) for shard in idle}) == len(idle), "a shard is in one place"
        assert all(len(shard) for shard in idle), "what is in line has records"
        owned = [s for s in partition.serial.values() if s.state is ShardState.OWNED]
        assert {id(s) for s in partition.serial.values()} == {
            id(s) for s in [*owned, *idle] if s.is_serial
        }
        assert partition.waiting_count == sum(map(len, [*owned, *idle]))
        assert partition.parallel is None or partition.parallel in idle
        is_in_line = bool(partition.ready) and partition.phase is PartitionPhase.OPEN
        assert is_in_line == partition.is_in_line == (partition in line)
        for state, shards in (
            (ShardState.READY, partition.ready),
            (ShardState.BLOCKED, partition.blocked),
            (ShardState.DELAYED, mine),
        ):
            assert all(shard.state is state for shard in shards)
        assert all(partition.tracker.is_open(offset) for offset in partition.failures)
        partition.tracker.check()
