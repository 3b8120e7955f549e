"""The plain bodies of an offset map: runs and bits over the offsets from a base.

A map says of each relative offset 0..n-1 whether it is completed. *Runs* are lengths that
alternate, incomplete first (that one may be 0); *bits* stand least significant first in each byte,
a set bit is completed, and one spare zero byte follows them. Numbers are signed and big-endian, of
2 bytes in the first version of either body and of 4 in the second. Writing takes time by the number
of holes, reading by the size of the body; neither walks the range.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence

from kafkamq.errors import WireError

MAX_INT16 = (1 << 15) - 1
MAX_INT32 = (1 << 31) - 1

_NUMBER = {2: "h", 4: "i"}  # struct's letters by width
_CLEAR = tuple(0xFF ^ (1 << bit) for bit in range(8))
_CLEARED = tuple(tuple(bit for bit in range(8) if not byte >> bit & 1) for byte in range(256))
_HAS_HOLES = re.compile(rb"[^\xff]")


def runs_of(base: int, length: int, holes: Sequence[int]) -> list[int]:
    """Lengths that alternate, incomplete first, and add up to ``length``.

    ``holes`` are the incomplete offsets from ``base`` up to ``base + length``, in order; one may
    stand there twice.
    """
    runs: list[int] = []
    position = base  # everything before it is in a run, but the open run of incompletes
    incomplete = 0
    for hole in holes:
        if hole == position:
            incomplete += 1
        elif hole > position:
            runs.append(incomplete)
            runs.append(hole - position)
            incomplete = 1
        position = hole + 1
    runs.append(incomplete)
    if position < base + length:
        runs.append(base + length - position)
    return runs


def split_runs(runs: Sequence[int], *, longest: int) -> list[int]:
    """The same map in runs of at most ``longest``, with runs of 0 of the other kind between."""
    result: list[int] = []
    for run in runs:
        while run > longest:
            result += (longest, 0)
            run -= longest
        result.append(run)
    return result


def runs_body(runs: Sequence[int], *, width: int) -> bytes:
    """The runs as numbers of ``width`` bytes; they must fit."""
    return struct.pack(f">{len(runs)}{_NUMBER[width]}", *runs)


def bits_body_bytes(length: int, *, width: int) -> int:
    """How long the body of bits is for that many offsets."""
    return width + (length + 7) // 8 + 1


def bits_body(base: int, length: int, holes: Sequence[int], *, width: int) -> bytes:
    """The number of offsets in ``width`` bytes, their bits, and the spare byte."""
    size = (length + 7) // 8
    bits = bytearray(b"\xff") * size
    if length % 8:
        bits[-1] = (1 << length % 8) - 1
    clear = _CLEAR
    for hole in holes:
        relative = hole - base
        bits[relative >> 3] &= clear[relative & 7]
    return struct.pack(f">{_NUMBER[width]}", length) + bits + b"\0"


def read_runs(body: bytes, *, width: int) -> tuple[int, Iterator[range]]:
    """How many relative offsets the runs cover, and the incomplete ones, as ranges in order."""
    if not body or len(body) % width:
        raise WireError(f"an offset map of runs of {width} bytes has {len(body)} bytes")
    runs = struct.unpack(f">{len(body) // width}{_NUMBER[width]}", body)
    if min(runs) < 0:
        raise WireError("an offset map with a negative run")
    return sum(runs), _incomplete_ranges(runs)


def _incomplete_ranges(runs: Sequence[int]) -> Iterator[range]:
    position = 0
    for index in range(0, len(runs) - 1, 2):
        incomplete = runs[index]
        if incomplete:
            yield range(position, position + incomplete)
        position += incomplete + runs[index + 1]
    if len(runs) % 2 and runs[-1]:
        yield range(position, position + runs[-1])


def bits_size(body: bytes, *, width: int) -> int:
    """How long a body of bits is by what it says itself; more may follow it."""
    return bits_body_bytes(_bits_length(body, width), width=width)


def _bits_length(body: bytes, width: int) -> int:
    if len(body) < width:
        raise WireError(f"an offset map of bits has {len(body)} bytes")
    length: int = struct.unpack_from(f">{_NUMBER[width]}", body)[0]
    if length < 0:
        raise WireError("an offset map of bits with a negative number of offsets")
    return length


def read_bits(body: bytes, *, width: int) -> tuple[int, int, Iterator[int]]:
    """How many relative offsets the bits cover, how many are incomplete, and which, in order."""
    length = _bits_length(body, width)
    expected = bits_body_bytes(length, width=width)
    if len(body) != expected:
        raise WireError(f"an offset map of {length} bits has {len(body)} bytes, not {expected}")
    bits = int.from_bytes(body[width:], "little")
    if bits >> length:
        raise WireError("an offset map with a set bit behind its last offset")
    return length, length - bits.bit_count(), _cleared_bits(body[width:-1], length)


def _cleared_bits(data: bytes, length: int) -> Iterator[int]:
    for match in _HAS_HOLES.finditer(data):
        first = match.start() * 8
        for bit in _CLEARED[data[match.start()]]:
            if first + bit < length:
                yield first + bit
