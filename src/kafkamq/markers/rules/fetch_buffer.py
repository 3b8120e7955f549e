"""What a worker has polled and not STARTed, and which offsets it may commit (R5); pure.

Messages of other queues share the topic, so a partition's committable offset is the first message
of our own queue that has no START, or else everything polled: theirs are committed along.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_AGE_MS = 20_000
"""No START for what was polled longer ago than this (R5)."""


Message = TypeVar("Message")


@dataclass(slots=True)
class Run(Generic[Message]):
    """Messages of our own queue in one partition, polled at once and not STARTed."""

    partition: int
    offsets: Sequence[int]  # ascending
    messages: Sequence[Message]  # one each
    polled_ms: int
    is_plain: bool = True  # each is a first delivery, without a TTL

    def cut(self, begin: int, end: int) -> Run[Message]:
        """A part of it."""
        messages, offsets = self.messages[begin:end], self.offsets[begin:end]
        return Run(self.partition, offsets, messages, self.polled_ms, self.is_plain)


def _firsts(runs: Iterable[Run[Message]]) -> Iterator[tuple[int, int]]:
    """Partition and first offset of each run."""
    return ((run.partition, run.offsets[0]) for run in runs)


class FetchBuffer(Generic[Message]):
    """The polled messages of one consumer, over all its partitions."""

    def __init__(self) -> None:
        self._queue: deque[Run[Message]] = deque()
        self._count = 0  # messages in there
        self._next: dict[int, int] = {}  # partition -> next offset to poll
        self._committed: dict[int, int] = {}  # also: where the first poll began
        self._taken: dict[int, int] = {}  # partition -> first offset whose START is under way
        self._held: dict[int, int] = {}  # partition held back -> first offset whose START is late
        self._uncommitted = 0  # records polled since the last commit, those of other queues too

    def __len__(self) -> int:
        return self._count

    @property
    def uncommitted_count(self) -> int:
        """Records, those of other queues included, that were polled since the last commit."""
        return self._uncommitted

    def partitions(self) -> tuple[int, ...]:
        """Those that something is known of."""
        return tuple(self._next)

    def positions(self) -> Mapping[int, int]:
        """The next offsets to poll, by partition."""
        return self._next

    @property
    def held(self) -> Collection[int]:
        """Partitions that are held back: records of theirs are not to be polled."""
        return self._held

    # Facts.

    def polled(
        self,
        own: Sequence[Run[Message]],
        *,
        first_offsets: dict[int, int],
        next_offsets: dict[int, int],
        count: int,
    ) -> None:
        """A batch was polled.

        Args:
            own: Messages of our queue, in the order of the batch; no run is empty.
            first_offsets: Smallest offset of the batch per partition.
            next_offsets: Largest offset + 1 of the batch per partition.
            count: Records of the batch, those of other queues included.
        """
        for partition, offset in first_offsets.items():
            self._committed.setdefault(partition, offset)
        self._next.update(next_offsets)
        self._uncommitted += count
        self._queue.extend(own)
        self._count += sum(len(run.messages) for run in own)

    def placed(self, partition: int, offset: int) -> None:
        """The consumer was told to read the partition from here, and this is committed."""
        self._drop(partition)
        self._committed[partition] = self._next[partition] = offset

    def skipped_to(self, partition: int, offset: int) -> None:
        """Reading goes on further ahead, because records are gone; what was polled stays."""
        self._committed.setdefault(partition, offset)
        self._next[partition] = offset

    def revoked(self, partitions: Iterable[int]) -> None:
        """Partitions are gone: what was polled from them is another owner's."""
        for partition in partitions:
            self._drop(partition)
            self._held.pop(partition, None)
            self._next.pop(partition, None)
            self._committed.pop(partition, None)

    def committed(self, offsets: dict[int, int], count: int | None = None) -> None:
        """These offsets are committed; ``count``: of so many records, by default of all polled."""
        for partition, offset in offsets.items():
            if partition in self._committed:
                self._committed[partition] = offset
        self._uncommitted = 0 if count is None else max(0, self._uncommitted - count)

    # Decisions.

    def head(self) -> Message | None:
        """The next message to START, None when nothing is there."""
        return self._queue[0].messages[0] if self._queue else None

    def upcoming(self) -> Iterable[Run[Message]]:
        """The runs in their order, still there."""
        return self._queue

    def take_many(self, count: int) -> list[Run[Message]]:
        """Remove so many messages; their STARTs are about to be written."""
        taken: list[Run[Message]] = []
        while count and self._queue:
            run = self._queue[0]
            size = len(run.messages)
            if size > count:
                taken.append(run.cut(0, count))
                self._queue[0] = run.cut(count, size)
                size = count
            else:
                taken.append(self._queue.popleft())
            self._count -= size
            count -= size
        for partition, offset in _firsts(taken):
            self._taken.setdefault(partition, offset)
        return taken

    def started(self) -> None:
        """The STARTs of everything taken are in the log, unless it is held back (R5)."""
        self._taken.clear()

    def hold(self, late: Mapping[int, int]) -> None:
        """Some STARTs are late: their partitions stand still, whatever becomes of the others.

        Args:
            late: The first such message of each of these partitions; it and all behind it is
                neither committed nor, but for what was taken already, taken.
        """
        for partition, offset in late.items():
            self._held[partition] = offset
            firsts = (first for number, first in _firsts(self._queue) if number == partition)
            first = next(firsts, None)
            if first is not None:
                self._drop_polled(partition)
                self._next[partition] = first

    def go_on(self, partitions: Iterable[int]) -> dict[int, int]:
        """Their STARTs are in the log after all; returns where to read on."""
        gone_on = [number for number in partitions if self._held.pop(number, None) is not None]
        return {number: self._next[number] for number in gone_on}

    def is_stale(self, monotonic_ms: int) -> bool:
        """Whether the head was polled too long ago to be STARTed (R5): fetch again."""
        return bool(self._queue) and monotonic_ms - self._queue[0].polled_ms > MAX_AGE_MS

    def committable(self) -> dict[int, int]:
        """Offsets to commit per partition; without those that are committed already."""
        result = {}
        waiting: dict[int, int] = {}  # partition -> first own offset without START
        for partition, offset in _firsts(self._queue):
            waiting.setdefault(partition, offset)
        for partition, next_offset in self._next.items():
            offset = waiting.get(partition, next_offset)
            offset = self._taken.get(partition, self._held.get(partition, offset))
            if offset != self._committed.get(partition):
                result[partition] = offset
        return result

    def rewind(self, partitions: Iterable[int] | None = None) -> dict[int, int]:
        """Forget what was polled and not committed; returns where to seek to.

        Args:
            partitions: Those concerned; None: all that are not held back.
        """
        if partitions is None:
            chosen = [number for number in self._next if number not in self._held]
        else:
            chosen = list(partitions)
        result = {}
        for partition in chosen:
            if partition in self._committed:
                self._drop(partition)
                self._held.pop(partition, None)
                self._next[partition] = result[partition] = self._committed[partition]
        return result

    def _drop(self, partition: int) -> None:
        self._taken.pop(partition, None)
        self._drop_polled(partition)

    def _drop_polled(self, partition: int) -> None:
        self._queue = deque(run for run in self._queue if run.partition != partition)
        self._count = sum(len(run.messages) for run in self._queue)

    def check(self) -> None:
        """Assert the invariants."""
        offsets: dict[int, list[int]] = {}
        for run in self._queue:
            assert len(run.offsets) == len(run.messages) > 0
            offsets.setdefault(run.partition, []).extend(run.offsets)
        for partition, own in offsets.items():
            assert own == sorted(set(own))
            assert own[-1] < self._next[partition]
