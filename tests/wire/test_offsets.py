"""Offset maps against what Parallel Consumer 0.5.3.3 wrote and read.

``vectors/parallel-consumer-offsets.json`` and the edges below were written by that library; more
than one string means that it breaks a tie by chance.
"""

from __future__ import annotations

import base64
import contextlib
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.strategies import bounded

from kafkamq.errors import WireError
from kafkamq.parallel.wire.offsets import OffsetMap, decode, encode, split_runs

VECTORS = json.loads(
    (Path(__file__).parent.parent / "vectors" / "parallel-consumer-offsets.json").read_text()
)
COMPRESSED = b"asJp"
RUNS = "ne"  # in which nothing is written, and which are not read, as they do not show their end


def named(case: dict[str, Any]) -> str:
    return str(case["name"])


def magic(metadata: str) -> str:
    return chr(base64.b64decode(metadata)[0])


@pytest.mark.parametrize("case", VECTORS["encode"], ids=named)
def test_writes_what_the_java_library_wrote(case: dict[str, Any]) -> None:
    metadata = encode(case["base"], case["highest_succeeded"], case["incompletes"])
    written = case["written"].values()
    if {magic(text) for text in written} <= set(RUNS):
        assert magic(metadata) not in RUNS
    elif magic(metadata).encode() in COMPRESSED:  # the bytes of a frame depend on zstd's version
        assert magic(metadata) in {magic(text) for text in written}
        assert len(metadata) <= min(map(len, written)) + 8
    else:
        assert metadata in written
    expected = OffsetMap(case["decoded_highest_seen"], tuple(case["incompletes"]))
    assert decode(case["base"], metadata) == expected


@pytest.mark.parametrize("case", VECTORS["encode"], ids=named)
def test_reads_every_form_of_the_java_library_that_shows_its_end(case: dict[str, Any]) -> None:
    expected = OffsetMap(case["decoded_highest_seen"], tuple(case["incompletes"]))
    texts = {**case["written"], **case["other_readable_forms"]}
    for form, metadata in texts.items():
        if magic(metadata) in RUNS:
            with pytest.raises(WireError, match="whose end is not known"):
                decode(case["base"], metadata)
            continue
        for memory in ("", "\0", *BEHIND, metadata):
            assert decode(case["base"], metadata + memory) == expected, form


BEHIND = ("A", "AAAA", "AA==", "AAA=", "=", "==", "\ufffd", "=\x01 ab", "bAALzgcA" * 100)
READ_ALIKE = {"empty"}
STRICTER = {  # the Java library reads these two as if nothing were wrong
    "runlength-v1-odd-length": "whose end is not known",
    "bitset-v1-declares-more-than-bytes": "3 bytes, not 5",
}
REFUSED = {  # and it drops the map, or throws, at these
    "not-base64": "another program",
    "kafka-streams-v1": "Kafka Streams",
    "bytearray-magic": "another program",
}
MORE_TOLERANT = {"trailing-nul-as-confluent-kafka-python-commits-it": OffsetMap(38, (3, 7, 20))}


@pytest.mark.parametrize("case", VECTORS["decode"], ids=named)
def test_reads_what_is_not_as_it_should_be(case: dict[str, Any]) -> None:
    name, base, metadata = case["name"], case["base"], case["metadata"]
    if name in READ_ALIKE:
        expected = OffsetMap(case["highest_seen"], tuple(case["incompletes"]))
        assert decode(base, metadata) == expected
    elif name in MORE_TOLERANT:
        assert decode(base, metadata) == MORE_TOLERANT[name]
    else:
        with pytest.raises(WireError, match={**STRICTER, **REFUSED}[name]):
            decode(base, metadata)


EDGES = {
    "nothing succeeded yet": (7, -1, [7], {"bgAB"}),
    "nothing succeeded yet, at the log's start": (0, -1, [0], {"bgAB"}),
    "nothing succeeded, nothing open": (7, -1, [], {"bAABAQA=", "bgAAAAE="}),
    "highest below the base": (10, 5, [10, 12], {"bgAA"}),
    "open above the highest only": (10, 9, [10, 11], {"bgAA"}),
    "no holes": (10, 12, [], {"bAADBwA=", "bgAAAAM="}),
    "nothing but holes": (10, 12, [10, 11, 12], {"bgAD"}),
    "the base is done": (10, 13, [12], {"bAAECwA="}),
    "the highest is open": (10, 15, [10, 15], {"bAAGHgA="}),
    "holes outside": (10, 15, [3, 12, 15, 16, 99], {"bAAGGwA="}),
    "a run of 32766": (0, 32766, [0], {"bgABf/4="}),
    "a run of 32767": (0, 32767, [0], {"bgABf/8="}),
    "a run of 32768": (0, 32768, [0], {"ZQAAAAEAAIAA"}),
    "32767 done": (0, 32766, [], {"bgAAf/8="}),
    "32768 done": (0, 32767, [], {"ZQAAAAAAAIAA"}),
    "32767 open": (5, 32771, range(5, 32772), {"bn//"}),
    "32768 open": (5, 32772, range(5, 32773), {"ZQAAgAA="}),
    "a gap over int16": (0, 40000, [0, 33000], {"ZQAAAAEAAIDnAAAAAQAAG1g="}),
    "two gaps over int16": (0, 70000, [0, 1, 35000], {"ZQAAAAIAAIi2AAAAAQAAiLg="}),
    "a tie at 8 offsets": (0, 7, [0, 1], {"bAAI/AA=", "bgACAAY="}),
    "bits, at 16 offsets": (0, 15, [3], {"bAAQ9/8A"}),
    "runs, at 9 offsets": (0, 8, [0], {"bgABAAg="}),
    "a large base": (1 << 62, (1 << 62) + 20, [1 << 62], {"bgABABQ="}),
    "the last offset": ((1 << 63) - 3, (1 << 63) - 2, [(1 << 63) - 3], {"bAACAgA=", "bgABAAE="}),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str) -> None:
    base, highest, incompletes, written = EDGES[name]
    metadata = encode(base, highest, incompletes)
    ending = {text for text in written if magic(text) not in RUNS}
    assert metadata in ending or (magic(metadata) not in RUNS and not ending)
    end = base if highest == -1 else max(highest, base - 1)
    expected = OffsetMap(end, tuple(hole for hole in incompletes if base <= hole <= end))
    for text in {metadata, *ending}:
        assert decode(base, text) == expected


def test_frames_begin_where_bits_have_200_bytes() -> None:
    assert magic(encode(0, 1567, range(0, 1568, 3))) == "l"  # 199 bytes
    assert magic(encode(0, 1568, range(0, 1569, 3))) == "J"  # 200 bytes
    few_holes = [0, *range(40_000, 40_000 + 23 * 2_000, 2_000)]
    assert magic(encode(0, 88_000, few_holes)) == "p"


def test_incompletes_come_in_any_order_and_number() -> None:
    assert encode(0, 10, [5, 0, 4, 5, 0]) == encode(0, 10, {0, 4, 5}) == "bAALzgcA"
    assert encode(0, 10, (hole for hole in (4, 5, 0))) == "bAALzgcA"


def test_a_map_over_int32_is_split_into_runs() -> None:
    """The Java writer gives such a map up."""
    holes = (0, 5, 4_999_999_000)
    metadata = encode(0, 4_999_999_999, holes)
    assert magic(metadata) == "p"
    assert decode(0, metadata) == OffsetMap(4_999_999_999, holes)


def test_runs_are_split_no_more_than_they_must() -> None:
    largest = (1 << 31) - 1
    assert split_runs([1, largest, 0], longest=largest) == [1, largest, 0]
    assert split_runs([1, largest + 1], longest=largest) == [1, largest, 0, 1]
    assert split_runs([0, 3 * largest], longest=largest) == [0, *[largest, 0] * 2, largest]


@pytest.mark.parametrize(
    ("end", "count"),
    [
        (30_000_000, 60),  # bits would have to win by less than their smallest frame
        (2_000_000_000, 4_000),  # they take 250 MB
        (10**12, 1_000),  # they do not exist
    ],
)
def test_bits_of_a_long_range_are_not_made(end: int, count: int) -> None:
    rng = random.Random(end)
    holes = (0, *sorted(rng.sample(range(1, end), count)))
    if count < 100:
        holes = tuple(range(0, end, end // count))
    tracemalloc.start()
    metadata = encode(0, end, holes)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert magic(metadata) == "p"
    assert peak < 2_000_000
    assert decode(0, metadata) == OffsetMap(end, holes)


def test_plain_bits_where_nothing_can_be_compressed() -> None:
    for length, expected in ((32_767, "l"), (32_768, "o")):  # Java: the same
        rng = random.Random(length)
        holes = tuple(hole for hole in range(length) if rng.random() < 0.5)
        metadata = encode(0, length - 1, holes)
        assert magic(metadata) == expected
        assert decode(0, metadata) == OffsetMap(length - 1, holes)


@pytest.mark.parametrize(
    ("base", "highest"), [(-1, 3), (1 << 63, 1 << 63), (0, (1 << 63) - 1), (5, -2)]
)
def test_offsets_that_kafka_does_not_have_are_refused(base: int, highest: int) -> None:
    with pytest.raises(WireError, match="cannot encode"):
        encode(base, highest, [])


@st.composite
def maps(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """Blocks of incompletes between gaps of all sizes, each as likely."""
    base = draw(st.integers(2, 50) | st.integers(2, 1 << 40))  # so that highest is not -1: EDGES
    position = base
    holes: list[int] = []
    blocks = draw(st.integers(0, 12) | st.integers(80, 300))
    gaps = st.integers(1, 12) | st.integers(1, 3_000) | st.sampled_from([32_767, 32_768, 10**7])
    scale = draw(gaps)
    for _ in range(blocks):
        count = draw(st.integers(1, 4))
        holes.extend(range(position, position + count))
        position += count + draw(st.integers(1, scale))
    return base, position - draw(st.integers(1, 2)), holes


@bounded
@given(maps())
def test_what_is_written_is_read(wanted: tuple[int, int, list[int]]) -> None:
    base, highest, holes = wanted
    expected = OffsetMap(max(highest, base - 1), tuple(hole for hole in holes if hole <= highest))
    assert decode(base, encode(base, highest, holes)) == expected
    assert decode(base, encode(base, highest, holes) + "\0") == expected


def test_no_map() -> None:
    assert decode(42, "") == decode(42, "\0") == OffsetMap(41, ())


def test_a_map_that_ends_behind_the_log_is_refused() -> None:
    metadata = encode(10, 20, [10])
    assert decode(10, metadata, log_end=21).highest_seen == 20
    with pytest.raises(WireError, match="ends at 20, the log before 20"):
        decode(10, metadata, log_end=20)
    nothing = encode(10, 9, [10])
    assert decode(10, nothing, log_end=3) == decode(10, "", log_end=3) == OffsetMap(9, ())
    assert decode(10, nothing, log_end=10) == decode(10, "", log_end=10) == OffsetMap(9, ())


@given(base=st.integers(0, 1000), holes=st.sets(st.integers(0, 3000)), length=st.integers(1, 3000))
def test_a_map_shows_its_end(base: int, holes: set[int], length: int) -> None:
    """What follows it in memory makes another map of it never, whatever it is."""
    incompletes = sorted(base + hole for hole in holes if hole < length)
    metadata = encode(base, base + length - 1, incompletes)
    expected = OffsetMap(base + length - 1, tuple(incompletes))
    for memory in ("", *BEHIND, metadata):
        assert decode(base, metadata + memory) == expected
    for end in range(0, len(metadata) - 1, 7):
        with contextlib.suppress(WireError):
            assert decode(base, metadata[:end]) == OffsetMap(base - 1)
