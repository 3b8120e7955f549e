"""Writes markers as bytes: the generated code encodes, what readers would refuse is refused here.

Of two encoded messages one behind the other protobuf makes one (they are merged). So a marker is
written in parts: who is meant (`encode_identity`, `encode_batches`), and what is said of them; what
all STARTs of a consumer say is encoded once.

Batches of messages (R27) are bits in memory, on the wire runs or a bitmap. No message is written
twice, and none outside of its batch's chunk of 4096 offsets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache

from kafkamq.errors import WireError
from kafkamq.markers.rules.batching import MAX_BATCHES, MAX_NAMED, Item, gather
from kafkamq.markers.wire import markers_pb2 as pb
from kafkamq.queue.wire.headers import cut_text
from kafkamq.queue.wire.keys import CHUNK_OFFSETS, split_key
from kafkamq.types import Headers, MessageBatch, MessageId, Outcome

MAX_MARKER_BYTES = 17 * 1024 * 1024
"""Largest marker that is decoded: one transaction's 16 MiB (R16) and room for what goes with it."""

MAX_DURATION_MS = 10 * 366 * 86_400_000
"""Longest timeout, delay or lease that is believed: ten years."""

MAX_ID_CHARACTERS = 1024
"""Longest consumer or engine id that is believed; trackers keep them in memory."""

MAX_COUNT = 0x7FFF_FFFF
"""Largest delivery count, partition or leader epoch."""

MAX_INT64 = 0x7FFF_FFFF_FFFF_FFFF
"""Largest offset, time or engine epoch."""

MAX_BATCH_BYTES = 64 * 1024
"""Largest marker with batches."""

BITMAP_BYTES = CHUNK_OFFSETS // 8

# In front, where kafka-mq-go's markers have it.
_END, _KEEPALIVE, _SCHEDULE = (
    pb.Marker(type=kind).SerializeToString() for kind in (pb.END, pb.KEEPALIVE, pb.SCHEDULE)
)
_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{0,249}")


def topic_name(name: str) -> str:
    """Return the name, if a topic can have it, or none.

    Raises:
        WireError: it is another text.
    """
    if name in (".", "..") or _TOPIC_NAME.fullmatch(name) is None:
        raise WireError("a message_topic that is no name of a topic")
    return name


def checked(value: int, maximum: int = MAX_INT64) -> int:
    """Return a number that readers believe: they would pass a marker with another one.

    Raises:
        WireError: it is negative or larger.
    """
    if not 0 <= value <= maximum:
        raise WireError(f"cannot encode {value}: 0 to {maximum}")
    return value


def checked_log(partition: int, topic_id: bytes, leader_epoch: int) -> tuple[int, bytes, int]:
    """Return what identifies a log, if readers believe it.

    Raises:
        WireError: a number is outside its range, or the topic's id has another size.
    """
    if not 0 <= partition <= MAX_COUNT or not 0 <= leader_epoch <= MAX_COUNT:
        raise WireError("cannot encode a partition or leader epoch outside 0 to 2^31 - 1")
    if len(topic_id) not in (0, 16):
        raise WireError(f"cannot encode a topic_id of {len(topic_id)} bytes: it has 16, or none")
    return partition, topic_id, leader_epoch


def _consumer(consumer_id: str) -> str:
    if len(consumer_id) > MAX_ID_CHARACTERS:
        raise WireError(f"cannot encode an id of {len(consumer_id)} characters")
    return consumer_id


def _bounded(data: bytes) -> bytes:
    if len(data) > MAX_MARKER_BYTES:
        raise WireError(f"a marker of {len(data)} bytes is too large: {MAX_MARKER_BYTES} at most")
    return data


def _message_id(message_id: MessageId) -> bytes:
    return encode_identity(message_id.partition, message_id.offset, *message_id.log)


def encode_identity(partition: int, offset: int, topic_id: bytes, leader_epoch: int) -> bytes:
    """Return a message's identity as its markers hold it, for those who write several of them.

    It is always written: an id of partition 0, offset 0 is there, but empty.
    """
    return identity_encoder(partition, topic_id, leader_epoch)(offset)


def identity_encoder(partition: int, topic_id: bytes, leader_epoch: int) -> Callable[[int], bytes]:
    """``encode_identity`` by the offset alone."""
    marker = pb.Marker()
    identity, encode = marker.message_id, marker.SerializeToString
    identity.SetInParent()
    log = checked_log(partition, topic_id, leader_epoch)
    identity.partition, identity.topic_id, identity.leader_epoch = log

    def encode_offset(offset: int) -> bytes:
        identity.offset = checked(offset)
        return encode()

    return encode_offset


def _add_headers(marker: pb.Marker, headers: Sequence[tuple[str, bytes | None]]) -> None:
    try:
        for name, value in headers:
            header = marker.headers.add()
            header.key = name
            if value is not None:
                # Null is absent; an empty value is written.
                header.value = value
    except UnicodeEncodeError:
        raise WireError("cannot encode a header whose name is not Unicode text") from None


class StartEncoder:
    """Encodes the STARTs of one consumer of one queue; keep it while those settings last.

    For one thread at a time.
    """

    __slots__ = ("_constant", "_marker", "names_topic")

    def __init__(
        self,
        *,
        consumer_id: str = "",
        redeliver_after_ms: int,
        max_deliveries: int = 0,
        max_lease_ms: int = 0,
        message_topic: str = "",
    ) -> None:
        self.names_topic = bool(message_topic)
        self._constant = pb.Marker(
            version=2 if message_topic else 0,
            redeliver_after_ms=checked(redeliver_after_ms, MAX_DURATION_MS),
            consumer_id=_consumer(consumer_id),
            max_deliveries=checked(max_deliveries, MAX_COUNT),
            max_lease_ms=checked(max_lease_ms, MAX_DURATION_MS),
            message_topic=topic_name(message_topic),
        ).SerializeToString()
        self._marker = pb.Marker()

    def encode(
        self,
        message_id: MessageId,
        key: bytes,
        value: bytes | None,
        *,
        delivery_count: int = 1,
        headers: Headers = (),
        expires_at_ms: int = 0,
        message_timestamp_ms: int = 0,
        by_reference: bool = False,
    ) -> bytes:
        """Return the START of one message.

        Args:
            key: Its whole record key.
            value: Its payload; None: null. Not written when ``by_reference``.
            delivery_count: 1 at the first delivery.
            expires_at_ms: Broker time; 0: never.
            message_timestamp_ms: Of the record; 0 or negative: unknown.
            by_reference: The payload stays in the message record (R11).

        Raises:
            WireError: a number is outside its range, or it is too large for any reader.
        """
        known = delivery_count, headers, expires_at_ms, message_timestamp_ms, by_reference
        return _bounded(self.encode_known(_message_id(message_id), key, value, *known))

    def encode_known(
        self,
        identity: bytes,
        key: bytes,
        value: bytes | None,
        delivery_count: int,
        headers: Sequence[tuple[str, bytes | None]],
        expires_at_ms: int,
        message_timestamp_ms: int,
        by_reference: bool,
    ) -> bytes:
        """``encode`` of any size, for who has the identity from ``encode_identity`` already."""
        marker = self._marker
        marker.Clear()
        marker.key = key
        if by_reference:
            marker.by_reference = True
        elif value is None:
            marker.null_value = True
        else:
            marker.value = value
        marker.delivery_count = checked(delivery_count, MAX_COUNT)
        if headers:
            _add_headers(marker, headers)
        if expires_at_ms:
            marker.expires_at_ms = checked(expires_at_ms)
        if message_timestamp_ms > 0:
            marker.message_timestamp_ms = checked(message_timestamp_ms)
        return identity + self._constant + marker.SerializeToString()


def encode_end(
    message_id: MessageId,
    outcome: Outcome,
    *,
    consumer_id: str = "",
    redeliver_after_ms: int = 0,
    reason: str = "",
    of_schedule: bool = False,
) -> bytes:
    """Return an END (R8).

    Args:
        message_id: Identity of the message, or of the SCHEDULE.
        redeliver_after_ms: The delay of a NACK; not written otherwise.
        reason: Text for people, cut at 4 KiB of UTF-8 (R11).
        of_schedule: ``message_id`` names a SCHEDULE.

    Raises:
        WireError: a number is outside its range.
    """
    return encode_known_end(
        _message_id(message_id), outcome, consumer_id, redeliver_after_ms, reason, of_schedule
    )


def encode_known_end(
    identity: bytes,
    outcome: Outcome,
    consumer_id: str,
    redeliver_after_ms: int = 0,
    reason: str = "",
    of_schedule: bool = False,
) -> bytes:
    """``encode_end``, for who has the identity from ``encode_identity`` already."""
    delay_ms = redeliver_after_ms if outcome is Outcome.NACK else 0
    end = _END + identity + _verdict(outcome, consumer_id, delay_ms, of_schedule)
    return end + pb.Marker(reason=cut_text(reason)).SerializeToString() if reason else end


@lru_cache(maxsize=1024)
def _verdict(outcome: Outcome, consumer_id: str, delay_ms: int, of_schedule: bool) -> bytes:
    return pb.Marker(
        redeliver_after_ms=checked(delay_ms, MAX_DURATION_MS),
        consumer_id=_consumer(consumer_id),
        outcome=outcome.value,  # type: ignore[arg-type]  # stubs know enum values only
        of_schedule=of_schedule,
    ).SerializeToString()


def encode_keepalive(
    message_id: MessageId | None, *, consumer_id: str = "", redeliver_after_ms: int
) -> bytes:
    """Return a KEEPALIVE of one message, or with None of all leases of ``consumer_id`` (R7).

    Raises:
        WireError: neither is given, or a number is outside its range.
    """
    if message_id is None and not consumer_id:
        raise WireError("cannot encode a KEEPALIVE that names neither a message nor a consumer")
    name = b"" if message_id is None else _message_id(message_id)
    return encode_known_keepalive(name, consumer_id, redeliver_after_ms)


def encode_known_keepalive(identity: bytes, consumer_id: str, redeliver_after_ms: int) -> bytes:
    """``encode_keepalive``, for who has the identity from ``encode_identity`` already."""
    keepalive = pb.Marker(
        redeliver_after_ms=checked(redeliver_after_ms, MAX_DURATION_MS),
        consumer_id=_consumer(consumer_id),
    )
    return _KEEPALIVE + identity + keepalive.SerializeToString()


def encode_schedule(
    key: bytes,
    value: bytes | None,
    *,
    redeliver_after_ms: int,
    headers: Headers = (),
    expires_at_ms: int = 0,
    consumer_id: str = "",
    first: MessageId | None = None,
) -> bytes:
    """Return a SCHEDULE: a message that enters its queue after ``redeliver_after_ms``.

    Args:
        key: The whole record key.
        redeliver_after_ms: The delay; of one carried forward, what remains of it (R19).
        expires_at_ms: Broker time; 0: never.
        first: Of one carried forward: marker partition and offset of its first record.

    Raises:
        WireError: a number is outside its range.
    """
    schedule = pb.Marker(
        redeliver_after_ms=checked(redeliver_after_ms, MAX_DURATION_MS),
        key=key,
        value=value or b"",
        null_value=value is None,
        expires_at_ms=checked(expires_at_ms),
        consumer_id=_consumer(consumer_id),
        carried_forward=first is not None,
    )
    _add_headers(schedule, headers)
    named = b"" if first is None else _message_id(first)
    return _bounded(_SCHEDULE + named + schedule.SerializeToString())


def encode_tick(engine_id: str, engine_epoch: int) -> bytes:
    """Return a TICK of an engine (R4, R17)."""
    engine, epoch = _consumer(engine_id), checked(engine_epoch)
    return pb.Marker(type=pb.TICK, consumer_id=engine, engine_epoch=epoch).SerializeToString()


def encode_batches(batches: Sequence[MessageBatch], *, version: int = 1) -> bytes:
    """Version and batches of a marker, which stand where ``encode_identity`` has one message.

    ``version`` 0: what follows says it.

    Raises:
        WireError: there are none or too many, they name too many messages or one twice, a batch is
            empty or leaves its chunk, or a number is outside its range.
    """
    if not 0 < len(batches) <= MAX_BATCHES:
        raise WireError(f"cannot encode {len(batches)} batches: 1 to {MAX_BATCHES}")
    if len(batches) > 1 and len(set(map(chunk_of, batches))) < len(batches):
        raise WireError("cannot encode two batches of one chunk")
    check_named(batches)
    marker = pb.Marker(version=version)
    for batch in batches:
        _encode_batch(marker.batches.add(), batch)
    return marker.SerializeToString()


def check_named(batches: Collection[MessageBatch]) -> None:
    if len(batches) * CHUNK_OFFSETS <= MAX_NAMED:
        return
    count = sum(batch.bits.bit_count() for batch in batches)
    if count > MAX_NAMED:
        raise WireError(f"{count} messages are too many for a marker ({MAX_NAMED} at most)")


def encode_named(items: Sequence[Item], *, together: bool) -> Iterator[tuple[bytes, list[Item]]]:
    """Yield who is meant by each marker that these need, as ``encode_known_end`` takes it.

    ``together``: in batches, where there are several.
    """
    if not together or len(items) == 1:
        for one in items:
            yield encode_identity(one.partition, one.offset, *one.log), [one]
        return
    for batches, members in gather(items):
        yield encode_batches(batches), members


def encode_batch_start(encoder: StartEncoder, batches: Sequence[MessageBatch], key: bytes) -> bytes:
    """Return a START of messages that stay where they are (R28); ``key`` may name their queue.

    Raises:
        WireError: the batches cannot be encoded, or it is too large for any reader.
    """
    named = encode_batches(batches, version=0 if encoder.names_topic else 1)
    start = encoder.encode_known(named, key, None, 0, (), 0, 0, True)
    if len(start) > MAX_BATCH_BYTES:
        raise WireError(f"a START of {len(start)} bytes is too large: {MAX_BATCH_BYTES} at most")
    return start


def encode_reference(
    encoder: StartEncoder,
    identity: bytes,
    key: bytes,
    delivery_count: int,
    headers: Sequence[tuple[str, bytes | None]],
    expires_at_ms: int,
    message_timestamp_ms: int,
    max_bytes: int,
) -> bytes:
    """Return a START by reference (R11), as ``StartEncoder.encode_known`` takes it.

    Who reads it takes key, headers and payload from the message. Where key and headers make it
    larger than ``max_bytes``, only the queue id stays of them, for who looks at the markers.
    """
    known = expires_at_ms, message_timestamp_ms, True
    start = encoder.encode_known(identity, key, None, delivery_count, headers, *known)
    if len(start) <= max_bytes:
        return start
    return encoder.encode_known(identity, split_key(key)[0], None, delivery_count, (), *known)


def chunk_of(batch: MessageBatch) -> tuple[int, bytes, int, int]:
    chunk = batch.base_offset // CHUNK_OFFSETS
    return batch.partition, batch.topic_id, batch.leader_epoch, chunk


def _encode_batch(wire: pb.MessageBatch, batch: MessageBatch) -> None:
    bits, base_offset = batch.bits, batch.base_offset
    if bits <= 0 or base_offset % CHUNK_OFFSETS + bits.bit_length() > CHUNK_OFFSETS:
        raise WireError("cannot encode a batch that is empty or leaves its chunk")
    log = checked_log(batch.partition, batch.topic_id, batch.leader_epoch)
    wire.partition, wire.topic_id, wire.leader_epoch = log
    wire.base_offset = checked(base_offset)
    runs, bitmap = _members(bits)
    if runs:
        wire.runs.extend(runs)
    else:
        wire.bitmap = bitmap


def _members(bits: int) -> tuple[list[int], bytes]:
    size = (bits.bit_length() + 7) // 8
    if (bits ^ bits << 1).bit_count() <= size:
        # A run takes a byte at least.
        runs = list(_runs(bits))
        if sum([1 if run < 128 else 2 for run in runs]) < size:
            return runs, b""
    return [], bits.to_bytes(size, "little")


def _runs(bits: int) -> Iterator[int]:
    """Yield how many are taken, skipped, taken ... from the lowest bit on; the first may be 0."""
    text = bin(bits)[:1:-1]
    begin, is_taken = 0, True
    while begin < len(text):
        end = text.find("0" if is_taken else "1", begin)
        if end < 0:
            end = len(text)
        yield end - begin
        begin, is_taken = end, not is_taken
