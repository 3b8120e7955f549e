"""How many members a share group's consumer has."""

from __future__ import annotations

import pytest

from kafkamq.share.backend import (
    HELD_BACK_MS,
    MAX_MEMBERS,
    first_members,
    max_members,
    members_to_add,
)

NOW_MS = 10_000
LONG_AGO_MS = NOW_MS - HELD_BACK_MS


@pytest.mark.parametrize(
    ("concurrency", "first", "at_most"),
    [(0, 4, 8), (1, 1, 1), (8, 1, 2), (16, 1, 4), (48, 4, 12), (100, 4, MAX_MEMBERS)],
)
def test_a_few_first_and_more_for_more_handlers(concurrency: int, first: int, at_most: int) -> None:
    assert (first_members(concurrency), max_members(concurrency)) == (first, at_most)


@pytest.mark.parametrize(
    ("held_since_ms", "count"),
    [
        ([None] * 4, 0),
        ([LONG_AGO_MS, None, None, None], 1),
        ([LONG_AGO_MS, LONG_AGO_MS, LONG_AGO_MS + 1, None], 2),
        ([LONG_AGO_MS] * 4, 4),
        ([LONG_AGO_MS, None, None, None, None], 0),
        ([LONG_AGO_MS] * 7, 3),
        ([LONG_AGO_MS] * 10, 0),
        ([LONG_AGO_MS] * 11, 0),  # the group has taken fewer meanwhile
    ],
)
def test_as_many_as_at_first_may_fetch(held_since_ms: list[int | None], count: int) -> None:
    assert members_to_add(held_since_ms, first=4, maximum=10, now_ms=NOW_MS) == count
