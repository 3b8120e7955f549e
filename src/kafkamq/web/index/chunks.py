"""Which messages of a chunk of 4096 offsets were STARTed, and of which queues they are.

So that a START of a thousand messages costs a few operations on long integers, and each message is
counted as waiting once: from when it was read until its first START, whichever is read first.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections import Counter, OrderedDict
from itertools import compress

from kafkamq.web.index.places import CHUNK_BITS, CHUNK_OFFSETS

MAX_CHUNKS = 2048  # in memory: 16 KiB each
_EMPTY = bytes(4 * CHUNK_OFFSETS)
_MASK = CHUNK_OFFSETS - 1


class Chunk:
    """One chunk; ``queues`` has 0 where no message was read."""

    __slots__ = ("known", "last_ms", "queues", "started")

    def __init__(self, started: int = 0, last_ms: int = 0) -> None:
        self.queues = array("I", _EMPTY)
        self.known = 0  # bits of messages that were read
        self.started = started
        self.last_ms = last_ms

    def add(self, at: int, queue: int) -> bool:
        """Take in a message; whether it waits now."""
        bit = 1 << at
        if self.known & bit:
            return False
        self.known |= bit
        self.queues[at] = queue
        return not self.started & bit

    def start(self, bits: int) -> Counter[int]:
        """Note that these were STARTed; how many of them had waited, by queue."""
        fresh = bits & self.known & ~self.started
        self.started |= bits
        return self.by_queue(fresh)

    def by_queue(self, bits: int) -> Counter[int]:
        """How many of these messages each queue has; of those that were not read nobody has."""
        bits &= self.known
        if not bits:
            return Counter()
        if bits & bits - 1 == 0:
            return Counter((self.queues[bits.bit_length() - 1],))
        first = (bits & -bits).bit_length() - 1
        chosen = map(int, bin(bits >> first)[:1:-1])
        return Counter(compress(self.queues[first : bits.bit_length()], chosen))

    def bits_of(self, queue: int, bits: int) -> int:
        """Those of these messages that are the queue's."""
        found, left = 0, bits & self.known
        while left:
            bit = left & -left
            if self.queues[bit.bit_length() - 1] == queue:
                found |= bit
            left ^= bit
        return found


class Chunks:
    """Chunks by their numbers, the last used of them in memory."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._chunks: OrderedDict[int, Chunk] = OrderedDict()
        self._changed: set[int] = set()

    def get(self, number: int, *, changes: bool = True) -> Chunk:
        """The chunk; a new one if nothing is known of it."""
        chunk = self._chunks.get(number)
        if chunk is None:
            chunk = self._chunks[number] = self._load(number)
        else:
            self._chunks.move_to_end(number)
        if changes:
            self._changed.add(number)
        return chunk

    def _load(self, number: int) -> Chunk:
        found = self._connection.execute(
            "SELECT started, last_ms FROM chunk WHERE chunk = ?", (number,)
        ).fetchone()
        if found is None:
            return Chunk()
        chunk = Chunk(int.from_bytes(found[0], "little"), found[1])
        first = number << CHUNK_BITS
        for place, queue in self._connection.execute(
            "SELECT place, queue FROM message WHERE place >= ? AND place < ?",
            (first, first + CHUNK_OFFSETS),
        ):
            at = place & _MASK
            chunk.queues[at] = queue
            chunk.known |= 1 << at
        return chunk

    def write(self) -> None:
        """Write what has changed; the caller commits."""
        rows = []
        for number in self._changed:
            chunk = self._chunks[number]
            size = (chunk.started.bit_length() + 7) // 8
            rows.append(
                (
                    number,
                    chunk.started.to_bytes(size, "little"),
                    chunk.known.bit_count(),
                    (chunk.known & ~chunk.started).bit_count(),
                    chunk.last_ms,
                )
            )
        self._connection.executemany("INSERT OR REPLACE INTO chunk VALUES (?, ?, ?, ?, ?)", rows)
        self._changed.clear()
        while len(self._chunks) > MAX_CHUNKS:
            self._chunks.popitem(last=False)

    def drop(self, number: int) -> None:
        """Forget a chunk whose rows are deleted."""
        self._chunks.pop(number, None)
        self._changed.discard(number)
