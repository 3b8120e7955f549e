"""The table of capabilities: what is refused, and who is named instead."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import within

from kafkamq import Backoff, ConfigError, Service
from kafkamq.queue.rules.capabilities import CAPABILITIES, Feature, backends_with, has, require
from kafkamq.types import Backend

ROOT = Path(__file__).resolve().parents[2]


def test_each_backend_declares_itself() -> None:
    assert set(CAPABILITIES) == set(Backend)
    for backend, found in CAPABILITIES.items():
        assert found.backend is backend
        assert found.orders
        assert not set(found.notes) - set(Feature)


@pytest.mark.parametrize("feature", Feature)
def test_some_backend_has_it(feature: Feature) -> None:
    assert backends_with((feature,))


def test_who_lacks_it_names_those_that_have_it() -> None:
    with pytest.raises(ConfigError, match=r"'share' has no delays.*; markers, offsets and claims"):
        require(Backend.SHARE, Feature.RETRY_DELAY, "queue 'a': nack(delay=5)")
    with pytest.raises(ConfigError, match="'claims' has no order by key; offsets has it"):
        require(Backend.CLAIMS, Feature.KEY_ORDER, "queue 'a'")
    assert has(Backend.OFFSETS, Feature.KEY_ORDER)
    require(Backend.OFFSETS, Feature.KEY_ORDER, "queue 'a'")


@pytest.mark.parametrize(
    ("backend", "options", "said"),
    [
        ("share", {"backoff": Backoff(first=5.0)}, "markers, offsets and claims have it"),
        ("offsets", {"exactly_once": True}, "markers has it"),
        ("claims", {"topic": "no topic"}, "topic is 'no topic'"),
        ("markers", {"topic": "no topic"}, "topic is 'no topic'"),
        ("markers", {"group": "\ud800"}, "without lone surrogates"),
        ("sqs", {}, "'markers', 'offsets', 'share', 'claims'"),
    ],
)
def test_a_queue_refuses_what_its_backend_lacks(
    backend: str, options: dict[str, object], said: str
) -> None:
    with Service("localhost:1") as service, pytest.raises(ConfigError, match=said):
        service.queue("a", backend=backend, **options)


def test_a_queue_has_a_topic_of_its_own() -> None:
    with Service("localhost:1", "ns") as service:
        assert service.queue("a", backend="share").config.topic == "ns.q.a"
        assert service.queue("a", backend="claims", topic="t").config.topic == "t"
        assert service.queue("a").config.topic == ""
        with pytest.raises(ConfigError, match="shares its namespace"):
            service.queue("a").create_topics()
        with pytest.raises(ConfigError, match="offsets and claims have it"):
            service.queue("a").consumer(ordering="partition")


def test_the_command_prints_the_table() -> None:
    command = [sys.executable, "-m", "kafkamq.cli", "backends"]
    shown = subprocess.run(
        [*command, "--json"], capture_output=True, check=True, timeout=within(60)
    )
    found = json.loads(shown.stdout)
    assert list(found) == ["markers", "offsets", "share", "claims"]
    assert found["share"]["features"]["extend"] is False
    assert found["share"]["min_kafka"] == "4.2"
    assert found["offsets"]["orders"] == ["key", "partition", "unordered"]


def test_the_document_is_current() -> None:
    script = ROOT / "tools" / "generate_backends.py"
    done = subprocess.run([sys.executable, str(script), "--check"], check=False, timeout=within(60))
    assert done.returncode == 0, "run tools/generate_backends.py"
