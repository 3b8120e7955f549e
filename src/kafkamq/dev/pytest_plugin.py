"""The pytest fixture `kafka_broker`: one real broker, which serves a whole session.

It starts when the first test asks for it. ``--kafka-version`` (or
``kafkamq_kafka_version`` in the ini file) chooses another version of Kafka; ``KAFKAMQ_CACHE``,
``XDG_CACHE_HOME`` and ``JAVA_HOME`` are respected.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kafkamq.dev.broker import LocalKafka


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kafkamq")
    group.addoption(
        "--kafka-version", metavar="VERSION", help="version of Kafka that kafka_broker runs"
    )
    parser.addini("kafkamq_kafka_version", "version of Kafka that kafka_broker runs", default="")


@pytest.fixture(scope="session")
def kafka_broker(request: pytest.FixtureRequest) -> Iterator[LocalKafka]:
    """Yield a running broker, shared by the session: use topic names of your own."""
    # Plugins load in every test run where this package is installed; most need no Kafka.
    from kafkamq.dev.artifacts import DEFAULT_VERSION
    from kafkamq.dev.broker import LocalKafka
    from kafkamq.dev.environment import cache_dir_from, java_from

    with LocalKafka(
        chosen_version(request.config, DEFAULT_VERSION),
        cache_dir=cache_dir_from(os.environ),
        java=java_from(os.environ),
    ) as broker:
        yield broker


def chosen_version(config: pytest.Config, default: str) -> str:
    chosen = config.getoption("--kafka-version") or config.getini("kafkamq_kafka_version")
    return str(chosen or default)
