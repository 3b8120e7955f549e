"""What a consumer's keeper does in one beat."""

from __future__ import annotations

import pytest
from tests.unit.worker_parts import Parts, deliver, record, starts_of

from kafkamq.markers import ack_writer as module
from kafkamq.markers.ack_writer import MAX_SLEEP_MS, Keeper
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


def test_the_keeper_is_woken_by_the_first_of_the_verdicts_that_it_gathers() -> None:
    parts = Parts()
    parts.poll(*(record(offset, partition=offset) for offset in range(4)))
    deliver(*starts_of(parts.start()))
    parts.see()
    parts.pipeline.committing(parts.pipeline.committable())
    held = parts.starter.finish(parts.pipeline.committed())
    first, second, third, fourth = (message for _, messages in held for message in messages)
    bell, writer = parts.state.keeper, parts.ack_writer

    first.ack()
    assert bell.wait(0.0)
    second.ack()
    assert not bell.wait(0.0), "it is awake"
    writer.serve()  # it has looked for both
    third.ack()
    assert bell.wait(0.0)
    writer.serve()

    writer.hurry()  # nothing is there
    assert bell.wait(0.0)
    writer.serve()
    fourth.ack()
    assert writer.gathering_s() > 0, "that hurry was not for this one"
