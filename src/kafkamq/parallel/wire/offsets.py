"""Offset maps in commit metadata: what is done beyond the committed offset.

The format is Parallel Consumer's, so that a group can move between Java and Python: standard base64
of one magic byte and a body over the offsets from the committed one up to the
highest that succeeded. Upper half of the table: the body as it is; lower half: a zstd frame of it.

    l  bits, 2-byte number     n  runs of 2 bytes
    o  bits, 4-byte number     e  runs of 4 bytes
    a, s: frames of l, o       J, p: frames of n, e

Metadata is read up to a NUL (``transport.commits``), so whatever follows it in memory may seem to
belong to it. Bits and frames show their end, and what stands behind it is passed over. Runs do not,
so they are neither written nor read but in frames.

Which form is written: bits of less than 200 bytes, else the smallest of bits and frames. A frame
holds the same body as the Java library's, its bytes depend on the version of zstd.

Offsets that do not exist count as completed. What is incomplete above the highest that succeeded is
not in a map: its reader polls that anyway.

A body says of each relative offset 0..n-1 whether it is completed. *Runs* are lengths that
alternate, incomplete first (that one may be 0); *bits* stand least significant first in each byte,
a set bit is completed, and one spare zero byte follows them. Numbers are signed and big-endian.
Writing takes time by the number of holes, reading by the size of the body; neither walks the range.

A frame of 3 KB can claim gigabytes, so a reader never asks for more than it has room for. The
library zstandard is an extra: it is imported when the first frame is written or read.

Source: Parallel Consumer, Offset Map.
"""

from __future__ import annotations

import base64
import re
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kafkamq.errors import ConfigError, WireError

NOTHING_SUCCEEDED = -1
"""For ``highest_succeeded``, as Parallel Consumer has it: the map then holds the base alone."""

MAX_METADATA_CHARS = 1024 * 1024
"""Longer metadata is refused unread; brokers allow 4096 characters by default."""

MAX_BODY_BYTES = 4 * 1024 * 1024
"""The longest body in a zstd frame: bits of 33 million offsets."""

MAX_INCOMPLETES = 4 * 1024 * 1024
"""A map with more incomplete offsets is refused."""

_SMALL_BYTES = 200
_MAX_OFFSET = (1 << 63) - 1
_KAFKA_STREAMS = (0x01, 0x02)
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
MAX_INT16 = (1 << 15) - 1
MAX_INT32 = (1 << 31) - 1
_NUMBER = {2: "h", 4: "i"}
_CLEAR = tuple(0xFF ^ (1 << bit) for bit in range(8))
_CLEARED = tuple(tuple(bit for bit in range(8) if not byte >> bit & 1) for byte in range(256))
_HAS_HOLES = re.compile(rb"[^\xff]")

LEVEL = 3
"""zstd's own default, and Parallel Consumer's."""

# Every zstd decoder should take this window; level 3 asks for 2 MiB.
_MAX_WINDOW_BYTES = 8 * 1024 * 1024
_MAX_BLOCK_BYTES = 128 * 1024
_HEADER_BYTES = 6
# The smallest block has one byte, repeated.
_SMALLEST_BLOCK_BYTES = 4
# In a slice at most 16 blocks begin, so it yields 2 MiB at most.
_SLICE_BYTES = 64


@dataclass(frozen=True, slots=True)
class OffsetMap:
    """What a map says of the offsets from its base up to ``highest_seen``.

    Those that are not in ``incompletes`` are done. ``highest_seen`` = base - 1: it says nothing.
    """

    highest_seen: int
    incompletes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Form:
    plain: int
    compressed: int
    width: int
    is_bits: bool


# Of equally small forms the first is written.
_FORMS = (
    _Form(ord("l"), ord("a"), 2, True),
    _Form(ord("n"), ord("J"), 2, False),
    _Form(ord("o"), ord("s"), 4, True),
    _Form(ord("e"), ord("p"), 4, False),
)
_PLAIN = {form.plain: form for form in _FORMS}
_COMPRESSED = {form.compressed: form for form in _FORMS}


@dataclass(frozen=True, slots=True)
class _Range:
    """What is to be written: ``length`` offsets from ``base``, the incomplete ones in order."""

    base: int
    length: int
    holes: Sequence[int]
    runs: Sequence[int]
    longest_run: int

    def size(self, form: _Form) -> int | None:
        largest = MAX_INT16 if form.width == 2 else MAX_INT32
        if form.is_bits:
            return _bits_bytes(self.length, form.width) if self.length <= largest else None
        return len(self.runs) * form.width if self.longest_run <= largest else None

    def body(self, form: _Form) -> bytes:
        """Return runs; or the number of offsets, their bits, and the spare byte."""
        number = _NUMBER[form.width]
        if not form.is_bits:
            return struct.pack(f">{len(self.runs)}{number}", *self.runs)
        length, base, clear = self.length, self.base, _CLEAR
        bits = bytearray(b"\xff") * ((length + 7) // 8)
        if length % 8:
            bits[-1] = (1 << length % 8) - 1
        for hole in self.holes:
            relative = hole - base
            bits[relative >> 3] &= clear[relative & 7]
        return struct.pack(f">{number}", length) + bits + b"\0"


def _bits_bytes(length: int, width: int) -> int:
    """Return how long the body of bits is for that many offsets."""
    return width + (length + 7) // 8 + 1


def encode(base: int, highest_succeeded: int, incompletes: Iterable[int]) -> str:
    """Return the metadata to commit with ``base``, in the smallest form; never empty.

    Args:
        base: The offset that is committed.
        highest_succeeded: The end of the map, inclusive; below ``base - 1`` it counts as that
            (gaps were jumped over), and ``NOTHING_SUCCEEDED`` as ``base``, which must then be
            among the incompletes, or the map would say that it is done.
        incompletes: What is not done, in any order; offsets outside the map are left out.

    Raises:
        WireError: an offset that Kafka does not have.
    """
    if not 0 <= base <= _MAX_OFFSET or not NOTHING_SUCCEEDED <= highest_succeeded < _MAX_OFFSET:
        raise WireError(f"cannot encode an offset map from {base} to {highest_succeeded}")
    if highest_succeeded == NOTHING_SUCCEEDED:
        highest_succeeded = base
    length = max(highest_succeeded - base + 1, 0)
    magic, body = _smallest(_range(base, length, incompletes))
    return base64.b64encode(bytes((magic,)) + body).decode("ascii")


def _range(base: int, length: int, incompletes: Iterable[int]) -> _Range:
    holes = sorted(incompletes)
    holes = holes[bisect_left(holes, base) : bisect_left(holes, base + length)]
    runs = runs_of(base, length, holes)
    if max(runs) > MAX_INT32:
        # Parallel Consumer's writer has no form for this; its reader has one.
        runs = split_runs(runs, longest=MAX_INT32)
    return _Range(base, length, holes, runs, max(runs))


def _smallest(wanted: _Range) -> tuple[int, bytes]:
    sizes = [(size, form) for form in _FORMS if (size := wanted.size(form)) is not None]
    bits_size, bits = min(
        (sized for sized in sizes if sized[1].is_bits),
        key=lambda sized: sized[0],
        default=(MAX_BODY_BYTES + 1, _FORMS[0]),
    )
    if bits_size < _SMALL_BYTES:
        return bits.plain, wanted.body(bits)
    import zstandard

    compressor = zstandard.ZstdCompressor(level=LEVEL)
    best: tuple[int, bytes] | None = None
    for size, form in sorted(sizes, key=lambda sized: sized[1].is_bits):
        # Bits of a long range are long: where they cannot win they are not even made.
        if best is not None and smallest_frame_bytes(size) >= len(best[1]):
            continue
        if size > MAX_BODY_BYTES and form.is_bits:
            continue
        # The length is not told, as by a Java output stream.
        stream = compressor.compressobj()
        frame = stream.compress(wanted.body(form)) + stream.flush()
        if best is None or len(frame) < len(best[1]):
            best = form.compressed, frame
    # Runs of 4 bytes hold every map.
    assert best is not None
    return best if len(best[1]) < bits_size else (bits.plain, wanted.body(bits))


def decode(base: int, metadata: str, *, log_end: int | None = None) -> OffsetMap:
    """Read the metadata that was committed with ``base``; what stands behind it is passed over.

    Args:
        base: The committed offset.
        metadata: Any of the six forms that show their end; empty, or a NUL: nothing is done beyond
            ``base``.
        log_end: The partition's end (the next offset to be written), where it is known.

    Raises:
        WireError: no such form, another program's metadata, more than the limits here, or a map
            that ends at or behind ``log_end``.
    """
    if not metadata or metadata[0] == "\0":
        return OffsetMap(base - 1)
    if len(metadata) > MAX_METADATA_CHARS:
        raise WireError(f"commit metadata of {len(metadata)} characters")
    form, body = _unwrap(metadata)
    read = _read_bits if form.is_bits else _read_runs
    length, incompletes = read(body, form.width, base)
    highest_seen = base + length - 1
    if highest_seen >= _MAX_OFFSET:
        raise WireError("an offset map that ends behind the last offset there can be")
    if log_end is not None and length and highest_seen >= log_end:
        raise WireError(f"an offset map that ends at {highest_seen}, the log before {log_end}")
    return OffsetMap(highest_seen, incompletes)


def _unwrap(metadata: str) -> tuple[_Form, bytes]:
    data = base64.b64decode(_BASE64.match(metadata)[0])  # type: ignore[index]  # it may be empty
    if not data:
        raise WireError("commit metadata that is not base64")
    magic, body = data[0], data[1:]
    if magic in _COMPRESSED:
        form = _COMPRESSED[magic]
        body, size = decompress(body, max_bytes=MAX_BODY_BYTES)
    elif magic in _PLAIN and _PLAIN[magic].is_bits:
        form = _PLAIN[magic]
        # By what it says itself: more may follow it.
        size = _bits_bytes(_bits_length(body, form.width), form.width)
        body = body[:size]
    elif magic in _PLAIN:
        raise WireError("an offset map of runs, whose end is not known")
    else:
        owner = "Kafka Streams" if magic in _KAFKA_STREAMS else "another program"
        raise WireError(f"commit metadata of {owner} (its first byte is {magic:#04x})")
    if not metadata.startswith(base64.b64encode(data[: 1 + size]).decode("ascii")):
        raise WireError("commit metadata in a base64 that no encoder writes")
    return form, body


def _bound(count: int) -> None:
    if count > MAX_INCOMPLETES:
        raise WireError(f"an offset map with {count} incomplete offsets")


def runs_of(base: int, length: int, holes: Sequence[int]) -> list[int]:
    """Lengths that alternate, incomplete first, and add up to ``length``.

    ``holes`` are the incomplete offsets from ``base`` up to ``base + length``, in order; one may
    stand there twice.
    """
    runs: list[int] = []
    # Everything before ``position`` is in a run, except the open run of incompletes.
    position = base
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
    """Return the map in runs of at most ``longest``, with runs of 0 of the other kind between."""
    result: list[int] = []
    for run in runs:
        while run > longest:
            result += (longest, 0)
            run -= longest
        result.append(run)
    return result


def _read_runs(body: bytes, width: int, base: int) -> tuple[int, tuple[int, ...]]:
    """Return how many offsets the body covers, and the incomplete ones."""
    if not body or len(body) % width:
        raise WireError(f"an offset map of runs of {width} bytes has {len(body)} bytes")
    runs = struct.unpack(f">{len(body) // width}{_NUMBER[width]}", body)
    if min(runs) < 0:
        raise WireError("an offset map with a negative run")
    _bound(sum(runs[::2]))
    incompletes: list[int] = []
    position = base
    for index in range(0, len(runs), 2):
        incompletes += range(position, position + runs[index])
        position += sum(runs[index : index + 2])
    return position - base, tuple(incompletes)


def _bits_length(body: bytes, width: int) -> int:
    if len(body) < width:
        raise WireError(f"an offset map of bits has {len(body)} bytes")
    length: int = struct.unpack_from(f">{_NUMBER[width]}", body)[0]
    if length < 0:
        raise WireError("an offset map of bits with a negative number of offsets")
    return length


def _read_bits(body: bytes, width: int, base: int) -> tuple[int, tuple[int, ...]]:
    """Return how many offsets the body covers, and the incomplete ones."""
    length = _bits_length(body, width)
    expected = _bits_bytes(length, width)
    if len(body) != expected:
        raise WireError(f"an offset map of {length} bits has {len(body)} bytes, not {expected}")
    bits = int.from_bytes(body[width:], "little")
    if bits >> length:
        raise WireError("an offset map with a set bit behind its last offset")
    _bound(length - bits.bit_count())
    return length, tuple([base + relative for relative in _cleared_bits(body[width:-1], length)])


def _cleared_bits(data: bytes, length: int) -> Iterator[int]:
    for match in _HAS_HOLES.finditer(data):
        first = match.start() * 8
        for bit in _CLEARED[data[match.start()]]:
            if first + bit < length:
                yield first + bit


def require_zstandard() -> None:
    """Make sure, before the first commit, that offset maps can be written."""
    try:
        import zstandard  # noqa: F401
    except ImportError:
        raise ConfigError(
            "offset maps need zstandard, which is not installed: pip install 'kafkamq[parallel]'"
        ) from None


def smallest_frame_bytes(body_bytes: int) -> int:
    """No frame of a body of that length is smaller, whatever is in it."""
    blocks = -(-body_bytes // _MAX_BLOCK_BYTES)
    return _HEADER_BYTES + blocks * _SMALLEST_BLOCK_BYTES


def decompress(data: bytes, *, max_bytes: int) -> tuple[bytes, int]:
    """Return the content of the frame that the data begin with, and how many bytes it takes."""
    import zstandard

    stream = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()
    parts: list[bytes] = []
    size = end = 0
    while end < len(data) and not stream.eof:
        try:
            part = stream.decompress(data[end : end + _SLICE_BYTES])
        except zstandard.ZstdError as error:
            raise WireError("an offset map with an invalid zstd frame") from error
        size += len(part)
        if size > max_bytes:
            raise WireError(f"an offset map of more than {max_bytes} bytes in its zstd frame")
        parts.append(part)
        end = min(len(data), end + _SLICE_BYTES)
    if not stream.eof:
        raise WireError("an offset map with a zstd frame that is cut off")
    return b"".join(parts), end - len(stream.unused_data)
