"""Fresh identities: ids of messages (UUIDv7) and of consumers."""

from __future__ import annotations

import os
import random
import secrets
import time

_random = random.Random(os.urandom(32))  # fast; ids are labels, not secrets
_RANDOM_BITS = 74
os.register_at_fork(after_in_child=lambda: _random.seed(os.urandom(32)))


def uuid7() -> str:
    """A UUID of version 7: ordered by the millisecond of its making, random otherwise."""
    bits = _random.getrandbits(_RANDOM_BITS)
    time_ms = time.time_ns() // 1_000_000
    head = f"{time_ms:012x}"
    tail = f"{0x8000_0000_0000_0000 | bits & 0x3FFF_FFFF_FFFF_FFFF:016x}"
    return f"{head[:8]}-{head[8:]}-{0x7000 | bits >> 62:04x}-{tail[:4]}-{tail[4:]}"


def new_consumer_id() -> str:
    return secrets.token_hex(12)
