"""One marker partition of a local tracker, without its loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kafkamq.config import TrackerConfig
from kafkamq.markers.rules.entry import NEVER
from kafkamq.markers.tracker.partition import Started, TrackedPartition
from kafkamq.types import Marker, MarkerType


def test_a_partition_that_waits_for_another_start_is_not_shown_as_live() -> None:
    part = TrackedPartition("markers", 3, TrackerConfig(), NEVER)
    ledger: Any = SimpleNamespace(last=SimpleNamespace(batch=1), epoch=1)
    part.start(Started(ledger, 0, "us"))
    part.core.apply(0, 1000, Marker(MarkerType.TICK, consumer_id="us", engine_epoch=1))
    status = part.status()
    assert status is not None
    assert status.is_live
    part.wait()  # fenced, or the outcome of its transaction is not known
    assert part.last_status is not None
    assert not part.last_status.is_live
    assert part.last_status.position == status.position
