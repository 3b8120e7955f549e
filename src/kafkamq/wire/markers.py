"""Markers as records: strict towards hostile bytes, tolerant towards kafka-mq-go's markers.

Fields 1-6 of ``markers.proto`` are kafka-mq-go's, so its markers decode as they are: no delivery
count reads as 1, no consumer id as empty, every END as ACK. Whatever else is wrong raises
``WireError`` and nothing but that; a newer version raises ``UnsupportedVersionError`` (R21).

Reading a field costs, so each type reads only the fields that it has; what a marker carries beyond
them is ignored. The encoders are in ``marker_writer`` and offered here as well.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from kafkamq.errors import UnsupportedVersionError, WireError
from kafkamq.types import Headers, Marker, MarkerType, MessageId, Outcome
from kafkamq.wire import markers_pb2 as pb
from kafkamq.wire.marker_writer import (
    MAX_COUNT,
    MAX_DURATION_MS,
    MAX_ID_CHARACTERS,
    MAX_INT64,
    MAX_MARKER_BYTES,
    StartEncoder,
    encode_end,
    encode_keepalive,
    encode_schedule,
    encode_start,
    encode_tick,
)

__all__ = [
    "MAX_DURATION_MS",
    "MAX_MARKER_BYTES",
    "StartEncoder",
    "decode_marker",
    "decode_slim",
    "encode_end",
    "encode_keepalive",
    "encode_marker",
    "encode_schedule",
    "encode_start",
    "encode_tick",
]

_OUTCOMES = tuple(Outcome)  # dense from 0
_START = MarkerType.START
_END = MarkerType.END
_KEEPALIVE = MarkerType.KEEPALIVE
_SCHEDULE = MarkerType.SCHEDULE
_TICK = MarkerType.TICK
_parse = pb.Marker.FromString


def decode_marker(
    data: bytes | None, *, topic: str = "", partition: int = -1, offset: int = -1
) -> Marker:
    """The marker in a record's value; where the record stands only serves the error text.

    Raises:
        WireError: the bytes are no marker; ``UnsupportedVersionError`` for a newer version's.
    """
    try:
        return _decode(data, slim=False)
    except WireError as error:
        raise _placed(error, topic, partition, offset) from None


def decode_slim(
    data: bytes | None, *, topic: str = "", partition: int = -1, offset: int = -1
) -> Marker:
    """Like ``decode_marker``, but key, value, headers and reason are left empty (R18).

    For trackers, which fold a marker and read the START again when it is due.
    """
    try:
        return _decode(data, slim=True)
    except WireError as error:
        raise _placed(error, topic, partition, offset) from None


def _placed(error: WireError, topic: str, partition: int, offset: int) -> WireError:
    return type(error)(error.reason, topic=topic, partition=partition, offset=offset)


def _decode(data: bytes | None, *, slim: bool) -> Marker:
    if not data:
        raise WireError("the record is empty")
    if len(data) > MAX_MARKER_BYTES:
        raise WireError(f"{len(data)} bytes are too many for a marker ({MAX_MARKER_BYTES} at most)")
    try:
        message = _parse(data)
    except (DecodeError, ValueError):  # ValueError: text that is not UTF-8, in pure Python
        raise WireError("the record is not a marker") from None
    version = message.version
    if version:
        if version > 0:
            raise UnsupportedVersionError(
                f"the marker has version {version}, this release reads version 0: upgrade kafkamq"
            )
        raise WireError(f"the marker has version {version}")
    kind: int = message.type
    if kind == 1:
        return _decode_end(message, slim)
    if kind == 0:
        return _decode_start(message, slim)
    if kind == 2:
        return _decode_keepalive(message)
    if kind == 16:
        return _decode_schedule(message, slim)
    if kind == 17:
        return Marker(
            _TICK, consumer_id=_consumer_id(message), engine_epoch=_time(message.engine_epoch)
        )
    raise WireError(f"unknown marker type {kind}")


def _decode_start(message: pb.Marker, slim: bool) -> Marker:
    if not message.HasField("message_id"):
        raise WireError("a START without message_id")
    delivery_count = message.delivery_count
    if delivery_count > MAX_COUNT or message.max_deliveries > MAX_COUNT:
        raise WireError("a count of deliveries is over 2^31 - 1")
    null = message.null_value
    return Marker(
        _START,
        _message_id(message.message_id),
        _duration(message.redeliver_after_ms),
        b"" if slim else message.key,
        None if null else b"" if slim else message.value,
        delivery_count or 1,
        () if slim else _headers(message),
        _time(message.expires_at_ms),
        _consumer_id(message),
        _time(message.message_timestamp_ms),
        message.by_reference,
        Outcome.ACK,
        "",
        message.max_deliveries,
        _duration(message.max_lease_ms),
    )


def _decode_end(message: pb.Marker, slim: bool) -> Marker:
    if not message.HasField("message_id"):
        raise WireError("an END without message_id")
    number: int = message.outcome
    if not 0 <= number < len(_OUTCOMES):
        raise WireError(f"an END with unknown outcome {number}")
    return Marker(
        _END,
        _message_id(message.message_id),
        _duration(message.redeliver_after_ms),
        consumer_id=_consumer_id(message),
        outcome=_OUTCOMES[number],
        reason="" if slim else message.reason,
        of_schedule=message.of_schedule,
    )


def _decode_keepalive(message: pb.Marker) -> Marker:
    consumer_id = _consumer_id(message)
    message_id = None
    if message.HasField("message_id"):
        message_id = _message_id(message.message_id)
    elif not consumer_id:
        raise WireError("a KEEPALIVE that names neither a message nor a consumer")
    return Marker(
        _KEEPALIVE, message_id, _duration(message.redeliver_after_ms), consumer_id=consumer_id
    )


def _decode_schedule(message: pb.Marker, slim: bool) -> Marker:
    carried = message.carried_forward
    if carried != message.HasField("message_id"):
        raise WireError("a SCHEDULE names a first one exactly when it was carried forward")
    return Marker(
        _SCHEDULE,
        _message_id(message.message_id) if carried else None,
        _duration(message.redeliver_after_ms),
        b"" if slim else message.key,
        None if message.null_value else b"" if slim else message.value,
        headers=() if slim else _headers(message),
        expires_at_ms=_time(message.expires_at_ms),
        consumer_id=_consumer_id(message),
        carried_forward=carried,
    )


def _message_id(message: pb.MessageId) -> MessageId:
    partition = message.partition
    offset = message.offset
    topic_id = message.topic_id
    leader_epoch = message.leader_epoch
    if partition < 0 or offset < 0 or leader_epoch < 0:
        raise WireError("a message_id with a negative number")
    if topic_id and len(topic_id) != 16:
        raise WireError(f"a topic_id of {len(topic_id)} bytes")
    return MessageId(partition, offset, topic_id, leader_epoch)


def _headers(message: pb.Marker) -> Headers:
    return tuple(
        [
            (header.key, header.value if header.HasField("value") else None)
            for header in message.headers
        ]
    )


def _consumer_id(message: pb.Marker) -> str:
    consumer_id = message.consumer_id
    if len(consumer_id) > MAX_ID_CHARACTERS:
        raise WireError(f"a consumer_id of {len(consumer_id)} characters")
    return consumer_id


def _duration(value_ms: int) -> int:
    if value_ms > MAX_DURATION_MS:
        raise WireError(f"a duration of {value_ms} ms")
    return value_ms


def _time(value_ms: int) -> int:
    if value_ms > MAX_INT64:
        raise WireError("a time or epoch over 2^63 - 1")
    return value_ms


def encode_marker(marker: Marker) -> bytes:
    """Any marker; ``decode_marker`` reads it back as an equal value.

    What its type does not have is not written.

    Raises:
        WireError: the marker is one that ``decode_marker`` would refuse.
    """
    kind = marker.type
    if kind is MarkerType.START:
        return encode_start(
            _named(marker),
            marker.key,
            marker.value,
            redeliver_after_ms=marker.redeliver_after_ms,
            consumer_id=marker.consumer_id,
            delivery_count=marker.delivery_count,
            headers=marker.headers,
            expires_at_ms=marker.expires_at_ms,
            message_timestamp_ms=marker.message_timestamp_ms,
            by_reference=marker.by_reference,
            max_deliveries=marker.max_deliveries,
            max_lease_ms=marker.max_lease_ms,
        )
    if kind is MarkerType.END:
        return encode_end(
            _named(marker),
            marker.outcome,
            consumer_id=marker.consumer_id,
            redeliver_after_ms=marker.redeliver_after_ms,
            reason=marker.reason,
            of_schedule=marker.of_schedule,
        )
    if kind is MarkerType.KEEPALIVE:
        return encode_keepalive(
            marker.message_id,
            consumer_id=marker.consumer_id,
            redeliver_after_ms=marker.redeliver_after_ms,
        )
    if kind is MarkerType.SCHEDULE:
        return encode_schedule(
            marker.key,
            marker.value,
            redeliver_after_ms=marker.redeliver_after_ms,
            headers=marker.headers,
            expires_at_ms=marker.expires_at_ms,
            consumer_id=marker.consumer_id,
            first=_named(marker) if marker.carried_forward else None,
        )
    if kind is MarkerType.TICK:
        return encode_tick(marker.consumer_id, marker.engine_epoch)
    raise AssertionError(f"no encoder for {kind!r}")


def _named(marker: Marker) -> MessageId:
    if marker.message_id is None:
        raise WireError(f"cannot encode a {marker.type.name} without message_id")
    return marker.message_id
