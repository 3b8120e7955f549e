"""The pytest fixture `kafka_cluster`: three real brokers to kill, pause and cut off."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from harness.cluster import KafkaCluster
from harness.network import why_no_network
from kafkamq.dev.artifacts import DEFAULT_VERSION
from kafkamq.dev.environment import cache_dir_from, java_from
from kafkamq.dev.pytest_plugin import chosen_version


@pytest.fixture(scope="session")
def _kafka_cluster(request: pytest.FixtureRequest) -> Iterator[KafkaCluster]:
    if reason := why_no_network():
        pytest.skip(f"no cluster on this machine: {reason}")
    with KafkaCluster(
        chosen_version(request.config, DEFAULT_VERSION),
        cache_dir=cache_dir_from(os.environ),
        java=java_from(os.environ),
    ) as cluster:
        yield cluster


@pytest.fixture
def kafka_cluster(_kafka_cluster: KafkaCluster) -> Iterator[KafkaCluster]:
    """Three running brokers in network namespaces, shared by the session, healed between tests.

    Skips, and says why, where there can be no network namespaces (they need root).
    """
    _kafka_cluster.heal()
    yield _kafka_cluster
    _kafka_cluster.heal()
