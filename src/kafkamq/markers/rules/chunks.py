"""What a state store has of a tracker's holds: chunks of 4096 consecutive offsets (R13, R18).

A chunk is the unit that is loaded and written: its holds as plain integers, and a bit for each
message that has ended (R12). Payloads never come here. Before there were holds, a chunk had an
entry for each message; such a one is a hold of one bit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

from kafkamq.markers.rules.hold import (
    ASKED,
    CARRY,
    CHUNK_OFFSETS,
    DUE,
    ENDED_MEMORY_MS,
    NEVER,
    PAGE_BITS,
    Hold,
)
from kafkamq.markers.rules.holders import Holder
from kafkamq.markers.rules.leaves import Ended

ChunkKey = tuple[bool, bytes, int, int, int]
"""(of_schedule, topic_id, leader_epoch, partition, offset // 4096)."""

_HEAD = struct.Struct("<qB")  # when the last message ended, marks
_HAS_ENDED, _OF_HOLDS = 1, 2
_WORDS = struct.Struct(f"<{CHUNK_OFFSETS // PAGE_BITS}Q")
_HOLD = struct.Struct("<BHiQqqqq")  # page, flags, holder number, bits, then times and offsets
_ENTRY = struct.Struct("<HHiqqqq")  # of versions 1 and 2: an offset in the place of page and bits


class Chunk:
    """What is known of a chunk while it lies in the store, as it was when it was written.

    Attributes:
        wake_ms: A lower bound of the next time at which something in it changes by itself.
        size: Open messages.
        first_start_offset: The smallest of its holds; NEVER when there is none.
        wanted: Messages that are due, or to be carried, and not asked for.
        asked: Those that are.
        ended_ms: When the last one that is remembered ended.
        stored: What the store has of it, while it is here; None: it is in the store alone.
        is_changed: The last snapshot wrote it.
    """

    __slots__ = (
        "asked",
        "ended_ms",
        "first_start_offset",
        "is_changed",
        "key",
        "size",
        "stored",
        "wake_ms",
        "wanted",
    )

    def __init__(self, key: ChunkKey) -> None:
        self.key = key
        self.stored: bytes | None = None
        self.is_changed = False
        self.wake_ms = self.first_start_offset = NEVER
        self.size = self.wanted = self.asked = 0
        self.ended_ms = -NEVER

    @property
    def is_here(self) -> bool:
        """Its holds are in memory, too."""
        return self.stored is not None

    def dump(self, ended: Ended | None, holds: Iterable[tuple[int, Hold]]) -> bytes:
        """The chunk as bytes for the store, and what is known of it from here on.

        ``holds`` go with their pages within the chunk; holders by their numbers, -1 is none.
        """
        self.size = self.wanted = self.asked = 0
        self.wake_ms = self.first_start_offset = NEVER
        self.ended_ms = -NEVER if ended is None else ended.last_ms
        marks = _OF_HOLDS | (_HAS_ENDED if ended else 0)
        parts = [_HEAD.pack(self.ended_ms, marks)]
        if ended:
            parts.append(_WORDS.pack(*ended.all()))
        for page, hold in holds:
            parts.append(
                _HOLD.pack(
                    page,
                    hold.flags,
                    -1 if hold.holder is None else hold.holder.number,
                    hold.bits,
                    hold.deadline_ms,
                    hold.start_offset,
                    hold.begin_ms,
                    hold.verdict_offset,
                )
            )
            count = hold.bits.bit_count()
            self.size += count
            if hold.flags & (DUE | CARRY):
                if hold.flags & ASKED:
                    self.asked += count
                else:
                    self.wanted += count
            self.wake_ms = min(self.wake_ms, hold.wake_ms)
            self.first_start_offset = min(self.first_start_offset, hold.start_offset)
        if not self.size:
            self.wake_ms = self.ended_ms + ENDED_MEMORY_MS
        return b"".join(parts)


def read_chunk(
    data: bytes, holders: Mapping[int, Holder]
) -> tuple[int, tuple[int, ...], list[tuple[int, Hold]]]:
    """What ``dump`` wrote, of any version: when the last one ended, the ended ones, the holds.

    References of the holders are not counted again, and no hold knows when it wakes.
    """
    ended_ms, marks = _HEAD.unpack_from(data)
    start = _HEAD.size
    words: tuple[int, ...] = ()
    if marks & _HAS_ENDED:
        words = _WORDS.unpack_from(data, start)
        start += _WORDS.size
    body = memoryview(data)[start:]
    rows: Iterable[tuple[int, ...]]
    if marks & _OF_HOLDS:
        rows = _HOLD.iter_unpack(body)
    else:
        rows = (
            (slot // PAGE_BITS, flags, number, 1 << slot % PAGE_BITS, *rest)
            for slot, flags, number, *rest in _ENTRY.iter_unpack(body)
        )
    holds = []
    for page, flags, number, bits, deadline_ms, first, begin_ms, verdict in rows:
        holder = None if number < 0 else holders[number]
        holds.append((page, Hold(bits, first, begin_ms, deadline_ms, flags, holder, verdict)))
    return ended_ms, words, holds
