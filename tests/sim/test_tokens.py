"""Verdicts by token under kills of holders and givers: one counts, the others are told (R34)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from harness.simulation.limits import Limits, draw_token_limits
from harness.simulation.settlers import Reported
from harness.simulation.simulator import Simulation, simulate
from tests.examples import examples

from kafkamq.errors import LeaseLostError, StateError
from kafkamq.markers.tokens import TokenSettler
from kafkamq.testing.checker import CheckFailedError
from kafkamq.types import Outcome

SEEDS = 4
MANY_SEEDS = 300
CALM = Limits(messages=40, settlers=2, handed_share=0.9, delayed_share=0.0)
ACK, NACK, REJECT = Outcome.ACK, Outcome.NACK, Outcome.REJECT


def reported(simulation: Simulation) -> Counter[tuple[Outcome, bool | None]]:
    return Counter((each.outcome, each.counted) for each in simulation.told.reported)


@pytest.mark.parametrize("seed", range(examples(SEEDS)))
def test_r34_each_seed_tells_the_truth(seed: int) -> None:
    simulate(seed, draw_token_limits(seed)).require_ok()


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_r34_many_seeds_tell_the_truth() -> None:
    for seed in range(SEEDS, SEEDS + MANY_SEEDS):
        simulate(seed, draw_token_limits(seed)).require_ok()


def test_r05_who_left_amid_a_rebalance_gets_nothing_of_it() -> None:
    """Nobody asks for anything, no broker answers, and the group's round ends later."""
    simulate(245, draw_token_limits(245)).require_ok()


def test_r34_all_kinds_of_verdicts_count_and_are_refused() -> None:
    simulation = simulate(1, CALM)
    simulation.require_ok()
    found = reported(simulation)
    assert all(found[outcome, told] for outcome in (ACK, NACK, REJECT) for told in (True, False))


# ---- red: the judge names each lie, and the shipped code is what keeps it from being told


@pytest.fixture(scope="module")
def calm() -> Simulation:
    return simulate(1, CALM)


@pytest.mark.parametrize("outcome", [ACK, NACK, REJECT])
def test_a_verdict_that_did_not_count_and_is_told_to_is_named(
    calm: Simulation, outcome: Outcome
) -> None:
    refused = [each for each in calm.told.reported if each.outcome is outcome and not each.counted]
    assert refused
    lies = [replace(each, counted=True) for each in refused]
    told = replace(calm.told, reported=[*calm.told.reported, *lies])
    with pytest.raises(CheckFailedError, match="told to count"):
        replace(calm, told=told).require_ok()


@pytest.mark.parametrize("outcome", [ACK, NACK, REJECT])
def test_a_verdict_that_counts_and_is_refused_is_named(calm: Simulation, outcome: Outcome) -> None:
    counted = next(each for each in calm.told.reported if each.outcome is outcome and each.counted)
    others = [each for each in calm.told.reported if each.message_id != counted.message_id]
    told = replace(
        calm.told, reported=[*others, Reported(counted.message_id, outcome, counted=False)]
    )
    with pytest.raises(CheckFailedError, match="one does"):
        replace(calm, told=told).require_ok()


def test_givers_who_are_told_nothing_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    own: Callable[..., None] = TokenSettler.settle

    def settle(self: TokenSettler, *args: Any, **kwargs: Any) -> None:
        try:
            own(self, *args, **kwargs)
        except (StateError, LeaseLostError):
            return

    monkeypatch.setattr(TokenSettler, "settle", settle)
    with pytest.raises(CheckFailedError, match="told to count"):
        simulate(1, CALM).require_ok()
