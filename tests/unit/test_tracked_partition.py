"""One marker partition of a local tracker, without its loop."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from kafkamq.config import TrackerConfig
from kafkamq.markers.rules.hold import NEVER
from kafkamq.markers.tracker.partition import Started, TrackedPartition
from kafkamq.markers.tracker.settlement import SettleReport
from kafkamq.types import Marker, MarkerType, MessageId

TWO_TICKS = (Marker(MarkerType.TICK),) * 2
"""Which a lease does not outlive: the first one's gap earns it a grace (R3)."""


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


@pytest.mark.parametrize(("number", "refresh_s"), [(0, 60), (3, 3600)])
def test_a_silent_partition_writes_its_ledger_again(
    number: int, refresh_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other replicas wait for what partition 0's says: one that was deleted is there again soon."""
    part = TrackedPartition("markers", number, TrackerConfig(), NEVER)
    ledger: Any = SimpleNamespace(last=SimpleNamespace(batch=1), epoch=1)
    part.start(Started(ledger, 0, "us"), is_written_soon=False)
    part.core.apply(0, 1000, Marker(MarkerType.TICK, consumer_id="us", engine_epoch=1))
    part.settled(part.position(), SettleReport(transactions=1))
    began_s = time.monotonic()
    now_s = began_s + refresh_s - 1
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    assert not part.wants_position()
    now_s = began_s + refresh_s + 1
    assert part.wants_position()


def test_what_is_awaited_is_planned_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """R18: not at once, as nothing has changed; and what else falls due is planned meanwhile."""
    part = TrackedPartition("markers", 3, TrackerConfig(), NEVER)
    ledger: Any = SimpleNamespace(last=SimpleNamespace(batch=1), epoch=1)
    part.start(Started(ledger, 0, "us"))
    part.core.apply(0, 1000, Marker(MarkerType.TICK, consumer_id="us", engine_epoch=1))

    def fall_due(offset: int) -> None:
        markers = Marker(MarkerType.START, MessageId(0, offset), 10, consumer_id="c"), *TWO_TICKS
        for number, marker in enumerate(markers):
            part.core.apply(offset + number, 1000 + 100 * (offset + number), marker)

    fall_due(1)
    awaited = list(part.plan())
    assert len(awaited) == 1
    part.settled(part.position(), SettleReport(awaited=awaited))
    part.awaited.add(awaited)
    status = part.status()
    assert status is not None
    assert status.awaited == 1
    fall_due(4)
    assert [each.message_id.offset for each in part.plan()] == [4]
    now_s = time.monotonic() + 6
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    assert [each.message_id.offset for each in part.plan()] == [1]
    assert part.core.due_count() == 2
