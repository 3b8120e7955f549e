"""Pytest fixtures of real servers: `kafka_cluster`, to kill and cut off, and `schema_registry`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal

import pytest

from harness.cluster import KafkaCluster
from harness.network import why_no_network
from harness.registry import LocalRegistry
from kafkamq.dev.artifacts import DEFAULT_VERSION
from kafkamq.dev.environment import cache_dir_from, java_from
from kafkamq.dev.pytest_plugin import chosen_version


def _life(fixture_name: str, config: pytest.Config) -> Literal["session", "function"]:
    """A run of fault tests shares a cluster; elsewhere it would only idle behind its test."""
    del fixture_name
    return "session" if config.option.markexpr == "faults" else "function"


@pytest.fixture(scope=_life)
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
    """Three running brokers in network namespaces, healed between the tests that share them.

    Skips, and says why, where there can be no network namespaces (they need root).
    """
    _kafka_cluster.heal()
    yield _kafka_cluster
    _kafka_cluster.heal()


@pytest.fixture(scope="session")
def schema_registry() -> Iterator[LocalRegistry]:
    """Yield a running schema registry, shared by the session: use subjects of your own."""
    with LocalRegistry(
        cache_dir=cache_dir_from(os.environ), java=java_from(os.environ)
    ) as registry:
        yield registry
