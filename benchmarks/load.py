"""A producer of load that says in the end whether all of it is in the log."""

from __future__ import annotations

from typing import Any

from confluent_kafka import KafkaError, Message, Producer

__all__ = ["LoadProducer"]


class LoadProducer(Producer):
    """Idempotent; of the reports of its records Python hears only those of failures."""

    def __init__(self, servers: str, **settings: Any) -> None:
        """``settings``: librdkafka's, ``_`` for ``.``."""
        self._failed: KafkaError | None = None  # the first failure
        given = {name.replace("_", "."): value for name, value in settings.items()}
        super().__init__(
            {
                "bootstrap.servers": servers,
                "enable.idempotence": True,
                "linger.ms": 20,
                "queue.buffering.max.messages": 2_000_000,
                **given,
                "delivery.report.only.error": True,  # the client takes the others without a call
                "on_delivery": self._report,
            }
        )

    def _report(self, error: KafkaError | None, _: Message) -> None:
        self._failed = self._failed or error

    def write(self, *record: Any, **more: Any) -> None:
        """``produce``, which waits while the client has no room."""
        while True:
            try:
                self.produce(*record, **more)
                return
            except BufferError:  # noqa: PERF203 - seldom
                self.poll(0.05)

    def write_batch(self, topic: str, records: list[dict[str, Any]], partition: int) -> None:
        """``produce_batch``, which must take all of them."""
        assert self.produce_batch(topic, records, partition) == len(records), records[-1]

    def confirm(self, timeout_s: float = 120.0) -> None:
        """Wait for all reports: everything is in the log, or an AssertionError says why not."""
        left = self.flush(timeout_s)
        assert self._failed is None, f"the broker did not take the load: {self._failed}"
        assert not left, f"{left} records have no report after {timeout_s:g} s"
