"""How many members a consumer of a share group has; pure.

A member gets no more records before each of its batch has its verdict: one that is slow holds back
its member. So there are few members while batches are quick, and more when handlers are idle
because every member is held back.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_MEMBERS = 24  # a group takes 200 by default
HELD_BACK_MS = 100
_UNKNOWN = (4, 8)
_HANDLERS_OF_ONE = 12
_HANDLERS_AT_LEAST = 4


def first_members(concurrency: int) -> int:
    """How many to begin with, for so many handlers at once; 0: unknown."""
    if not concurrency:
        return _UNKNOWN[0]
    return max(1, min(4, concurrency // _HANDLERS_OF_ONE))


def max_members(concurrency: int) -> int:
    """How many there may be, for so many handlers at once; 0: unknown."""
    if not concurrency:
        return _UNKNOWN[1]
    return max(1, min(MAX_MEMBERS, concurrency // _HANDLERS_AT_LEAST))


def members_to_add(held_since_ms: Sequence[int | None], *, maximum: int, now_ms: int) -> int:
    """How many more, when somebody waits for messages and there are none."""
    count = len(held_since_ms)
    for since_ms in held_since_ms:
        if since_ms is None or now_ms - since_ms < HELD_BACK_MS:
            return 0
    return max(0, min(maximum - count, (count + 1) // 2))
