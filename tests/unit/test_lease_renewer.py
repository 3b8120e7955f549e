"""What a consumer's own thread does in one beat."""

from __future__ import annotations

import pytest
from tests.unit.worker_parts import Parts

from kafkamq.markers import lease_renewer as module
from kafkamq.markers.lease_renewer import MAX_SLEEP_MS, LeaseRenewer
from kafkamq.metrics.health import health


def test_the_group_is_looked_after_once_a_second_however_many_verdicts_wake_the_heart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ms = 1000
    monkeypatch.setattr(module, "monotonic_ms", lambda: now_ms)
    parts, tended = Parts(), list[int]()
    renewer = LeaseRenewer(parts.state, parts.ack_writer, lambda: tended.append(now_ms))
    for now_ms in range(1000, 1000 + 3 * MAX_SLEEP_MS, 10):  # noqa: B007 - the clock reads it
        renewer._beat()
    assert tended == [1000, 1000 + MAX_SLEEP_MS, 1000 + 2 * MAX_SLEEP_MS]
    assert renewer._sleep_ms() <= MAX_SLEEP_MS
    health.remove(renewer._loop)
