"""The scheduler against a model that looks at every record there ever was.

The model keeps one entry for each record of each assignment and derives all else from them: who may
be handed out now, in which order, and what must not wait. A crash forgets all but the commits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.examples import examples
from tests.unit.shard_records import Sample

from kafkamq.parallel.rules.offsets import OffsetTracker
from kafkamq.parallel.rules.shards import (
    NullKeys,
    Ordering,
    PartitionPhase,
    PartitionState,
    Run,
    Scheduler,
)

PARTITIONS = 2
SEEDS = st.integers(0, (1 << 32) - 1)
KEYS = [None, b"a", b"b", b"c", b"d"]
DISRUPTIONS = st.sampled_from(["crash", "assign", "close", "hold", "hold"] + ["commit"] * 3)


class Status(Enum):
    WAITING = 0
    OUT = 1
    DONE = 2


@dataclass
class Entry:
    """All that the model knows of a record in its present assignment."""

    record: Sample
    group: object  # records of one group stay in order; None: no order
    status: Status = Status.WAITING
    due_ms: int = 0


@dataclass
class Partition:
    """A partition's log, what is committed of it, and the state that works on it."""

    log: list[Sample]
    committed: tuple[int, int, tuple[int, ...]]
    state: PartitionState[Sample] | None = None
    entries: dict[int, Entry] | None = None
    position: int = 0
    began: int = 0
    skipped: set[int] = field(default_factory=set)  # done when the assignment began
    done: set[int] = field(default_factory=set)  # ever, by a assignment that counted


class SchedulerMachine(RuleBasedStateMachine):
    """One consumer that loses and gets its partitions."""

    @initialize(
        ordering=st.sampled_from(Ordering),
        null_keys=st.sampled_from(NullKeys),
        max_run=st.sampled_from([1, 2, 5, 64]),
    )
    def begin(self, ordering: Ordering, null_keys: NullKeys, max_run: int) -> None:
        self.ordering, self.null_keys, self.max_run = ordering, null_keys, max_run
        self.now_ms = 1_000
        self.partitions = [Partition([], (0, -1, ())) for _ in range(PARTITIONS)]
        self.start()

    def start(self) -> None:
        self.scheduler: Scheduler[Sample] = Scheduler(
            ordering=self.ordering, null_keys=self.null_keys, max_run=self.max_run
        )
        self.runs: list[Run[Sample]] = []
        for partition in self.partitions:
            partition.state = partition.entries = None
        for index in range(PARTITIONS):
            self.assign(index)

    def group(self, record: Sample) -> object:
        if self.ordering is Ordering.UNORDERED:
            return None
        if self.ordering is Ordering.PARTITION:
            return "all"
        if record.key is None and self.null_keys is NullKeys.PARALLEL:
            return None
        return ("key", record.key)

    # Partitions come and go.

    def assign(self, index: int) -> None:
        partition = self.partitions[index]
        offset, highest, holes = partition.committed
        tracker = OffsetTracker(offset, highest_seen=highest, incompletes=holes)
        before = partition.state
        partition.state = self.scheduler.assign(index, tracker)
        assert partition.state is not before
        partition.entries, partition.position, partition.began = {}, offset, offset
        partition.skipped = set(range(offset, highest + 1)).difference(holes)
        lost = {r.offset for r in partition.log if r.offset < offset} | partition.skipped
        lost &= {r.offset for r in partition.log}
        assert lost <= partition.done, "skipped without having been processed"

    @rule(index=st.integers(0, PARTITIONS - 1), what=DISRUPTIONS)
    def disrupt(self, index: int, what: str) -> None:
        """One rule for many, or there would never be much work at once."""
        partition = self.partitions[index]
        if what == "crash":
            self.start()
        elif partition.state is None or what == "assign":
            self.assign(index)
        elif what == "commit":
            progress = partition.state.tracker.progress()
            partition.committed = (
                progress.committable_offset,
                progress.highest_succeeded,
                progress.incompletes,
            )
        elif what == "hold" and partition.state.phase is PartitionPhase.OPEN:
            self.scheduler.hold(partition.state)
        else:
            self.scheduler.close(partition.state)
            partition.state = partition.entries = None

    @rule(index=st.integers(0, PARTITIONS - 1), above=st.none() | st.integers(-1, 20))
    def set_ceiling(self, index: int, above: int | None) -> None:
        state = self.partitions[index].state
        if state is not None:
            ceiling = None if above is None else state.tracker.committable_offset() + above
            self.scheduler.set_ceiling(state, ceiling)

    # Work.

    @rule(
        index=st.integers(0, PARTITIONS - 1),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=12),
        gap=st.sampled_from([0, 0, 3]),
        again=st.sampled_from([False] * 5 + [True]),  # the consumer went back in between
    )
    def poll(self, index: int, keys: list[bytes | None], gap: int, again: bool) -> None:
        partition = self.partitions[index]
        if again:
            partition.position = partition.began
        end = partition.log[-1].offset + 1 + gap if partition.log else 0
        partition.log += [Sample(end + number, key) for number, key in enumerate(keys)]
        self.poll_more(partition)

    def poll_more(self, partition: Partition) -> None:
        if partition.state is None or partition.entries is None:
            return
        batch = [record for record in partition.log if record.offset >= partition.position][:10]
        wanted = [
            record
            for record in batch
            if record.offset not in partition.entries and record.offset not in partition.skipped
        ]
        assert self.scheduler.add(partition.state, batch) == len(wanted)
        for record in wanted:
            partition.entries[record.offset] = Entry(record, self.group(record))
        if batch:
            partition.position = batch[-1].offset + 1

    @rule(max_records=st.sampled_from([1, 2, 3, 10, 100]), step_ms=st.sampled_from([0, 1, 10, 100]))
    def take(self, max_records: int, step_ms: int) -> None:
        self.now_ms += step_ms
        runs = self.scheduler.take(self.now_ms, max_records)
        taken = 0
        for run in runs:
            entries = self.entries_of(run.partition)
            assert entries is not None and 0 < len(run.records) <= self.max_run
            taken += len(run.records)
            for record in run.records:
                entry = entries[record.offset]
                assert entry in self.eligible(run.partition), "not its turn"
                if entry.group is not None:
                    before = [e for e in entries.values() if e.group == entry.group]
                    assert all(
                        e.status is Status.DONE or e.record in run.records
                        for e in before
                        if e.record.offset < record.offset
                    ), "order"
            assert [r.offset for r in run.records] == sorted({r.offset for r in run.records})
            for record in run.records:
                entries[record.offset].status = Status.OUT
        self.runs += runs
        assert taken <= max_records
        if taken < max_records:
            assert not any(self.eligible(state) for state in self.scheduler.partitions), (
                "work waits"
            )

    def partition_of(self, state: PartitionState[Sample]) -> Partition:
        assert isinstance(state.place, int)
        return self.partitions[state.place]

    def entries_of(self, state: PartitionState[Sample]) -> dict[int, Entry] | None:
        partition = self.partition_of(state)
        return partition.entries if partition.state is state else None

    def eligible(self, state: PartitionState[Sample]) -> list[Entry]:
        """Which records may be handed out now: of a group, those before the first that may not."""
        entries = self.entries_of(state)
        if entries is None or state.phase is not PartitionPhase.OPEN:
            return []
        # What workers have of earlier assignments is busy until it comes back.
        left = [
            record
            for run in self.runs
            if run.partition.place == state.place and run.partition is not state
            for record in run.records
        ]
        busy = {record.offset for record in left if self.group(record) is None}
        result, closed_groups = [], {self.group(record) for record in left} - {None}
        for entry in sorted(entries.values(), key=lambda e: e.record.offset):
            if entry.group in closed_groups or entry.status is Status.DONE:
                continue
            if entry.group is None and entry.record.offset in busy:
                continue
            too_high = state.ceiling is not None and entry.record.offset > state.ceiling
            if entry.status is Status.OUT or entry.due_ms > self.now_ms or too_high:
                if entry.group is not None:
                    closed_groups.add(entry.group)
                continue
            result.append(entry)
        return result

    @precondition(lambda self: self.runs)
    @rule(seed=SEEDS)
    def release(self, seed: int) -> None:
        """A run ends: some of it done, some failed, some not tried."""
        rng = random.Random(seed)
        run = self.runs.pop(rng.randrange(len(self.runs)))
        processed = rng.choice([len(run.records), rng.randint(0, len(run.records))])
        tried = run.records[:processed]
        worst = rng.choice([0, 0, 1, 3])
        failed = [record for record in tried if rng.randrange(4) < worst]
        delay = rng.choice([0, 1, 50])
        due_ms = self.now_ms + delay
        done = [record for record in tried if record not in failed]
        if rng.randrange(2):
            self.scheduler.complete(run.partition, [record.offset for record in done])
            self.scheduler.release(
                run, processed=processed, failed=[(record, due_ms) for record in failed]
            )
        else:
            self.scheduler.release(
                run, processed=processed, failed=[(record, due_ms) for record in failed]
            )
            self.scheduler.complete(run.partition, [record.offset for record in done])
        entries = self.entries_of(run.partition)
        if entries is None:
            assert run.is_stale
            return
        self.settle(run, entries, done)
        for record in run.records[processed:]:
            entries[record.offset].status = Status.WAITING
        for record in failed:
            entry = entries[record.offset]
            entry.status, entry.due_ms = Status.WAITING, due_ms

    @precondition(lambda self: self.runs)
    @rule(seed=SEEDS)
    def finish(self, seed: int) -> None:
        rng = random.Random(seed)
        chosen = rng.sample(self.runs, rng.randint(1, min(3, len(self.runs))))
        self.scheduler.finish(chosen)
        for run in chosen:
            self.runs = [other for other in self.runs if other is not run]
            entries = self.entries_of(run.partition)
            if entries is not None:
                self.settle(run, entries, run.records)

    @precondition(lambda self: self.runs)
    @rule(seed=SEEDS)
    def reclaim(self, seed: int) -> None:
        """A worker is stuck: what it has not begun is for others, in order behind what it is at."""
        rng = random.Random(seed)
        run = rng.choice(self.runs)
        rest = run.records[rng.randint(int(run.shard.is_serial), len(run.records)) :]
        self.scheduler.reclaim(run, list(rest))
        entries = self.entries_of(run.partition)
        if entries is not None:
            for record in rest:
                entries[record.offset].status = Status.WAITING

    @rule(seed=SEEDS)
    def give_up(self, seed: int) -> None:
        """A record is parked elsewhere, whether it waits or is in a worker's hands."""
        rng = random.Random(seed)
        partition = rng.choice(self.partitions)
        state, entries = partition.state, partition.entries
        open_ones = [e for e in (entries or {}).values() if e.status is not Status.DONE]
        if state is None or not open_ones:
            return
        entry = rng.choice(open_ones)
        found = self.scheduler.find(state, entry.record.offset)
        assert (found is entry.record) == (entry.status is Status.WAITING)
        if entry.status is Status.WAITING:
            self.scheduler.withdraw(state, [entry.record.offset])
            self.scheduler.complete(state, [entry.record.offset])
            entry.status = Status.DONE
            partition.done.add(entry.record.offset)
            group = [e for e in entries.values() if e.group == entry.group] if entries else []
            behind = [e for e in group if e.status is Status.WAITING]
            is_first = all(entry.record.offset < e.record.offset for e in behind)
            if entry.group is not None and is_first and entry.due_ms > self.now_ms:
                for other in behind:  # they waited for it, and need not any more
                    other.due_ms = min(other.due_ms, self.now_ms)

    @rule(seed=SEEDS)
    def go_on_for_a_while(self, seed: int) -> None:
        """Many steps in one: what comes of them goes deeper than the rules one by one."""
        rng = random.Random(seed)
        for _ in range(25):
            step = rng.randrange(5)
            if step == 0:
                keys = rng.choices(KEYS, k=rng.randint(1, 6))
                index = rng.randrange(PARTITIONS)
                self.poll(index=index, keys=keys, gap=rng.choice([0, 0, 3]), again=False)
            elif step == 1 or not self.runs:
                self.take(max_records=rng.choice([1, 2, 10]), step_ms=rng.choice([0, 1, 30]))
            elif step == 2:
                self.finish(seed=rng.getrandbits(32))
            elif rng.randrange(4) == 0:
                self.reclaim(seed=rng.getrandbits(32))
            else:
                self.release(seed=rng.getrandbits(32))
            self.counts_agree()

    def settle(self, run: Run[Sample], entries: dict[int, Entry], done: list[Sample]) -> None:
        for record in done:
            entry = entries[record.offset]
            assert entry.status is Status.OUT
            entry.status = Status.DONE
            self.partition_of(run.partition).done.add(record.offset)

    # What must hold.

    @invariant()
    def counts_agree(self) -> None:
        self.scheduler.check()
        for partition in self.partitions:
            if partition.state is None or partition.entries is None:
                continue
            statuses = [entry.status for entry in partition.entries.values()]
            assert partition.state.waiting_count == statuses.count(Status.WAITING)
            assert partition.state.in_flight_count == statuses.count(Status.OUT)
            assert partition.state.tracker.open_count == len(statuses) - statuses.count(Status.DONE)

    @invariant()
    def the_next_due_time_is_known(self) -> None:
        waiting = [
            entry.due_ms
            for partition in self.partitions
            for entry in (partition.entries or {}).values()
            if entry.status is Status.WAITING and entry.due_ms > self.now_ms
        ]
        if waiting:
            due_ms = self.scheduler.next_due_ms()
            assert due_ms is not None and due_ms <= max(waiting)

    def teardown(self) -> None:
        """Whatever happened: once workers only succeed, everything gets done."""
        if not hasattr(self, "scheduler"):
            return
        for state in self.scheduler.partitions:
            self.scheduler.set_ceiling(state, None)
            if state.phase is PartitionPhase.HELD:
                self.scheduler.close(state)
        self.scheduler.finish(self.runs)
        self.now_ms += 1_000
        while runs := self.scheduler.take(self.now_ms, 10):
            self.scheduler.finish(runs)
        for state in self.scheduler.partitions:
            assert state.tracker.open_count == state.waiting_count == state.in_flight_count == 0
            assert not state.serial and state.parallel is None
        assert self.scheduler.next_due_ms() is None


SchedulerMachine.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None
)
TestSchedulerModel = SchedulerMachine.TestCase
