"""The member of a parallel consumer's group, where its position is outside the log."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message, TopicPartition

from kafkamq.config import ServiceConfig
from kafkamq.parallel.config import ParallelConfig
from kafkamq.parallel.positions import Position
from kafkamq.parallel.rules.offsets import OffsetTracker
from kafkamq.parallel.source import Source
from kafkamq.parallel.stats import Stats
from kafkamq.transport import follower


class Client:
    """A consumer that is assigned one partition, polls events, and notes what is asked of it."""

    def __init__(self, events: list[object], end: int) -> None:
        self.calls: list[str] = []
        self.events = events
        self.end = end

    def subscribe(self, _: Sequence[str], *, on_assign: Any, **__: object) -> None:
        self.on_assign = on_assign

    def assignment(self) -> list[TopicPartition]:
        return [TopicPartition("t", 0)]

    def get_watermark_offsets(self, *_: object, **__: object) -> tuple[int, int]:
        return 0, self.end

    def consume(self, *_: object) -> list[object]:
        events, self.events = self.events, []
        return events

    def __getattr__(self, name: str) -> Any:
        return lambda _: self.calls.append(name)


@pytest.mark.parametrize(("end", "is_another"), [(60, True), (2000, False)])
def test_another_log_is_fetched_also_if_the_one_before_was_paused(
    monkeypatch: pytest.MonkeyPatch, end: int, is_another: bool
) -> None:
    """Its member begins again and knows of no pause; in the same log it ends that itself.

    Nor does it hear that the log before was read to its end.
    """
    codes = KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET
    client = Client([Message("t", 0, 1000, error=KafkaError(code)) for code in codes], end)
    monkeypatch.setattr(follower, "open_consumer", lambda *_: client)
    service = ServiceConfig(bootstrap_servers="nowhere:1")
    config = ParallelConfig(service=service, topics=("^t",), group_id="g", on_data_loss="skip")
    begun: list[int] = []
    member: Any = SimpleNamespace(
        assigned=lambda _: None, restarted=lambda position: begun.append(position.offset)
    )
    source = Source(config, member, Stats())
    there = Position("t", 0, 1000, OffsetTracker(1000), True)
    monkeypatch.setattr(source, "_find", lambda _: [there])
    source.subscribe()
    client.on_assign(client, [TopicPartition("t", 0)])
    client.calls.clear()
    assert source.poll(10, 0.0) == []
    assert begun == ([0] if is_another else [])
    assert client.calls == [
        "incremental_unassign",
        "incremental_assign",
        *(["resume"] if is_another else []),
    ]
    assert not source._group.outside
    assert not source.ends
