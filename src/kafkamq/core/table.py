"""The chunks of one marker partition, in memory or in a state store, and when they wake."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace

from kafkamq.core.chunks import Chunk, ChunkKey
from kafkamq.core.entry import ENDED_MEMORY_MS, NEVER, Entry
from kafkamq.core.holders import Holder
from kafkamq.core.pages import Page, Pages

__all__ = ["ChunkTable"]

_MIN_STALE = 64  # pairs that count no more are dropped when there are so many, and half are


class ChunkTable:
    """Chunks by key, with heaps of when they wake and of where they begin.

    A loop asks every few milliseconds what comes next, and there may be as many chunks as open
    messages: nothing here that a loop asks for goes through all of them.

    Args:
        load_chunk: Fetches a chunk from the state store; only asked for chunks that `adopt` named.

    Attributes:
        open: Entries, in all chunks.
        unsettled: Those that are wanted or asked for.
        wanting: Keys of all chunks in which something is wanted, and maybe of others.
        pages: Where the chunks are that are neither here nor gone.
    """

    __slots__ = (
        "_awaited",
        "_exported",
        "_firsts",
        "_load_chunk",
        "_stored_holders",
        "_wakes",
        "chunks",
        "next_wake_ms",
        "open",
        "pages",
        "unsettled",
        "wanting",
    )

    def __init__(self, load_chunk: Callable[[ChunkKey], bytes] | None = None) -> None:
        self.chunks: dict[ChunkKey, Chunk] = {}
        self._exported: set[ChunkKey] = set()
        self.next_wake_ms = NEVER  # a lower bound over all chunks
        self._wakes: list[tuple[int, ChunkKey]] = []  # heap; stale where the chunk disagrees
        # Heaps of chunks with entries; a pair counts while the chunk's ``listed_...`` is its first.
        self._awaited: list[tuple[int, ChunkKey]] = []  # by a lower bound of ``wake_ms``
        self._firsts: list[tuple[int, ChunkKey]] = []  # by a lower bound of the start offset
        self.open = 0
        self.unsettled = 0
        self.wanting: dict[ChunkKey, None] = {}
        self._load_chunk = load_chunk
        self._stored_holders: Mapping[int, Holder] = {}
        self.pages = Pages()

    def adopt(
        self, chunks: list[Chunk], stored_holders: Mapping[int, Holder], pages: Pages
    ) -> None:
        """Begin with chunks that lie in the state store; holders as their numbers name them."""
        self._stored_holders = stored_holders
        self.pages = pages
        self.chunks = {chunk.key: chunk for chunk in chunks}
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

        One that is not among the entries may be packed: ``chunk.unpack``.
        """
        chunk = self.chunks.get(key) or self._turn_up(key)
        if chunk is None:
            return Chunk(key), {}
        entries = chunk.entries
        return chunk, self.entries(chunk) if entries is None else entries

    def obtain(self, key: ChunkKey) -> tuple[Chunk, dict[int, Entry]]:
        """As ``find``, but a chunk is made when there is none."""
        chunk = self.chunks.get(key) or self._turn_up(key)
        if chunk is None:
            chunk = self.chunks[key] = Chunk(key)
        entries = chunk.entries
        return chunk, self.entries(chunk) if entries is None else entries

    def entries(self, chunk: Chunk) -> dict[int, Entry]:
        """All of the chunk's entries, loaded from the state store when they are not here."""
        if chunk.packed is not None:
            return chunk.unpack_all()
        entries = chunk.entries
        if entries is None:
            assert self._load_chunk is not None, "a chunk lies in a store that nobody gave"
            entries = chunk.load(self._load_chunk(chunk.key), self._stored_holders)
        return entries

    def loose(self, chunk: Chunk) -> dict[int, Entry]:
        """The chunk's entries that are not packed, loaded when they are not here."""
        entries = chunk.entries
        return self.entries(chunk) if entries is None else entries

    def note(self, chunk: Chunk, slot: int, at_ms: int) -> None:
        """Entry ``slot`` changes by itself after ``at_ms``."""
        agenda = chunk.agenda
        if agenda is not None:
            heappush(agenda, at_ms << 12 | slot)
        if at_ms < chunk.wake_ms:
            self.wake_at(chunk, at_ms)

    def enlist(self, chunk: Chunk, start_offset: int) -> None:
        """The chunk has an entry, begun at ``start_offset``, and is missing in a heap."""
        if chunk.listed_wake_ms is None:
            self._await(chunk)
        if chunk.listed_first is None:
            chunk.listed_first = start_offset
            heappush(self._firsts, (start_offset, chunk.key))
        if max(len(self._awaited), len(self._firsts)) > 2 * len(self.chunks) + _MIN_STALE:
            self._relist()

    def _await(self, chunk: Chunk) -> None:
        chunk.listed_wake_ms = chunk.wake_ms
        heappush(self._awaited, (chunk.wake_ms, chunk.key))

    def _relist(self) -> None:
        """Build the heaps anew, without pairs that count no more."""
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
            first = chunk.first_start_offset()  # it never goes back
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
