"""Which task folds a marker partition: group keys that Spark's hash sends where we want them.

Spark puts a row into shuffle partition ``murmur3(key) mod n``. Small integers collide there (eight
of them reach five tasks), so a marker partition is grouped by a text whose salt is chosen so that
partition p lands in task ``p mod n``. A test pins the hash against Spark's own.
"""

from __future__ import annotations

from itertools import count

_MASK = 0xFFFF_FFFF
_SEED = 42


def spark_hash(text: str) -> int:
    """Spark SQL's ``hash(text)``: a signed 32-bit murmur3 whose tail is mixed byte by byte."""
    data = text.encode()
    whole = len(data) & ~3
    value = _SEED
    for start in range(0, whole, 4):
        value = _mix(value, int.from_bytes(data[start : start + 4], "little"))
    for byte in data[whole:]:
        value = _mix(value, (byte - 256 if byte > 127 else byte) & _MASK)
    value ^= len(data)
    value = ((value ^ (value >> 16)) * 0x85EB_CA6B) & _MASK
    value = ((value ^ (value >> 13)) * 0xC2B2_AE35) & _MASK
    value ^= value >> 16
    return value - (1 << 32) if value >> 31 else value


def _mix(value: int, word: int) -> int:
    word = (word * 0xCC9E_2D51) & _MASK
    word = (word << 15 | word >> 17) & _MASK
    value ^= (word * 0x1B87_3593) & _MASK
    value = (value << 13 | value >> 19) & _MASK
    return (value * 5 + 0xE654_6B64) & _MASK


def group_key(topic: str, partition: int, tasks: int) -> str:
    """The group key of a marker partition: of ``tasks`` shuffle partitions, for p mod tasks."""
    for salt in count():
        key = f"{topic}/{partition}/{salt}"
        if spark_hash(key) % tasks == partition % tasks:
            return key
    raise AssertionError("count() has no end")
