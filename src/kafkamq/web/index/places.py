"""Where a record stands, as one integer, so that it is a row's number in the database.

From the highest bit: which log (2 bits), partition (16 bits), offset (42 bits). Records of one
chunk of 4096 offsets share ``place >> CHUNK_BITS``.
"""

from __future__ import annotations

MESSAGES, MARKERS, LETTERS = 0, 1, 2
CHUNK_BITS = 12
CHUNK_OFFSETS = 1 << CHUNK_BITS
_OFFSET_BITS = 42
_PARTITION_BITS = 16
MAX_OFFSET = (1 << _OFFSET_BITS) - 1
MAX_PARTITION = (1 << _PARTITION_BITS) - 1


def place_of(log: int, partition: int, offset: int) -> int:
    """One integer for a record's place; total: what is too large or too small is cut."""
    partition = max(-1, min(partition, MAX_PARTITION))
    offset = max(-1, min(offset, MAX_OFFSET))
    return (log << _PARTITION_BITS | partition) << _OFFSET_BITS | offset


def split_place(place: int) -> tuple[int, int, int]:
    """Log, partition and offset."""
    log_and_partition = place >> _OFFSET_BITS
    return (
        log_and_partition >> _PARTITION_BITS,
        log_and_partition & MAX_PARTITION,
        place & MAX_OFFSET,
    )
