"""The next batch's commit sets out as a receive ends; what becomes of it is for the next one."""

from __future__ import annotations

import pytest
from tests.unit.test_interrupts import COUNT, EXPIRED, _Reader, _state, _without_kafka

from kafkamq.errors import BrokerError
from kafkamq.transport.offset_commits import Commit

__all__ = ["_without_kafka"]  # a fixture


class _Failing(_Reader):
    """Of its third commit is known that it failed."""

    commits = 0

    def commit(self, timeout_s: float) -> Commit:
        self.commits += 1
        if self.commits == 3:
            raise BrokerError("not authorized", code="GROUP_AUTHORIZATION_FAILED")
        return super().commit(timeout_s)


def test_an_error_of_that_commit_keeps_nothing_from_being_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kafkamq.markers.batches.AHEAD_COUNT", 1)
    monkeypatch.setattr("kafkamq.markers.batches.AHEAD_MS", 1 << 40)
    monkeypatch.setattr("kafkamq.markers.consumer.MessageReader", _Failing)
    consumer = _state()
    found: list[int] = []
    while len(found) < COUNT - 1:
        for message in consumer.receive_many(2, 0.0):
            found.append(message.offset)
            message.ack()
    assert sorted(found) == [offset for offset in range(COUNT) if offset != EXPIRED]
