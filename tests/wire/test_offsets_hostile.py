"""Metadata that is malformed, foreign or hostile: a WireError, and never more memory than said."""

from __future__ import annotations

import base64
import contextlib
import struct
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.strategies import bounded

from kafkamq.errors import WireError
from kafkamq.parallel.wire.offsets import (
    MAX_BODY_BYTES,
    MAX_INCOMPLETES,
    MAX_METADATA_CHARS,
    OffsetMap,
    decode,
    decompress,
    smallest_frame_bytes,
)

ALL_FORMS = "lonesaJp"
FRAME_OF = {"l": "a", "o": "s", "n": "J", "e": "p"}


def metadata(magic: str | bytes, body: bytes) -> str:
    head = magic.encode() if isinstance(magic, str) else magic
    return base64.b64encode(head + body).decode()


def frame(body: bytes) -> bytes:
    stream = zstandard.ZstdCompressor(level=3).compressobj()
    return stream.compress(body) + stream.flush()


def refuses(text: str, match: str = ".") -> None:
    with pytest.raises(WireError, match=match):
        decode(42, text)


def framed(magic: str, body: bytes) -> str:
    """Of runs the only form that is read: their end is not known without a frame."""
    return metadata(FRAME_OF[magic], frame(body))


def readable(magic: str, body: bytes) -> list[str]:
    return [framed(magic, body), *([metadata(magic, body)] if magic in "lo" else [])]


GOOD = {
    "l": struct.pack(">h", 11) + bytes((0xCE, 0x07, 0)),
    "o": struct.pack(">i", 11) + bytes((0xCE, 0x07, 0)),
    "n": struct.pack(">4h", 1, 3, 2, 5),
    "e": struct.pack(">4i", 1, 3, 2, 5),
}


@pytest.mark.parametrize("magic", GOOD)
def test_the_bodies_that_are_spoilt_below_are_good(magic: str) -> None:
    for text in readable(magic, GOOD[magic]):
        assert decode(42, text) == OffsetMap(52, (42, 46, 47))
    if magic in "ne":
        refuses(metadata(magic, GOOD[magic]), "whose end is not known")


@pytest.mark.parametrize("magic", ALL_FORMS)
def test_a_magic_byte_alone(magic: str) -> None:
    refuses(metadata(magic, b""))


@pytest.mark.parametrize("magic", GOOD)
def test_one_byte_more_or_less(magic: str) -> None:
    refuses(framed(magic, GOOD[magic] + b"\0"), "bytes")
    for body in (GOOD[magic][:-1], b""):
        for text in readable(magic, body):
            refuses(text, "bytes")


@pytest.mark.parametrize(
    ("magic", "body"),
    [
        ("n", struct.pack(">2h", 3, -1)),
        ("n", struct.pack(">2h", -1, 3)),
        ("e", struct.pack(">3i", 3, 9, -(1 << 31))),
        ("l", struct.pack(">h", -1) + b"\xff\0"),
        ("l", struct.pack(">h", -8) + b"\0"),
        ("o", struct.pack(">i", -1) + b"\0"),
    ],
)
def test_negative_numbers(magic: str, body: bytes) -> None:
    for text in readable(magic, body):
        refuses(text, "negative")


def test_a_set_bit_behind_the_last_offset() -> None:
    refuses(metadata("l", struct.pack(">h", 3) + b"\x0f\0"), "behind")
    refuses(metadata("l", struct.pack(">h", 8) + b"\xff\x01"), "behind")
    assert decode(42, metadata("l", struct.pack(">h", 3) + b"\x07\0")) == OffsetMap(44, ())


def test_runs_of_zero_are_read() -> None:
    body = struct.pack(">6h", 0, 3, 0, 4, 1, 0)
    assert decode(42, framed("n", body)) == OffsetMap(49, (49,))


@pytest.mark.parametrize("head", [b"\x00", b"\x01", b"\x02", b"L", b"\xee", b"A", b"\xff", b"P"])
def test_foreign_magic_bytes(head: bytes) -> None:
    refuses(metadata(head, GOOD["n"]), "Kafka Streams" if head in b"\x01\x02" else "another")


@pytest.mark.parametrize(
    "text",
    [
        "hello world!",
        " bAALzgcA",
        "\ufffdbAALzgcA",
        "bAAL-_cA",  # another alphabet
        "bAALzgc",  # cut off
        "bAABAQA",  # no padding
        "bAABAQB=",  # a bit too many
        "bAABAQAAbAABAQA=",  # it would end within four characters
        "é",
        "\ud800",
        "\U0001f600",
        "=",
        "====",
        '{"version":1}',
    ],
)
def test_no_base64(text: str) -> None:
    refuses(text)


def test_what_stands_behind_a_map_is_passed_over() -> None:
    for text in ("bAALzgcA\n", "bAALzgcA\0\0", "bAALzgcA\ufffd", "bAALzgcAbAALzgcA"):
        assert decode(42, text) == decode(42, "bAALzgcA")
    for text in ("bAABAQA==", "bAABAQA=bAABAQA=", "bAABAQA=\0="):
        assert decode(42, text) == decode(42, "bAABAQA=")
    assert decode(42, "\0bAALzgcA") == decode(42, "")


def test_too_many_characters() -> None:
    refuses("A" * (MAX_METADATA_CHARS + 4), "characters")


def test_an_end_beyond_all_offsets() -> None:
    text = framed("e", struct.pack(">2i", 0, 1_000))
    assert decode((1 << 63) - 1_001, text).highest_seen == (1 << 63) - 2
    with pytest.raises(WireError, match="last offset"):
        decode((1 << 63) - 1_000, text)


def test_too_many_incompletes() -> None:
    most = struct.pack(">2i", MAX_INCOMPLETES, 7)
    assert len(decode(0, framed("e", most)).incompletes) == MAX_INCOMPLETES
    refuses(framed("e", struct.pack(">2i", MAX_INCOMPLETES + 1, 7)), "incomplete offsets")
    refuses(framed("e", struct.pack(">i", (1 << 31) - 1)), "incomplete offsets")
    refuses(framed("e", struct.pack(">3i", MAX_INCOMPLETES, 7, 1)), "incomplete offsets")
    count = MAX_INCOMPLETES + 8
    refuses(metadata("s", frame(struct.pack(">i", count) + bytes(count // 8 + 1))), "incomplete")


# zstd


@pytest.mark.parametrize("magic", "asJp")
def test_what_does_not_begin_with_a_whole_frame(magic: str) -> None:
    plain = {compressed: plain for plain, compressed in FRAME_OF.items()}[magic]
    good = frame(GOOD[plain])
    for bad in (
        b"\0",
        GOOD[plain],
        good[:-1],
        good[:5],
        b"\x50\x2a\x4d\x18\x04\0\0\0abcd",  # a frame to be skipped
        b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + good,
    ):
        refuses(metadata(magic, bad))
    expected = decode(42, metadata(magic, good))
    for behind in (b"\0", b"\0\0", b"\0\0\0", b"\0" * 200, good):
        # The last four characters of the map say where it ends, or hold what stands behind it.
        text = metadata(magic, good + behind)
        if len(good) % 3 == 2:
            assert decode(42, text) == expected
        else:
            refuses(text, "no encoder")


def test_a_frame_that_is_cut_off_is_not_taken_for_a_shorter_map() -> None:
    body = struct.pack(">100000i", *range(100_000))
    good = frame(body)
    assert decompress(good, max_bytes=len(body)) == (body, len(good))
    for end in (len(good) - 1, len(good) - 3, len(good) // 2, 70_000, 0):
        with pytest.raises(WireError, match="cut off"):
            decompress(good[:end], max_bytes=len(body))
    for behind in (b"\0", b"\0" * 63, b"\0" * 200, good):
        assert decompress(good + behind, max_bytes=len(body)) == (body, len(good))
    with pytest.raises(WireError, match="more than"):
        decompress(good, max_bytes=len(body) - 1)


def test_frames_of_other_writers_are_read() -> None:
    """With the length of the content, a checksum, or several blocks."""
    body = struct.pack(">i", 3_000_000) + b"\xff" * 375_000 + b"\0"
    for compressor in (
        zstandard.ZstdCompressor(level=19),
        zstandard.ZstdCompressor(level=1, write_checksum=True),
    ):
        text = metadata("s", compressor.compress(body))
        assert decode(0, text) == OffsetMap(2_999_999, ())
    spoilt = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(GOOD["e"]))
    spoilt[-1] ^= 1
    refuses(metadata("p", bytes(spoilt)), "invalid zstd")


def test_a_window_that_would_take_all_memory_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    refuses(metadata("p", stream.compress(GOOD["e"]) + stream.flush()), "invalid zstd")


def bomb(size: int) -> bytes:
    stream = zstandard.ZstdCompressor(level=3).compressobj()
    block = bytes(1 << 20)
    parts = [stream.compress(block) for _ in range(size >> 20)]
    return b"".join([*parts, stream.flush()])


def test_a_zstd_bomb_is_cut_short() -> None:
    small_text_much_content = bomb(1 << 28)
    assert len(small_text_much_content) < 16_384
    tracemalloc.start()
    for magic in "asJp":
        refuses(metadata(magic, small_text_much_content), f"more than {MAX_BODY_BYTES} bytes")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * MAX_BODY_BYTES


def test_the_longest_body_is_read() -> None:
    count = (MAX_BODY_BYTES - 5) * 8
    body = struct.pack(">i", count) + b"\xff" * (count // 8) + b"\0"
    assert len(body) == MAX_BODY_BYTES
    assert decode(0, metadata("s", frame(body))) == OffsetMap(count - 1, ())
    refuses(metadata("s", frame(body + b"\0")), "more than")


def test_no_frame_is_smaller_than_the_smallest() -> None:
    for size in (1, 200, 131_072, 131_073, 1_000_000, 1 << 24):
        assert smallest_frame_bytes(size) <= len(frame(b"\xff" * size))
    assert smallest_frame_bytes(131_073) == smallest_frame_bytes(131_072) + 4


@bounded
@given(st.binary(max_size=300))
def test_decompress_raises_nothing_but_wire_errors(data: bytes) -> None:
    for text in (data, frame(data)[: len(data)], b"\x28\xb5\x2f\xfd" + data):
        with contextlib.suppress(WireError):
            decompress(text, max_bytes=1_000)
    assert decompress(frame(data), max_bytes=300) == (data, len(frame(data)))


@bounded
@given(st.sampled_from(ALL_FORMS), st.binary(max_size=60), st.booleans())
def test_decode_raises_nothing_but_wire_errors(magic: str, data: bytes, packed: bool) -> None:
    body = frame(data) if packed else data
    try:
        result = decode(1_000, metadata(magic, body))
    except WireError:
        return
    assert result.highest_seen >= 999
    assert list(result.incompletes) == sorted(set(result.incompletes))
    assert all(1_000 <= hole <= result.highest_seen for hole in result.incompletes)


@bounded
@given(st.text(max_size=60))
def test_any_text(text: str) -> None:
    with contextlib.suppress(WireError):
        decode(7, text)
