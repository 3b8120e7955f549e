"""Fresh identities: ids of messages (UUIDv7) and of consumers."""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Callable
from itertools import count

_random = random.Random(os.urandom(32))  # fast; ids are labels, not secrets
_Millisecond = tuple[int, str, Callable[[], int]]
_NEVER: _Millisecond = (-1, "", int)
_latest = [_NEVER]


def _after_fork() -> None:
    _random.seed(os.urandom(32))
    _latest[0] = _NEVER


os.register_at_fork(after_in_child=_after_fork)


def uuid7() -> str:
    """A UUID of version 7: ordered by its making, with 73 random bits for each millisecond.

    Those of one millisecond count on from a random number (RFC 9562, section 6.2, method 1).
    """
    latest = _latest[0]
    time_ms = time.time_ns() // 1_000_000
    if latest[0] != time_ms:
        latest = _latest[0] = _begin(time_ms)
    return f"{latest[1]}{latest[2]():012x}"


def _begin(time_ms: int) -> _Millisecond:
    head, bits = f"{time_ms:012x}", _random.getrandbits(26)
    prefix = f"{head[:8]}-{head[8:]}-{0x7000 | bits >> 14:04x}-{0x8000 | bits & 0x3FFF:04x}-"
    # Of 48 bits for the counter, which so does not come to its end.
    return time_ms, prefix, count(_random.getrandbits(47)).__next__


def new_consumer_id() -> str:
    return secrets.token_hex(12)
