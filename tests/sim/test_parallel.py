"""The shipped parallel consumer, simulated: each seed draws a group, its handlers and its faults.

A failure names its seed: ``make sim SEEDS=N..N ARGS="--kind parallel"`` shows it again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from harness.simulation.limits import Faults
from harness.simulation.parallel.draw import Manner, ParallelLimits, Use
from harness.simulation.parallel.ledger import PARALLEL_STATES
from harness.simulation.parallel.run import ParallelSimulation, simulate_parallel
from tests.examples import examples

SEEDS = 100
CHUNK = 20
MANY_SEEDS = 1000


def check(simulation: ParallelSimulation) -> ParallelSimulation:
    """Fail with what is wrong, and the seed that shows it."""
    simulation.require_ok()
    return simulation


@cache
def reached_by(first: int) -> frozenset[str]:
    """The states that a chunk of seeds reaches; fails with the first seed that is not in order."""
    reached: set[str] = set()
    for seed in range(first, first + CHUNK):
        reached.update(check(simulate_parallel(seed)).reached)
    return frozenset(reached)


@pytest.mark.parametrize("first", range(0, examples(SEEDS), CHUNK))
def test_seeds(first: int) -> None:
    reached_by(first)


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_many_seeds_reach_every_state() -> None:
    reached = frozenset[str]().union(*(reached_by(at) for at in range(0, MANY_SEEDS, CHUNK)))
    assert sorted(PARALLEL_STATES - reached) == []


# ---- one thing at a time

QUIET = ParallelLimits(members=2, records=60, keys=5)


@pytest.mark.parametrize("seed", range(examples(2)))
@pytest.mark.parametrize("protocol", ["eager", "cooperative", "consumer"])
@pytest.mark.parametrize("mode", ["asynchronous", "synchronous", "transactional"])
def test_without_faults_every_record_is_handled_once(seed: int, protocol: str, mode: str) -> None:
    """While members come and go: what is done beyond a committed offset stays done."""
    use = Use.PRODUCE if mode == "transactional" else Use.POLL
    limits = replace(QUIET, protocol=protocol, mode=mode, use=use, closes=3, joins=1)
    assert check(simulate_parallel(seed, limits)).handled == 60


@pytest.mark.parametrize("seed", range(examples(3)))
def test_records_that_are_given_up_are_one_dead_letter_each(seed: int) -> None:
    manners = ((Manner.QUICK, 0.6), (Manner.HOPELESS, 0.2), (Manner.REJECTS, 0.2))
    limits = replace(QUIET, manners=manners, max_attempts=2)
    simulation = check(simulate_parallel(seed, limits))
    assert 20 < simulation.handled < 60


@pytest.mark.parametrize("seed", range(examples(2)))
@pytest.mark.parametrize("by", ["an aborted transaction", "a rebalance"])
def test_a_key_is_with_one_handler_of_a_process(seed: int, by: str) -> None:
    """Whatever becomes of its partition while the handler is at work."""
    manners = ((Manner.QUICK, 0.7), (Manner.SLOW, 0.3))
    limits = replace(QUIET, revoke_timeout_ms=100, protocol="eager", closes=2, joins=2)
    if by == "an aborted transaction":
        manners = (*manners, (Manner.LARGE, 0.1))
        limits = replace(QUIET, use=Use.PRODUCE, mode="transactional", max_attempts=2)
    reached = check(simulate_parallel(seed, replace(limits, manners=manners))).reached
    assert reached["parallel: a transaction is aborted"] or by == "a rebalance"
    assert reached["a partition went with a handler at work"] or by != "a rebalance"


@pytest.mark.parametrize("seed", [74875, 76012])
def test_what_is_known_of_a_log_that_was_truncated_says_nothing_of_the_next_one(seed: int) -> None:
    """74875: a commit was made again behind it; 76012: the judge took it for noticed too early."""
    assert check(simulate_parallel(seed)).reached["a log was truncated under its readers"]


@pytest.mark.parametrize("seed", range(examples(3)))
def test_b3_a_log_that_was_replaced_is_read_from_its_start(seed: int) -> None:
    limits = replace(QUIET, partitions=1, truncations=2, records=100, chaos_ms=10_000)
    simulation = check(simulate_parallel(seed, limits))
    assert simulation.reached["a log was truncated under its readers"]


@pytest.mark.parametrize("seed", range(examples(3)))
def test_members_that_die_all_the_time_repeat_and_lose_nothing(seed: int) -> None:
    limits = replace(QUIET, members=3, faults=Faults(kill_every=200, latency_ms=100))
    assert check(simulate_parallel(seed, limits)).deaths > 3


def test_nothing_is_written_to_a_log_whose_lost_records_a_map_still_knows() -> None:
    """New records at their places would be taken for done, which nobody could tell."""
    check(simulate_parallel(71021))


def test_a_dead_letter_behind_a_refused_result_is_not_written_again() -> None:
    check(simulate_parallel(74733))
