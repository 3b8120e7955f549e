"""Writes a consumer's markers: its STARTs, KEEPALIVEs and ENDs, in order per partition."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import Message as Record

from kafkamq.clients.errors import ErrorWatch, broker_error, raised_error
from kafkamq.clients.producers import end_producer
from kafkamq.clients.settings import connect, producer_settings
from kafkamq.kafka.clock import monotonic_ms
from kafkamq.kafka.namespace import Namespace
from kafkamq.kafka.sender import refresh_topic

__all__ = ["REPORTS_MS", "MarkerWriter", "Report"]

REPORTS_MS = 100  # delivery reports wait no longer than this for the application
MAX_QUEUED = 1_000_000  # markers; max_in_flight bounds them long before
LINGER_MS = 0.5  # markers of one batch in few requests; who waits for one flushes, so it sets out
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
                "linger.ms": LINGER_MS,
            },
        )
        self._lock = threading.Lock()  # of the client's life
        self._serving = threading.Lock()
        self._client = connect(Producer, self._settings, self.watch)
        self._served_ms = 0
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

    def write_many(self, partition: int, markers: list[dict[str, Any]]) -> None:
        """Queue markers of one partition: value, key and callback of each.

        Raises:
            BrokerError: As ``write``; markers that are not queued have an ``_error``.
        """
        try:
            queued = self._client.produce_batch(self.topic, markers, partition)
        except KafkaException as error:
            for marker in markers:
                marker["_error"] = error
            raise broker_error(error, f"writing to {self.topic}") from error
        if queued == len(markers):
            return
        for marker in markers:
            if "_error" in marker:  # the queue is full, or the partition is new: it says which
                self.write(marker["value"], marker["key"], partition, marker["callback"])
                del marker["_error"]

    def _write_again(self, value: bytes, key: bytes, partition: int, on_delivery: Report) -> None:
        """The partition is new, and known by now."""
        try:
            self._client.produce(self.topic, value, key, partition, on_delivery=on_delivery)
        except (BufferError, KafkaException) as error:
            inner = error if isinstance(error, KafkaException) else KafkaError(KafkaError._FAIL)
            raise broker_error(inner, f"writing to {self.topic}") from error

    def flush(self, timeout_s: float) -> bool:
        """Serve reports until nothing is under way; False: not in time.

        Raises:
            BrokerError: The client failed for good while it held markers. It was made anew; what
                it held is reported.
        """
        client = self._client
        try:
            with self._serving:
                is_done = client.flush(max(0.0, timeout_s)) == 0
            self._served_ms = monotonic_ms()
            return is_done
        except (KafkaException, SystemError) as error:
            cause = raised_error(error)
            held = len(client)  # only now: before, the error itself was counted too
            self.renew()
            if not held:  # nobody's marker has failed: the next write meets the cause again
                return True
            raise broker_error(cause, f"writing to {self.topic}") from cause

    def poll(self) -> None:
        """Serve the reports that are there, unless another thread does so, or did a moment ago.

        Whoever serves takes turns with the application's thread, one per report, which is slow.

        Raises:
            BrokerError: As ``flush``.
        """
        if monotonic_ms() - self._served_ms < REPORTS_MS:
            return
        if not self._serving.acquire(blocking=False):
            return
        failure: KafkaException | None = None
        try:
            self._client.poll(0)
        except (KafkaException, SystemError) as error:
            failure = raised_error(error)
        finally:
            self._serving.release()
        if failure is not None:
            self.renew()
            raise broker_error(failure, f"writing to {self.topic}") from failure

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
