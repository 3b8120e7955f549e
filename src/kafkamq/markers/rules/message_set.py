"""A set of messages, a bit for each: chunks of 4096 offsets, as markers name them; pure."""

from __future__ import annotations

from kafkamq.markers.rules.hold import CHUNK_OFFSETS
from kafkamq.types import MessageBatch, MessageId

_Chunk = tuple[int, bytes, int, int]
"""Partition, topic id, leader epoch (R13), number of the chunk."""


class MessageSet:
    """Messages by their identity; not thread-safe."""

    def __init__(self) -> None:
        self._chunks: dict[_Chunk, int] = {}  # bit i: the i-th message of the chunk

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __len__(self) -> int:
        return sum(bits.bit_count() for bits in self._chunks.values())

    def __contains__(self, one: MessageId) -> bool:
        number, at = divmod(one.offset, CHUNK_OFFSETS)
        bits = self._chunks.get((one.partition, one.topic_id, one.leader_epoch, number), 0)
        return bits >> at & 1 == 1

    def add(self, batch: MessageBatch, first_offset: int = 0) -> bool:
        """Those of a batch from this offset on; whether there are any."""
        below = max(0, first_offset - batch.base_offset)
        bits = batch.bits >> below << below
        if bits:
            number, at = divmod(batch.base_offset, CHUNK_OFFSETS)
            chunk = batch.partition, batch.topic_id, batch.leader_epoch, number
            self._chunks[chunk] = self._chunks.get(chunk, 0) | bits << at
        return bits != 0

    def discard(self, batch: MessageBatch) -> None:
        """Take those of a batch out, as far as they are in it."""
        number, at = divmod(batch.base_offset, CHUNK_OFFSETS)
        chunk = batch.partition, batch.topic_id, batch.leader_epoch, number
        bits = self._chunks.pop(chunk, 0) & ~(batch.bits << at)
        if bits:
            self._chunks[chunk] = bits

    def update(self, other: MessageSet) -> None:
        """Add all of another one."""
        for chunk, bits in other._chunks.items():
            self._chunks[chunk] = self._chunks.get(chunk, 0) | bits

    def end(self, partition: int) -> int:
        """The offset behind the last one of this partition; 0: there is none."""
        return max(
            (
                number * CHUNK_OFFSETS + bits.bit_length()
                for (of, _, _, number), bits in self._chunks.items()
                if of == partition
            ),
            default=0,
        )

    def drop_before(self, partition: int, offset: int) -> None:
        """Forget the chunks of this partition that end at or before the offset."""
        number = offset // CHUNK_OFFSETS
        for chunk in [each for each in self._chunks if each[0] == partition and each[3] < number]:
            del self._chunks[chunk]
