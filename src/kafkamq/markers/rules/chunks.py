"""Entries of a tracker, in chunks of 4096 consecutive offsets of one log (R13, R18).

A chunk is the unit that a state store loads and writes. It holds the open entries as plain
integers and one bit for each ended message (R12). Payloads never come here.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from heapq import heapify

from kafkamq.markers.rules.entry import CHUNK_OFFSETS, ENDED_MEMORY_MS, NEVER, Entry
from kafkamq.markers.rules.holders import Holder
from kafkamq.types import MessageId

__all__ = ["Chunk", "ChunkKey", "chunk_key"]

ChunkKey = tuple[bool, bytes, int, int, int]
"""(of_schedule, topic_id, leader_epoch, partition, offset // 4096)."""

_SLOT_MASK = CHUNK_OFFSETS - 1
_BITMAP_BYTES = CHUNK_OFFSETS // 8
_NOTHING_ENDED = bytearray()  # of all chunks; another one takes its place
_HEAD = struct.Struct("<qB")  # ended_ms, has a bitmap
_ENTRY = struct.Struct("<HHiqqqq")  # slot, flags, holder number, then the four times and offsets


def chunk_key(message_id: MessageId, of_schedule: bool) -> ChunkKey:
    """The chunk that an identity belongs to."""
    return (
        of_schedule,
        message_id.topic_id,
        message_id.leader_epoch,
        message_id.partition,
        message_id.offset // CHUNK_OFFSETS,
    )


class Chunk:
    """One chunk: entries by slot in the order of their first marker, ended bits, and a summary.

    ``entries`` is None while the chunk lies in a state store; the summary is always there.
    ``wake_ms`` is a lower bound of the next time at which something in it changes by itself.
    """

    __slots__ = (
        "agenda",
        "asked",
        "dirty",
        "ended",
        "ended_ms",
        "entries",
        "is_mixed",
        "is_packed",
        "key",
        "listed_first",
        "listed_wake_ms",
        "min_start_offset",
        "size",
        "wake_ms",
        "wanted",
    )

    def __init__(self, key: ChunkKey) -> None:
        self.key = key
        self.entries: dict[int, Entry] | None = {}
        self.is_packed = False  # others of its entries may be in a page
        self.is_mixed = False  # entries are not in order: one that was packed came back
        self.agenda: list[int] | None = None  # heap of (time << 12 | slot); None: not built
        self.ended = _NOTHING_ENDED
        self.ended_ms = -NEVER
        self.dirty = True  # not in the state store as it is
        self.wake_ms = NEVER
        self.wanted = 0  # due, or to be carried, and not asked for
        self.asked = 0
        self.size = 0  # open entries; like min_start_offset only kept while not loaded
        self.min_start_offset = NEVER
        self.listed_wake_ms: int | None = None  # where the table's heaps have it; None: nowhere
        self.listed_first: int | None = None

    def open_count(self) -> int:
        """Open entries."""
        if self.entries is None:
            return self.size
        return len(self.entries)

    def first_start_offset(self) -> int:
        """Smallest start offset of an open entry; NEVER when there is none."""
        if self.entries is None:
            return self.min_start_offset
        for entry in self.in_order().values():
            return entry.start_offset
        return NEVER

    def in_order(self) -> dict[int, Entry]:
        """The entries, in the order of their first markers."""
        entries = self.entries
        assert entries is not None, "the chunk is here, not in a store"
        if self.is_mixed:
            self.is_mixed = False
            found = sorted(entries.items(), key=_first_marker)
            entries.clear()  # in place: a caller may have it
            entries.update(found)
        return entries

    def build_agenda(self, times: list[int]) -> list[int]:
        """Order the chunk's times (each ``time << 12 | slot``) for cheap waking."""
        heapify(times)
        self.agenda = times
        return times

    def has_ended(self, slot: int, now_ms: int) -> bool:
        """The message ended, and is remembered (R12)."""
        return (
            bool(self.ended)
            and now_ms <= self.ended_ms + ENDED_MEMORY_MS
            and bool(self.ended[slot >> 3] & 1 << (slot & 7))
        )

    def remember_end(self, slot: int, now_ms: int) -> None:
        """Set the message's bit; bits older than R12's memory go."""
        if not self.ended or now_ms > self.ended_ms + ENDED_MEMORY_MS:
            self.ended = bytearray(_BITMAP_BYTES)
        self.ended[slot >> 3] |= 1 << (slot & 7)
        self.ended_ms = now_ms

    def dump(self) -> bytes:
        """The chunk as bytes for a state store; holders by their numbers, -1 is none."""
        parts = [_HEAD.pack(self.ended_ms, bool(self.ended)), bytes(self.ended)]
        for slot, entry in self.in_order().items():
            number = -1 if entry.holder is None else entry.holder.number
            parts.append(
                _ENTRY.pack(
                    slot,
                    entry.flags,
                    number,
                    entry.deadline_ms,
                    entry.start_offset,
                    entry.begin_ms,
                    entry.verdict_offset,
                )
            )
        return b"".join(parts)

    def load(self, data: bytes, holders: Mapping[int, Holder]) -> dict[int, Entry]:
        """Read what ``dump`` wrote; references of the holders are not counted again."""
        ended_ms, has_bitmap = _HEAD.unpack_from(data)
        start = _HEAD.size
        if has_bitmap:
            self.ended = bytearray(data[start : start + _BITMAP_BYTES])
            start += _BITMAP_BYTES
        self.ended_ms = ended_ms
        entries: dict[int, Entry] = {}
        for (
            slot,
            flags,
            number,
            deadline_ms,
            start_offset,
            begin_ms,
            verdict_offset,
        ) in _ENTRY.iter_unpack(memoryview(data)[start:]):
            holder = None if number < 0 else holders[number]
            entries[slot] = Entry(
                deadline_ms, start_offset, begin_ms, flags, holder, verdict_offset
            )
        self.entries = entries
        return entries

    def slot_of(self, message_id: MessageId) -> int:
        """The slot of an identity that belongs to this chunk."""
        return message_id.offset & _SLOT_MASK

    def identity(self, slot: int) -> MessageId:
        """The identity of a slot."""
        _, topic_id, leader_epoch, partition, number = self.key
        return MessageId(partition, number * CHUNK_OFFSETS + slot, topic_id, leader_epoch)


def _first_marker(item: tuple[int, Entry]) -> int:
    return item[1].start_offset
