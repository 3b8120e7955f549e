"""The shipped claims engine, simulated: each seed draws members, how they work, and their faults.

A failure names its seed: ``make sim SEEDS=N..N ARGS="--kind claims"`` shows it again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from harness.simulation.claims.draw import ClaimLimits, ClaimUse
from harness.simulation.claims.ledger import CLAIM_STATES
from harness.simulation.claims.run import ClaimSimulation, simulate_claims
from harness.simulation.limits import Faults
from tests.examples import examples

SEEDS = 60
STATE_SEEDS = 100  # all states are reached by so many
CHUNK = 20


def check(simulation: ClaimSimulation) -> ClaimSimulation:
    """Fail with what is wrong, and the seed that shows it."""
    simulation.require_ok()
    return simulation


@cache
def reached_by(first: int) -> frozenset[str]:
    """The states that a chunk of seeds reaches; fails with the first seed that is not in order."""
    reached: set[str] = set()
    for seed in range(first, first + CHUNK):
        reached.update(check(simulate_claims(seed)).reached)
    return frozenset(reached)


@pytest.mark.parametrize("first", range(0, examples(SEEDS), CHUNK))
def test_seeds(first: int) -> None:
    reached_by(first)


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_the_seeds_reach_every_state() -> None:
    reached = frozenset[str]().union(*(reached_by(first) for first in range(0, STATE_SEEDS, CHUNK)))
    assert sorted(CLAIM_STATES - reached) == []


# ---- one thing at a time

QUIET = ClaimLimits(members=2, messages=30, chaos_ms=5000, releases_if_behind=False)


@pytest.mark.parametrize("seed", range(examples(2)))
@pytest.mark.parametrize("use", list(ClaimUse))
def test_without_faults_every_message_is_handed_out_once(seed: int, use: ClaimUse) -> None:
    limits = replace(QUIET, use=use, joins=1)
    assert check(simulate_claims(seed, limits)).handed_out == 30


@pytest.mark.parametrize("use", [ClaimUse.AT_LEAST_ONCE, ClaimUse.FENCED, ClaimUse.AT_MOST_ONCE])
def test_members_that_die_all_the_time_have_one_owner_at_a_time(use: ClaimUse) -> None:
    limits = replace(QUIET, use=use, members=3, faults=Faults(kill_every=150, freeze_every=1000))
    assert sum(check(simulate_claims(seed, limits)).deaths for seed in range(3)) > 3


@pytest.mark.parametrize("seed", [3, 7])
def test_a_whole_topic_of_which_messages_were_deleted_is_given_back_whole(seed: int) -> None:
    """Who kept the other partitions left the key to others, and nobody had the topic again."""
    limits = replace(
        QUIET, mode="topic", members=3, partitions=3, interval_ms=500, slow_share=0.3, deletions=5,
        releases_if_behind=True,
    )  # fmt: skip
    check(simulate_claims(seed, limits))


def test_a_position_of_ranges_whose_commit_was_lost_is_committed_again() -> None:
    """Where nothing came behind it, the group's position stood still for ever."""
    check(simulate_claims(959))


@pytest.mark.parametrize("seed", [70171, 71615])
def test_heartbeats_of_a_whole_topic_with_transactions_come_in_time(seed: int) -> None:
    """Half a second between them is less than the requests of a claim took: no topic was whole."""
    check(simulate_claims(seed))


def test_a_range_is_told_to_be_done_when_all_of_it_is() -> None:
    """Another member took it over, and had done its first part."""
    check(simulate_claims(70102))


def test_a_message_done_under_a_former_claim_is_committed_by_its_new_owner_too() -> None:
    """Whose transaction failed once: it took the former owner's commit for its own."""
    check(simulate_claims(940013))


def test_a_member_that_was_stopped_hands_out_nothing_of_a_range_that_another_has() -> None:
    """It was stopped between the check of its claim and the hand-out."""
    check(simulate_claims(74035))
    limits = replace(
        QUIET, use=ClaimUse.RANGES, members=3, partitions=1, messages=300, batch=20, work_ms=0,
        interval_ms=500, chaos_ms=15_000, preempt_every=1,
        faults=Faults(freeze_every=30, max_freeze_ms=3000),
    )  # fmt: skip
    assert check(simulate_claims(0, limits)).reached["claims: a range"]
