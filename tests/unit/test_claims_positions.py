"""Positions, start offsets and health of a claimant, on the Go client's answers and beyond."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkamq.claims.rules.claimant import DeliveredOffsets, Health, start_position, velocity
from kafkamq.claims.rules.steps import ClaimantConfig, End
from kafkamq.errors import StateError

VECTORS = json.loads(
    (Path(__file__).parents[1] / "vectors" / "marshal-scenarios.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("case", VECTORS["commit"], ids=lambda case: case["title"][:30])
def test_commits(case: dict[str, Any]) -> None:
    offsets = DeliveredOffsets(case["current"])
    offsets.deliver(case["delivered"])
    for operation, expected in zip(case["ops"], case["expected"], strict=True):
        if operation[0] == "commit":
            assert offsets.commit(operation[1]) == expected["ok"]
        else:
            assert {
                "advanced": offsets.advance(),
                "current": offsets.position,
                "outstanding": offsets.outstanding,
                "tracked": offsets.tracked,
            } == expected


def test_a_second_commit_changes_nothing() -> None:
    """The Go client's count of outstanding messages goes below zero here."""
    offsets = DeliveredOffsets(0)
    offsets.deliver([0, 1])
    assert offsets.commit(1)
    assert offsets.commit(1)
    assert offsets.outstanding == 1
    assert offsets.commit(0)
    assert offsets.advance()
    assert not offsets.commit(1)  # passed
    assert (offsets.position, offsets.outstanding, offsets.tracked) == (2, 0, 0)


@pytest.mark.parametrize("again", [4, 5, 7])
def test_nothing_is_handed_out_twice(again: int) -> None:
    offsets = DeliveredOffsets(5)
    offsets.deliver([6, 7])
    with pytest.raises(StateError, match="handed out before"):
        offsets.deliver([again])


@given(st.lists(st.integers(0, 40), unique=True).map(sorted), st.data())
def test_the_position_is_the_first_gap(delivered: list[int], data: st.DataObject) -> None:
    offsets = DeliveredOffsets(0)
    offsets.deliver(delivered)
    done: set[int] = set()
    for offset in data.draw(st.permutations(delivered)):
        assert offsets.commit(offset)
        done.add(offset)
        offsets.advance()
        passed = [given for given in delivered if given < offsets.position]
        assert set(passed) <= done, "nothing open is passed"
        following = [given for given in delivered if given >= offsets.position]
        assert not following or following[0] not in done, "nothing done is left at the front"
        assert offsets.outstanding == len(delivered) - len(done)


@pytest.mark.parametrize("case", VECTORS["start_offset"], ids=str)
def test_start_offsets(case: dict[str, int]) -> None:
    start = start_position(
        coordination_offset=case["coordination_offset"],
        committed_offset=case["committed_offset"],
        earliest_offset=case["earliest"],
    )
    assert start.offset == case["expected_start"]


@pytest.mark.parametrize(
    ("known", "committed", "earliest", "latest", "expected"),
    [
        (5, 9, 0, 20, (5, 0, 0)),  # the coordination log knows better
        (5, 9, 7, 20, (7, 2, 0)),  # two messages were deleted unread
        (0, 0, 7, 20, (7, 0, 0)),  # nothing was known: nothing is missed
        (30, 0, 0, 20, (20, 0, 10)),  # the topic was recreated: the Go client tries forever
        (30, 0, 25, 25, (25, 0, 5)),
        (3, 0, 25, 25, (25, 22, 0)),
        (-5, -1, 0, 0, (0, 0, 0)),
    ],
)
def test_starts_outside_the_log_are_told(
    known: int, committed: int, earliest: int, latest: int, expected: tuple[int, int, int]
) -> None:
    start = start_position(
        coordination_offset=known,
        committed_offset=committed,
        earliest_offset=earliest,
        latest_offset=latest,
    )
    assert (start.offset, start.deleted, start.beyond) == expected


@pytest.mark.parametrize(("known", "committed", "expected"), [(5, 9, 9), (9, 5, 9), (-1, -1, 0)])
def test_at_most_once_begins_at_the_larger_one(known: int, committed: int, expected: int) -> None:
    start = start_position(
        coordination_offset=known, committed_offset=committed, earliest_offset=0, take_larger=True
    )
    assert start.offset == expected


def judge(
    *,
    position: int,
    latest_offset: int,
    positions: list[int],
    latest_offsets: list[int],
    message_age_ms: int,
    cycles_behind: int,
    release_if_behind: bool = True,
    is_whole_topic: bool = False,
) -> tuple[End | None, int]:
    config = ClaimantConfig(
        client="c",
        instance="i",
        group="g",
        topic="t",
        partition=0,
        release_if_behind=release_if_behind,
        is_whole_topic=is_whole_topic,
    )
    health = Health(config, 0)
    for sampled in zip(positions, latest_offsets, strict=True):
        health.sample(*sampled)
    health.cycles_behind = cycles_behind
    return health.judge(position, latest_offset, message_age_ms), health.cycles_behind


# The Go client looks at the age of its own heartbeats here; ours are watched by the lease (C2).
HEALTH = [case for case in VECTORS["health"] if case["seconds_since_heartbeat"] <= 60]


@pytest.mark.parametrize("number", range(len(HEALTH)))
def test_health(number: int) -> None:
    case = HEALTH[number]
    end, cycles_behind = judge(
        position=case["current"],
        latest_offset=case["latest"],
        positions=case["current_history"],
        latest_offsets=case["latest_history"],
        message_age_ms=case["seconds_since_message"] * 1000,
        cycles_behind=case["cycles_behind"],
        release_if_behind=case["release_claims_if_behind"],
        is_whole_topic=case["claim_entire_topic"],
    )
    assert {
        "consumer_velocity": velocity(case["current_history"]),
        "partition_velocity": velocity(case["latest_history"]),
        "cycles_behind": cycles_behind,
        "healthy": end is None,
    } == case["expected"]


HEALTHY: dict[str, Any] = {
    "position": 100,
    "latest_offset": 120,
    "positions": [100, 100],
    "latest_offsets": [110, 120],
    "message_age_ms": 0,
    "cycles_behind": 0,
}


@pytest.mark.parametrize(
    ("changes", "end", "cycles"),
    [
        ({}, None, 1),
        ({"message_age_ms": 60_000}, None, 1),  # an interval is not too long
        ({"message_age_ms": 60_001}, End.STUCK, 0),
        ({"message_age_ms": 60_001, "release_if_behind": False}, None, 0),
        ({"message_age_ms": 60_001, "is_whole_topic": True}, End.STUCK, 0),
        ({"message_age_ms": 60_001, "positions": [90, 100]}, None, 0),  # it moved
        ({"message_age_ms": 60_001, "position": 120, "latest_offsets": [120, 120]}, None, 0),
        ({"cycles_behind": 2}, End.BEHIND, 3),
        ({"cycles_behind": 2, "is_whole_topic": True}, None, 2),
        ({"positions": [91, 100], "cycles_behind": 2}, End.BEHIND, 3),  # 100 + 2 x 9 < 120, 9 < 10
        ({"positions": [90, 100], "cycles_behind": 2}, None, 0),  # would reach the end
        ({"positions": [91, 100], "latest_offsets": [111, 120]}, None, 1),  # as fast: behind
        ({"positions": [91, 100], "latest_offsets": [112, 120]}, None, 0),  # catching up
    ],
)
def test_health_at_its_edges(changes: dict[str, Any], end: End | None, cycles: int) -> None:
    assert judge(**{**HEALTHY, **changes}) == (end, cycles)


def test_velocities_count_what_is_there() -> None:
    assert velocity([]) == velocity([0, 0]) == velocity([5]) == velocity([5, 5]) == 0
    assert velocity([0, 7, 0, 3]) == 4
    assert velocity([-1, 10, 20]) == 10
    config = ClaimantConfig(client="c", instance="i", group="g", topic="t", partition=0)
    health = Health(config, 0)
    for sample in range(1, 13):
        health.sample(sample, sample)
    assert list(health.positions) == list(range(3, 13)), "the last ten"
