"""Writes a consumer's markers: its STARTs, KEEPALIVEs and ENDs, in order per partition."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import Message as Record

from kafkamq.clients.errors import ErrorWatch, broker_error
from kafkamq.clients.settings import connect, producer_settings
from kafkamq.kafka.namespace import Namespace
from kafkamq.kafka.sender import end_producer, refresh_topic

__all__ = ["MarkerWriter", "Report"]

MAX_QUEUED = 1_000_000  # markers; max_in_flight bounds them long before
_log = logging.getLogger(__name__)

Report = Callable[["KafkaError | None", Record], None]


class MarkerWriter:
    """The markers producer of one consumer (R5); thread-safe.

    Idempotent, acks=all: what is confirmed is in the log, in the order it was written. Delivery
    reports are served by ``poll`` and ``flush``, by one thread at a time: when ``flush`` returns
    True all of them have run. They take locks of their own, so call neither with one held.
    """

    def __init__(self, namespace: Namespace) -> None:
        config = namespace.config
        self._servers = config.bootstrap_servers
        self.topic = config.marker_topic
        self.watch = ErrorWatch(self._servers)
        largest = namespace.facts().max_marker_bytes
        self._settings = producer_settings(
            config,
            **{
                "message.max.bytes": max(1_000_000, largest + 65_536),
                "queue.buffering.max.messages": MAX_QUEUED,
            },
        )
        self._lock = threading.Lock()  # of the client's life
        self._serving = threading.Lock()
        self._client = connect(Producer, self._settings, self.watch)
        self._closed = False

    def __len__(self) -> int:
        """Markers, and reports of markers, that are under way."""
        return len(self._client)

    def write(self, value: bytes, key: bytes, partition: int, on_delivery: Report) -> None:
        """Queue one marker.

        Raises:
            BrokerError: The queue is full, or the client refuses it.
        """
        try:
            self._client.produce(self.topic, value, key, partition, on_delivery=on_delivery)
        except BufferError:
            full = KafkaError(KafkaError._QUEUE_FULL, "the markers queue is full")
            raise broker_error(full, f"writing to {self.topic}") from None
        except KafkaException as error:
            if not refresh_topic(self._client, self.topic, error):
                raise broker_error(error, f"writing to {self.topic}") from error
            self._write_again(value, key, partition, on_delivery)

    def _write_again(self, value: bytes, key: bytes, partition: int, on_delivery: Report) -> None:
        """The partition is new, and known by now."""
        try:
            self._client.produce(self.topic, value, key, partition, on_delivery=on_delivery)
        except (BufferError, KafkaException) as error:
            inner = error if isinstance(error, KafkaException) else KafkaError(KafkaError._FAIL)
            raise broker_error(inner, f"writing to {self.topic}") from error

    def flush(self, timeout_s: float) -> bool:
        """Serve reports until nothing is under way; False: not in time."""
        with self._serving:
            return self._client.flush(max(0.0, timeout_s)) == 0

    def poll(self) -> None:
        """Serve the reports that are there, unless another thread does so."""
        if self._serving.acquire(blocking=False):
            try:
                self._client.poll(0)
            finally:
                self._serving.release()

    def renew(self) -> None:
        """Make a new client after a fatal error; what the old one held is reported as failed."""
        with self._lock:
            if self._closed:
                return
            old = self._client
            self.watch = ErrorWatch(self._servers)
            self._client = connect(Producer, self._settings, self.watch)
        _log.warning("the markers producer was made anew after a fatal error")
        with self._serving:
            end_producer(old)

    def close(self) -> None:
        """End the client; what is still queued fails. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with self._serving:
            end_producer(self._client)
