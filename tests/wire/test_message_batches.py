"""Batches of messages in a marker: bits in memory, the shorter of two forms on the wire (R27)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.wire.strategies import batch_lists, batch_markers, bounded, varint

from kafkamq.errors import WireError
from kafkamq.markers.rules.batching import MAX_BATCHES, MAX_NAMED
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.markers.wire import markers_pb2 as pb
from kafkamq.markers.wire.marker_writer import MAX_BATCH_BYTES
from kafkamq.markers.wire.markers import decode_marker, decode_slim, encode_marker
from kafkamq.types import Marker, MarkerType, MessageBatch, MessageId, expand

TOPIC_ID = bytes(range(16))


def batch(base_offset: int, bits: int, partition: int = 0) -> MessageBatch:
    return MessageBatch(partition, b"", 0, base_offset, bits)


def end(*batches: MessageBatch) -> Marker:
    return Marker(MarkerType.END, batches=batches)


def written(*batches: pb.MessageBatch) -> bytes:
    return pb.Marker(version=1, type=pb.END, batches=batches).SerializeToString()


def test_golden_start() -> None:
    data = bytes.fromhex(
        "08 01"  # version 1
        "82 02 21 08 03 10 ac 02"  # a batch of 33 bytes: partition 3, from 300 on
        "1a 04 e8 07 01 02"  # 1000 taken, 1 not, 2 taken
        "82 01 10 000102030405060708090a0b0c0d0e0f 88 01 05"
        "20 90 4e"  # redeliver after 10,000 ms
        "2a 01 71"  # queue q
        "a8 01 01"  # by reference
        "9a 01 01 77"  # consumer w
        "d0 01 05 d8 01 e0 d4 03"  # 5 deliveries, 60 s at most
    )
    marker = Marker(
        MarkerType.START,
        None,
        10_000,
        b"q",
        consumer_id="w",
        by_reference=True,
        max_deliveries=5,
        max_lease_ms=60_000,
        batches=(MessageBatch(3, TOPIC_ID, 5, 300, (1 << 1000) - 1 | 3 << 1001),),
    )
    assert decode_marker(data) == marker
    assert pb.Marker.FromString(encode_marker(marker)) == pb.Marker.FromString(data)


def test_golden_bitmap() -> None:
    data = bytes.fromhex("08 01 10 01 82 02 06 10 80 20 22 01 55")
    assert decode_marker(data) == end(batch(4096, 0b1010101))
    assert pb.Marker.FromString(encode_marker(end(batch(4096, 0b1010101)))) == pb.Marker.FromString(
        data
    )


def test_a_thousand_messages_take_a_few_bytes() -> None:
    assert len(encode_marker(end(batch(1_000_000, (1 << 1000) - 1)))) <= 20


def test_what_is_named_twice_is_meant_once() -> None:
    parts = (
        pb.MessageBatch(base_offset=4100, runs=[3]),  # 4100 to 4102
        pb.MessageBatch(base_offset=4098, runs=[0, 1, 2], bitmap=b"\x81"),  # 4098 to 4100, 4105
        pb.MessageBatch(base_offset=5, runs=[1]),
        pb.MessageBatch(base_offset=4200, runs=[1], partition=1),
    )
    assert decode_marker(written(*parts)).batches == (
        batch(4098, 0b10011111),
        batch(5, 1),
        batch(4200, 1, partition=1),
    )


HOSTILE = {
    "nobody": written(pb.MessageBatch(base_offset=1)),
    "runs of nobody": written(pb.MessageBatch(base_offset=1, runs=[0, 5, 0])),
    "bits of nobody": written(pb.MessageBatch(base_offset=1, bitmap=bytes(9))),
    "runs leave the chunk": written(pb.MessageBatch(base_offset=4095, runs=[2])),
    "skipped beyond the chunk": written(pb.MessageBatch(runs=[1, 4096])),
    "bits leave the chunk": written(pb.MessageBatch(base_offset=4095, bitmap=b"\x03")),
    "runs of a gigabyte": written(pb.MessageBatch(runs=[2**32 - 1])),
    "bitmap longer than a chunk": written(pb.MessageBatch(bitmap=b"\x01" + bytes(512))),
    "negative offset": written(pb.MessageBatch(base_offset=-1, runs=[1])),
    "negative partition": written(pb.MessageBatch(partition=-1, runs=[1])),
    "negative epoch": written(pb.MessageBatch(leader_epoch=-1, runs=[1])),
    "short topic id": written(pb.MessageBatch(topic_id=b"x", runs=[1])),
    "too many": written(
        *(pb.MessageBatch(base_offset=each * 4096, runs=[1]) for each in range(MAX_BATCHES + 1))
    ),
    "too many messages": written(
        *(pb.MessageBatch(base_offset=each * 4096, runs=[4096]) for each in range(4)),
        pb.MessageBatch(base_offset=5 * 4096, runs=[1]),
    ),
    "too large": written(pb.MessageBatch(runs=[0, 0] * MAX_BATCH_BYTES + [1])),
    "one is malformed": written(pb.MessageBatch(runs=[1]), pb.MessageBatch(runs=[5000])),
    "beside a message": pb.Marker(
        version=1, type=pb.END, message_id=pb.MessageId(), batches=[pb.MessageBatch(runs=[1])]
    ).SerializeToString(),
    "TICK": pb.Marker(
        version=1, type=pb.TICK, batches=[pb.MessageBatch(runs=[1])]
    ).SerializeToString(),
    "without batches": written(),
    "in version 0": pb.Marker(type=pb.END, batches=[pb.MessageBatch(runs=[1])]).SerializeToString(),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_writer_writes_is_refused(name: str) -> None:
    with pytest.raises(WireError, match=r"batch|message|topic_id"):
        decode_marker(HOSTILE[name])


@bounded
@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 100), st.integers(1, 3996)), max_size=70)
)
def test_no_record_means_more_than_a_reader_takes(runs: list[tuple[int, int, int]]) -> None:
    """Overlaps count once; what is too much is refused as a whole."""
    hostile = [
        pb.MessageBatch(base_offset=4096 * chunk + first, runs=[run]) for chunk, first, run in runs
    ]
    named = {4096 * chunk + first + each for chunk, first, run in runs for each in range(run)}
    if 0 < len(named) <= MAX_NAMED and len(runs) <= MAX_BATCHES:
        batches = decode_marker(written(*hostile)).batches
        assert {each.offset for batch in batches for each in batch.message_ids()} == named
    else:
        with pytest.raises(WireError):
            decode_marker(written(*hostile))


@bounded
@given(
    st.builds(
        pb.MessageBatch,
        base_offset=st.integers(-5, 9000),
        runs=st.lists(st.integers(0, 5) | st.integers(0, 5000) | st.integers(0, 2**32 - 1)),
        bitmap=st.binary(max_size=20) | st.binary(min_size=500, max_size=520),
    )
)
def test_any_batch_decodes_as_counted_one_by_one_or_is_refused(hostile: pb.MessageBatch) -> None:
    named = {i for i in range(len(hostile.bitmap) * 8) if hostile.bitmap[i // 8] >> i % 8 & 1}
    at = 0
    for number, length in enumerate(hostile.runs):
        if at < 4096 and not number % 2:
            named |= set(range(at, at + min(length, 4096)))
        at += length
    room = 4096 - hostile.base_offset % 4096
    fits = at <= room and len(hostile.bitmap) <= 512 and bool(named) and max(named) < room
    if fits and hostile.base_offset >= 0:
        (decoded,) = decode_marker(written(hostile)).batches
        offsets = [each.offset for each in decoded.message_ids()]
        assert offsets == [hostile.base_offset + each for each in sorted(named)]
    else:
        with pytest.raises(WireError):
            decode_marker(written(hostile))


FIELDS_OF_A_BATCH = """
    0803 08ff10 1000 10ff1f 108020 108000 10ffffffffffffffffff01 1a0105 1a028808 1a0101 1a00
    1a020501 1a028000 1a028040 1805 220101 22020180 2200 82011000112233445566778899aabbccddeeff
    82010178 880105 5001
"""
FIELDS_OF_A_MARKER = """
    0801 0802 1001 1002 1011 1a00 2005 2a0171 9a010177 b00101 8202061080201a0101 820200
    e001ffffffffffffffffff01 d00105 50 ff
"""


@settings(bounded, max_examples=examples(1000))
@given(
    st.sampled_from([b"", b"\x10\x01", b"\x10\x02", b"\x10\x81\x00"]),
    st.sampled_from([b"", b"\x08\x03", b"\x08\xff\x10"]),
    st.integers(0, 2**14) | st.integers(0, 2**63 - 1),
    st.integers(0, 9) | st.integers(0, 4097),
    st.just(b"") | st.sampled_from(FIELDS_OF_A_BATCH.split()).map(bytes.fromhex),
    st.sampled_from([0] * 9 + [-1, 1, 2]),
    st.just(b"") | st.sampled_from(FIELDS_OF_A_MARKER.split()).map(bytes.fromhex),
)
def test_a_batch_of_one_run_decodes_as_in_a_record_of_any_form(
    kind: bytes, partition: bytes, base: int, run: int, more: bytes, wrong: int, rest: bytes
) -> None:
    runs = varint(run)
    body = partition + b"\x10" + varint(base) + b"\x1a" + varint(len(runs)) + runs + more
    data = kind + b"\x08\x01\x82\x02" + varint(len(body) + wrong) + body + rest
    for decode in (decode_marker, decode_slim):
        # A version that a later one overrides: as no worker writes it, the whole is parsed.
        assert decoded(decode, data) == decoded(decode, b"\x08\x00" + data)


def decoded(decode: Callable[[bytes], Marker], data: bytes) -> Marker | str:
    try:
        return decode(data)
    except WireError as error:
        return str(error)


REFUSED = {
    "empty": (batch(1, 0),),
    "leaves its chunk": (batch(4095, 3),),
    "negative bits": (batch(0, -1),),
    "negative offset": (batch(-4096, 1),),
    "offset over int64": (batch(2**63, 1),),
    "one chunk twice": (batch(0, 1), batch(1, 1)),
    "too many": tuple(batch(each * 4096, 1) for each in range(MAX_BATCHES + 1)),
    "too many messages": tuple(batch(each * 4096, (1 << 3500) - 1) for each in range(5)),
    "partition over int32": (batch(0, 1, partition=2**31),),
    "topic id of a byte": (MessageBatch(0, b"x", 0, 0, 1),),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_encoder_is_strict(name: str) -> None:
    with pytest.raises(WireError, match=r"cannot encode|too many"):
        encode_marker(end(*REFUSED[name]))


def test_a_marker_names_one_message_or_batches() -> None:
    for wrong in (
        replace(end(batch(0, 1)), message_id=MessageId(0, 0)),
        Marker(MarkerType.TICK, batches=(batch(0, 1),)),
        Marker(MarkerType.START, None, 1, b"q" * MAX_BATCH_BYTES, batches=(batch(0, 1),)),
    ):
        with pytest.raises(WireError):
            encode_marker(wrong)


@settings(bounded, max_examples=examples(20))
@given(batch_lists())
def test_expanding_names_each_message_once(batches: tuple[MessageBatch, ...]) -> None:
    singles = list(expand(Marker(MarkerType.KEEPALIVE, None, 7, consumer_id="w", batches=batches)))
    assert len(singles) == sum(each.bits.bit_count() for each in batches)
    named = {each.message_id for each in singles}
    assert len(named) == len(singles)
    for single in singles:
        assert single == Marker(MarkerType.KEEPALIVE, single.message_id, 7, consumer_id="w")
        identity = single.message_id
        assert identity is not None
        (home,) = (
            each
            for each in batches
            if (each.partition, each.topic_id, each.leader_epoch)
            == (identity.partition, identity.topic_id, identity.leader_epoch)
            and each.base_offset // 4096 == identity.offset // 4096
        )
        assert home.bits >> identity.offset - home.base_offset & 1


def test_a_single_marker_expands_to_itself() -> None:
    marker = Marker(MarkerType.TICK)
    assert list(expand(marker)) == [marker]


@settings(bounded, max_examples=examples(50))
@given(st.lists(batch_markers, min_size=1, max_size=4))
def test_a_tracker_folds_a_batch_as_its_single_markers(markers: list[Marker]) -> None:  # R27
    whole, singly = RedeliveryTracker(), RedeliveryTracker()
    for number, marker in enumerate(markers):
        small = [
            replace(each, bits=each.bits & 0xFFFF | 1 << each.bits.bit_length() - 1)
            for each in marker.batches
        ]
        marker = replace(marker, batches=tuple(small))
        whole.apply(number, 1000 * number, marker)
        for place, each in enumerate(expand(marker)):
            singly.apply(number * 100 + place, 1000 * number, each)
    assert whole.in_progress() == singly.in_progress()
    assert whole.due_count() == singly.due_count()
    whole.check()
