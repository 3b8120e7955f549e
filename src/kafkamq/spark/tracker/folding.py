"""One marker partition is folded here, batch by batch, over a store of its state (R18).

State is what ``markers/rules/snapshot.py`` makes: one index, and the chunks of 4096 offsets that a
batch touches. There is no timer and no wall clock; time comes in with the records (R1), TICKs
among them.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kafkamq.config import TrackerConfig
from kafkamq.errors import StateError
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.markers.rules.snapshot import restore_tracker, take_snapshot
from kafkamq.markers.wire.records import TrackerStatus, encode_status
from kafkamq.spark.blocks import Block, encode_actions
from kafkamq.types import Outcome

FOLDED_COLUMNS = ("status", "actions")
"""One row per marker partition and batch, for the driver; both are BINARY."""

Cell = tuple[str, int, int, int, int, bytes]
"""Topic, partition, begin and end of the batch's range, the block's first offset, the block."""


_MAX_ACTIONS, _LEAST_ACTIONS = 400_000, 500


def most_actions(tracker: TrackerConfig, partitions: int) -> int:
    """Return how many a row may have: all of a batch are in the driver's memory."""
    share = max(_LEAST_ACTIONS, _MAX_ACTIONS // max(1, partitions))
    return min(tracker.max_offsets_per_commit, share)


@dataclass(frozen=True, kw_only=True)
class FoldSettings:
    engine: str
    # Of this start (R22); 0: it stands by, and its TICK will tell (R36).
    epoch: int
    max_lease_ms: int
    carry_after_ms: int
    max_actions: int  # R16
    starting: dict[int, int] = field(default_factory=dict)
    # Of this start alone: epochs begin again where Kafka has forgotten the ledgers.
    token: str = field(default_factory=lambda: secrets.token_hex(8))


class IndexState(Protocol):
    def get(self) -> tuple[Any, ...] | None: ...
    def update(self, newValue: tuple[Any, ...]) -> None: ...  # noqa: N803 - Spark's


class ChunkState(Protocol):
    def getValue(self, key: tuple[Any, ...]) -> tuple[Any, ...] | None: ...  # noqa: N802
    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None: ...  # noqa: N802
    def removeKey(self, key: tuple[Any, ...]) -> None: ...  # noqa: N802


@dataclass
class PartitionFold:
    """Folds the batches of one marker partition and says what is due."""

    settings: FoldSettings
    # Where the index is kept, with the epoch and what was counted in it.
    index: IndexState
    # Where chunks are kept, by name.
    chunks: ChunkState

    def fold(self, cells: Sequence[Cell]) -> tuple[bytes, bytes]:
        """Return a batch's row, of ``FOLDED_COLUMNS``; the cells in offset order.

        Raises:
            StateError: The state is not that of the batch before.
        """
        topic, partition, range_start, range_end = cells[0][:4]
        stored = self.index.get()
        tracker = self._tracker(None if stored is None else stored[0], partition)
        if tracker.next_offset != range_start:
            raise StateError(
                f"{topic}[{partition}]: the state has folded up to {tracker.next_offset}, the "
                f"batch begins at {range_start}: the checkpoint is damaged; start with a new one"
            )
        redelivered = dead_lettered = 0
        before = _epoch(tracker)
        if stored is not None and stored[1] == before:
            redelivered, dead_lettered = stored[2:4]
        apply = tracker.apply
        for cell in cells:
            block = Block(cell[5])
            for row in block:
                apply(*row)
            redelivered += block.count(Outcome.REDELIVERED)
            dead_lettered += block.count(Outcome.DEAD_LETTERED)
        if _epoch(tracker) != before:
            redelivered = dead_lettered = 0
        tracker.next_offset = range_end
        actions = tracker.plan(self.settings.max_actions)
        self._keep(tracker, redelivered, dead_lettered)
        wake = tracker.next_wake()
        status = TrackerStatus(
            topic=topic,
            partition=partition,
            engine=self.settings.engine,
            epoch=_epoch(tracker),
            clock_ms=tracker.clock_ms,
            position=tracker.next_offset,
            committable_offset=tracker.committable_offset(),
            entries=tracker.open_count(),
            due=tracker.due_count(),
            deadline_ms=wake.deadline_ms,
            warn_ms=wake.warn_ms,
            late_verdicts=tracker.late_verdicts,
            malformed=tracker.malformed,
            redelivered=redelivered,
            dead_lettered=dead_lettered,
            is_live=tracker.is_live,
        )
        return encode_status(status), encode_actions(actions)

    def _tracker(self, index: bytes | None, partition: int) -> RedeliveryTracker:
        settings = self.settings
        known: dict[str, Any] = {
            "partition": partition,
            "max_lease_ms": settings.max_lease_ms,
            "longest_ms": 2 * settings.carry_after_ms,
            "carry_after_ms": settings.carry_after_ms,
            "engine": (settings.token, settings.epoch),
        }
        if index is None:
            return RedeliveryTracker(settings.starting.get(partition, 0), **known)
        return restore_tracker(bytes(index), self._load, **known)

    def _load(self, name: str) -> bytes:
        found = self.chunks.getValue((name,))
        if found is None:
            raise StateError(f"chunk {name} is missing in the state: the checkpoint is damaged")
        return bytes(found[0])

    def _keep(self, tracker: RedeliveryTracker, redelivered: int, dead_lettered: int) -> None:
        snapshot = take_snapshot(tracker)
        for name in snapshot.removed:
            self.chunks.removeKey((name,))
        for name, chunk in snapshot.changed.items():
            self.chunks.updateValue((name,), (chunk,))
        self.index.update((snapshot.index, _epoch(tracker), redelivered, dead_lettered))


def _epoch(tracker: RedeliveryTracker) -> int:
    """Return the epoch of the start; 0 while it stands by."""
    return 0 if tracker.engine is None else tracker.engine[1]
