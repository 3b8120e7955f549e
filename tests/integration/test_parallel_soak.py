"""Members that are killed and stopped: nothing lost, keys in order, never stuck."""

from __future__ import annotations

import pytest
from tests.integration.parallel_soak import soak


@pytest.mark.slow
def test_a_short_soak(bootstrap: str, namespace: str) -> None:
    verdict = soak(
        bootstrap,
        namespace,
        seed=7,
        members=2,
        records=15_000,
        pause_s=(0.8, 1.6),
        kill_share=0.5,
        timeout_s=40,
    )
    assert verdict.lost == 0
    assert verdict.disorder == []
    assert verdict.kills + verdict.stops >= 1
    if not verdict.kills:
        assert verdict.repeated == 0


@pytest.mark.faults
@pytest.mark.parametrize("protocol", ["classic", "broker"])
@pytest.mark.parametrize("members", [2, 12])
def test_a_long_soak(bootstrap: str, namespace: str, members: int, protocol: str) -> None:
    verdict = soak(
        bootstrap,
        namespace,
        seed=members,
        members=members,
        records=500_000,
        pause_s=(0.1, 0.5) if members == 12 else (1.0, 3.0),
        kill_share=0.3,
        timeout_s=240,
        protocol=protocol,
    )
    assert verdict.lost == 0
    assert verdict.disorder == []


@pytest.mark.faults
def test_transactions_survive_kills(bootstrap: str, namespace: str) -> None:
    """Who reads committed data sees the result of each record exactly once."""
    verdict = soak(
        bootstrap,
        namespace,
        seed=11,
        members=3,
        records=60_000,
        pause_s=(1.5, 3.0),
        kill_share=0.7,
        timeout_s=120,
        mode="transactional",
    )
    assert verdict.kills
    assert (verdict.lost, verdict.repeated, verdict.disorder) == (0, 0, [])
