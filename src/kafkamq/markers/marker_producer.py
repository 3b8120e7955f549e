"""Writes a consumer's markers: its STARTs, KEEPALIVEs and ENDs, in order per partition."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any

from kafkamq.queue.namespace import Namespace
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.errors import KafkaException
from kafkamq.transport.port import Producer
from kafkamq.transport.producer import IdempotentProducer, Report
from kafkamq.transport.settings import marker_settings

REPORTS_MS = 100  # delivery reports wait no longer than this for the application
MAX_QUEUED = 1_000_000  # markers; max_in_flight bounds them long before
LINGER_MS = 0.5  # markers of one batch in few requests; who waits for one flushes, so it sets out


class MarkerWriter(IdempotentProducer):
    """The markers producer of one consumer (R5); thread-safe."""

    def __init__(self, namespace: Namespace) -> None:
        config = namespace.config
        self.topic = config.marker_topic
        self._served_ms = 0
        settings = marker_settings(
            config, queue_buffering_max_messages=MAX_QUEUED, linger_ms=LINGER_MS
        )
        super().__init__(config, settings)

    def write(self, value: bytes, key: bytes, partition: int, on_delivery: Report) -> None:
        """Queue one marker.

        Raises:
            BrokerError: The queue is full, or the client refuses it.
            StateError: Closed.
        """
        self.produce(self.topic, value, key, partition, None, on_delivery)

    def write_many(self, partition: int, markers: list[dict[str, Any]]) -> None:
        """Queue markers of one partition: value, key and callback of each.

        Raises:
            BrokerError: As ``write``; markers that are not queued have an ``_error``.
            StateError: Closed.
        """
        self.produce_many(self.topic, partition, markers)

    def poll(self) -> None:
        """Serve the reports that are there, unless another thread does so, or did a moment ago.

        Whoever serves takes turns with the application's thread, one per report, which is slow.

        Raises:
            BrokerError: As ``flush``.
        """
        if monotonic_ms() - self._served_ms < REPORTS_MS or self._serving.locked():
            return
        self._raise(self._serve(methodcaller("poll", 0.0)))

    def _serve(self, call: Callable[[Producer], int]) -> KafkaException | None:
        try:
            return super()._serve(call)
        finally:
            self._served_ms = monotonic_ms()
