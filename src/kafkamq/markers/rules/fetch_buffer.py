"""What a worker has polled and not STARTed, and which offsets it may commit (R5); pure.

Messages of other queues share the topic, so a partition's committable offset is the first message
of our own queue that has no START, or else everything polled: theirs are committed along.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

MAX_AGE_MS = 20_000
"""No START for what was polled longer ago than this (R5)."""


class Waiting(Protocol):
    """A message of our own queue, polled and not STARTed."""

    partition: int
    offset: int
    polled_ms: int


_PARTITION = attrgetter("partition")
Message = TypeVar("Message", bound=Waiting)
Record = TypeVar("Record")


@dataclass(slots=True)
class Polled(Generic[Record]):
    """A record of any type as such a message."""

    record: Record
    partition: int
    offset: int
    polled_ms: int


def _firsts(messages: Iterable[Waiting]) -> Iterator[tuple[int, int]]:
    """Partition and first offset of each run of messages of one partition."""
    for partition, run in groupby(messages, _PARTITION):
        yield partition, next(run).offset


class FetchBuffer(Generic[Message]):
    """The polled messages of one consumer, over all its partitions."""

    def __init__(self) -> None:
        self._queue: deque[Message] = deque()
        self._next: dict[int, int] = {}  # partition -> next offset to poll
        self._committed: dict[int, int] = {}  # also: where the first poll began
        self._taken: dict[int, int] = {}  # partition -> first offset whose START is under way
        self._held: dict[int, int] = {}  # partition held back -> first offset whose START is late
        self._uncommitted = 0  # records polled since the last commit, those of other queues too

    def __len__(self) -> int:
        return len(self._queue)

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
        own: Sequence[Message],
        *,
        first_offsets: dict[int, int],
        next_offsets: dict[int, int],
        count: int,
    ) -> None:
        """A batch was polled.

        Args:
            own: Messages of our queue, in the order of the batch.
            first_offsets: Smallest offset of the batch per partition.
            next_offsets: Largest offset + 1 of the batch per partition.
            count: Records of the batch, those of other queues included.
        """
        for partition, offset in first_offsets.items():
            self._committed.setdefault(partition, offset)
        self._next.update(next_offsets)
        self._uncommitted += count
        self._queue.extend(own)

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
        return self._queue[0] if self._queue else None

    def take(self) -> Message:
        """Remove the head; its START is about to be written."""
        (message,) = self.take_many(1)
        return message

    def upcoming(self, count: int) -> Iterable[Message]:
        """The first ``count`` messages, still there."""
        return islice(self._queue, count)

    def take_many(self, count: int) -> list[Message]:
        """Remove so many; their STARTs are about to be written."""
        pop = self._queue.popleft
        messages = [pop() for _ in range(count)]
        for partition, offset in _firsts(messages):
            self._taken.setdefault(partition, offset)
        return messages

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
            first = next((m.offset for m in self._queue if m.partition == partition), None)
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
        if any(message.partition == partition for message in self._queue):
            self._queue = deque(m for m in self._queue if m.partition != partition)

    def check(self) -> None:
        """Assert the invariants."""
        offsets: dict[int, list[int]] = {}
        for message in self._queue:
            offsets.setdefault(message.partition, []).append(message.offset)
        for partition, own in offsets.items():
            assert own == sorted(set(own))
            assert own[-1] < self._next[partition]
