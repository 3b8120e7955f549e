"""The broker goes away under a local tracker: killed and back, frozen and back."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from tests.integration.tracker_logs import Logs
from tests.waiting import wait_until

from kafkamq.config import TrackerConfig
from kafkamq.dev import LocalKafka, cache_dir_from, java_from
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.types import Outcome


@pytest.fixture
def broker() -> Iterator[LocalKafka]:
    with LocalKafka(cache_dir=cache_dir_from(os.environ), java=java_from(os.environ)) as broker:
        yield broker


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["kill", "pause"])
def test_an_outage_delays_and_neither_loses_nor_repeats(
    broker: LocalKafka, namespace: str, kind: str
) -> None:
    logs = Logs(broker.bootstrap_servers, namespace)
    with LocalTracker(logs.config, TrackerConfig(max_offsets_per_commit=50)).in_thread() as tracker:
        wait_until(lambda: tracker.is_live)
        ids = logs.send(4000)
        logs.start(*ids, timeout_ms=1000)
        wait_until(lambda: len(logs.copied()) > 100)  # it is firing
        if kind == "kill":
            broker.kill()
            time.sleep(2)
            broker.start()
        else:
            broker.pause()
            time.sleep(12)  # longer than the transaction's timeout
            broker.resume()
        wait_until(lambda: len(logs.ends(Outcome.REDELIVERED)) >= len(ids), timeout_s=90)
        late = logs.send(1)
        logs.start(*late, timeout_ms=500)
        wait_until(lambda: set(late) <= set(logs.ends(Outcome.REDELIVERED)), timeout_s=60)
    expected = Counter((id_.partition, id_.offset) for id_ in [*ids, *late])
    assert Counter(logs.copied()) == expected
    assert Counter(logs.ends(Outcome.REDELIVERED)) == Counter([*ids, *late])
