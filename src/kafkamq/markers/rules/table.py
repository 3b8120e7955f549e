"""The holds of one marker partition, in memory or in a state store, and when they wake."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from kafkamq.markers.rules.chunks import Chunk, ChunkKey, Page, Pages, read_chunk
from kafkamq.markers.rules.hold import (
    ASKED,
    CARRY,
    CHUNK_OFFSETS,
    DUE,
    ENDED_MEMORY_MS,
    MAX_HOLDS,
    MIN_HOLDS,
    NEVER,
    PAGE_BITS,
    Ended,
    Hold,
    Holders,
    HoldLog,
    Leaf,
    LogKey,
)
from kafkamq.types import MessageId

# The least number of pairs that count no more, and half of all pairs, that are dropped.
_MIN_STALE = 64
_CHUNK_PAGES = CHUNK_OFFSETS // PAGE_BITS
_Heap = list[tuple[int, int, Leaf]]
"""Pairs of a leaf's bound and the leaf; one counts while the leaf has holds, and that bound."""


class HoldTable:
    """Holds by log, with heaps of when their leaves wake and of where these begin.

    A loop asks every few milliseconds what comes next, and there may be as many holds as open
    messages: nothing here that a loop asks for goes through all of them.

    Args:
        holders: Who holds them.
        wakes_at: When a hold changes by itself; True for a SCHEDULE's.
        load_chunk: Fetches a chunk from the state store; only asked for chunks that `adopt` named.

    Attributes:
        logs: By key; one without holds and memory is not kept.
        chunks: What the state store has, the pages' aside; those that are here, too, are marked.
        pages: Where the chunks are that are neither here nor listed.
        open: Messages, in all holds.
        unsettled: Those that are wanted or asked for.
        wanting: Leaves in which something is wanted, and maybe others.
    """

    def __init__(
        self,
        holders: Holders,
        wakes_at: Callable[[Hold, bool], int],
        load_chunk: Callable[[ChunkKey], bytes] | None,
    ) -> None:
        self.logs: dict[LogKey, HoldLog] = {}
        self.chunks: dict[ChunkKey, Chunk] = {}
        self.pages = Pages()
        self.next_wake_ms = NEVER
        self.open = 0
        self.unsettled = 0
        self.wanting: dict[Leaf, None] = {}
        self._holders = holders
        self._wakes_at = wakes_at
        self._load_chunk = load_chunk
        self._wakes: _Heap = []
        self._firsts: _Heap = []
        self._ended: deque[Ended] = deque()
        self._asleep: list[tuple[int, ChunkKey]] = []
        self._made = 0
        self._size = 0

    # ---- holds

    def find(self, key: LogKey, page: int, makes: bool = False) -> HoldLog | None:
        """Return the log with what the store has of the chunk; ``makes`` one if there is none."""
        if self.chunks or self.pages.closed:
            self._fetch((*key, page // _CHUNK_PAGES))
        log = self.logs.get(key)
        if log is None and makes:
            log = self.logs[key] = HoldLog(key)
        return log

    def enter(self, log: HoldLog, page: int, hold: Hold) -> None:
        """New messages; the hold knows when it wakes."""
        self.open += hold.bits.bit_count()
        self._put(log, page, hold)

    def _put(self, log: HoldLog, page: int, hold: Hold) -> None:
        leaves = log.leaves
        if page >= log.last_page:
            if page > log.last_page:
                log.last_page, log.last_bits = page, 0
            log.last_bits |= hold.bits
            leaf = leaves[-1] if leaves else self._new_leaf(log, 0, page)
            if len(leaf.holds) >= MAX_HOLDS:
                leaf = self._cut(leaf, leaf.index(page), len(leaves), page)
            leaf.pages.append(page)
            leaf.holds.append(hold)
        else:
            index = max(0, bisect_right(log.firsts, page) - 1)
            leaf = leaves[index] if leaves else self._new_leaf(log, 0, page)
            log.firsts[index] = min(page, log.firsts[index])
            leaf.insert(page, hold)
        if hold.start_offset < leaf.first_offset:
            self._begins_at(leaf, hold.start_offset)
        if hold.wake_ms < leaf.wake_ms:
            self.wake_at(leaf, hold.wake_ms)
        if len(leaf.holds) > MAX_HOLDS:
            self.even_out(leaf, page)

    def want(self, leaf: Leaf, bits: int) -> None:
        self.unsettled += bits.bit_count()
        self.wanting[leaf] = None

    def part(self, leaf: Leaf, page: int, hold: Hold, bits: int) -> Hold:
        """Split off these messages of a hold; `even_out` when the page is done."""
        if hold.bits == bits:
            return hold
        part = hold.split(bits)
        leaf.insert(page, part)
        return part

    def _new_leaf(self, log: HoldLog, index: int, page: int) -> Leaf:
        self._made += 1
        self._size += 1
        leaf = Leaf(log, self._made)
        log.leaves.insert(index, leaf)
        log.firsts.insert(index, page)
        return leaf

    def even_out(self, leaf: Leaf, page: int) -> None:
        """Divide a leaf that has too many holds, and drop or join one that has few.

        ``page`` is one of the leaf's, or was.
        """
        log, size = leaf.log, len(leaf.holds)
        index = max(0, bisect_right(log.firsts, page) - 1)
        if size > MAX_HOLDS:
            at = leaf.middle()
            right = self._cut(leaf, at, index + 1, leaf.pages[at])
            for each in (leaf, right):
                self.even_out(each, each.pages[0])
        elif size < MIN_HOLDS and (not size or len(log.leaves) > 1):
            if size:
                index = max(index, 1)
                leaf, right = log.leaves[index - 1 : index + 1]
                if len(leaf.holds) + len(right.holds) > MAX_HOLDS // 2:
                    return
                leaf.join(right)
                self._list(right, leaf)
            self.wanting.pop(log.leaves[index], None)
            del log.leaves[index], log.firsts[index]
            self._size -= 1

    def _cut(self, leaf: Leaf, at: int, index: int, page: int) -> Leaf:
        """Return a new leaf that begins with this page and takes over what is from ``at`` on."""
        right = self._new_leaf(leaf.log, index, page)
        if at < len(leaf.holds):
            leaf.give(at, right)
            self._list(leaf, right)
        return right

    def _list(self, old: Leaf, new: Leaf) -> None:
        """A leaf has holds that were in another one."""
        new.measure()
        self._begins_at(new, new.first_offset)
        if new.wake_ms < NEVER:
            self.wake_at(new, new.wake_ms)
        if old in self.wanting:
            self.wanting[new] = None

    def leaves(self) -> Iterator[Leaf]:
        for log in self.logs.values():
            yield from log.leaves

    def identities(self, *, of_schedule: bool) -> set[MessageId]:
        self.fetch_all()
        return {
            MessageId(leaf.log.key[3], offset, *leaf.log.key[1:3])
            for leaf in self.leaves()
            if leaf.log.key[0] is of_schedule
            for page, hold in zip(leaf.pages, leaf.holds, strict=True)
            for offset in range(page * PAGE_BITS, (page + 1) * PAGE_BITS)
            if hold.bits >> offset % PAGE_BITS & 1
        }

    # ---- what has ended (R12)

    def remember_end(self, log: HoldLog, page: int, bits: int, now_ms: int) -> None:
        """These messages have ended; older bits than the memory go. Repeated ends do nothing."""
        number, at = divmod(page, _CHUNK_PAGES)
        ended = log.ended.get(number)
        if ended is None or now_ms > ended.last_ms + ENDED_MEMORY_MS:
            ended = self._keep_ended(log, number, now_ms)
        word = ended.of(at)
        if bits & ~word:
            ended.set(at, word | bits)
            ended.last_ms = now_ms

    def forget_end(self, log: HoldLog, page: int, bits: int) -> None:
        number, at = divmod(page, _CHUNK_PAGES)
        ended = log.ended[number]
        ended.set(at, ended.of(at) & ~bits)

    def _keep_ended(
        self, log: HoldLog, number: int, last_ms: int, words: Sequence[int] = ()
    ) -> Ended:
        ended = log.ended.get(number)
        if ended is None:
            ended = log.ended[number] = Ended(log, number)
            self._ended.append(ended)
            self.next_wake_ms = min(self.next_wake_ms, last_ms + ENDED_MEMORY_MS)
        ended.reset(last_ms, words)
        return ended

    def _forget(self, now_ms: int) -> None:
        """What comes after one that is remembered longer than when it was listed waits for it."""
        chunks = self._ended
        while chunks and chunks[0].last_ms + ENDED_MEMORY_MS < now_ms:
            ended = chunks.popleft()
            log = ended.log
            del log.ended[ended.number]
            if not log.ended and not log.leaves:
                del self.logs[log.key]
        chunks.rotate(-1)

    # ---- what comes next

    def note(self, leaf: Leaf, hold: Hold) -> None:
        """The hold changes by itself at another time than it did."""
        hold.wake_ms = at_ms = self._wakes_at(hold, leaf.log.key[0])
        if at_ms < leaf.wake_ms:
            self.wake_at(leaf, at_ms)

    def wake_at(self, leaf: Leaf, at_ms: int) -> None:
        leaf.wake_ms = at_ms
        self._wakes = self._pushed(self._wakes, at_ms, leaf)
        if at_ms < self.next_wake_ms:
            self.next_wake_ms = at_ms

    def _begins_at(self, leaf: Leaf, offset: int) -> None:
        leaf.first_offset = offset
        self._firsts = self._pushed(self._firsts, offset, leaf)

    def _pushed(self, heap: _Heap, value: int, leaf: Leaf) -> _Heap:
        """Return the heap with one pair more, now and then without those that count no more."""
        if len(heap) > 2 * self._size + _MIN_STALE:
            is_wake = heap is self._wakes
            heap = [
                (each.wake_ms if is_wake else each.first_offset, each.number, each)
                for each in self.leaves()
                if each is not leaf
            ]
            heapify(heap)
        heappush(heap, (value, leaf.number, leaf))
        return heap

    def next_change_ms(self) -> int:
        """Return a lower bound of when an open hold changes by itself; NEVER: none does."""
        wakes = self._wakes
        while wakes and not (wakes[0][2].holds and wakes[0][2].wake_ms == wakes[0][0]):
            heappop(wakes)
        stored = [chunk.wake_ms for chunk in self._stored() if chunk.size]
        return min(wakes[0][0] if wakes else NEVER, self.pages.change_ms, *stored)

    def first_start_offset(self) -> int:
        """Smallest start offset of an open hold; NEVER when there is none."""
        heap, first = self._firsts, NEVER
        while heap:
            listed, number, leaf = heap[0]
            if not leaf.holds or leaf.first_offset != listed:
                heappop(heap)
                continue
            first = min([hold.start_offset for hold in leaf.holds])
            if first == listed:
                # A smaller one was listed by itself.
                break
            leaf.first_offset = first
            heapreplace(heap, (first, number, leaf))
        stored = [chunk.first_start_offset for chunk in self._stored()]
        return min(first, self.pages.first_start_offset, *stored)

    def passed(self, now_ms: int) -> Iterator[Leaf]:
        """Leaves whose wake time the clock has passed; the caller sets their next ``wake_ms``.

        What holds nothing, and has forgotten what ended, is dropped.
        """
        self._wake_stored(now_ms)
        wakes = self._wakes
        while wakes and wakes[0][0] < now_ms:
            at_ms, number, leaf = heappop(wakes)
            if leaf.holds and leaf.wake_ms == at_ms:
                yield leaf
                if leaf.wake_ms < NEVER:
                    heappush(wakes, (leaf.wake_ms, number, leaf))
        self._forget(now_ms)
        times = [heap[0][0] for heap in (wakes, self._asleep) if heap]
        if self._ended:
            times.append(self._ended[0].last_ms + ENDED_MEMORY_MS)
        self.next_wake_ms = min([*times, self.pages.wake_ms])

    # ---- the state store

    def adopt(self, chunks: Iterable[Chunk], pages: Pages) -> None:
        self.pages = pages
        self.chunks = {chunk.key: chunk for chunk in chunks}
        self.open = sum(chunk.size for chunk in self.chunks.values())
        self.open += sum(page.size for page in pages.closed)
        self.unsettled = sum(chunk.wanted + chunk.asked for chunk in self.chunks.values())
        self._asleep = [(chunk.wake_ms, chunk.key) for chunk in self.chunks.values()]
        heapify(self._asleep)
        self.next_wake_ms = min([at_ms for at_ms, _ in self._asleep[:1]] + [pages.wake_ms])

    def open_pages(self, pages: list[Page]) -> None:
        """Have the chunks of closed pages listed."""
        for chunk in self.pages.read(pages):
            self.chunks[chunk.key] = chunk
            heappush(self._asleep, (chunk.wake_ms, chunk.key))
            self.next_wake_ms = min(self.next_wake_ms, chunk.wake_ms)

    def _stored(self) -> list[Chunk]:
        return [chunk for chunk in self.chunks.values() if not chunk.is_here]

    def _wake_stored(self, now_ms: int) -> None:
        if self.pages.wake_ms < now_ms:
            self.open_pages([page for page in self.pages.closed if page.wake_ms < now_ms])
        while self._asleep and self._asleep[0][0] < now_ms:
            self._fetch(heappop(self._asleep)[1])

    def _fetch(self, key: ChunkKey) -> None:
        chunk = self.chunks.get(key)
        if chunk is None:
            page = self.pages.of(key)
            if page is None:
                return
            self.open_pages([page])
            chunk = self.chunks.get(key)
        if chunk is not None and not chunk.is_here:
            self._load(chunk)

    def _load(self, chunk: Chunk) -> None:
        assert self._load_chunk is not None, "a chunk lies in a store that nobody gave"
        chunk.stored = self._load_chunk(chunk.key)
        key, number = chunk.key[:4], chunk.key[4]
        log = self.logs.setdefault(key, HoldLog(key))
        ended_ms, words, holds = read_chunk(chunk.stored, self._holders.by_number)
        if words:
            self._keep_ended(log, number, ended_ms, words)
        for page, hold in holds:
            if not hold.flags & DUE:
                hold.wake_ms = self._wakes_at(hold, key[0])
            self._put(log, number * _CHUNK_PAGES + page, hold)
            if hold.flags & (DUE | CARRY) and not hold.flags & ASKED:
                leaf = log.leaf(number * _CHUNK_PAGES + page)
                assert leaf is not None, "it was just put there"
                self.wanting[leaf] = None

    def fetch_all(self) -> None:
        self.open_pages(self.pages.closed)
        for chunk in self._stored():
            self._load(chunk)

    def fetch_wanted(self, limit: int) -> None:
        for chunk in self._stored():
            if limit > 0 and chunk.wanted:
                limit -= chunk.wanted
                self._load(chunk)

    def fetch_asked(self) -> None:
        for chunk in self._stored():
            if chunk.asked:
                self._load(chunk)

    def here(self) -> dict[ChunkKey, tuple[Ended | None, list[tuple[int, Hold]]]]:
        """Return what is not in the store alone: ends and holds, by chunk and page."""
        found: dict[ChunkKey, tuple[Ended | None, list[tuple[int, Hold]]]] = {}
        for key, log in self.logs.items():
            for number, ended in log.ended.items():
                found[(*key, number)] = ended, []
            for leaf in log.leaves:
                for page, hold in zip(leaf.pages, leaf.holds, strict=True):
                    number, at = divmod(page, _CHUNK_PAGES)
                    found.setdefault((*key, number), (None, []))[1].append((at, hold))
        return found
