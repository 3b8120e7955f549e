"""Members that are killed and stopped: nothing lost, keys in order, never stuck."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from tests.integration.parallel_soak import soak

from kafkamq.dev import LocalKafka, cache_dir_from, java_from

_log = logging.getLogger(__name__)
WATCHFUL = {  # Kafka's defaults miss a killed member of a group.protocol=consumer after 45 s
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.min.heartbeat.interval.ms": "500",
    "group.consumer.heartbeat.interval.ms": "1000",
}


@pytest.fixture(scope="module")
def watchful() -> Iterator[LocalKafka]:
    """A broker that soon misses a member that was killed, whatever the group's protocol."""
    with LocalKafka(
        properties=WATCHFUL, cache_dir=cache_dir_from(os.environ), java=java_from(os.environ)
    ) as broker:
        yield broker


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
        calm_after_s=20,
        timeout_s=120,
    )
    assert verdict.lost == 0
    assert verdict.disorder == []
    assert verdict.unexplained == []
    assert verdict.kills + verdict.stops >= 1


@pytest.mark.faults
@pytest.mark.parametrize("protocol", ["classic", "broker"])
@pytest.mark.parametrize("members", [2, 12])
def test_a_long_soak(
    watchful: LocalKafka,
    namespace: str,
    members: int,
    protocol: str,
) -> None:
    verdict = soak(
        watchful.bootstrap_servers,
        namespace,
        seed=members,
        members=members,
        records=500_000,
        pause_s=(0.1, 0.5) if members == 12 else (1.0, 3.0),
        kill_share=0.3,
        calm_after_s=150,
        timeout_s=300,
        protocol=protocol,
    )
    _log.info("%s", verdict)
    assert verdict.lost == 0
    assert verdict.disorder == []
    assert verdict.unexplained == []
    assert verdict.kills and verdict.stops


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
        calm_after_s=60,
        timeout_s=120,
        mode="transactional",
    )
    _log.info("%s", verdict)
    assert verdict.kills
    assert (verdict.lost, verdict.repeated, verdict.disorder) == (0, 0, [])
