"""Batches of messages in a marker (R27): bits in memory; on the wire runs or a bitmap.

Writing is strict: no message twice, none outside of the batch's chunk of 4096 offsets. Reading is
lenient, since a refused START would leave all of its messages without anybody who watches them:
what is named twice is meant once. Malformed is what leaves its chunk, is empty or too much.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from kafkamq.errors import WireError
from kafkamq.markers.rules.batching import MAX_BATCHES, MAX_NAMED, Item, gather
from kafkamq.markers.wire import markers_pb2 as pb
from kafkamq.markers.wire.marker_writer import (
    StartEncoder,
    checked,
    checked_log,
    encode_identity,
)
from kafkamq.queue.wire.keys import split_key
from kafkamq.queue.wire.partitions import CHUNK_OFFSETS
from kafkamq.types import MessageBatch

MAX_BATCH_BYTES = 64 * 1024
"""Largest marker with batches."""

_BITMAP_BYTES = CHUNK_OFFSETS // 8


def encode_batches(batches: Sequence[MessageBatch], *, version: int = 1) -> bytes:
    """Version and batches of a marker, which stand where ``encode_identity`` has one message.

    ``version`` 0: what follows says it.

    Raises:
        WireError: there are none or too many, they name too many messages or one twice, a batch is
            empty or leaves its chunk, or a number is outside its range.
    """
    if not 0 < len(batches) <= MAX_BATCHES:
        raise WireError(f"cannot encode {len(batches)} batches: 1 to {MAX_BATCHES}")
    if len(batches) > 1 and len(set(map(_chunk, batches))) < len(batches):
        raise WireError("cannot encode two batches of one chunk")
    _check_named(batches)
    marker = pb.Marker(version=version)
    for batch in batches:
        _encode(marker.batches.add(), batch)
    return marker.SerializeToString()


def _check_named(batches: Collection[MessageBatch]) -> None:
    if len(batches) * CHUNK_OFFSETS <= MAX_NAMED:
        return
    count = sum(batch.bits.bit_count() for batch in batches)
    if count > MAX_NAMED:
        raise WireError(f"{count} messages are too many for a marker ({MAX_NAMED} at most)")


def encode_named(items: Sequence[Item], *, together: bool) -> Iterator[tuple[bytes, list[Item]]]:
    """Who is meant by each marker that is needed to name these, as ``encode_known_end`` takes it.

    ``together``: in batches, where there are several.
    """
    if not together or len(items) == 1:
        for one in items:
            yield encode_identity(one.partition, one.offset, *one.log), [one]
        return
    for batches, members in gather(items):
        yield encode_batches(batches), members


def encode_batch_start(encoder: StartEncoder, batches: Sequence[MessageBatch], key: bytes) -> bytes:
    """A START of messages that stay where they are (R28); ``key`` names their queue, or is empty.

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
    """A START by reference (R11), as ``StartEncoder.encode_known`` takes it.

    Who reads it takes key, headers and payload from the message. Where key and headers make it
    larger than ``max_bytes``, only the queue id stays of them, for who looks at the markers.
    """
    known = expires_at_ms, message_timestamp_ms, True
    start = encoder.encode_known(identity, key, None, delivery_count, headers, *known)
    if len(start) <= max_bytes:
        return start
    return encoder.encode_known(identity, split_key(key)[0], None, delivery_count, (), *known)


def _chunk(batch: MessageBatch) -> tuple[int, bytes, int, int]:
    chunk = batch.base_offset // CHUNK_OFFSETS
    return batch.partition, batch.topic_id, batch.leader_epoch, chunk


def _encode(wire: pb.MessageBatch, batch: MessageBatch) -> None:
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
    """Runs, or the bitmap where that is not longer."""
    size = (bits.bit_length() + 7) // 8
    if (bits ^ bits << 1).bit_count() <= size:  # at least a byte a run
        runs = list(_runs(bits))
        if sum([1 if run < 128 else 2 for run in runs]) < size:
            return runs, b""
    return [], bits.to_bytes(size, "little")


def _runs(bits: int) -> Iterator[int]:
    """How many are taken, skipped, taken ... from the lowest bit on; the first may be 0."""
    text = bin(bits)[:1:-1]
    begin, is_taken = 0, True
    while begin < len(text):
        end = text.find("0" if is_taken else "1", begin)
        if end < 0:
            end = len(text)
        yield end - begin
        begin, is_taken = end, not is_taken


def decode_batches(batches: Sequence[pb.MessageBatch]) -> tuple[MessageBatch, ...]:
    """The batches of a marker, at most one of each chunk.

    Raises:
        WireError: they are too many, name too many messages, or one is malformed.
    """
    count = len(batches)
    if count == 1:  # an index costs a third of an iterator
        return (_decoded(batches[0]),)
    if count > MAX_BATCHES:
        raise WireError(f"{count} batches are too many for a marker ({MAX_BATCHES} at most)")
    by_chunk: dict[tuple[int, bytes, int, int], MessageBatch] = {}
    for batch in map(_decoded, batches):
        key = _chunk(batch)
        other = by_chunk.get(key)
        by_chunk[key] = batch if other is None else _union(other, batch)
    _check_named(by_chunk.values())
    return tuple(by_chunk.values())


def _union(one: MessageBatch, other: MessageBatch) -> MessageBatch:
    base_offset = min(one.base_offset, other.base_offset)
    bits = one.bits << one.base_offset - base_offset | other.bits << other.base_offset - base_offset
    return MessageBatch(one.partition, one.topic_id, one.leader_epoch, base_offset, bits)


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
        if len(bitmap) > _BITMAP_BYTES:
            raise WireError(f"a batch with a bitmap of {len(bitmap)} bytes")
        bits = int.from_bytes(bitmap, "little")
    room = CHUNK_OFFSETS - base_offset % CHUNK_OFFSETS
    runs = batch.runs
    count = len(runs)
    if count == 1 and runs[0] <= room:
        bits |= (1 << runs[0]) - 1
    elif sum(runs) > room:
        raise WireError("a batch that leaves its chunk")
    elif count:  # digits: cheaper than a shift of the whole for each run
        digits = "".join(["10"[at & 1] * length for at, length in enumerate(runs)])
        bits |= int(digits[::-1] or "0", 2)
    if not bits or bits.bit_length() > room:
        raise WireError("a batch that is empty or leaves its chunk")
    return MessageBatch(partition, topic_id, leader_epoch, base_offset, bits)
