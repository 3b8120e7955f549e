"""Which partition a record goes to: Kafka's murmur2, and R26 for markers."""

from __future__ import annotations

import struct
from functools import lru_cache

CHUNK_OFFSETS = 4096
"""Offsets of one message partition whose markers share a marker partition (R26)."""

_MASK = 0xFFFF_FFFF
_MULTIPLIER = 0x5BD1_E995
_SEED = 0x9747_B28C


def murmur2(data: bytes) -> int:
    """Kafka's 32-bit murmur2 hash of ``data``, unsigned.

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
    """The partition of a keyed record among ``count`` partitions (at least 1)."""
    return (murmur2(key) & 0x7FFF_FFFF) % count


def marker_key(partition: int, offset: int) -> bytes:
    """What R26 hashes for a message's markers; also their record key."""
    return b"%d:%d" % (partition, offset // CHUNK_OFFSETS)


def marker_partition(partition: int, offset: int, count: int) -> int:
    """The marker partition of a message's START among ``count`` marker partitions (R26).

    Its KEEPALIVEs and ENDs go where its START went, also after partitions were added: remember the
    partition of the START, do not ask again.
    """
    return _chunk_partition(partition, offset // CHUNK_OFFSETS, count)


@lru_cache(maxsize=4096)
def _chunk_partition(partition: int, chunk: int, count: int) -> int:
    return key_partition(b"%d:%d" % (partition, chunk), count)
