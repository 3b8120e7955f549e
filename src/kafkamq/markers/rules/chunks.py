"""What a state store has of a tracker's holds: chunks of 4096 consecutive offsets (R13, R18).

A chunk is the unit that is loaded and written: its holds as plain integers, and a bit for each
message that has ended (R12). Payloads never come here.

The index of a state is read and written with every batch, whatever it holds, and messages far apart
have a chunk each. So it lists only the chunks that changed last. The others' lines lie in pages of
neighbouring keys, which are read when a record or the clock touches one of their chunks, and
written when one of their lines is another. The index has a summary of each page.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from kafkamq.markers.rules.hold import (
    ASKED,
    CARRY,
    CHUNK_OFFSETS,
    DUE,
    ENDED_MEMORY_MS,
    NEVER,
    PAGE_BITS,
    Ended,
    Hold,
    Holder,
)

ChunkKey = tuple[bool, bytes, int, int, int]
"""(of_schedule, topic_id, leader_epoch, partition, offset // 4096)."""

_HEAD = struct.Struct("<qB")
_HAS_ENDED, _OF_HOLDS = 1, 2
_WORDS = struct.Struct(f"<{CHUNK_OFFSETS // PAGE_BITS}Q")
_HOLD = struct.Struct("<BHiQqqqq")


@dataclass(slots=True, eq=False)
class Chunk:
    """What is known of a chunk while it lies in the store, as it was when it was written."""

    key: ChunkKey
    # A lower bound of the next time at which something in it changes by itself.
    wake_ms: int = NEVER
    # Open messages.
    size: int = 0
    # The smallest of its holds; NEVER when there is none.
    first_start_offset: int = NEVER
    # Messages that are due, or to be carried, and not asked for; and those that are.
    wanted: int = 0
    asked: int = 0
    # When the last one that is remembered ended.
    ended_ms: int = -NEVER
    # What the store has of it, while it is here; None: it is in the store alone.
    stored: bytes | None = None
    # The last snapshot wrote it.
    is_changed: bool = False

    @property
    def is_here(self) -> bool:
        return self.stored is not None

    def dump(self, ended: Ended | None, holds: Iterable[tuple[int, Hold]]) -> bytes:
        """Return the chunk as bytes for the store, and what is known of it from here on.

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
    """Return what ``dump`` wrote: when the last one ended, the ended ones, the holds.

    References of the holders are not counted again, and no hold knows when it wakes.
    """
    ended_ms, marks = _HEAD.unpack_from(data)
    start = _HEAD.size
    words: tuple[int, ...] = ()
    if marks & _HAS_ENDED:
        words = _WORDS.unpack_from(data, start)
        start += _WORDS.size
    holds = []
    for row in _HOLD.iter_unpack(memoryview(data)[start:]):
        page, flags, number, bits, deadline_ms, first, begin_ms, verdict = row
        holder = None if number < 0 else holders[number]
        holds.append((page, Hold(bits, first, begin_ms, deadline_ms, flags, holder, verdict)))
    return ended_ms, words, holds


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLimits:
    """How chunks are shared out among the index and pages."""

    # Chunks in the index; of more, those that changed first go to pages, until ``kept`` stay.
    listed: int = 1024
    kept: int = 512
    # Lines of a page; one with twice as many is split, one with fewer than the least is dissolved.
    page: int = 512
    least: int = 64


LIMITS = PageLimits()


@dataclass(slots=True, eq=False)
class Page:
    """A range of keys, and what the chunks in it come to; none of them is wanted or asked for."""

    number: int
    first: ChunkKey
    last: ChunkKey
    wake_ms: int = NEVER
    change_ms: int = NEVER
    first_start_offset: int = NEVER
    size: int = 0
    keys: list[ChunkKey] = field(default_factory=list)
    stored: bytes = b""

    def sum_up(self, chunks: Sequence[Chunk]) -> None:
        filled = [chunk for chunk in chunks if chunk.size]
        self.keys = [chunk.key for chunk in chunks]
        self.first, self.last = self.keys[0], self.keys[-1]
        self.wake_ms = min(chunk.wake_ms for chunk in chunks)
        self.change_ms = min((chunk.wake_ms for chunk in filled), default=NEVER)
        self.first_start_offset = min(chunk.first_start_offset for chunk in chunks)
        self.size = sum(chunk.size for chunk in filled)


first_key = attrgetter("first")
"""Orders pages."""


class Pages:
    """The pages of one table: closed ones lie in the store, the chunks of open ones are here.

    Args:
        closed: What the index tells of.
        next_number: For the next page that is made.
        load: Fetches a page's bytes and chunks from the state store.
    """

    def __init__(
        self,
        closed: Iterable[Page] = (),
        next_number: int = 0,
        load: Callable[[Page], tuple[bytes, list[Chunk]]] | None = None,
    ) -> None:
        self.open: list[Page] = []
        self.next_number = next_number
        self._load = load
        self._close(sorted(closed, key=first_key))

    def _close(self, closed: list[Page]) -> None:
        self.closed = closed
        self.wake_ms = min((page.wake_ms for page in closed), default=NEVER)
        self.change_ms = min((page.change_ms for page in closed), default=NEVER)
        self.first_start_offset = min((page.first_start_offset for page in closed), default=NEVER)

    def of(self, key: ChunkKey) -> Page | None:
        at = bisect_right(self.closed, key, key=first_key) - 1
        return self.closed[at] if at >= 0 and key <= self.closed[at].last else None

    def read(self, pages: Sequence[Page]) -> list[Chunk]:
        """Open these pages; their chunks are the table's from here on."""
        opened: list[Chunk] = []
        leaving = set(pages)
        for page in pages:
            assert self._load is not None, "a page lies in a store that nobody gave"
            page.stored, chunks = self._load(page)
            page.keys = [chunk.key for chunk in chunks]
            opened += chunks
        self.open += pages
        self._close([page for page in self.closed if page not in leaving])
        return opened

    def new(self, keys: Sequence[ChunkKey]) -> None:
        self.open.append(Page(self.next_number, keys[0], keys[-1], keys=list(keys)))
        self.next_number += 1
