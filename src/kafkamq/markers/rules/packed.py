"""Entries as bytes (R18): what a tracker holds and has no need to look at.

An entry as an object takes some 220 bytes, and 1,000 if it is alone in its chunk; here it takes
some 55. A page has up to 256 entries of one log in the order of their offsets, however far apart
they lie: what an entry takes does not depend on how many others are in its chunk.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable

from kafkamq.markers.rules.chunks import Chunk, ChunkKey
from kafkamq.markers.rules.entry import CARRY, CHUNK_OFFSETS, DUE, NEVER, Entry
from kafkamq.markers.rules.holders import Holder

__all__ = ["LogKey", "PackedEntries", "PackedPage"]

LogKey = tuple[bool, bytes, int, int]
"""(of_schedule, topic_id, leader_epoch, partition): a chunk's key without its number."""

_ROW = struct.Struct("<qqqIiH")  # start offset, beginning, deadline, verdict, holder, flags
_ROW_BYTES = _ROW.size
_read_row = _ROW.unpack_from
_MAX_ROWS = 256
_FEW_ROWS = _MAX_ROWS // 4  # two neighbours are made one when one of them has fewer
_NOBODY = -1
_UNKNOWN = -1


class PackedPage(Chunk):
    """Rows of one log. To the table it is a chunk whose entries lie elsewhere.

    Attributes:
        offsets: Of the messages, ascending.
        changes_ms: For each a lower bound of when it changes by itself.
    """

    __slots__ = ("_rows", "changes_ms", "offsets")

    def __init__(self, key: ChunkKey) -> None:
        super().__init__(key)
        self.entries = None
        self.offsets = array("q")
        self.changes_ms = array("q")
        self._rows = bytearray()

    def open_count(self) -> int:
        return len(self.offsets)

    def first_start_offset(self) -> int:
        if self.min_start_offset == _UNKNOWN:
            rows = _ROW.iter_unpack(self._rows)
            self.min_start_offset = min((row[0] for row in rows), default=NEVER)
        return self.min_start_offset

    def wanted_offsets(self) -> list[int]:
        """Of the rows with an action that is to be asked for."""
        rows = _ROW.iter_unpack(self._rows)
        return [
            offset for offset, row in zip(self.offsets, rows, strict=True) if row[5] & (DUE | CARRY)
        ]

    def append(self, offset: int, row: bytes, changes_ms: int) -> None:
        """As ``insert``, for the greatest offset."""
        self.offsets.append(offset)
        self.changes_ms.append(changes_ms)
        self._rows += row

    def insert(self, offset: int, row: bytes, changes_ms: int) -> None:
        """Put a row in; the caller counts it and sees to the bounds."""
        index = bisect_left(self.offsets, offset)
        self.offsets.insert(index, offset)
        self.changes_ms.insert(index, changes_ms)
        place = index * _ROW_BYTES
        self._rows[place:place] = row

    def read(self, index: int, holders: dict[int, Holder]) -> Entry:
        """The row as an object; it stays here."""
        place = index * _ROW_BYTES
        start_offset, begin_ms, deadline_ms, verdict, number, flags = _read_row(self._rows, place)
        return Entry(
            deadline_ms,
            start_offset,
            begin_ms,
            flags,
            None if number == _NOBODY else holders[number],
            start_offset + verdict if verdict else -1,
        )

    def write(self, index: int, entry: Entry, changes_ms: int) -> None:
        """The row's entry is another one."""
        self.changes_ms[index] = changes_ms
        place = index * _ROW_BYTES
        self._rows[place : place + _ROW_BYTES] = _row(entry)

    def pop(self, index: int, holders: dict[int, Holder]) -> Entry:
        """The row as an object; it is not here any more."""
        entry = self.read(index, holders)
        place = index * _ROW_BYTES
        del self.offsets[index], self.changes_ms[index], self._rows[place : place + _ROW_BYTES]
        if self.min_start_offset == entry.start_offset:
            self.min_start_offset = _UNKNOWN
        if entry.flags & (DUE | CARRY):
            self.wanted -= 1
        return entry

    def trim(self) -> None:
        """Return the memory that more rows would take."""
        self.offsets, self.changes_ms = self.offsets[:], self.changes_ms[:]
        self._rows = self._rows[:]

    def split(self, right: PackedPage) -> None:
        """Give the second half to an empty page."""
        half = len(self.offsets) // 2
        place = half * _ROW_BYTES
        right.offsets, self.offsets = self.offsets[half:], self.offsets[:half]
        right.changes_ms, self.changes_ms = self.changes_ms[half:], self.changes_ms[:half]
        right._rows, self._rows = self._rows[place:], self._rows[:place]
        right.wanted = len(right.wanted_offsets())
        self.wanted -= right.wanted
        self.min_start_offset = right.min_start_offset = _UNKNOWN

    def join(self, right: PackedPage) -> None:
        """Take all rows of the page behind."""
        self.offsets += right.offsets
        self.changes_ms += right.changes_ms
        self._rows += right._rows
        self.wanted += right.wanted
        self.wake_ms = min(self.wake_ms, right.wake_ms)
        self.min_start_offset = _UNKNOWN


def _row(entry: Entry) -> bytes:
    verdict_offset, start_offset = entry.verdict_offset, entry.start_offset
    return _ROW.pack(
        start_offset,
        entry.begin_ms,
        entry.deadline_ms,
        0 if verdict_offset < 0 else verdict_offset - start_offset,
        _NOBODY if entry.holder is None else entry.holder.number,
        entry.flags,
    )


class _Log:
    """The pages of one log in the order of their offsets."""

    __slots__ = ("firsts", "last", "pages")

    def __init__(self) -> None:
        self.pages: list[PackedPage] = []
        self.firsts: list[int] = []  # of each page: no offset in it is smaller
        self.last = -1  # no offset in any page is greater


class PackedEntries:
    """Everything that is packed in one tracker; an entry is either here or an object, never both.

    Args:
        chunks: The table's: pages are among them, under numbers that no chunk has.
        holders: By their numbers.
        list_page: Called with a page that has other rows than it had.

    Attributes:
        count: How many are here.
    """

    __slots__ = ("_chunks", "_holders", "_list_page", "_logs", "_next_number", "count")

    def __init__(
        self,
        chunks: dict[ChunkKey, Chunk],
        holders: dict[int, Holder],
        list_page: Callable[[PackedPage], None],
    ) -> None:
        self.count = 0
        self._chunks = chunks
        self._holders = holders
        self._list_page = list_page
        self._logs: dict[LogKey, _Log] = {}
        self._next_number = -1

    def put(self, key: LogKey, offset: int, entry: Entry, changes_ms: int) -> PackedPage | None:
        """Take an entry in; whoever has the object must forget it. None: it does not fit.

        Returns its page, whose bounds of time and start offset the caller corrects.
        """
        try:
            row = _row(entry)
        except struct.error:
            return None
        log = self._logs.get(key)
        if log is None:
            log = self._logs[key] = _Log()
        if offset <= log.last:
            page = self._page_for(log, key, offset)
            page.insert(offset, row, changes_ms)
        else:
            log.last = offset
            pages = log.pages
            if not pages or len(pages[-1].offsets) >= _MAX_ROWS:
                if pages:
                    pages[-1].trim()
                self._new_page(log, key, len(pages), offset)
            page = pages[-1]
            page.append(offset, row, changes_ms)
        if entry.start_offset < page.min_start_offset:  # not when it is unknown
            page.min_start_offset = entry.start_offset
        if entry.flags & (DUE | CARRY):
            page.wanted += 1
        self.count += 1
        return page

    def reaches(self, key: ChunkKey) -> bool:
        """Something of the chunk may be here."""
        log = self._logs.get(key[:4])
        return log is not None and key[4] * CHUNK_OFFSETS <= log.last

    def _page_for(self, log: _Log, key: LogKey, offset: int) -> PackedPage:
        place = bisect_right(log.firsts, offset) - 1
        if place < 0:
            place, log.firsts[0] = 0, offset
        page = log.pages[place]
        if len(page.offsets) < _MAX_ROWS:
            return page
        right = self._new_page(log, key, place + 1, page.offsets[_MAX_ROWS // 2])
        page.split(right)
        right.wake_ms = min(right.changes_ms)
        self._list_page(right)
        return page if offset < right.offsets[0] else right

    def _new_page(self, log: _Log, key: LogKey, place: int, first: int) -> PackedPage:
        page = PackedPage((*key, self._next_number))
        self._next_number -= 1
        self._chunks[page.key] = page
        log.pages.insert(place, page)
        log.firsts.insert(place, first)
        return page

    def take(self, key: LogKey, offset: int) -> Entry | None:
        """The entry as an object, from here on the caller's; None: it is not here."""
        log = self._logs.get(key)
        if log is None or offset > log.last:  # as that of a new message
            return None
        place = bisect_right(log.firsts, offset) - 1
        if place < 0:
            return None
        page = log.pages[place]
        index = bisect_left(page.offsets, offset)
        if index == len(page.offsets) or page.offsets[index] != offset:
            return None
        entry = page.pop(index, self._holders)
        self.count -= 1
        if len(page.offsets) < _FEW_ROWS:
            self._shrink(log, key, place)
        return entry

    def _shrink(self, log: _Log, key: LogKey, place: int) -> None:
        """Drop a page without rows, and make two small neighbours one."""
        pages = log.pages
        page = pages[place]
        if page.offsets:
            other = place + 1 if place == 0 else place - 1
            if other == len(pages) or len(pages[other].offsets) > _MAX_ROWS // 2:
                return
            place = max(place, other)
            page = pages[place]
            pages[place - 1].join(page)
            self._list_page(pages[place - 1])
        del pages[place], log.firsts[place], self._chunks[page.key]
        if not pages:
            del self._logs[key]
