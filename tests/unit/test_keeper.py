"""What a consumer's keeper does in one beat."""

from __future__ import annotations

import pytest
from tests.unit.worker_parts import Parts

from kafkamq.markers import keeper as module
from kafkamq.markers.keeper import MAX_SLEEP_MS, Keeper
from kafkamq.metrics.health import health


def test_positions_are_written_once_a_second_however_many_verdicts_wake_the_keeper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ms = 1000
    monkeypatch.setattr(module, "monotonic_ms", lambda: now_ms)
    parts, written = Parts(), list[int]()
    keeper = Keeper(parts.state, parts.ack_writer, lambda: written.append(now_ms))
    for now_ms in range(1000, 1000 + 3 * MAX_SLEEP_MS, 10):  # noqa: B007 - the clock reads it
        keeper.beat()
    assert written == [1000, 1000 + MAX_SLEEP_MS, 1000 + 2 * MAX_SLEEP_MS]
    assert keeper.sleep_ms() <= MAX_SLEEP_MS
    health.remove(keeper.loop)
