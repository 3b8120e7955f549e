"""Messages that markers name together: which they may (R28-R30), batches and sets of them; pure.

A START by reference leaves the payload where it is, so the message must outlive its lease by far:
its age and the longest lease are at most half of what its topic keeps. Its age is the broker's time
since it was appended, and that time is known from no message (what is polled may be days old), but
from the wall clock and from the delivery reports of this process: the later counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from kafkamq.markers.rules.hold import CHUNK_OFFSETS
from kafkamq.types import MessageBatch, MessageId

MAX_BATCHES = 64
"""Most batches of one marker."""

MAX_NAMED = 16_384
"""Most messages that one marker names: what some hundred hostile bytes can ask of a reader."""

_CHUNK_BITS = CHUNK_OFFSETS.bit_length() - 1


def chunk_end(offset: int) -> int:
    return ((offset >> _CHUNK_BITS) + 1) << _CHUNK_BITS


class Placed(Protocol):
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def log(self) -> tuple[bytes, int]: ...


Item = TypeVar("Item", bound=Placed)
T = TypeVar("T")


def gather(items: Iterable[Item]) -> list[tuple[tuple[MessageBatch, ...], list[Item]]]:
    """Get the batches of each marker that is needed to name these, and what these batches mean."""
    chunks: dict[tuple[int, tuple[bytes, int], int], list[Item]] = {}
    last_log: object = None
    last_partition = last_chunk = -1
    for item in items:
        chunk = item.offset >> _CHUNK_BITS
        # Seldom: they come in runs.
        if chunk != last_chunk or item.log is not last_log or item.partition != last_partition:
            last_chunk, last_log, last_partition = chunk, item.log, item.partition
            add = chunks.setdefault((item.partition, item.log, chunk), []).append
        add(item)
    parts = [
        (batch_of(partition, log, sorted({item.offset for item in of})), of)
        for (partition, log, _), of in chunks.items()
    ]
    return [(batches, [item for of in named for item in of]) for batches, named in join(parts)]


def join(named: Iterable[tuple[MessageBatch, T]]) -> list[tuple[tuple[MessageBatch, ...], list[T]]]:
    """Join batches of one chunk, as ``gather`` does items; each marker with its items."""
    chunks: dict[tuple[int, bytes, int, int], list[tuple[MessageBatch, T]]] = {}
    for batch, item in named:
        log = batch.topic_id, batch.leader_epoch
        chunk = batch.partition, *log, batch.base_offset >> _CHUNK_BITS
        chunks.setdefault(chunk, []).append((batch, item))
    markers: list[tuple[tuple[MessageBatch, ...], list[T]]] = []
    batches: list[MessageBatch] = []
    items: list[T] = []
    count = 0
    for of in chunks.values():
        batch = union([each for each, _ in of])
        size = batch.bits.bit_count()
        if len(batches) == MAX_BATCHES or (count + size > MAX_NAMED and batches):
            markers.append((tuple(batches), items))
            batches, items, count = [], [], 0
        batches.append(batch)
        items += [item for _, item in of]
        count += size
    if batches:
        markers.append((tuple(batches), items))
    return markers


def union(batches: Sequence[MessageBatch]) -> MessageBatch:
    one = batches[0]
    if len(batches) == 1:
        return one
    base, bits = min(each.base_offset for each in batches), 0
    for each in batches:
        bits |= each.bits << (each.base_offset - base)
    return MessageBatch(one.partition, one.topic_id, one.leader_epoch, base, bits)


def batch_of(partition: int, log: tuple[bytes, int], offsets: Sequence[int]) -> MessageBatch:
    """Return messages of one chunk, ascending, by topic id and leader epoch."""
    first = offsets[0]
    span = offsets[-1] - first + 1
    if span == len(offsets):
        bits = (1 << span) - 1
    else:
        digits = bytearray(b"0" * span)
        for offset in offsets:
            # It is the digit "1"; the lowest bit comes last.
            digits[first - offset - 1] = 49
        bits = int(digits, 2)
    return MessageBatch(partition, *log, first, bits)


def oldest_by_reference_ms(now_ms: int, *, max_lease_ms: int, retention_ms: int) -> int:
    """Return messages that are as old as this, or younger, may be STARTed by reference (R28).

    Args:
        now_ms: The brokers' time.
        retention_ms: Of the messages topic; negative: forever.
    """
    if retention_ms < 0:
        return 0
    # From this time on 2 * (age + max_lease) < retention holds.
    return now_ms + max_lease_ms - (retention_ms + 1) // 2 + 1


def delay_by_reference_ms(delay_ms: int, time_ms: int, now_ms: int, *, retention_ms: int) -> int:
    """Return a NACK's delay, cut to half of what a message of that time has left (R28)."""
    if retention_ms < 0:
        return delay_ms
    return max(0, min(delay_ms, (time_ms + retention_ms - now_ms) // 2))


_Chunk = tuple[int, bytes, int, int]
"""Partition, topic id, leader epoch (R13), number of the chunk."""


class MessageSet:
    """Messages by their identity; not thread-safe."""

    def __init__(self) -> None:
        # Bit i is the i-th message of the chunk.
        self._chunks: dict[_Chunk, int] = {}

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __len__(self) -> int:
        return sum(bits.bit_count() for bits in self._chunks.values())

    def __contains__(self, one: MessageId) -> bool:
        number, at = divmod(one.offset, CHUNK_OFFSETS)
        bits = self._chunks.get((one.partition, one.topic_id, one.leader_epoch, number), 0)
        return bits >> at & 1 == 1

    def add(self, batch: MessageBatch, first_offset: int = 0) -> bool:
        below = max(0, first_offset - batch.base_offset)
        bits = batch.bits >> below << below
        if bits:
            number, at = divmod(batch.base_offset, CHUNK_OFFSETS)
            chunk = batch.partition, batch.topic_id, batch.leader_epoch, number
            self._chunks[chunk] = self._chunks.get(chunk, 0) | bits << at
        return bits != 0

    def discard(self, batch: MessageBatch) -> None:
        number, at = divmod(batch.base_offset, CHUNK_OFFSETS)
        chunk = batch.partition, batch.topic_id, batch.leader_epoch, number
        bits = self._chunks.pop(chunk, 0) & ~(batch.bits << at)
        if bits:
            self._chunks[chunk] = bits

    def update(self, other: MessageSet) -> None:
        for chunk, bits in other._chunks.items():
            self._chunks[chunk] = self._chunks.get(chunk, 0) | bits

    def end(self, partition: int) -> int:
        """Return the offset behind the last one of this partition; 0: there is none."""
        return max(
            (
                number * CHUNK_OFFSETS + bits.bit_length()
                for (of, _, _, number), bits in self._chunks.items()
                if of == partition
            ),
            default=0,
        )

    def drop_before(self, partition: int, offset: int) -> None:
        number = offset // CHUNK_OFFSETS
        for chunk in [each for each in self._chunks if each[0] == partition and each[3] < number]:
            del self._chunks[chunk]
