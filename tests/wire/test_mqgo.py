"""kafka-mq-go's records: bytes by hand, and against its own, smaller, protobuf."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.strategies import INT32, INT64, bounded, durations, ends, starts

from kafkamq.errors import ConfigError, WireError
from kafkamq.markers.wire.interop import (
    CONSUMER_GROUP_PREFIX,
    GoRecord,
    decode_go_marker,
    encode_go_marker,
    encode_go_message,
)
from kafkamq.markers.wire.markers import decode_marker, encode_marker
from kafkamq.queue.topics import FOREIGN_TRACKER_GROUP
from kafkamq.types import Marker, MarkerType, MessageId, Outcome

START = bytes.fromhex("1a 05 08 01 10 ac 02 20 e0 d4 03 2a 06 6f7264657273 32 02 6869")
KEEPALIVE = bytes.fromhex("10 02 1a 05 08 01 10 ac 02 20 e0 d4 03")
END = bytes.fromhex("10 01 1a 05 08 01 10 ac 02")

GOLDEN = [
    (START, Marker(MarkerType.START, MessageId(1, 300), 60_000, b"orders", b"hi")),
    (KEEPALIVE, Marker(MarkerType.KEEPALIVE, MessageId(1, 300), 60_000)),
    (END, Marker(MarkerType.END, MessageId(1, 300))),
]


@pytest.mark.parametrize(("data", "marker"), GOLDEN)
def test_golden_markers_both_ways(data: bytes, marker: Marker) -> None:
    assert decode_go_marker(b"orders", data) == (b"orders", marker)
    assert encode_go_marker("orders", marker) == GoRecord(b"orders", data)


def test_what_its_clients_do_not_say_reads_as_the_default() -> None:
    marker = decode_marker(START)
    assert (marker.delivery_count, marker.consumer_id, marker.headers) == (1, "", ())
    assert decode_marker(END).outcome is Outcome.ACK


def test_its_message_has_the_queue_id_as_key() -> None:
    assert encode_go_message("orders", b"hi") == GoRecord(b"orders", b"hi")
    with pytest.raises(ConfigError):
        encode_go_message("a\0b", b"hi")
    assert CONSUMER_GROUP_PREFIX + "orders" == "kafka-mq-orders"
    assert FOREIGN_TRACKER_GROUP == "kafka-mq-redelivery"


@pytest.mark.parametrize(
    "marker",
    [
        Marker(MarkerType.TICK, MessageId(0, 0)),
        Marker(MarkerType.SCHEDULE, MessageId(0, 0)),
        Marker(MarkerType.KEEPALIVE, consumer_id="w"),
        Marker(MarkerType.START, MessageId(0, 0), value=None),
        *[Marker(MarkerType.END, MessageId(0, 0), outcome=o) for o in Outcome if o],
    ],
)
def test_what_it_does_not_know_is_not_written(marker: Marker) -> None:
    with pytest.raises(WireError):
        encode_go_marker("orders", marker)


def test_a_marker_of_its_has_a_key() -> None:
    for key in (None, b""):
        with pytest.raises(WireError, match="key"):
            decode_go_marker(key, END)
    with pytest.raises(WireError):
        decode_go_marker(b"orders", b"")


def foreign_class() -> Any:
    """Its protobuf, from the documented fields: none of our own."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="foreign.proto", syntax="proto3")
    identity = file.message_type.add(name="MessageID")
    identity.field.add(name="partition", number=1, type=field.TYPE_INT32)
    identity.field.add(name="offset", number=2, type=field.TYPE_INT64)
    marker = file.message_type.add(name="Marker")
    for number, (name, kind) in enumerate(
        [
            ("version", field.TYPE_INT32),
            ("type", field.TYPE_INT32),
            ("message_id", field.TYPE_MESSAGE),
            ("redeliver_after_ms", field.TYPE_UINT64),
            ("key", field.TYPE_BYTES),
            ("value", field.TYPE_BYTES),
        ],
        start=1,
    ):
        added = marker.field.add(name=name, number=number, type=kind)
        if kind == field.TYPE_MESSAGE:
            added.type_name = ".MessageID"
    for message in file.message_type:
        for each in message.field:
            each.label = field.LABEL_OPTIONAL
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Marker"))


Foreign = foreign_class()


@bounded
@given(st.integers(0, INT32), st.integers(0, INT64), durations, st.binary(min_size=1), st.binary())
def test_what_its_clients_write_is_read(
    partition: int, offset: int, timeout_ms: int, key: bytes, value: bytes
) -> None:
    written = Foreign(redeliver_after_ms=timeout_ms, key=key, value=value)
    written.message_id.SetInParent()
    written.message_id.partition = partition
    written.message_id.offset = offset
    marker = Marker(MarkerType.START, MessageId(partition, offset), timeout_ms, key, value)
    data = written.SerializeToString()
    assert decode_marker(data) == marker
    assert encode_go_marker("q", marker).value == data  # byte for byte


@bounded
@given(starts | ends)
def test_ours_read_there_as_the_same_message(marker: Marker) -> None:
    read = Foreign.FromString(encode_marker(marker))
    identity = marker.message_id
    assert identity is not None
    assert (read.message_id.partition, read.message_id.offset) == (
        identity.partition,
        identity.offset,
    )
    assert (read.version, read.type, read.key) == (0, int(marker.type), marker.key)
    assert read.redeliver_after_ms == marker.redeliver_after_ms
