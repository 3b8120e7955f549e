"""The chunks of one marker partition, in memory or in a state store, and when they wake."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace

from kafkamq.markers.rules.chunks import Chunk, ChunkKey
from kafkamq.markers.rules.entry import (
    ASKED,
    CARRY,
    CHUNK_OFFSETS,
    DUE,
    ENDED_MEMORY_MS,
    NEVER,
    Entry,
)
from kafkamq.markers.rules.holders import Holder
from kafkamq.markers.rules.packed import PackedEntries, PackedPage
from kafkamq.markers.rules.pages import Page, Pages
from kafkamq.types import MessageId

__all__ = ["CHUNK_COST", "ChunkTable"]

_MIN_STALE = 64  # pairs that count no more are dropped when there are so many, and half are
CHUNK_COST = 7  # what a chunk with entries takes beside them, in entries of 220 bytes: 8 with one


class ChunkTable:
    """Chunks by key, with heaps of when they wake and of where they begin.

    A loop asks every few milliseconds what comes next, and there may be as many chunks as open
    messages: nothing here that a loop asks for goes through all of them.

    Args:
        holders: By their numbers.
        changes_at: When an entry changes by itself; True for a SCHEDULE's.
        load_chunk: Fetches a chunk from the state store; only asked for chunks that `adopt` named.
        max_loose: Entries that are kept as objects, and some; what was there before them is packed.
            One that is alone in its chunk counts for eight.

    Attributes:
        chunks: By key; packed pages are among them.
        packed: What is packed.
        open: Entries, in all chunks.
        max_open: When there are more, it is time to ``pack``; chunks with entries make it less.
        unsettled: Those that are wanted or asked for.
        wanting: Keys of all chunks in which something is wanted, and maybe of others.
        pages: Where the chunks are that are neither here nor gone.
    """

    __slots__ = (
        "_awaited",
        "_changes_at",
        "_exported",
        "_firsts",
        "_holders",
        "_load_chunk",
        "_max_loose",
        "_packed_at",
        "_wakes",
        "chunks",
        "max_open",
        "next_wake_ms",
        "open",
        "packed",
        "pages",
        "unsettled",
        "wanting",
    )

    def __init__(
        self,
        holders: dict[int, Holder],
        changes_at: Callable[[Entry, bool], int],
        load_chunk: Callable[[ChunkKey], bytes] | None,
        max_loose: int,
    ) -> None:
        self.chunks: dict[ChunkKey, Chunk] = {}
        self.packed = PackedEntries(self.chunks, holders, self._list_page)
        self._exported: set[ChunkKey] = set()
        self.next_wake_ms = NEVER  # a lower bound over all chunks
        self._wakes: list[tuple[int, ChunkKey]] = []  # heap; stale where the chunk disagrees
        # Heaps of chunks with entries; a pair counts while the chunk's ``listed_...`` is its first.
        self._awaited: list[tuple[int, ChunkKey]] = []  # by a lower bound of ``wake_ms``
        self._firsts: list[tuple[int, ChunkKey]] = []  # by a lower bound of the start offset
        self.open = 0
        self.unsettled = 0
        self.wanting: dict[ChunkKey, None] = {}
        self._holders = holders
        self._changes_at = changes_at
        self._load_chunk = load_chunk
        self._max_loose = max_loose
        self.max_open = max_loose // 2
        self._packed_at = 0  # offset of the START that packed last
        self.pages = Pages()

    def adopt(self, chunks: list[Chunk], pages: Pages) -> None:
        """Begin with chunks that lie in the state store."""
        self.pages = pages
        self.chunks.update((chunk.key, chunk) for chunk in chunks)
        self._exported = set(self.chunks)
        self._wakes = [(chunk.wake_ms, chunk.key) for chunk in chunks if chunk.wake_ms < NEVER]
        heapify(self._wakes)
        self.next_wake_ms = min(self._wakes[0][0] if self._wakes else NEVER, pages.wake_ms)
        filled = [chunk for chunk in chunks if chunk.size]
        self.open = sum(chunk.size for chunk in filled) + sum(page.size for page in pages.closed)
        self.unsettled = sum(chunk.wanted + chunk.asked for chunk in filled)
        self.wanting = {chunk.key: None for chunk in filled if chunk.wanted}
        for chunk in filled:
            chunk.listed_wake_ms, chunk.listed_first = chunk.wake_ms, chunk.min_start_offset
        self._relist()

    def export(self) -> set[ChunkKey]:
        """What is here goes to the state store; returns what went there before and is gone."""
        gone = self._exported - self.chunks.keys()
        self._exported = set(self.chunks)
        return gone

    def open_pages(self, pages: list[Page]) -> None:
        """Have the chunks of closed pages here."""
        for chunk in self.pages.read(pages):
            self.chunks[chunk.key] = chunk
            self._exported.add(chunk.key)
            if chunk.wake_ms < NEVER:
                heappush(self._wakes, (chunk.wake_ms, chunk.key))
            if chunk.size:
                self.enlist(chunk, chunk.min_start_offset)

    def _turn_up(self, key: ChunkKey) -> Chunk | None:
        """A chunk that was not here, from its page; None: there is none."""
        page = self.pages.of(key)
        if page is None:
            return None
        self.open_pages([page])
        return self.chunks.get(key)

    def find(self, key: ChunkKey) -> tuple[Chunk, dict[int, Entry]]:
        """The chunk and its entries; an empty one that is not kept when there is none.

        One that is not among the entries may be packed: ``unpack``.
        """
        chunk = self.chunks.get(key) or self._turn_up(key)
        if chunk is None:
            chunk = Chunk(key)
            if self.packed.count:
                chunk.is_packed = self.packed.reaches(key)
        entries = chunk.entries
        return chunk, self.entries(chunk) if entries is None else entries

    def obtain(self, key: ChunkKey) -> tuple[Chunk, dict[int, Entry]]:
        """As ``find``, but a chunk is made when there is none."""
        chunk = self.chunks.get(key) or self._turn_up(key)
        if chunk is None:
            chunk = self.chunks[key] = Chunk(key)
            if self.packed.count:
                chunk.is_packed = self.packed.reaches(key)
        entries = chunk.entries
        return chunk, self.entries(chunk) if entries is None else entries

    def entries(self, chunk: Chunk) -> dict[int, Entry]:
        """The chunk's entries that are not packed, from the state store when they are not here."""
        if chunk.entries is None:
            assert self._load_chunk is not None, "a chunk lies in a store that nobody gave"
            return chunk.load(self._load_chunk(chunk.key), self._holders)
        return chunk.in_order()

    def enter(
        self, chunk: Chunk, entries: dict[int, Entry], slot: int, entry: Entry, now_ms: int
    ) -> None:
        """A new entry."""
        if not entries:
            self.max_open -= CHUNK_COST
        entries[slot] = entry
        chunk.dirty = True
        self.open += 1
        self.note(chunk, slot, self._changes_at(entry, chunk.key[0]))
        if chunk.listed_first is None or chunk.listed_wake_ms is None:
            self.enlist(chunk, entry.start_offset)
        if self.open > self.max_open:
            self.pack(entry.start_offset, now_ms)

    def identities(self, *, of_schedule: bool) -> set[MessageId]:
        """Of all entries of this kind."""
        self.open_pages(self.pages.closed)
        self.unpack_all()
        return {
            chunk.identity(slot)
            for chunk in self.chunks.values()
            if chunk.key[0] is of_schedule
            for slot in self.entries(chunk)
        }

    # ---- packing

    def pack(self, start_offset: int, now_ms: int) -> None:
        """Pack what began before the last call, and is not asked for."""
        before, self._packed_at = self._packed_at, start_offset
        for chunk in list(self.chunks.values()):
            if chunk.entries:
                self._pack(chunk, chunk.entries, before, now_ms)
        # What is asked for stays, and each time goes through all chunks: so not too often.
        self.max_open = self.open + max(self._max_loose // 2, len(self.chunks) // 2)
        if len(self._wakes) > 2 * len(self.chunks) + _MIN_STALE:
            self._wakes = [(c.wake_ms, key) for key, c in self.chunks.items() if c.wake_ms < NEVER]
            heapify(self._wakes)

    def _pack(self, chunk: Chunk, entries: dict[int, Entry], before: int, now_ms: int) -> None:
        for entry in entries.values():
            if entry.start_offset >= before and not chunk.is_mixed:  # it is the oldest
                return
            break
        of_schedule, log_key = chunk.key[0], chunk.key[:4]
        first = chunk.key[4] * CHUNK_OFFSETS
        put, changes_at = self.packed.put, self._changes_at
        kept: dict[int, Entry] = {}
        for slot, entry in entries.items():
            page = None
            flags = entry.flags
            if entry.start_offset < before and not flags & ASKED:
                at_ms = NEVER if flags & DUE else changes_at(entry, of_schedule)
                page = put(log_key, first + slot, entry, at_ms)
            if page is None:
                kept[slot] = entry
                continue
            if at_ms < page.wake_ms:
                self.wake_at(page, at_ms)
            listed = page.listed_first
            if listed is None or entry.start_offset < listed or page.listed_wake_ms is None:
                self.enlist(page, entry.start_offset)
            if flags & (DUE | CARRY):
                chunk.wanted -= 1
                self.wanting[page.key] = None
        if len(kept) < len(entries):
            chunk.entries = kept
            chunk.is_packed = True
            if not kept:
                self._emptied(chunk, now_ms)

    def _emptied(self, chunk: Chunk, now_ms: int) -> None:
        """All entries were packed; the chunk is needed while it remembers what ended."""
        chunk.agenda = None
        chunk.is_mixed = False
        forget_ms = chunk.ended_ms + ENDED_MEMORY_MS
        if now_ms > forget_ms:
            del self.chunks[chunk.key]
        elif chunk.wake_ms > forget_ms:
            self.wake_at(chunk, forget_ms)

    def unpack(self, chunk: Chunk, slot: int, *, ends: bool = False) -> Entry | None:
        """The entry of a slot if it is packed, put among the chunk's entries.

        With ``ends`` it is only taken out, unless it is due.
        """
        if not chunk.is_packed:
            return None
        key = chunk.key
        entry = self.packed.take(key[:4], key[4] * CHUNK_OFFSETS + slot)
        if entry is not None:
            self.max_open -= 1
            if not ends or entry.flags & (DUE | CARRY):
                self._put_back(chunk, slot, entry)
        return entry

    def _put_back(self, chunk: Chunk, slot: int, entry: Entry) -> None:
        """An entry that was packed is among the chunk's again."""
        self.chunks[chunk.key] = chunk  # it may be one that ``find`` did not keep
        entries = chunk.entries
        assert entries is not None, "what is packed was not in a store"
        chunk.is_mixed = bool(entries)
        if not entries:
            self.max_open -= CHUNK_COST
        entries[slot] = entry
        chunk.dirty = True
        if entry.flags & (DUE | CARRY):
            chunk.wanted += 1
            self.wanting[chunk.key] = None
        if not entry.flags & DUE:
            self.note(chunk, slot, self._changes_at(entry, chunk.key[0]))
        self.enlist(chunk, entry.start_offset)

    def unpack_wanted(self, chunk: Chunk, limit: int) -> Iterable[Chunk]:
        """Where its wanted entries are objects: itself; for a page, chunks with some of them."""
        if not isinstance(chunk, PackedPage):
            return (chunk,)
        return self._unpack_rows(chunk, chunk.wanted_offsets()[:limit])

    def unpack_all(self) -> None:
        """Nothing is packed any more."""
        for page in [each for each in self.chunks.values() if isinstance(each, PackedPage)]:
            self._unpack_rows(page, list(page.offsets))

    def _unpack_rows(self, page: PackedPage, offsets: list[int]) -> Iterable[Chunk]:
        found: dict[ChunkKey, Chunk] = {}
        for offset in offsets:
            number, slot = divmod(offset, CHUNK_OFFSETS)
            chunk, _ = self.obtain((*page.key[:4], number))
            self.unpack(chunk, slot)
            found[chunk.key] = chunk
        return found.values()

    # ---- what comes next

    def note(self, chunk: Chunk, slot: int, at_ms: int) -> None:
        """Entry ``slot`` changes by itself after ``at_ms``."""
        agenda = chunk.agenda
        if agenda is not None:
            heappush(agenda, at_ms << 12 | slot)
        if at_ms < chunk.wake_ms:
            self.wake_at(chunk, at_ms)

    def enlist(self, chunk: Chunk, start_offset: int) -> None:
        """The chunk has an entry, begun at ``start_offset``, and may be missing in a heap."""
        if chunk.listed_wake_ms is None:
            self._await(chunk)
        if chunk.listed_first is None or start_offset < chunk.listed_first:
            chunk.listed_first = start_offset
            heappush(self._firsts, (start_offset, chunk.key))
        if max(len(self._awaited), len(self._firsts)) > 2 * len(self.chunks) + _MIN_STALE:
            self._relist()

    def _await(self, chunk: Chunk) -> None:
        chunk.listed_wake_ms = chunk.wake_ms
        heappush(self._awaited, (chunk.wake_ms, chunk.key))

    def _list_page(self, page: PackedPage) -> None:
        """The page has other rows than it had."""
        self.wake_at(page, page.wake_ms)
        self.enlist(page, page.first_start_offset())
        if page.wanted:
            self.wanting[page.key] = None

    def _relist(self) -> None:
        """Build the heaps again, without pairs that count no more."""
        self._awaited, self._firsts = [], []
        for key, chunk in self.chunks.items():
            if chunk.listed_wake_ms is not None:
                self._awaited.append((chunk.listed_wake_ms, key))
            if chunk.listed_first is not None:
                self._firsts.append((chunk.listed_first, key))
        heapify(self._awaited)
        heapify(self._firsts)

    def next_change_ms(self) -> int:
        """A lower bound of the time at which an open entry changes by itself; NEVER: none does."""
        heap = self._awaited
        while heap:
            at_ms, key = heap[0]
            chunk = self.chunks.get(key)
            if chunk is None or chunk.listed_wake_ms != at_ms:
                heappop(heap)
            elif not chunk.open_count():
                heappop(heap)
                chunk.listed_wake_ms = None
            elif chunk.wake_ms != at_ms:  # later than it was
                chunk.listed_wake_ms = chunk.wake_ms
                heapreplace(heap, (chunk.wake_ms, key))
            else:
                return min(at_ms, self.pages.change_ms)
        return self.pages.change_ms

    def first_start_offset(self) -> int:
        """Smallest start offset of an open entry; NEVER when there is none."""
        heap = self._firsts
        while heap:
            offset, key = heap[0]
            chunk = self.chunks.get(key)
            if chunk is None or chunk.listed_first != offset:
                heappop(heap)
                continue
            first = chunk.first_start_offset()  # a smaller one was listed by itself
            if first == offset:
                return min(offset, self.pages.first_start_offset)
            if first == NEVER:
                heappop(heap)
                chunk.listed_first = None
            else:
                chunk.listed_first = first
                heapreplace(heap, (first, key))
        return self.pages.first_start_offset

    def wake_at(self, chunk: Chunk, at_ms: int) -> None:
        """The chunk wakes after ``at_ms``."""
        chunk.wake_ms = at_ms
        heappush(self._wakes, (at_ms, chunk.key))
        if at_ms < self.next_wake_ms:
            self.next_wake_ms = at_ms
        listed_ms = chunk.listed_wake_ms
        if listed_ms is not None and at_ms < listed_ms:
            self._await(chunk)

    def passed(self, now_ms: int) -> Iterator[Chunk]:
        """Chunks whose wake time the clock has passed; the caller sets their next ``wake_ms``.

        Chunks that hold nothing, and have forgotten what ended, are dropped.
        """
        wakes, pages = self._wakes, self.pages
        if pages.wake_ms < now_ms:
            self.open_pages([page for page in pages.closed if page.wake_ms < now_ms])
        while wakes and wakes[0][0] < now_ms:
            wake_ms, key = heappop(wakes)
            chunk = self.chunks.get(key)
            if chunk is None or chunk.wake_ms != wake_ms:
                continue
            yield chunk
            if not chunk.open_count():
                chunk.wake_ms = chunk.ended_ms + ENDED_MEMORY_MS
                chunk.listed_wake_ms = None  # it may be later; the next entry lists it again
                if now_ms > chunk.wake_ms:
                    del self.chunks[key]
                    continue
            if chunk.wake_ms < NEVER:
                heappush(wakes, (chunk.wake_ms, key))
        self.next_wake_ms = min(wakes[0][0] if wakes else NEVER, pages.wake_ms)
