"""Entries of one chunk as bytes (R18): what a tracker holds and has no need to look at.

An entry as an object takes some 220 bytes, here it takes 32. Places are fixed by slot, so one entry
is found without reading the others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from kafkamq.core.entry import CHUNK_OFFSETS, NEVER, Entry
from kafkamq.core.holders import Holder

__all__ = ["PackedEntries"]

_ROW = struct.Struct("<qqqiHH")  # deadline, start offset, beginning, holder's place, flags, used
_NOBODY = -1


class PackedEntries:
    """Some of a chunk's entries; an entry is either here or an object, never both.

    Attributes:
        count: How many are here.
        minimum: Fewer are not worth the bytes of a whole chunk.
    """

    __slots__ = ("_first", "_holders", "_places", "_rows", "_verdicts", "count", "minimum")

    def __init__(self, minimum: int) -> None:
        self.count = 0
        self.minimum = minimum
        self._rows = bytearray(CHUNK_OFFSETS * _ROW.size)
        self._holders: list[Holder] = []
        self._places: dict[int, int] = {}  # of holders, by their numbers
        self._verdicts: dict[int, int] = {}  # by slot; few entries have one
        self._first = NEVER  # smallest start offset; -1: not known

    def put(self, slot: int, entry: Entry) -> None:
        """Take an entry in; whoever has the object must forget it."""
        holder = entry.holder
        place = _NOBODY
        if holder is not None:
            place = self._places.setdefault(holder.number, len(self._holders))
            if place == len(self._holders):
                self._holders.append(holder)
        if entry.verdict_offset >= 0:
            self._verdicts[slot] = entry.verdict_offset
        _ROW.pack_into(
            self._rows,
            slot * _ROW.size,
            entry.deadline_ms,
            entry.start_offset,
            entry.begin_ms,
            place,
            entry.flags,
            1,
        )
        self.count += 1
        if entry.start_offset < self._first:
            self._first = entry.start_offset

    def take(self, slot: int) -> Entry | None:
        """The entry of a slot as an object, from here on the caller's; None: it is not here."""
        row = _ROW.unpack_from(self._rows, slot * _ROW.size)
        if not row[5]:
            return None
        self._rows[(slot + 1) * _ROW.size - 2] = 0
        self.count -= 1
        if row[1] == self._first:
            self._first = -1
        return self._entry(slot, row)

    def _entry(self, slot: int, row: tuple[int, ...]) -> Entry:
        deadline_ms, start_offset, begin_ms, place, flags, _ = row
        holder = None if place == _NOBODY else self._holders[place]
        verdict_offset = self._verdicts.pop(slot, -1) if self._verdicts else -1
        return Entry(deadline_ms, start_offset, begin_ms, flags, holder, verdict_offset)

    def take_all(self) -> Iterator[tuple[int, Entry]]:
        """Every entry with its slot; nothing is left here."""
        for slot, row in enumerate(_ROW.iter_unpack(self._rows)):
            if row[5]:
                yield slot, self._entry(slot, row)
        self.count = 0

    def first_start_offset(self) -> int:
        """Smallest start offset; NEVER when nothing is here."""
        if self._first < 0:
            rows = _ROW.iter_unpack(self._rows)
            self._first = min((row[1] for row in rows if row[5]), default=NEVER)
        return self._first
