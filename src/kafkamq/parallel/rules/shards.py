"""Scheduling: which records a worker gets next, in order where order is asked for; pure.

Rules:

- BY KEY: records of one key and partition are handed out one run at a time, in offset order;
  a record without a key is ordered with all others that have none, or with none (``NullKeys``).
  BY PARTITION: the same for the whole partition. UNORDERED: no order.
- A record that failed comes back first in its shard, and not before its time; until then the shard
  waits with it. Without an order only the record itself waits.
- Partitions take turns by the records they hand out, and so do the shards of a partition: a worker
  gets at most ``max_run`` records of a shard, then the shard goes to the end of the line.
- A partition with a ceiling hands out nothing above it, so that its holes are filled first.
- A closed partition takes in nothing, hands out nothing, and nothing done counts in it.
- What a worker has of a closed partition is busy until its run comes back: a key (without an order:
  a record) is in one worker's hands at a time, also where its partition comes back, or is read
  again after an aborted transaction.

A ``PartitionState`` is of one assignment: the next one brings a new state, so whatever belongs to
an old one is stale. A *shard* is work kept in order: one key's records, or all of the partition's.
A *run* is a piece of a shard in a worker's hands. ``Scheduler`` is the only one that changes them.

Everything that is polled is in the partition's tracker, hence waits, is in flight, or is done. How
much may be polled ahead is for ``flow``. There is a shard for each key that has something open; it
is forgotten with its last record.

Several threads may work on one scheduler if each call is made under one lock; a run's records are
its worker's alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from math import inf
from typing import Generic, Protocol, TypeVar

from kafkamq.errors import ConfigError, StateError
from kafkamq.parallel.rules.offsets import OffsetTracker

# Records that are done and stay referenced in front of a long shard.
_MAX_CUT_OFF = 512
DEFAULT_MAX_RUN = 64


class Record(Protocol):
    """What the scheduler wants to know of a record; it hands back the same object."""

    @property
    def offset(self) -> int:
        """Return its offset in its partition."""

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

    # They are handled one after another, as if they had one key in common.
    SERIAL = "serial"
    PARALLEL = "parallel"


class PartitionPhase(Enum):
    """Whether work of a partition is handed out, and whether it counts."""

    OPEN = 0
    # Nothing is handed out; what is in flight counts.
    HELD = 1
    # The partition was revoked or lost: nothing counts any more.
    CLOSED = 2


class ShardState(Enum):
    """A shard that is nowhere has no records and is forgotten."""

    READY = 0
    # It is serial, and a worker has a run of it, perhaps of an earlier assignment.
    OWNED = 1
    DELAYED = 2
    BLOCKED = 3


@dataclass(slots=True, eq=False)
class Shard(Generic[R]):
    """Records in order, most of them not handed out yet."""

    partition: PartitionState[R]
    key: Hashable
    is_serial: bool
    records: list[R]
    start: int = 0
    state: ShardState = ShardState.READY

    def __len__(self) -> int:
        return len(self.records) - self.start

    def count_up_to(self, offset: int, limit: int) -> int:
        """Return how many of the first ``limit`` records are not above ``offset``."""
        end = min(self.start + limit, len(self.records))
        return bisect_right(self.records, offset, self.start, end, key=_offset) - self.start

    def cut(self, count: int) -> list[R]:
        records, start = self.records, self.start
        end = start + count
        if end >= len(records):
            self.records, self.start = [], 0
            return records[start:] if start else records
        taken = records[start:end]
        if end >= _MAX_CUT_OFF and end * 8 >= len(records):
            # This is rare, as moving the rest costs.
            del records[:end]
            end = 0
        self.start = end
        return taken

    def put_back(self, records: list[R]) -> None:
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
    # How many records from its front were tried; None: all.
    end: int | None = None
    # What is to be tried again, in order, with the times (monotonic ms) of the next attempts.
    failed: list[tuple[R, int]] | None = None
    outputs: list[tuple[R, object]] | None = None

    @property
    def partition(self) -> PartitionState[R]:
        return self.shard.partition

    @property
    def is_serial(self) -> bool:
        return self.shard.is_serial

    @property
    def is_stale(self) -> bool:
        """The partition has gone elsewhere: stop, whatever is done now does not count."""
        return self.shard.partition.phase is PartitionPhase.CLOSED

    def is_behind(self, record: R) -> bool:
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


@dataclass(slots=True, eq=False)
class PartitionState(Generic[R]):
    """One assignment of a partition; read it freely, only the scheduler changes it."""

    place: Hashable
    tracker: OffsetTracker
    phase: PartitionPhase = PartitionPhase.OPEN
    ceiling: int | None = None
    waiting_count: int = 0
    in_flight_count: int = 0
    is_in_line: bool = False
    serial: dict[Hashable, Shard[R]] = field(default_factory=dict)
    parallel: Shard[R] | None = None
    ready: deque[Shard[R]] = field(default_factory=deque)
    blocked: list[Shard[R]] = field(default_factory=list)
    delayed: list[tuple[int, int, Shard[R]]] = field(default_factory=list)
    loose: set[Run[R]] = field(default_factory=set)

    def at_work(self) -> dict[Hashable, Shard[R]]:
        """Keys whose runs workers have, and offsets of what they have in no order."""
        found = {
            key: shard for key, shard in self.serial.items() if shard.state is ShardState.OWNED
        }
        for run in self.loose:
            found.update(dict.fromkeys([record.offset for record in run.records], run.shard))
        return found

    def clear(self) -> None:
        self.waiting_count = self.in_flight_count = 0
        self.parallel = None
        for collection in (self.serial, self.ready, self.blocked, self.delayed):
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


class Scheduler(Generic[R]):
    def __init__(
        self,
        *,
        ordering: Ordering = Ordering.KEY,
        null_keys: NullKeys = NullKeys.SERIAL,
        max_run: int = DEFAULT_MAX_RUN,
    ) -> None:
        if max_run < 1:
            raise ConfigError(f"max_run is {max_run}: it must be at least 1")
        self._ordering = ordering
        self._null_keys = null_keys
        self._max_run = max_run
        self._partitions: dict[Hashable, PartitionState[R]] = {}
        self._line: deque[PartitionState[R]] = deque()
        # Keys, or offsets of what is in no order, in workers' hands that are of closed partitions.
        self._busy: dict[Hashable, dict[Hashable, Shard[R]]] = {}
        self._due_ms: float = inf
        self._delays = 0
        self.waiting_count = 0

    # Views.

    @property
    def partitions(self) -> tuple[PartitionState[R], ...]:
        return tuple(self._partitions.values())

    @property
    def has_ready(self) -> bool:
        return bool(self._line)

    @property
    def in_flight_count(self) -> int:
        return sum(partition.in_flight_count for partition in self._partitions.values())

    def ready_runs(self, enough: int) -> int:
        """Say how many runs are ready for different workers; counts no further than ``enough``."""
        count = 0
        for partition in self._line:
            count += len(partition.ready)
            if partition.parallel is not None:
                count += len(partition.parallel)
            if count >= enough:
                return enough
        return count

    def next_due_ms(self) -> int | None:
        """Return when the next delayed record is due; None: none waits for a time."""
        return min(
            (
                partition.delayed[0][0]
                for partition in self._partitions.values()
                if partition.delayed
            ),
            default=None,
        )

    # Partitions come and go.

    def assign(self, place: Hashable, tracker: OffsetTracker) -> PartitionState[R]:
        """A partition came; its state of an earlier assignment is closed."""
        older = self._partitions.get(place)
        if older is not None:
            self.close(older)
        partition: PartitionState[R] = PartitionState(place, tracker)
        self._partitions[place] = partition
        return partition

    def hold(self, partition: PartitionState[R]) -> None:
        """Hand out nothing of it any more; what is in flight still counts (before a commit)."""
        if partition.phase is PartitionPhase.OPEN:
            partition.phase = PartitionPhase.HELD
            self._leave_line(partition)

    def close(self, partition: PartitionState[R]) -> None:
        """The partition is not ours any more: forget its work, count nothing of what is done."""
        if partition.phase is PartitionPhase.CLOSED:
            return
        partition.phase = PartitionPhase.CLOSED
        self._leave_line(partition)
        del self._partitions[partition.place]
        self.waiting_count -= partition.waiting_count
        at_work = partition.at_work()
        if at_work:
            # What an earlier assignment has in workers' hands is seen to first.
            self._busy[partition.place] = at_work | self._busy.get(partition.place, {})
        partition.clear()

    def set_ceiling(self, partition: PartitionState[R], ceiling: int | None) -> None:
        """Hand out nothing above that offset until further notice; None: everything."""
        raised = ceiling is None or (partition.ceiling is not None and ceiling > partition.ceiling)
        partition.ceiling = ceiling
        if raised and partition.blocked:
            blocked, partition.blocked = partition.blocked, []
            for shard in blocked:
                self._make_ready(shard)

    # Work comes in.

    def add(self, partition: PartitionState[R], records: Sequence[R]) -> int:
        """Add records polled for that partition, in order; what is done already is left out."""
        if partition.phase is PartitionPhase.CLOSED:
            return 0
        offsets = [record.offset for record in records]
        wanted = partition.tracker.add(offsets)
        if wanted is not offsets:
            accepted = frozenset(wanted)
            records = [record for record in records if record.offset in accepted]
        if not records:
            return 0
        partition.waiting_count += len(records)
        self.waiting_count += len(records)
        if self._ordering is Ordering.KEY:
            self._add_by_key(partition, records)
        elif self._ordering is Ordering.PARTITION:
            self._add_to_serial(partition, records)
        else:
            self._add_to_parallel(partition, records)
        self._line_up(partition)
        return len(records)

    def _add_by_key(self, partition: PartitionState[R], records: Iterable[R]) -> None:
        shards, ready = partition.serial, partition.ready
        busy = self._busy.get(partition.place)
        keyless: list[R] | None = [] if self._null_keys is NullKeys.PARALLEL else None
        for record in records:
            key = record.key
            shard = shards.get(key)
            if shard is not None:
                shard.records.append(record)
            elif key is None and keyless is not None:
                keyless.append(record)
            else:
                shards[key] = shard = Shard(partition, key, True, [record])
                if busy and key in busy:
                    shard.state = ShardState.OWNED
                else:
                    ready.append(shard)
        if keyless:
            self._add_to_parallel(partition, keyless)

    def _add_to_serial(self, partition: PartitionState[R], records: Iterable[R]) -> None:
        shard = partition.serial.get(None)
        if shard is not None:
            shard.records.extend(records)
            return
        partition.serial[None] = shard = Shard(partition, None, True, list(records))
        if None in self._busy.get(partition.place, ()):
            shard.state = ShardState.OWNED
        else:
            partition.ready.append(shard)

    def _add_to_parallel(self, partition: PartitionState[R], records: Iterable[R]) -> None:
        busy = self._busy.get(partition.place)
        if busy:
            records = list(records)
            for record in records:
                if record.offset in busy:
                    shard = Shard(partition, record.offset, True, [record], 0, ShardState.OWNED)
                    partition.serial[record.offset] = shard
            records = [record for record in records if record.offset not in busy]
            if not records:
                return
        if partition.parallel is not None:
            partition.parallel.records.extend(records)
        else:
            partition.parallel = Shard(partition, None, False, list(records))
            partition.ready.append(partition.parallel)

    # Work goes out.

    def take(
        self, monotonic_ms: int, max_records: int = 1, *, max_run: int | None = None
    ) -> list[Run[R]]:
        """Runs of ``max_records`` records in all, for one worker; empty: nothing to do now.

        ``max_run`` takes the place of the scheduler's own limit of one shard's records. Each run
        goes back by ``release`` or ``finish``, whether its partition is closed meanwhile or not.
        """
        if self._due_ms <= monotonic_ms:
            self._wake(monotonic_ms)
        runs: list[Run[R]] = []
        if max_run is None:
            max_run = self._max_run
        line = self._line
        while line and max_records > 0:
            partition = line.popleft()
            max_records -= self._take_from(partition, max_records, max_run, runs)
            if partition.ready:
                line.append(partition)
            else:
                partition.is_in_line = False
        return runs

    def _take_from(
        self, partition: PartitionState[R], limit: int, max_run: int, runs: list[Run[R]]
    ) -> int:
        ready, ceiling, owned = partition.ready, partition.ceiling, ShardState.OWNED
        taken = 0
        while ready and taken < limit:
            shard = ready.popleft()
            count = limit - taken
            if count > max_run:
                count = max_run
            if ceiling is not None:
                count = shard.count_up_to(ceiling, count)
                if not count:
                    shard.state = ShardState.BLOCKED
                    partition.blocked.append(shard)
                    continue
            records = shard.records
            if shard.start or len(records) > count:
                records = shard.cut(count)
            else:
                # This is what ``cut`` does for all records, without the call.
                shard.records = []
            run = Run(shard, records)
            runs.append(run)
            taken += len(records)
            if shard.is_serial:
                shard.state = owned
                continue
            partition.loose.add(run)
            if shard.records:
                ready.append(shard)
            elif shard is partition.parallel:
                partition.parallel = None
        partition.waiting_count -= taken
        self.waiting_count -= taken
        partition.in_flight_count += taken
        return taken

    def _wake(self, monotonic_ms: int) -> None:
        for partition in self._partitions.values():
            delayed = partition.delayed
            while delayed and delayed[0][0] <= monotonic_ms:
                self._make_ready(heappop(delayed)[2])
        due_ms = self.next_due_ms()
        self._due_ms = inf if due_ms is None else due_ms

    # Work comes back.

    def finish(self, runs: Iterable[Run[R]]) -> None:
        """Every record of these runs is done."""
        partition: PartitionState[R] | None = None
        offsets: list[int] = []
        for run in runs:
            shard = run.shard
            if shard.partition is not partition:
                if partition is not None:
                    self.complete(partition, offsets)
                partition, offsets = shard.partition, []
            records = run.records
            if len(records) == 1:
                # With many keys this is the usual case.
                offsets.append(records[0].offset)
            else:
                offsets += [record.offset for record in records]
            if self._retake(run) and shard.is_serial:
                if shard.records:
                    self._make_ready(shard)
                else:
                    del partition.serial[shard.key]
        if partition is not None:
            self.complete(partition, offsets)

    def complete(self, partition: PartitionState[R], offsets: Sequence[int]) -> None:
        """These are done: processed, or given up with a dead letter in place."""
        if partition.phase is PartitionPhase.CLOSED:
            return
        partition.tracker.complete(offsets)

    def keep(self, partition: PartitionState[R], count: int) -> None:
        """Count records that stay in flight behind their runs; below 0: no longer."""
        if partition.phase is not PartitionPhase.CLOSED:
            partition.in_flight_count += count

    def release(
        self, run: Run[R], *, processed: int | None = None, failed: Sequence[tuple[R, int]] = ()
    ) -> None:
        """The worker lets go of a run; it completes what is done by ``complete``.

        Args:
            run: As it was taken.
            processed: How many records from its front were tried; the others come back as if they
                had not been taken. None: all.
            failed: Records among the processed that are to be tried again, in their order, each
                with the monotonic time in ms before which it is not. A serial shard waits for the
                latest of them.
        """
        if not self._retake(run):
            return
        shard, partition = run.shard, run.shard.partition
        untried = [] if processed is None else run.records[processed:]
        partition.waiting_count += len(untried) + len(failed)
        self.waiting_count += len(untried) + len(failed)
        if shard.is_serial:
            self._give_back(shard, untried, failed)
        else:
            self._scatter(partition, untried, failed)

    def reclaim(self, run: Run[R], records: list[R]) -> None:
        """Take records at a run's end back, as its worker is stuck or shall end.

        They come back as if they had not been taken; the worker must not touch them any more. In
        order they wait for the end of the run, also if nothing is left of it.
        """
        if run.is_released or not records:
            return
        del run.records[len(run.records) - len(records) :]
        partition = run.shard.partition
        if partition.phase is PartitionPhase.CLOSED:
            if not run.shard.is_serial:
                self._free(run, records)
            return
        partition.in_flight_count -= len(records)
        partition.waiting_count += len(records)
        self.waiting_count += len(records)
        if run.shard.is_serial:
            run.shard.put_back(records)
        else:
            self._make_ready(Shard(partition, None, False, records))

    def find(self, partition: PartitionState[R], offset: int) -> R | None:
        """Return a record that waits; None: it is in a worker's hands, done, or unknown."""
        for shard in self._waiting_shards(partition):
            for record in shard.records[shard.start :]:
                if record.offset == offset:
                    return record
        return None

    def withdraw(self, partition: PartitionState[R], offsets: Sequence[int]) -> None:
        """Hand those records out no more if they wait; what waited behind them need not.

        It looks at all that waits, so several at once cost as much as one.
        """
        if not offsets:
            return
        gone, delayed = frozenset(offsets), dict[Shard[R], None]()
        for shard in self._waiting_shards(partition):
            waiting = shard.records[shard.start :]
            kept = [record for record in waiting if record.offset not in gone]
            if len(kept) == len(waiting):
                continue
            partition.waiting_count -= len(waiting) - len(kept)
            self.waiting_count -= len(waiting) - len(kept)
            shard.records, shard.start = kept, 0
            if shard.state is ShardState.DELAYED and waiting[0].offset in gone:
                delayed[shard] = None
            elif not kept and shard.state is not ShardState.OWNED:
                self._drop(shard)
        if not delayed:
            return
        partition.delayed = [entry for entry in partition.delayed if entry[2] not in delayed]
        heapify(partition.delayed)
        for shard in delayed:
            if shard.records:
                self._make_ready(shard)
            else:
                self._drop(shard)

    def _waiting_shards(self, partition: PartitionState[R]) -> Iterable[Shard[R]]:
        delayed = [entry[2] for entry in partition.delayed]
        every = (*partition.serial.values(), *partition.ready, *partition.blocked, *delayed)
        return dict.fromkeys(every)

    def _drop(self, shard: Shard[R]) -> None:
        shard.partition.forget(shard)
        if not shard.partition.ready:
            self._leave_line(shard.partition)

    def _retake(self, run: Run[R]) -> bool:
        """Return whether what comes back still counts."""
        if run.is_released:
            raise StateError("this run was released before")
        run.is_released = True
        partition = run.shard.partition
        if partition.phase is PartitionPhase.CLOSED:
            self._free(run, run.records)
            return False
        partition.in_flight_count -= len(run.records)
        if not run.shard.is_serial:
            partition.loose.discard(run)
        return True

    def _free(self, run: Run[R], records: Iterable[R]) -> None:
        """What comes back of a closed partition is busy no more."""
        place, shard = run.partition.place, run.shard
        busy = self._busy.get(place)
        if not busy:
            return
        keys = [shard.key] if shard.is_serial else [record.offset for record in records]
        partition = self._partitions.get(place)
        for key in keys:
            if busy.get(key) is not shard:
                continue
            del busy[key]
            waiting = None if partition is None else partition.serial.get(key)
            if waiting is not None:
                self._give_back(waiting, [], ())
        if not busy:
            del self._busy[place]

    def _give_back(
        self, shard: Shard[R], untried: list[R], failed: Sequence[tuple[R, int]]
    ) -> None:
        if untried or failed:
            shard.put_back([record for record, _ in failed] + untried)
        if failed:
            self._delay(shard, max(due_ms for _, due_ms in failed))
        elif shard.records:
            self._make_ready(shard)
        else:
            del shard.partition.serial[shard.key]

    def _scatter(
        self, partition: PartitionState[R], untried: list[R], failed: Sequence[tuple[R, int]]
    ) -> None:
        if untried:
            self._make_ready(Shard(partition, None, False, untried))
        for record, due_ms in failed:
            self._delay(Shard(partition, None, False, [record]), due_ms)

    def _delay(self, shard: Shard[R], due_ms: int) -> None:
        shard.state = ShardState.DELAYED
        self._delays += 1
        heappush(shard.partition.delayed, (due_ms, self._delays, shard))
        self._due_ms = min(self._due_ms, due_ms)

    def _make_ready(self, shard: Shard[R]) -> None:
        shard.state = ShardState.READY
        shard.partition.ready.append(shard)
        self._line_up(shard.partition)

    def check(self) -> None:
        check_partitions(self._partitions.values(), self._line)
        due_ms = self.next_due_ms()
        assert due_ms is None or self._due_ms <= due_ms
        assert all(self._busy.values()), "a place where nothing is busy is forgotten"
        waiting = sum(partition.waiting_count for partition in self._partitions.values())
        assert self.waiting_count == waiting

    # The line.

    def _line_up(self, partition: PartitionState[R]) -> None:
        if partition.ready and not partition.is_in_line and partition.phase is PartitionPhase.OPEN:
            partition.is_in_line = True
            self._line.append(partition)

    def _leave_line(self, partition: PartitionState[R]) -> None:
        if partition.is_in_line:
            partition.is_in_line = False
            self._line.remove(partition)


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
        partition.tracker.check()
