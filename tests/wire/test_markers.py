"""Markers: what is written is what is read, and what is hostile is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.wire.strategies import bounded, damaged, markers

from kafkamq.errors import UnsupportedVersionError, WireError
from kafkamq.markers.wire import markers_pb2 as pb
from kafkamq.markers.wire.marker_writer import (
    MAX_DURATION_MS,
    MAX_MARKER_BYTES,
    StartEncoder,
    encode_identity,
    encode_reference,
)
from kafkamq.markers.wire.markers import decode_marker, decode_slim, encode_marker
from kafkamq.types import Marker, MarkerType, MessageId, Outcome

TOPIC_ID = bytes(range(16))


def slimmed(marker: Marker) -> Marker:
    return replace(marker, key=b"", value=b"", headers=(), reason="")


@bounded
@given(markers)
def test_what_is_encoded_is_decoded(marker: Marker) -> None:
    assert decode_marker(encode_marker(marker)) == marker


@bounded
@given(markers)
def test_slim_leaves_out_payloads_and_nothing_else(marker: Marker) -> None:
    assert decode_slim(encode_marker(marker)) == slimmed(marker)


def outcome_of(decode: object, data: bytes) -> object:
    try:
        return decode(data)  # type: ignore[operator]  # both decoders, told apart by the caller
    except WireError as error:
        return type(error), str(error)


@bounded
@given(st.binary(max_size=120) | damaged(markers.map(encode_marker)))
@example(b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
def test_bytes_decode_or_raise_wire_error_both_ways_alike(data: bytes) -> None:
    full, slim = outcome_of(decode_marker, data), outcome_of(decode_slim, data)
    if isinstance(full, Marker):
        assert slim == slimmed(full)
        if full.redeliver_after_ms <= MAX_DURATION_MS:
            assert decode_marker(encode_marker(full)) == replace(
                full, reason=decode_marker(encode_marker(full)).reason
            )
    else:
        assert slim == full


def test_golden_start() -> None:
    data = bytes.fromhex(
        "1a 1b 08 03 10 ac 02 82 01 10 000102030405060708090a0b0c0d0e0f 88 01 05"
        "20 90 4e"  # redeliver after 10,000 ms
        "2a 08 6f 72 64 65 72 73 00 6b"  # key: orders NUL k
        "32 02 68 69"
        "80 01 02"  # delivery 2
        "8a 01 06 0a 01 61 12 01 62"  # header a: b
        "8a 01 03 0a 01 6e"  # header n: null
        "8a 01 05 0a 01 65 12 00"  # header e: empty
        "90 01 e8 07"  # expires at 1000
        "9a 01 01 77"  # consumer w
        "a0 01 64"  # the message's timestamp: 100
        "d0 01 05 d8 01 e0 d4 03"  # 5 deliveries, 60 s at most
    )
    marker = Marker(
        MarkerType.START,
        MessageId(3, 300, TOPIC_ID, 5),
        10_000,
        b"orders\0k",
        b"hi",
        delivery_count=2,
        headers=(("a", b"b"), ("n", None), ("e", b"")),
        expires_at_ms=1000,
        consumer_id="w",
        message_timestamp_ms=100,
        max_deliveries=5,
        max_lease_ms=60_000,
    )
    assert decode_marker(data) == marker
    assert pb.Marker.FromString(encode_marker(marker)) == pb.Marker.FromString(data)


@pytest.mark.parametrize(
    ("text", "marker"),
    [
        (
            "10 01 1a 02 10 07 b0 01 01 20 64 c2 01 02 6e 6f",
            Marker(
                MarkerType.END,
                MessageId(0, 7),
                100,
                outcome=Outcome.NACK,
                reason="no",
            ),
        ),
        (
            "10 01 1a 00 b0 01 03 e8 01 01",
            Marker(MarkerType.END, MessageId(0, 0), outcome=Outcome.REDELIVERED, of_schedule=True),
        ),
        (
            "10 02 20 64 9a 01 01 77",
            Marker(MarkerType.KEEPALIVE, None, 100, consumer_id="w"),
        ),
        (
            "10 10 20 64 2a 01 71 c8 01 01",
            Marker(MarkerType.SCHEDULE, None, 100, b"q", None),
        ),
        (
            "10 10 1a 02 08 01 20 64 2a 01 71 e0 01 01",
            Marker(MarkerType.SCHEDULE, MessageId(1, 0), 100, b"q", carried_forward=True),
        ),
        (
            "10 11 9a 01 01 65 f8 01 09",
            Marker(MarkerType.TICK, consumer_id="e", engine_epoch=9),
        ),
    ],
)
def test_golden_bytes(text: str, marker: Marker) -> None:
    assert decode_marker(bytes.fromhex(text)) == marker
    assert decode_marker(encode_marker(marker)) == marker


@pytest.mark.parametrize("outcome", Outcome)
def test_only_a_nack_has_a_delay(outcome: Outcome) -> None:  # R8
    delay_ms = 9 if outcome is Outcome.NACK else 0
    message = pb.Marker(type=pb.END, message_id=pb.MessageId(offset=1), redeliver_after_ms=9)
    message.outcome = int(outcome)  # type: ignore[assignment]  # stubs know enum values only
    assert decode_marker(message.SerializeToString()).redeliver_after_ms == delay_ms
    marker = Marker(MarkerType.END, MessageId(0, 1), 9, outcome=outcome)
    assert pb.Marker.FromString(encode_marker(marker)).redeliver_after_ms == delay_ms


def test_null_empty_and_referenced_payloads_differ() -> None:
    def payload(**fields: object) -> tuple[bytes | None, bool]:
        message = pb.Marker(message_id=pb.MessageId(offset=1), **fields)  # type: ignore[arg-type]
        marker = decode_marker(message.SerializeToString())
        return marker.value, marker.by_reference

    assert payload() == (b"", False)
    assert payload(null_value=True) == (None, False)
    assert payload(by_reference=True, value=b"ignored", null_value=True) == (b"", True)


def test_a_start_by_reference_leaves_out_what_does_not_fit() -> None:  # R11
    encoder = StartEncoder(consumer_id="w", redeliver_after_ms=1000)
    identity = encode_identity(3, 7, b"", 0)
    known = b"q\0" + b"k" * 500, 2, (("name", b"h" * 500),), 90, 80
    whole = decode_marker(encode_reference(encoder, identity, *known, 2000))
    small = decode_marker(encode_reference(encoder, identity, *known, 1000))
    assert (whole.key, whole.headers) == (known[0], known[2])
    assert (small.key, small.headers) == (b"q", ())
    for each in (whole, small):
        assert each.by_reference
        assert (each.message_id, each.delivery_count) == (MessageId(3, 7), 2)
        assert (each.expires_at_ms, each.message_timestamp_ms) == (90, 80)


def start(**fields: object) -> bytes:
    message = pb.Marker(message_id=pb.MessageId(partition=1, offset=2))
    for name, value in fields.items():
        setattr(message, name, value)
    return message.SerializeToString()


def identified(**fields: object) -> bytes:
    identity = pb.MessageId(partition=1, offset=2)
    for name, value in fields.items():
        setattr(identity, name, value)
    return pb.Marker(message_id=identity).SerializeToString()


HOSTILE: dict[str, bytes | None] = {
    "null": None,
    "empty": b"",
    "not protobuf": b"\xff\xff\xff",
    "truncated": start(value=b"x" * 50)[:-1],
    "too large": start(value=b"x" * MAX_MARKER_BYTES),
    "negative version": pb.Marker(version=-1).SerializeToString(),
    "START without message": pb.Marker(key=b"q", redeliver_after_ms=1).SerializeToString(),
    "END without message": pb.Marker(type=pb.END).SerializeToString(),
    "KEEPALIVE of nobody": pb.Marker(type=pb.KEEPALIVE, redeliver_after_ms=1).SerializeToString(),
    "carried SCHEDULE without first one": b"\x10\x10\xe0\x01\x01",
    "SCHEDULE with first one, not carried": b"\x10\x10\x1a\x02\x10\x07",
    "unknown type": b"\x10\x03\x1a\x02\x10\x07",
    "negative type": b"\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x1a\x02\x10\x07",
    "unknown outcome": b"\x10\x01\x1a\x02\x10\x07\xb0\x01\x07",
    "negative outcome": b"\x10\x01\x1a\x02\x10\x07\xb0\x01" + b"\xff" * 9 + b"\x01",
    "negative partition": identified(partition=-1),
    "negative offset": identified(offset=-1),
    "negative leader epoch": identified(leader_epoch=-1),
    "short topic id": identified(topic_id=b"x" * 15),
    "long topic id": identified(topic_id=b"x" * 17),
    "timeout of centuries": start(redeliver_after_ms=MAX_DURATION_MS + 1),
    "lease of centuries": start(max_lease_ms=2**64 - 1),
    "delay of centuries": b"\x10\x01\x1a\x02\x10\x07\xb0\x01\x01\x20" + b"\xff" * 9 + b"\x01",
    "delivery count over int32": start(delivery_count=2**31),
    "max_deliveries over int32": start(max_deliveries=2**32 - 1),
    "expiry over int64": start(expires_at_ms=2**63),
    "timestamp over int64": start(message_timestamp_ms=2**64 - 1),
    "epoch over int64": pb.Marker(type=pb.TICK, engine_epoch=2**63).SerializeToString(),
    "consumer id of a megabyte": start(consumer_id="x" * 1_000_000),
    "consumer id not UTF-8": start() + b"\x9a\x01\x01\xff",
    "header name not UTF-8": start() + b"\x8a\x01\x03\x0a\x01\xff",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_records_are_refused_by_both_decoders(name: str) -> None:
    with pytest.raises(WireError) as caught:
        decode_marker(HOSTILE[name], topic="t.markers", partition=3, offset=14)
    error = caught.value
    assert (error.topic, error.partition, error.offset) == ("t.markers", 3, 14)
    assert str(error).startswith("t.markers[3]@14: ")
    with pytest.raises(WireError) as slim:
        decode_slim(HOSTILE[name])
    for each in (error, slim.value):
        assert not isinstance(each, UnsupportedVersionError)
        assert "xxx" not in str(each)  # never the payload


@pytest.mark.parametrize(
    "data",
    [
        pb.Marker(version=3).SerializeToString(),
        pb.Marker(version=3, type=pb.TICK, engine_epoch=2**64 - 1).SerializeToString(),
        b"\x08\x03\x10\x63",  # and a type that nobody knows
        identified(partition=-1, topic_id=b"x") + b"\x08\x07",
    ],
)
def test_a_newer_version_is_told_apart_whatever_else_is_in_it(data: bytes) -> None:  # R21
    with pytest.raises(UnsupportedVersionError, match="upgrade") as caught:
        decode_marker(data, topic="t", partition=0, offset=5)
    assert caught.value.offset == 5
    with pytest.raises(UnsupportedVersionError, match="upgrade"):
        decode_slim(data)


def test_fields_of_tomorrow_are_ignored() -> None:
    assert decode_marker(start() + b"\xf8\x07\x01").message_id == MessageId(1, 2)


def test_an_identity_at_the_very_beginning_is_an_identity() -> None:
    marker = Marker(MarkerType.START, MessageId(0, 0), 1)
    assert decode_marker(encode_marker(marker)) == marker


@pytest.mark.parametrize(
    "marker",
    [
        Marker(MarkerType.START),
        Marker(MarkerType.END),
        Marker(MarkerType.KEEPALIVE),
        Marker(MarkerType.SCHEDULE, carried_forward=True),
        Marker(MarkerType.START, MessageId(-1, 0)),
        Marker(MarkerType.START, MessageId(2**31, 0)),
        Marker(MarkerType.START, MessageId(0, -1)),
        Marker(MarkerType.START, MessageId(0, 2**63)),
        Marker(MarkerType.START, MessageId(0, 0, b"short")),
        Marker(MarkerType.START, MessageId(0, 0, b"", -1)),
        Marker(MarkerType.START, MessageId(0, 0), MAX_DURATION_MS + 1),
        Marker(MarkerType.START, MessageId(0, 0), -1),
        Marker(MarkerType.START, MessageId(0, 0), delivery_count=2**31),
        Marker(MarkerType.START, MessageId(0, 0), delivery_count=-1),
        Marker(MarkerType.START, MessageId(0, 0), max_deliveries=2**31),
        Marker(MarkerType.START, MessageId(0, 0), max_lease_ms=MAX_DURATION_MS + 1),
        Marker(MarkerType.START, MessageId(0, 0), expires_at_ms=2**63),
        Marker(MarkerType.START, MessageId(0, 0), message_timestamp_ms=2**63),
        Marker(MarkerType.START, MessageId(0, 0), consumer_id="x" * 1025),
        Marker(MarkerType.START, MessageId(0, 0), value=bytes(MAX_MARKER_BYTES)),
        Marker(MarkerType.START, MessageId(0, 0), headers=(("\udcff", b""),)),
        Marker(MarkerType.END, MessageId(0, 0), -1, outcome=Outcome.NACK),
        Marker(MarkerType.SCHEDULE, redeliver_after_ms=MAX_DURATION_MS + 1),
        Marker(MarkerType.SCHEDULE, value=bytes(MAX_MARKER_BYTES)),
        Marker(MarkerType.TICK, engine_epoch=2**63),
    ],
)
def test_what_readers_would_refuse_is_not_written(marker: Marker) -> None:
    with pytest.raises(WireError):
        encode_marker(marker)


def test_reasons_are_cut_at_4_kib_and_never_stop_a_verdict() -> None:  # R11
    end = Marker(MarkerType.END, MessageId(0, 1), outcome=Outcome.REJECT)
    cut = decode_marker(encode_marker(replace(end, reason="ä" * 4096))).reason
    assert cut == "ä" * 2048
    odd = decode_marker(encode_marker(replace(end, reason="file \udcff.txt"))).reason
    assert odd == "file ?.txt"


def test_one_encoder_of_many_starts_forgets_what_has_changed() -> None:
    encoder = StartEncoder(consumer_id="worker", redeliver_after_ms=10_000)
    for key in (b"work", b"work\0a"):
        for value in (b"", b"x", b"xy", b"yx", None, b"x" * 20_000, b"x"):
            for time_ms in (0, 5, 6):
                again = StartEncoder(consumer_id="worker", redeliver_after_ms=10_000)
                start = [
                    each.encode(MessageId(1, 2), key, value, message_timestamp_ms=time_ms)
                    for each in (encoder, again)
                ]
                assert start[0] == start[1]
