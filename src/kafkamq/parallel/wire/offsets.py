"""Offset maps in commit metadata: what is done beyond the committed offset.

The format is Parallel Consumer's, so that a group can move between Java and Python: standard base64
of one magic byte and a body (``offset_forms``) over the offsets from the committed one up to the
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
not in a map: whoever reads it polls that anyway.

Source: Parallel Consumer, Offset Map.
"""

from __future__ import annotations

import base64
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from kafkamq.errors import WireError
from kafkamq.parallel.wire import offset_forms as forms
from kafkamq.parallel.wire.offset_zstd import Compressor, decompress, smallest_frame_bytes

NOTHING_SUCCEEDED = -1
"""For ``highest_succeeded``, as Parallel Consumer has it: the map then holds the base alone."""

MAX_METADATA_CHARS = 1024 * 1024
"""Longer metadata is refused unread; brokers allow 4096 characters by default."""

MAX_BODY_BYTES = 4 * 1024 * 1024
"""The longest body in a zstd frame: bits of 33 million offsets."""

MAX_INCOMPLETES = 4 * 1024 * 1024
"""A map with more incomplete offsets is refused."""

_SMALL_BYTES = 200  # of a plain body: below, nothing is compressed
_MAX_OFFSET = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class OffsetMap:
    """What a map says of the offsets from its base up to ``highest_seen``.

    Those that are not in ``incompletes`` are done. ``highest_seen`` = base - 1: it says nothing.
    """

    highest_seen: int
    incompletes: tuple[int, ...] = ()  # in order


@dataclass(frozen=True, slots=True)
class _Form:
    plain: int  # magic bytes
    compressed: int
    width: int
    is_bits: bool


_FORMS = (  # of equally small ones the first is written
    _Form(ord("l"), ord("a"), 2, True),
    _Form(ord("n"), ord("J"), 2, False),
    _Form(ord("o"), ord("s"), 4, True),
    _Form(ord("e"), ord("p"), 4, False),
)
_PLAIN = {form.plain: form for form in _FORMS}
_COMPRESSED = {form.compressed: form for form in _FORMS}
_KAFKA_STREAMS = (0x01, 0x02)
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")


@dataclass(frozen=True, slots=True)
class _Range:
    """What is to be written: ``length`` offsets from ``base``, the incomplete ones in order."""

    base: int
    length: int
    holes: Sequence[int]
    runs: Sequence[int]
    longest_run: int

    def size(self, form: _Form) -> int | None:
        """The bytes of its plain body; None where the form cannot hold it."""
        largest = forms.MAX_INT16 if form.width == 2 else forms.MAX_INT32
        if form.is_bits:
            fits = self.length <= largest
            return forms.bits_body_bytes(self.length, width=form.width) if fits else None
        return len(self.runs) * form.width if self.longest_run <= largest else None

    def body(self, form: _Form) -> bytes:
        if form.is_bits:
            return forms.bits_body(self.base, self.length, self.holes, width=form.width)
        return forms.runs_body(self.runs, width=form.width)


def encode(base: int, highest_succeeded: int, incompletes: Iterable[int]) -> str:
    """The metadata to commit with ``base``, in the smallest form; never empty.

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
    runs = forms.runs_of(base, length, holes)
    if max(runs) > forms.MAX_INT32:  # no form of Parallel Consumer's writer, but its reader's
        runs = forms.split_runs(runs, longest=forms.MAX_INT32)
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
    compressor = Compressor()
    best: tuple[int, bytes] | None = None
    for size, form in sorted(sizes, key=lambda sized: sized[1].is_bits):
        # Bits of a long range are long: where they cannot win they are not even made.
        if best is not None and smallest_frame_bytes(size) >= len(best[1]):
            continue
        if size > MAX_BODY_BYTES and form.is_bits:
            continue
        frame = compressor.compress(wanted.body(form))
        if best is None or len(frame) < len(best[1]):
            best = form.compressed, frame
    assert best is not None  # runs of 4 bytes hold every map
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
    length, incompletes = _read(form, body, base)
    highest_seen = base + length - 1
    if highest_seen >= _MAX_OFFSET:
        raise WireError("an offset map that ends behind the last offset there can be")
    if log_end is not None and length and highest_seen >= log_end:
        raise WireError(f"an offset map that ends at {highest_seen}, the log before {log_end}")
    return OffsetMap(highest_seen, incompletes)


def _unwrap(metadata: str) -> tuple[_Form, bytes]:
    """The form, and its body up to its own end."""
    data = base64.b64decode(_BASE64.match(metadata)[0])  # type: ignore[index]  # it may be empty
    if not data:
        raise WireError("commit metadata that is not base64")
    magic, body = data[0], data[1:]
    if magic in _COMPRESSED:
        form = _COMPRESSED[magic]
        body, size = decompress(body, max_bytes=MAX_BODY_BYTES)
    elif magic in _PLAIN and _PLAIN[magic].is_bits:
        form = _PLAIN[magic]
        size = forms.bits_size(body, width=form.width)
        body = body[:size]
    elif magic in _PLAIN:
        raise WireError("an offset map of runs, whose end is not known")
    else:
        owner = "Kafka Streams" if magic in _KAFKA_STREAMS else "another program"
        raise WireError(f"commit metadata of {owner} (its first byte is {magic:#04x})")
    if not metadata.startswith(base64.b64encode(data[: 1 + size]).decode("ascii")):
        raise WireError("commit metadata in a base64 that no encoder writes")
    return form, body


def _read(form: _Form, body: bytes, base: int) -> tuple[int, tuple[int, ...]]:
    if form.is_bits:
        length, count, cleared = forms.read_bits(body, width=form.width)
        _bound(count)
        return length, tuple([base + relative for relative in cleared])
    length, ranges = forms.read_runs(body, width=form.width)
    spans = list(ranges)
    _bound(sum(map(len, spans)))
    return length, tuple(
        chain.from_iterable(range(base + span.start, base + span.stop) for span in spans)
    )


def _bound(count: int) -> None:
    if count > MAX_INCOMPLETES:
        raise WireError(f"an offset map with {count} incomplete offsets")
