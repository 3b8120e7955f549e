"""In-process tracker = tracker through a store (as on Spark) = naive model, on random logs."""

from __future__ import annotations

from collections import Counter

import pytest
from harness.agreement import check_agreement, cut_batches, plan_of_batches
from harness.random_markers import random_markers
from tests.examples import examples

from kafkamq.markers.rules.chunks import LIMITS, PageLimits
from kafkamq.markers.rules.delivery import DueCause, Settle
from kafkamq.markers.rules.hold import NEVER

CARRY_AFTER_MS = (NEVER, 5000, 30_000)
FEW = PageLimits(listed=4, kept=2, page=3, least=2)


def agree(seeds: range, count: int, limits: PageLimits = LIMITS, batch_rate: float = 0.0) -> int:
    return sum(
        check_agreement(
            random_markers(seed, count, partition=seed % 4, batch_rate=batch_rate),
            seed,
            partition=seed % 4,
            carry_after_ms=CARRY_AFTER_MS[seed % 3],
            limits=limits,
        )
        for seed in seeds
    )


def test_three_ways_of_folding_agree() -> None:
    assert agree(range(examples(60)), 150) > examples(500)


def test_three_ways_of_folding_agree_where_most_of_the_state_is_in_pages() -> None:
    assert agree(range(examples(60)), 150, FEW) > examples(500)


def test_r27_a_record_with_batches_means_a_record_for_each_message() -> None:
    assert agree(range(examples(30)), 80, batch_rate=0.6) > examples(500)


def test_r27_batches_through_a_state_that_is_mostly_in_pages() -> None:
    assert agree(range(100, 100 + examples(20)), 80, FEW, 0.6) > examples(300)


@pytest.mark.faults
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(1000, 1600, 75))
def test_r27_batches_in_many_logs(first: int) -> None:
    assert agree(range(first, first + 75), 250, FEW if first % 2 else LIMITS, 0.5) > 1000


@pytest.mark.faults
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(60, 1000, 94))
def test_three_ways_of_folding_agree_on_many_logs(first: int) -> None:
    assert agree(range(first, first + 94), 300, FEW if first % 4 else LIMITS) > 1000


def test_random_logs_reach_every_cause() -> None:
    """The generator is worth something only if everything happens in its logs."""
    causes: Counter[object] = Counter()
    for seed in range(60):
        batches = cut_batches(random_markers(seed, 300), seed)
        for plan in plan_of_batches(batches, carry_after_ms=CARRY_AFTER_MS[seed % 3]):
            causes.update(a.cause if isinstance(a, Settle) else "carry" for a in plan)
    assert causes.keys() == {*DueCause, "carry"}
    assert min(causes.values()) >= 10, causes


def test_random_logs_are_reproducible() -> None:
    assert random_markers(7, 100) == random_markers(7, 100)
    assert random_markers(7, 100) != random_markers(8, 100)
