"""Do the trackers agree? One log, folded three ways: at once, through a state store, naively.

The in-process tracker folds continuously; the Spark tracker writes its state into a store after
each batch and begins the next one from there; the naive model knows nothing but the rules. On any
log, cut into any batches, the three must plan the same and see the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from harness.naive import NaiveTracker
from harness.random_markers import MarkerRecord
from kafkamq.markers.rules.chunks import LIMITS, PageLimits
from kafkamq.markers.rules.delivery import Carry, Settle, each_message, row_order
from kafkamq.markers.rules.hold import NEVER
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.markers.rules.snapshot import restore_tracker, take_snapshot

Batch = Sequence[MarkerRecord]


@dataclass
class StateStore:
    """A tracker's state between batches, as a key-value store keeps it."""

    index: bytes = b""
    chunks: dict[str, bytes] = field(default_factory=dict)
    loads: int = 0
    limits: PageLimits = LIMITS

    def load(self, name: str) -> bytes:
        """Return one chunk or page; counted."""
        self.loads += 1
        return self.chunks[name]

    def save(self, tracker: RedeliveryTracker) -> None:
        """Write what changed."""
        snapshot = take_snapshot(tracker, self.limits)
        self.index = snapshot.index
        self.chunks.update(snapshot.changed)
        for name in snapshot.removed:
            self.chunks.pop(name, None)

    def restore(
        self,
        *,
        partition: int = 0,
        max_lease_ms: int = 43_200_000,
        carry_after_ms: int = NEVER,
        engine: tuple[str, int] | None = None,
    ) -> RedeliveryTracker:
        """Return the tracker as it was saved."""
        return restore_tracker(
            self.index,
            self.load,
            partition=partition,
            max_lease_ms=max_lease_ms,
            carry_after_ms=carry_after_ms,
            engine=engine,
        )


def cut_batches(records: Batch, seed: int) -> list[Batch]:
    """Return the log in batches of random sizes."""
    rng = random.Random(seed)
    largest = rng.choice((1, 5, 50, 300))
    batches = []
    at = 0
    while at < len(records):
        size = rng.randint(1, largest)
        batches.append(records[at : at + size])
        at += size
    return batches


def plan_of_batches(
    batches: Sequence[Batch], *, partition: int = 0, carry_after_ms: int = NEVER
) -> list[Sequence[Settle | Carry]]:
    """Return what the core plans after each batch; for comparison with any other engine."""
    first_offset = batches[0][0].offset if batches else 0
    tracker = RedeliveryTracker(first_offset, partition=partition, carry_after_ms=carry_after_ms)
    plans = []
    for batch in batches:
        for record in batch:
            tracker.apply(record.offset, record.timestamp_ms, record.marker)
        plans.append(tracker.plan())
    return plans


def check_agreement(
    records: Batch,
    seed: int,
    *,
    partition: int = 0,
    carry_after_ms: int = NEVER,
    limits: PageLimits = LIMITS,
) -> int:
    """Fold the log three ways and assert that nobody can tell them apart.

    Args:
        records: A log of one marker partition.
        seed: Draws the batches, and which transactions abort.
        partition: The marker partition that it is the log of.
        carry_after_ms: As for ``RedeliveryTracker``.
        limits: Of the state in the store.

    Returns:
        How many actions were planned.

    Raises:
        AssertionError: they differ; the text names seed and offset.
    """
    rng = random.Random(seed)
    abort_rate = rng.choice((0.0, 0.3))
    first_offset = records[0].offset if records else 0
    at_once = RedeliveryTracker(first_offset, partition=partition, carry_after_ms=carry_after_ms)
    store = StateStore(limits=limits)
    store.save(RedeliveryTracker(first_offset, partition=partition))
    naive = NaiveTracker(
        first_offset,
        partition=partition,
        carry_after_ms=None if carry_after_ms >= NEVER else carry_after_ms,
    )
    planned = 0
    for batch in cut_batches(records, seed):
        stored = store.restore(partition=partition, carry_after_ms=carry_after_ms)
        for record in batch:
            for apply in (at_once.apply, stored.apply, naive.apply):
                apply(record.offset, record.timestamp_ms, record.marker)
        where = f"seed {seed}, behind offset {batch[-1].offset}"
        actions = naive.plan()
        planned += len(actions)
        _equal(where, "plan", actions, [partial(_planned, each) for each in (at_once, stored)])
        failed = [action for action in actions if rng.random() < abort_rate]
        for tracker in (at_once, stored, naive):
            tracker.aborted(failed)
        store.save(stored)
        _equal_views(where, naive, (at_once, stored))
        again = store.restore(partition=partition, carry_after_ms=carry_after_ms)
        _equal_views(where, naive, (at_once, again))
    return planned


def _planned(tracker: RedeliveryTracker) -> list[Settle | Carry]:
    """Return what it plans, one action for a message; its own order is that of R32."""
    actions = list(tracker.plan())
    assert actions == sorted(actions, key=row_order), "by START, log, page and lowest bit"
    return sorted(each_message(actions), key=row_order)


def _equal_views(
    where: str, naive: NaiveTracker, trackers: tuple[RedeliveryTracker, RedeliveryTracker]
) -> None:
    first, second = trackers
    state = naive.state()
    entries = state.entries
    offset = min((entry.start_offset for entry in entries.values()), default=state.next_offset)
    _equal(where, "position", offset, (first.committable_offset, second.committable_offset))
    for tracker in trackers:
        tracker.check()
        assert tracker.late_verdicts == state.late_verdicts, f"late_verdicts: {where}"
        assert tracker.malformed == state.malformed, f"malformed: {where}"
        assert tracker.clock_ms == state.now_ms, f"clock_ms: {where}"
        assert tracker.next_offset == state.next_offset, f"next_offset: {where}"
    opened = {message_id for of_schedule, message_id in entries if not of_schedule}
    _equal(where, "in_progress", opened, (first.in_progress, second.in_progress))
    scheduled = {message_id for of_schedule, message_id in entries if of_schedule}
    _equal(where, "scheduled", scheduled, (first.scheduled, second.scheduled))


def _equal(where: str, name: str, expected: object, views: Sequence[Callable[[], object]]) -> None:
    for way, view in zip(("at once", "through a store"), views, strict=True):
        actual = view()
        assert actual == expected, f"{name}, {way}: {where}\n{actual}\nthe rules say\n{expected}"
