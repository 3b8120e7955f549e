"""Messages and events packed: one row of SQLite has many, as it costs more than to read a record.

Ids and keys are found by a search through all packs: some 40 ms for a million messages.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, compress, count, pairwise
from struct import Struct

# Each write has all of a pack that has grown, be it by one message; one with so many bytes grows no
# more.
PACK_OFFSETS, MAX_PACK_BYTES = 512, 1 << 16
_BITS = bytes.maketrans(b"01", b"\0\1")
_EVENT = Struct("<qqHBIIQH")


def selectors(bits: int) -> bytes:
    """Return a byte for each bit, the lowest first."""
    return bin(bits)[:1:-1].encode().translate(_BITS)


def places_of(first: int, bits: int) -> Iterator[int]:
    return compress(count(first), selectors(bits))


def bytes_of(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


class Pack:
    """Messages of up to 512 offsets, in columns side by side; one lacks what is an empty text."""

    __slots__ = ("bits", "headers", "ids", "keys", "place", "queues", "times")

    def __init__(self, place: int, messages: int = 0, last_ms: int = 0, *columns: bytes) -> None:
        """Read a row, or make a pack without messages."""
        bits, queues, times, ids, keys, headers = columns or (b"",) * 6
        self.place = place
        # Bit i: there is a message at ``place`` + i.
        self.bits = int.from_bytes(bits, "little")
        self.queues, self.times = array("I", queues), array("q", times)
        if not messages == len(self.queues) == self.bits.bit_count():
            raise sqlite3.DatabaseError(f"the pack at {place} has its messages twice, or not")
        self.ids, self.keys = (_unpack_texts(each, messages) for each in (ids, keys))
        self.headers = _unpack_texts(headers, messages) or [b""] * messages

    def row(self) -> tuple[object, ...]:
        texts = (self.ids, self.keys, self.headers if any(self.headers) else ())
        columns = (bytes_of(self.bits), self.queues.tobytes(), self.times.tobytes())
        return (self.place, len(self.ids), max(self.times), *columns, *map(_pack_texts, texts))

    def places(self) -> Iterator[int]:
        return places_of(self.place, self.bits)


def _pack_texts(texts: Sequence[bytes]) -> bytes:
    return array("H", map(len, texts)).tobytes() + b"".join(texts)


def _unpack_texts(data: bytes, number: int) -> list[bytes]:
    if not data:
        return []
    ends = accumulate(array("H", data[: 2 * number]), initial=2 * number)
    return [data[begin:end] for begin, end in pairwise(ends)]


def pack_event(
    marker: int,
    at_ms: int,
    first: int,
    kind: int,
    consumer: int,
    reason: int,
    delay_ms: int,
    bits: int,
) -> bytes:
    """Pack what the marker at this place says of messages of one chunk, from ``first`` on.

    ``consumer`` and ``reason`` are names' numbers; 0: none.
    """
    size = (bits.bit_length() + 7) // 8
    facts = _EVENT.pack(marker, at_ms, first, kind, consumer, reason, delay_ms, size)
    return facts + bits.to_bytes(size, "little")


def unpack_events(data: bytes) -> Iterator[tuple[int, ...]]:
    """Reverse ``pack_event``, of one behind the other."""
    begin = 0
    while begin < len(data):
        *facts, size = _EVENT.unpack_from(data, begin)
        begin += _EVENT.size + size
        yield *facts, int.from_bytes(data[begin - size : begin], "little")
