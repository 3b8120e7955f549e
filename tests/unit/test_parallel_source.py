"""The member of a parallel consumer's group, where its position is outside the log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from kafkamq.parallel import source as module
from kafkamq.parallel.source import Source


class Consumer:
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def assignment(self) -> list[object]:
        return [module.TopicPartition("t", 0)]

    def __getattr__(self, name: str) -> Any:
        return lambda _: self.calls.append(name)


class Event:
    """A partition whose position is 1000."""

    def error(self) -> KafkaError:
        return KafkaError(KafkaError._AUTO_OFFSET_RESET)

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return 1000


@pytest.mark.parametrize(("end", "is_another"), [(60, True), (2000, False)])
def test_another_log_is_fetched_also_if_the_one_before_was_paused(
    monkeypatch: pytest.MonkeyPatch, end: int, is_another: bool
) -> None:
    """Its member begins anew and knows of no pause; in the same log it ends that itself."""
    found = Source.__new__(Source)
    consumer = Consumer()
    found._consumer = consumer  # type: ignore[assignment]
    parts: Any = SimpleNamespace(on_data_loss="skip", group_id="g", topics=("t",))
    parts.check = lambda _: None
    found._config = found._watch = parts
    found._is_eager = False
    found._member = SimpleNamespace(restarted=lambda _: None)  # type: ignore[assignment]
    monkeypatch.setattr(module, "log_bounds", lambda *_: (0, end))
    event: Any = Event()
    assert found._event(event.error(), event) is is_another
    assert consumer.calls == [
        "incremental_unassign",
        "incremental_assign",
        *(["resume"] if is_another else []),
    ]
