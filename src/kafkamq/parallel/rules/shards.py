"""Scheduling: which records a worker gets next, in order where order is asked for; pure.

Rules:

- BY KEY: records of one key and partition are handed out one run at a time, in offset order;
  whoever has no key is ordered with all others that have none, or with nobody (``NullKeys``).
  BY PARTITION: the same for the whole partition. UNORDERED: no order.
- A record that failed comes back first in its shard, and not before its time; until then the shard
  waits with it. Without an order only the record itself waits.
- Partitions take turns by the records they hand out, and so do the shards of a partition: a worker
  gets at most ``max_run`` records of a shard, then the shard goes to the end of the line.
- A lane with a ceiling hands out nothing above it, so that its holes are filled first.
- Epochs: a closed lane takes in nothing, hands out nothing, and nothing done counts in it.

Everything that is polled is in the lane's tracker, hence waits, is in flight, or is done. How much
may be polled ahead is for ``flow``. There is a shard for each key that has something open; it is
forgotten with its last record.

Several threads may work on one scheduler if each call is made under one lock; a run's records are
its worker's alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from kafkamq.errors import ConfigError, StateError
from kafkamq.parallel.rules.lanes import (
    Lane,
    LaneState,
    Record,
    Run,
    Shard,
    ShardState,
    check_lanes,
)
from kafkamq.parallel.rules.offsets import OffsetTracker
from kafkamq.parallel.rules.ordering import NullKeys, Ordering

__all__ = ["DEFAULT_MAX_RUN", "NullKeys", "Ordering", "Scheduler"]

DEFAULT_MAX_RUN = 64

R = TypeVar("R", bound=Record)


class Scheduler(Generic[R]):
    """All lanes of one consumer.

    Args:
        ordering: What stays in order.
        null_keys: Only by key: what becomes of records without one.
        max_run: The most records of one shard in a worker's hands.
    """

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
        self._lanes: dict[Hashable, Lane[R]] = {}
        self._line: deque[Lane[R]] = deque()  # open lanes with ready shards
        self._delayed: list[tuple[int, int, Shard[R]]] = []  # heap: due, number, shard
        self._delays = 0
        self._epoch = 0
        self._waiting_count = 0  # of all lanes

    # Views.

    @property
    def lanes(self) -> tuple[Lane[R], ...]:
        """The lanes that are not closed, in the order in which they came."""
        return tuple(self._lanes.values())

    @property
    def has_ready(self) -> bool:
        """Whether ``take`` has something, apart from what becomes due."""
        return bool(self._line)

    @property
    def waiting_count(self) -> int:
        """Records in no worker's hands."""
        return self._waiting_count

    @property
    def in_flight_count(self) -> int:
        """Records in workers' hands that count."""
        return sum(lane.in_flight_count for lane in self._lanes.values())

    def ready_runs(self, enough: int) -> int:
        """How many runs are ready for different workers; counts no further than ``enough``."""
        count = 0
        for lane in self._line:
            count += len(lane.ready)
            if lane.parallel is not None:  # many workers share it
                count += len(lane.parallel)
            if count >= enough:
                return enough
        return count

    def next_due_ms(self) -> int | None:
        """When the next delayed record is due; None: none waits for a time."""
        return self._delayed[0][0] if self._delayed else None

    # Partitions come and go.

    def assign(self, partition: Hashable, tracker: OffsetTracker) -> Lane[R]:
        """A new lane; an older one of that partition is closed."""
        older = self._lanes.get(partition)
        if older is not None:
            self.close(older)
        self._epoch += 1
        lane: Lane[R] = Lane(partition, self._epoch, tracker)
        self._lanes[partition] = lane
        return lane

    def hold(self, lane: Lane[R]) -> None:
        """Hand out nothing of it any more; what is in flight still counts (before a commit)."""
        if lane.state is LaneState.OPEN:
            lane.state = LaneState.HELD
            self._leave_line(lane)

    def resume(self, lane: Lane[R]) -> None:
        """Hand out its work again."""
        if lane.state is LaneState.HELD:
            lane.state = LaneState.OPEN
            self._line_up(lane)

    def close(self, lane: Lane[R]) -> None:
        """The partition is not ours any more: forget its work, count nothing of what is done."""
        if lane.state is LaneState.CLOSED:
            return
        lane.state = LaneState.CLOSED
        self._leave_line(lane)
        self._delayed = [entry for entry in self._delayed if entry[2].lane is not lane]
        heapify(self._delayed)
        del self._lanes[lane.partition]
        self._waiting_count -= lane.waiting_count
        lane.waiting_count = lane.in_flight_count = lane.delayed_count = 0
        lane.parallel = None
        for collection in (lane.serial, lane.ready, lane.blocked, lane.failures):
            collection.clear()

    def set_ceiling(self, lane: Lane[R], ceiling: int | None) -> None:
        """Hand out nothing above that offset until further notice; None: everything."""
        raised = ceiling is None or (lane.ceiling is not None and ceiling > lane.ceiling)
        lane.ceiling = ceiling
        if raised and lane.blocked:
            blocked, lane.blocked = lane.blocked, []
            for shard in blocked:
                self._make_ready(shard)

    # Work comes in.

    def add(self, lane: Lane[R], records: Sequence[R]) -> int:
        """Records polled for that lane, in order; those that are done already are left out.

        Returns:
            How many are to be processed; 0 also if the lane is closed.

        Raises:
            StateError: the offsets do not ascend; nothing was added.
        """
        if lane.state is LaneState.CLOSED:
            return 0
        offsets = [record.offset for record in records]
        wanted = lane.tracker.add(offsets)
        if wanted is not offsets:
            accepted = frozenset(wanted)
            records = [record for record in records if record.offset in accepted]
        if not records:
            return 0
        lane.waiting_count += len(records)
        self._waiting_count += len(records)
        if self._ordering is Ordering.KEY:
            self._add_by_key(lane, records)
        elif self._ordering is Ordering.PARTITION:
            self._add_to_serial(lane, None, records)
        else:
            self._add_to_parallel(lane, records)
        self._line_up(lane)
        return len(records)

    def _add_by_key(self, lane: Lane[R], records: Iterable[R]) -> None:
        shards, ready = lane.serial, lane.ready
        keyless: list[R] | None = [] if self._null_keys is NullKeys.PARALLEL else None
        for record in records:
            key = record.key
            shard = shards.get(key)
            if shard is not None:
                shard.records.append(record)
            elif key is None and keyless is not None:
                keyless.append(record)
            else:
                shards[key] = shard = Shard(lane, key, True, [record])
                ready.append(shard)
        if keyless:
            self._add_to_parallel(lane, keyless)

    def _add_to_serial(self, lane: Lane[R], key: Hashable, records: Iterable[R]) -> None:
        shard = lane.serial.get(key)
        if shard is not None:
            shard.records.extend(records)
        else:
            lane.serial[key] = shard = Shard(lane, key, True, list(records))
            lane.ready.append(shard)

    def _add_to_parallel(self, lane: Lane[R], records: Iterable[R]) -> None:
        if lane.parallel is not None:
            lane.parallel.records.extend(records)
        else:
            lane.parallel = Shard(lane, None, False, list(records))
            lane.ready.append(lane.parallel)

    # Work goes out.

    def take(
        self, monotonic_ms: int, max_records: int = 1, *, max_run: int | None = None
    ) -> list[Run[R]]:
        """Runs of ``max_records`` records in all, for one worker; empty: nothing to do now.

        ``max_run`` takes the place of the scheduler's own limit of one shard's records. Each run
        goes back by ``release`` or ``finish``, whether its lane is closed meanwhile or not.
        """
        if self._delayed and self._delayed[0][0] <= monotonic_ms:
            self._wake(monotonic_ms)
        runs: list[Run[R]] = []
        if max_run is None:
            max_run = self._max_run
        line = self._line
        while line and max_records > 0:
            lane = line.popleft()
            if lane.ceiling is None:
                max_records -= self._take_from(lane, max_records, max_run, runs)
            else:
                max_records -= self._take_below(lane, max_records, max_run, runs)
            if lane.ready:
                line.append(lane)
            else:
                lane.is_in_line = False
        return runs

    def _take_from(self, lane: Lane[R], limit: int, max_run: int, runs: list[Run[R]]) -> int:
        ready, owned = lane.ready, ShardState.OWNED
        taken = 0
        while ready and taken < limit:
            shard = ready.popleft()
            count = limit - taken
            if count > max_run:
                count = max_run
            records = shard.records
            if shard.start or len(records) > count:
                records = shard.cut(count)
            else:  # all of it; as ``cut`` does, without the call
                shard.records = []
            runs.append(Run(shard, records))
            taken += len(records)
            if shard.is_serial:
                shard.state = owned
            else:
                self._after_cut(shard)
        lane.waiting_count -= taken
        self._waiting_count -= taken
        lane.in_flight_count += taken
        return taken

    def _take_below(self, lane: Lane[R], limit: int, max_run: int, runs: list[Run[R]]) -> int:
        taken, ceiling = 0, lane.ceiling
        assert ceiling is not None
        while lane.ready and taken < limit:
            shard = lane.ready.popleft()
            count = shard.count_up_to(ceiling, min(max_run, limit - taken))
            if not count:
                shard.state = ShardState.BLOCKED
                lane.blocked.append(shard)
                continue
            runs.append(Run(shard, shard.cut(count)))
            taken += count
            self._after_cut(shard)
        lane.waiting_count -= taken
        self._waiting_count -= taken
        lane.in_flight_count += taken
        return taken

    def _after_cut(self, shard: Shard[R]) -> None:
        if shard.is_serial:
            shard.state = ShardState.OWNED
        elif shard.records:
            shard.lane.ready.append(shard)
        elif shard is shard.lane.parallel:
            shard.lane.parallel = None

    def _wake(self, monotonic_ms: int) -> None:
        delayed = self._delayed
        while delayed and delayed[0][0] <= monotonic_ms:
            shard = heappop(delayed)[2]
            shard.lane.delayed_count -= 1
            self._make_ready(shard)

    # Work comes back.

    def finish(self, runs: Iterable[Run[R]]) -> None:
        """Every record of these runs is done."""
        lane: Lane[R] | None = None
        offsets: list[int] = []
        for run in runs:
            shard = run.shard
            if shard.lane is not lane:
                if lane is not None:
                    self.complete(lane, offsets)
                lane, offsets = shard.lane, []
            records = run.records
            if len(records) == 1:  # many keys: this is most of the time
                offsets.append(records[0].offset)
            else:
                offsets += [record.offset for record in records]
            if self._retake(run) and shard.is_serial:
                if shard.records:
                    self._make_ready(shard)
                else:
                    del lane.serial[shard.key]
        if lane is not None:
            self.complete(lane, offsets)

    def complete(self, lane: Lane[R], offsets: Sequence[int]) -> None:
        """These are done: processed, or given up with a dead letter in place."""
        if lane.state is LaneState.CLOSED:
            return
        lane.tracker.complete(offsets)
        if lane.failures:
            for offset in offsets:
                lane.failures.pop(offset, None)

    def release(
        self,
        run: Run[R],
        *,
        processed: int | None = None,
        failed: Sequence[tuple[R, int]] = (),
    ) -> None:
        """The worker lets go of a run; it completes what is done by ``complete``.

        Args:
            run: As it was taken.
            processed: How many records from its front were tried; the others come back as if they
                had not been taken. None: all.
            failed: Records among the processed that are to be tried again, in their order, each
                with the monotonic time in ms before which it is not. A serial shard waits for the
                latest of them.

        Raises:
            StateError: the run was released before.
        """
        if not self._retake(run):
            return
        shard, lane = run.shard, run.shard.lane
        untried = [] if processed is None else run.records[processed:]
        lane.waiting_count += len(untried) + len(failed)
        self._waiting_count += len(untried) + len(failed)
        for record, _ in failed:
            lane.failures[record.offset] = lane.failures.get(record.offset, 0) + 1
        if shard.is_serial:
            self._give_back(shard, untried, failed)
        else:
            self._scatter(lane, untried, failed)

    def reclaim(self, run: Run[R], records: list[R]) -> None:
        """Take records at a run's end back, as its worker is stuck or shall end.

        They come back as if they had not been taken; the worker must not touch them any more. In
        order they wait for the end of the run, also if nothing is left of it.
        """
        if run.is_released or not records:
            return
        del run.records[len(run.records) - len(records) :]
        lane = run.shard.lane
        if lane.state is LaneState.CLOSED:
            return
        lane.in_flight_count -= len(records)
        lane.waiting_count += len(records)
        self._waiting_count += len(records)
        if run.shard.is_serial:
            run.shard.put_back(records)
        else:
            self._make_ready(Shard(lane, None, False, records))

    def find(self, lane: Lane[R], offset: int) -> R | None:
        """A record that waits; None: it is in a worker's hands, done, or unknown."""
        for shard in self._waiting_shards(lane):
            for record in shard.records[shard.start :]:
                if record.offset == offset:
                    return record
        return None

    def withdraw(self, lane: Lane[R], offset: int) -> None:
        """Hand that record out no more if it waits; what waited behind it need not. Slow."""
        for shard in self._waiting_shards(lane):
            waiting = shard.records[shard.start :]
            kept = [record for record in waiting if record.offset != offset]
            if len(kept) == len(waiting):
                continue
            lane.waiting_count -= 1
            self._waiting_count -= 1
            shard.records, shard.start = kept, 0
            if shard.state is ShardState.DELAYED and waiting[0].offset == offset:
                self._delayed = [entry for entry in self._delayed if entry[2] is not shard]
                heapify(self._delayed)
                lane.delayed_count -= 1
                if kept:
                    self._make_ready(shard)
            if not kept and shard.state is not ShardState.OWNED:
                self._drop(shard)
            return

    def _waiting_shards(self, lane: Lane[R]) -> list[Shard[R]]:
        delayed = [entry[2] for entry in self._delayed if entry[2].lane is lane]
        return list({*lane.serial.values(), *lane.ready, *lane.blocked, *delayed})

    def _drop(self, shard: Shard[R]) -> None:
        """Forget a shard that has become empty and is in nobody's hands."""
        lane = shard.lane
        lane.ready = deque(other for other in lane.ready if other is not shard)
        lane.blocked = [other for other in lane.blocked if other is not shard]
        if shard is lane.parallel:
            lane.parallel = None
        if shard.is_serial:
            del lane.serial[shard.key]
        if not lane.ready:
            self._leave_line(lane)

    def _retake(self, run: Run[R]) -> bool:
        """Whether what comes back still counts."""
        if run.is_released:
            raise StateError("this run was released before")
        run.is_released = True
        lane = run.shard.lane
        if lane.state is LaneState.CLOSED:
            return False
        lane.in_flight_count -= len(run.records)
        return True

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
            del shard.lane.serial[shard.key]

    def _scatter(self, lane: Lane[R], untried: list[R], failed: Sequence[tuple[R, int]]) -> None:
        if untried:
            self._make_ready(Shard(lane, None, False, untried))
        for record, due_ms in failed:
            self._delay(Shard(lane, None, False, [record]), due_ms)

    def _delay(self, shard: Shard[R], due_ms: int) -> None:
        shard.state = ShardState.DELAYED
        shard.lane.delayed_count += 1
        self._delays += 1
        heappush(self._delayed, (due_ms, self._delays, shard))

    def _make_ready(self, shard: Shard[R]) -> None:
        shard.state = ShardState.READY
        shard.lane.ready.append(shard)
        self._line_up(shard.lane)

    def check(self) -> None:
        """Assert the invariants."""
        delayed = [shard for _, _, shard in self._delayed]
        check_lanes(self._lanes.values(), delayed, self._line)
        assert self._waiting_count == sum(lane.waiting_count for lane in self._lanes.values())

    # The line.

    def _line_up(self, lane: Lane[R]) -> None:
        if lane.ready and not lane.is_in_line and lane.state is LaneState.OPEN:
            lane.is_in_line = True
            self._line.append(lane)

    def _leave_line(self, lane: Lane[R]) -> None:
        if lane.is_in_line:
            lane.is_in_line = False
            self._line.remove(lane)
