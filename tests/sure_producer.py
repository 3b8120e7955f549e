"""A producer for tests: what it wrote is in Kafka, or the test ends here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from confluent_kafka import KafkaError, Message, Producer
from tests.waiting import within

from kafkamq.transport import clients
from kafkamq.types import Headers

__all__ = ["Row", "SureProducer", "write_records"]

Row = tuple[bytes | None, bytes | None, int, Headers]


class SureProducer(Producer):
    """Counts reports: a flush that leaves the client empty says nothing of what was refused."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(dict(settings))
        self._sent = 0
        self._confirmed = 0
        self._refused: list[KafkaError] = []

    def produce(
        self,
        topic: str,
        *args: Any,
        on_delivery: Callable[[KafkaError | None, Message], None] | None = None,
        **more: Any,
    ) -> None:

        def told(error: KafkaError | None, record: Message) -> None:
            if error is None:
                self._confirmed += 1
            else:
                self._refused.append(error)
            if on_delivery is not None:
                on_delivery(error, record)

        super().produce(topic, *args, on_delivery=told, **more)
        self._sent += 1

    def confirm(self, timeout_s: float = 30.0) -> None:
        """Wait for the reports of all that was produced."""
        self.flush(within(timeout_s))
        assert not self._refused, self._refused[0]
        assert self._confirmed == self._sent, f"{self._confirmed} of {self._sent} are confirmed"


def write_records(producer: clients.Producer, topic: str, records: Iterable[Row]) -> None:
    """Through a client of the port: value, key, partition and headers of each; all are there."""
    told: list[KafkaError | None] = []
    count = 0
    for value, key, partition, headers in records:
        producer.produce(
            topic,
            value,
            key,
            partition,
            headers=list(headers),
            on_delivery=lambda error, _: told.append(error),
        )
        count += 1
    producer.flush(within(30.0))
    assert told == [None] * count, f"of {count} records: {told}"
