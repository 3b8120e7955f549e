"""Here are record keys, and the partitions that follow from them: Kafka's murmur2, and R26 for
markers.

A message's key is ``queue_id``, or ``queue_id NUL user_key`` when the sender gave a key.
kafka-mq-go's clients know only the first form. A user key may hold NULs: the first one separates.
"""

from __future__ import annotations

import struct
from functools import lru_cache

from kafkamq.config import utf8
from kafkamq.errors import ConfigError

_SEPARATOR = b"\0"


def join_key(queue_id: str | bytes, user_key: str | bytes | None = None) -> bytes:
    """Return the record key of a message; None means no user key, an empty one is a key."""
    prefix = utf8(queue_id, name="queue_id") if isinstance(queue_id, str) else queue_id
    if not prefix or _SEPARATOR in prefix:
        raise ConfigError(f"queue_id is {queue_id!r}: it must not be empty nor hold a NUL")
    if user_key is None:
        return prefix
    if isinstance(user_key, str):
        return prefix + _SEPARATOR + utf8(user_key, name="key")
    if not isinstance(user_key, bytes):
        raise ConfigError(f"key is a {type(user_key).__name__}: it must be bytes or a text")
    return prefix + _SEPARATOR + user_key


def split_key(record_key: bytes | None) -> tuple[bytes, bytes | None]:
    """Queue id and user key of a record key; total.

    A record without a key belongs to no queue: its queue id is empty, which no queue's is.
    """
    if record_key is None:
        return b"", None
    queue_id, separator, user_key = record_key.partition(_SEPARATOR)
    return queue_id, user_key if separator else None


CHUNK_OFFSETS = 4096
"""Offsets of one message partition whose markers share a marker partition (R26)."""

_MASK = 0xFFFF_FFFF
_MULTIPLIER = 0x5BD1_E995
_SEED = 0x9747_B28C


def murmur2(data: bytes) -> int:
    """Return Kafka's 32-bit murmur2 hash of ``data``, unsigned.

    The Java client and librdkafka's ``murmur2_random`` choose ``(hash & 0x7fffffff) % partitions``.
    """
    length = len(data)
    whole = length & ~3
    value = _SEED ^ length
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        mixed = (word * _MULTIPLIER) & _MASK
        mixed = ((mixed ^ (mixed >> 24)) * _MULTIPLIER) & _MASK
        value = ((value * _MULTIPLIER) & _MASK) ^ mixed
    if whole < length:
        value ^= int.from_bytes(data[whole:], "little")
        value = (value * _MULTIPLIER) & _MASK
    value = ((value ^ (value >> 13)) * _MULTIPLIER) & _MASK
    return value ^ (value >> 15)


def key_partition(key: bytes, count: int) -> int:
    """Return the partition of a keyed record among ``count`` partitions (at least 1)."""
    return (murmur2(key) & 0x7FFF_FFFF) % count


def marker_key(partition: int, offset: int) -> bytes:
    """Return what R26 hashes for a message's markers; also their record key."""
    return b"%d:%d" % (partition, offset // CHUNK_OFFSETS)


def marker_partition(partition: int, offset: int, count: int) -> int:
    """Return the marker partition of a message's START among ``count`` marker partitions (R26).

    Its KEEPALIVEs and ENDs go where its START went, also after partitions were added: remember the
    partition of the START, do not ask again.
    """
    return _chunk_partition(partition, offset // CHUNK_OFFSETS, count)


@lru_cache(maxsize=4096)
def _chunk_partition(partition: int, chunk: int, count: int) -> int:
    return key_partition(b"%d:%d" % (partition, chunk), count)
