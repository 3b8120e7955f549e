"""Reads markers: strict towards hostile bytes, tolerant towards kafka-mq-go's markers.

Fields 1-6 of ``markers.proto`` are kafka-mq-go's, so its markers decode as they are: no delivery
count reads as 1, no consumer id as empty, every END as ACK. Whatever else is wrong raises
``WireError`` and nothing but that; a newer version raises ``UnsupportedVersionError`` (R21).

Reading a field costs, so each type reads only the fields that it has; what a marker carries beyond
them is ignored. Batches are read leniently, since a refused START would leave all of its messages
without anybody who watches them: what is named twice is meant once. Malformed is what leaves its
chunk, is empty or too much. Who writes markers of one kind calls ``marker_writer``.
"""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from kafkamq.errors import UnsupportedVersionError, WireError
from kafkamq.markers.rules.batching import MAX_BATCHES, union
from kafkamq.markers.wire import markers_pb2 as pb
from kafkamq.markers.wire.marker_writer import (
    BITMAP_BYTES,
    MAX_BATCH_BYTES,
    MAX_COUNT,
    MAX_DURATION_MS,
    MAX_ID_CHARACTERS,
    MAX_INT64,
    MAX_MARKER_BYTES,
    StartEncoder,
    check_named,
    chunk_of,
    encode_batch_start,
    encode_batches,
    encode_end,
    encode_keepalive,
    encode_known_end,
    encode_known_keepalive,
    encode_schedule,
    encode_tick,
    topic_name,
)
from kafkamq.queue.wire.keys import CHUNK_OFFSETS
from kafkamq.types import Headers, Marker, MarkerType, MessageBatch, MessageId, Outcome

# Of STARTs that name a topic (R37); it is 1 with batches, 0 of others.
_VERSION = 2
_OUTCOMES = tuple(Outcome)
_OUTCOME_COUNT = len(_OUTCOMES)
_ACK = Outcome.ACK
_START = MarkerType.START
_END = MarkerType.END
_KEEPALIVE = MarkerType.KEEPALIVE
_SCHEDULE = MarkerType.SCHEDULE
_TICK = MarkerType.TICK
_parse = pb.Marker.FromString


def decode_marker(
    data: bytes | None, *, topic: str = "", partition: int = -1, offset: int = -1
) -> Marker:
    """Return the marker in a record's value; where the record stands only serves the error text.

    Raises:
        WireError: the bytes are no marker; ``UnsupportedVersionError`` for a newer version's.
    """
    try:
        return _decode(data, False)
    except WireError as error:
        raise type(error)(error.reason, topic=topic, partition=partition, offset=offset) from None


def decode_slim(data: bytes | None) -> Marker:
    """Decode a marker, but leave key, value, headers and reason empty (R18).

    For trackers, which fold a marker and read the START again when it is due.
    """
    return _decode(data, True)


def _decode(data: bytes | None, slim: bool) -> Marker:
    if not data:
        raise WireError("the record is empty")
    if len(data) > MAX_MARKER_BYTES:
        raise WireError(f"{len(data)} bytes are too many for a marker ({MAX_MARKER_BYTES} at most)")
    try:
        message = _parse(data)
    except (DecodeError, ValueError):
        # A ValueError is a text that is not UTF-8, in pure Python.
        raise WireError("the record is not a marker") from None
    version: int = message.version
    if not 0 <= version <= _VERSION:
        raise _other_version(version)
    batches = message.batches if version else ()
    if batches:
        return _decode_batched(message, batches, slim, len(data))
    kind: int = message.type
    if kind == 1:
        return _decode_end(message, slim, _message_id(message), ())
    if kind == 0:
        return _decode_start(message, slim, version)
    if kind == 2:
        return _decode_keepalive(message)
    if kind == 16:
        return _decode_schedule(message, slim)
    if kind == 17:
        return _decode_tick(message)
    raise WireError(f"unknown marker type {kind}")


def _other_version(version: int) -> WireError:
    if version < 0:
        return WireError(f"the marker has version {version}")
    return UnsupportedVersionError(
        f"the marker has version {version}, this release reads up to {_VERSION}: upgrade kafkamq"
    )


def _decode_batched(
    message: pb.Marker, wire_batches: Sequence[pb.MessageBatch], slim: bool, size: int
) -> Marker:
    """Return a marker of version 1; of a START the messages say what else it would (R29)."""
    if size > MAX_BATCH_BYTES:
        raise WireError(f"{size} bytes are too many for batches ({MAX_BATCH_BYTES} at most)")
    kind: int = message.type
    if kind not in (0, 1, 2) or message.HasField("message_id"):
        raise WireError(f"batches in a marker of type {kind}, or beside a message")
    batches = decode_batches(wire_batches)
    if kind == 1:
        return _decode_end(message, slim, None, batches)
    consumer_id = _consumer_id(message)
    redeliver_after_ms = _duration(message)
    if kind == 2:
        return Marker(
            _KEEPALIVE, None, redeliver_after_ms, consumer_id=consumer_id, batches=batches
        )
    max_lease_ms = message.max_lease_ms
    max_deliveries = message.max_deliveries
    if max_lease_ms > MAX_DURATION_MS or max_deliveries > MAX_COUNT:
        raise WireError(f"a START of {max_lease_ms} ms and {max_deliveries} deliveries at most")
    return Marker(
        _START,
        None,
        redeliver_after_ms,
        b"" if slim else message.key,
        consumer_id=consumer_id,
        by_reference=True,
        max_deliveries=max_deliveries,
        max_lease_ms=max_lease_ms,
        message_topic=topic_name(message.message_topic) if message.version == 2 else "",
        batches=batches,
    )


def decode_batches(batches: Sequence[pb.MessageBatch]) -> tuple[MessageBatch, ...]:
    """Return the batches of a marker, at most one of each chunk.

    Raises:
        WireError: they are too many, name too many messages, or one is malformed.
    """
    count = len(batches)
    if count == 1:
        # An index costs a third of an iterator.
        return (_decoded(batches[0]),)
    if count > MAX_BATCHES:
        raise WireError(f"{count} batches are too many for a marker ({MAX_BATCHES} at most)")
    by_chunk: dict[tuple[int, bytes, int, int], MessageBatch] = {}
    for batch in map(_decoded, batches):
        key = chunk_of(batch)
        other = by_chunk.get(key)
        by_chunk[key] = batch if other is None else union((other, batch))
    check_named(by_chunk.values())
    return tuple(by_chunk.values())


def _decoded(batch: pb.MessageBatch) -> MessageBatch:
    partition = batch.partition
    base_offset = batch.base_offset
    topic_id = batch.topic_id
    leader_epoch = batch.leader_epoch
    if partition < 0 or base_offset < 0 or leader_epoch < 0:
        raise WireError("a batch with a negative number")
    if topic_id and len(topic_id) != 16:
        raise WireError(f"a topic_id of {len(topic_id)} bytes")
    bitmap = batch.bitmap
    bits = 0
    if bitmap:
        if len(bitmap) > BITMAP_BYTES:
            raise WireError(f"a batch with a bitmap of {len(bitmap)} bytes")
        bits = int.from_bytes(bitmap, "little")
    room = CHUNK_OFFSETS - base_offset % CHUNK_OFFSETS
    runs = batch.runs
    count = len(runs)
    if count == 1 and runs[0] <= room:
        bits |= (1 << runs[0]) - 1
    elif sum(runs) > room:
        raise WireError("a batch that leaves its chunk")
    elif count:
        # Digits are cheaper than a shift of the whole for each run.
        digits = "".join(["10"[at & 1] * length for at, length in enumerate(runs)])
        bits |= int(digits[::-1] or "0", 2)
    if not bits or bits.bit_length() > room:
        raise WireError("a batch that is empty or leaves its chunk")
    return MessageBatch(partition, topic_id, leader_epoch, base_offset, bits)


def _decode_start(message: pb.Marker, slim: bool, version: int) -> Marker:
    redeliver_after_ms = message.redeliver_after_ms
    max_lease_ms = message.max_lease_ms
    if redeliver_after_ms > MAX_DURATION_MS or max_lease_ms > MAX_DURATION_MS:
        raise WireError(f"a START of {redeliver_after_ms} ms, {max_lease_ms} ms at most")
    delivery_count = message.delivery_count
    max_deliveries = message.max_deliveries
    if delivery_count > MAX_COUNT or max_deliveries > MAX_COUNT:
        raise WireError("a START with a count of deliveries over 2^31 - 1")
    expires_at_ms = message.expires_at_ms
    message_timestamp_ms = message.message_timestamp_ms
    if expires_at_ms > MAX_INT64 or message_timestamp_ms > MAX_INT64:
        raise WireError("a START with a time over 2^63 - 1")
    by_reference = message.by_reference
    key = value = b""
    headers: Headers = ()
    is_null = False
    if not slim:
        key = message.key
        headers = _headers(message)
        if not by_reference:
            value = message.value
            is_null = message.null_value
    return Marker(
        _START,
        _message_id(message),
        redeliver_after_ms,
        key,
        None if is_null else value,
        delivery_count or 1,
        headers,
        expires_at_ms,
        _consumer_id(message),
        message_timestamp_ms,
        by_reference,
        _ACK,
        "",
        max_deliveries,
        max_lease_ms,
        message_topic=topic_name(message.message_topic) if version == 2 else "",
    )


def _decode_end(
    message: pb.Marker,
    slim: bool,
    message_id: MessageId | None,
    batches: tuple[MessageBatch, ...],
) -> Marker:
    number: int = message.outcome
    redeliver_after_ms = 0
    reason = ""
    if number:
        if not 0 < number < _OUTCOME_COUNT:
            raise WireError(f"an END with unknown outcome {number}")
        if number == 1:
            redeliver_after_ms = _duration(message)
        if not slim:
            reason = message.reason
    return Marker(
        _END,
        message_id,
        redeliver_after_ms,
        b"",
        b"",
        1,
        (),
        0,
        _consumer_id(message),
        0,
        False,
        _OUTCOMES[number],
        reason,
        0,
        0,
        False,
        message.of_schedule,
        0,
        "",
        batches,
    )


def _decode_keepalive(message: pb.Marker) -> Marker:
    consumer_id = _consumer_id(message)
    message_id = None
    if message.HasField("message_id"):
        message_id = _message_id(message)
    elif not consumer_id:
        raise WireError("a KEEPALIVE that names neither a message nor a consumer")
    return Marker(_KEEPALIVE, message_id, _duration(message), consumer_id=consumer_id)


def _decode_schedule(message: pb.Marker, slim: bool) -> Marker:
    carried = message.carried_forward
    if carried != message.HasField("message_id"):
        raise WireError("a SCHEDULE names a first one exactly when it was carried forward")
    expires_at_ms = message.expires_at_ms
    if expires_at_ms > MAX_INT64:
        raise WireError("a SCHEDULE with a time over 2^63 - 1")
    return Marker(
        _SCHEDULE,
        _message_id(message) if carried else None,
        _duration(message),
        b"" if slim else message.key,
        b"" if slim else None if message.null_value else message.value,
        headers=() if slim else _headers(message),
        expires_at_ms=expires_at_ms,
        consumer_id=_consumer_id(message),
        carried_forward=carried,
    )


def _decode_tick(message: pb.Marker) -> Marker:
    engine_epoch = message.engine_epoch
    if engine_epoch > MAX_INT64:
        raise WireError("an engine epoch over 2^63 - 1")
    return Marker(_TICK, consumer_id=_consumer_id(message), engine_epoch=engine_epoch)


def _message_id(message: pb.Marker) -> MessageId:
    identity = message.message_id
    partition = identity.partition
    offset = identity.offset
    topic_id = identity.topic_id
    leader_epoch = identity.leader_epoch
    if not offset and not message.HasField("message_id"):
        raise WireError("the marker names no message")
    if partition < 0 or offset < 0 or leader_epoch < 0:
        raise WireError("a message_id with a negative number")
    if topic_id and len(topic_id) != 16:
        raise WireError(f"a topic_id of {len(topic_id)} bytes")
    return MessageId(partition, offset, topic_id, leader_epoch)


def _headers(message: pb.Marker) -> Headers:
    headers = message.headers
    if not headers:
        return ()
    return tuple([(h.key, h.value if h.HasField("value") else None) for h in headers])


def _consumer_id(message: pb.Marker) -> str:
    consumer_id = message.consumer_id
    if len(consumer_id) > MAX_ID_CHARACTERS:
        raise WireError(f"a consumer_id of {len(consumer_id)} characters")
    return consumer_id


def _duration(message: pb.Marker) -> int:
    redeliver_after_ms = message.redeliver_after_ms
    if redeliver_after_ms > MAX_DURATION_MS:
        raise WireError(f"a marker with redeliver_after_ms {redeliver_after_ms}")
    return redeliver_after_ms


def encode_marker(marker: Marker) -> bytes:
    """Any marker; ``decode_marker`` reads it back as an equal value.

    What its type does not have is not written.

    Raises:
        WireError: the marker is one that ``decode_marker`` would refuse.
    """
    kind = marker.type
    if marker.batches:
        return _encode_batched(marker)
    if kind is MarkerType.START:
        return _encoder(marker).encode(
            _named(marker),
            marker.key,
            marker.value,
            delivery_count=marker.delivery_count,
            headers=marker.headers,
            expires_at_ms=marker.expires_at_ms,
            message_timestamp_ms=marker.message_timestamp_ms,
            by_reference=marker.by_reference,
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


def _encoder(start: Marker) -> StartEncoder:
    return StartEncoder(
        consumer_id=start.consumer_id,
        redeliver_after_ms=start.redeliver_after_ms,
        max_deliveries=start.max_deliveries,
        max_lease_ms=start.max_lease_ms,
        message_topic=start.message_topic,
    )


def _encode_batched(marker: Marker) -> bytes:
    kind = marker.type
    if marker.message_id is not None:
        raise WireError("cannot encode a marker that names a message beside its batches")
    if kind is MarkerType.START:
        return encode_batch_start(_encoder(marker), marker.batches, marker.key)
    identity = encode_batches(marker.batches)
    if kind is MarkerType.END:
        known = marker.consumer_id, marker.redeliver_after_ms, marker.reason, marker.of_schedule
        return encode_known_end(identity, marker.outcome, *known)
    if kind is MarkerType.KEEPALIVE:
        return encode_known_keepalive(identity, marker.consumer_id, marker.redeliver_after_ms)
    raise WireError(f"cannot encode a {kind.name} with batches")


def _named(marker: Marker) -> MessageId:
    if marker.message_id is None:
        raise WireError(f"cannot encode a {marker.type.name} without message_id")
    return marker.message_id
