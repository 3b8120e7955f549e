"""The hand-written encoders against the generated code: the same meaning, field by field."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.strategies import INT64, bounded, markers, starts

from kafkamq.errors import WireError
from kafkamq.markers.wire import markers_pb2 as pb
from kafkamq.markers.wire.marker_writer import StartEncoder
from kafkamq.markers.wire.markers import decode_marker, encode_marker
from kafkamq.types import Headers, Marker, MarkerType, MessageBatch, MessageId


def by_the_shorter(batch: MessageBatch) -> pb.MessageBatch:
    """Runs, counted one by one, or the bitmap where it is not longer."""
    taken = [batch.bits >> number & 1 for number in range(batch.bits.bit_length())]
    runs = [0] if not taken[0] else []
    runs += [len(list(group)) for _, group in itertools.groupby(taken)]
    empty = pb.MessageBatch(
        partition=batch.partition,
        base_offset=batch.base_offset,
        topic_id=batch.topic_id,
        leader_epoch=batch.leader_epoch,
    )
    by_runs, by_bitmap = pb.MessageBatch(runs=runs), pb.MessageBatch()
    by_runs.MergeFrom(empty)
    by_bitmap.MergeFrom(empty)
    by_bitmap.bitmap = batch.bits.to_bytes((len(taken) + 7) // 8, "little")
    return by_runs if by_runs.ByteSize() < by_bitmap.ByteSize() else by_bitmap


def by_generated_code(marker: Marker) -> pb.Marker:
    message = pb.Marker(
        type=int(marker.type),  # type: ignore[arg-type]  # stubs know enum values only
        redeliver_after_ms=marker.redeliver_after_ms,
        key=marker.key,
        value=marker.value,
        null_value=marker.value is None,
        expires_at_ms=marker.expires_at_ms,
        consumer_id=marker.consumer_id,
        message_timestamp_ms=marker.message_timestamp_ms,
        by_reference=marker.by_reference,
        outcome=int(marker.outcome),  # type: ignore[arg-type]
        reason=marker.reason,
        max_deliveries=marker.max_deliveries,
        max_lease_ms=marker.max_lease_ms,
        carried_forward=marker.carried_forward,
        of_schedule=marker.of_schedule,
        engine_epoch=marker.engine_epoch,
        headers=[pb.Header(key=name, value=value) for name, value in marker.headers],
    )
    if marker.batches:
        message.version = 1
        message.batches.extend(by_the_shorter(batch) for batch in marker.batches)
    elif marker.type == pb.START:
        message.delivery_count = marker.delivery_count
    if marker.message_topic:
        message.version = 2
        message.message_topic = marker.message_topic
    if marker.message_id is not None:
        identity = marker.message_id
        message.message_id.SetInParent()
        message.message_id.partition = identity.partition
        message.message_id.offset = identity.offset
        message.message_id.topic_id = identity.topic_id
        message.message_id.leader_epoch = identity.leader_epoch
    return message


@bounded
@given(markers)
def test_hand_written_bytes_mean_what_generated_code_writes(marker: Marker) -> None:
    written = encode_marker(marker)
    expected = by_generated_code(marker)
    assert pb.Marker.FromString(written) == expected
    assert len(written) == expected.ByteSize()  # nothing twice, no default written


@bounded
@given(st.lists(starts, min_size=1, max_size=4))
def test_one_encoder_serves_many_messages(batch: list[Marker]) -> None:
    first = batch[0]
    encoder = StartEncoder(
        consumer_id=first.consumer_id,
        redeliver_after_ms=first.redeliver_after_ms,
        max_deliveries=first.max_deliveries,
        max_lease_ms=first.max_lease_ms,
    )
    for marker in batch:
        identity = marker.message_id
        assert identity is not None
        written = encoder.encode(
            identity,
            marker.key,
            marker.value,
            delivery_count=marker.delivery_count,
            headers=marker.headers,
            expires_at_ms=marker.expires_at_ms,
            message_timestamp_ms=marker.message_timestamp_ms,
        )
        expected = by_generated_code(marker)
        expected.consumer_id = first.consumer_id
        expected.redeliver_after_ms = first.redeliver_after_ms
        expected.max_deliveries = first.max_deliveries
        expected.max_lease_ms = first.max_lease_ms
        assert pb.Marker.FromString(written) == expected


@pytest.mark.parametrize(
    "headers",
    [
        (("a", b"12"),),
        (("b", b"12"),),
        (("b", b"123"),),
        (("b", b""),),
        (("b", None),),
        (("b", b"12"), ("b", b"12")),
        (),
    ],
)
def test_one_messages_headers_do_not_show_in_the_next(headers: Headers) -> None:
    encoder = StartEncoder(redeliver_after_ms=1)
    for each in (("b", b"12"),), headers, (("b", b"12"),):
        written = encoder.encode(MessageId(0, 1), b"q", b"payload", headers=each)
        assert decode_marker(written).headers == each


def test_a_payload_by_reference_is_not_written() -> None:
    encoder = StartEncoder(redeliver_after_ms=1)
    written = encoder.encode(MessageId(0, 1), b"q", b"payload", by_reference=True)
    assert pb.Marker.FromString(written).by_reference
    assert b"payload" not in written


def test_a_timestamp_that_kafka_does_not_know_is_left_out() -> None:
    encoder = StartEncoder(redeliver_after_ms=1)
    written = encoder.encode(MessageId(0, 1), b"q", b"", message_timestamp_ms=-1)
    assert pb.Marker.FromString(written).message_timestamp_ms == 0


@pytest.mark.parametrize("value", [0, 127, 128, 16383, 16384, 2**28 - 1, 2**28, 2**42, INT64])
def test_offsets_at_the_edges_of_varints(value: int) -> None:
    marker = Marker(MarkerType.END, MessageId(0, value))
    assert decode_marker(encode_marker(marker)) == marker


@pytest.mark.parametrize("value", [-1, -(2**63), INT64 + 1])
def test_numbers_that_the_wire_does_not_have(value: int) -> None:
    with pytest.raises(WireError):
        encode_marker(Marker(MarkerType.END, MessageId(0, value)))
    with pytest.raises(WireError):
        encode_marker(Marker(MarkerType.TICK, engine_epoch=value))
    start = Marker(MarkerType.START, MessageId(0, 1), 1, expires_at_ms=value)
    with pytest.raises(WireError):
        encode_marker(start)
