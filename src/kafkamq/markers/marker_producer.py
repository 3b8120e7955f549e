"""Writes a consumer's markers: its STARTs, KEEPALIVEs and ENDs, in order per partition."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from operator import methodcaller
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import Message as Record

from kafkamq.errors import StateError
from kafkamq.queue.namespace import Namespace
from kafkamq.queue.sender import refresh_topic
from kafkamq.transport.clients import open_producer
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.errors import (
    ErrorWatch,
    Meaning,
    broker_error,
    has_ended,
    meaning,
    raised_error,
)
from kafkamq.transport.port import Producer
from kafkamq.transport.producer import end_producer
from kafkamq.transport.settings import marker_settings

__all__ = ["REPORTS_MS", "MarkerWriter", "Report"]

REPORTS_MS = 100  # delivery reports wait no longer than this for the application
MAX_QUEUED = 1_000_000  # markers; max_in_flight bounds them long before
LINGER_MS = 0.5  # markers of one batch in few requests; who waits for one flushes, so it sets out
_SET_OUT_S = 0.005  # a flush of so long ends what lingers
_SLICE_S = 0.25
_TURN_S = 0.0005
_log = logging.getLogger(__name__)

Report = Callable[["KafkaError | None", Record], None]


class MarkerWriter:
    """The markers producer of one consumer (R5); thread-safe.

    Idempotent, acks=all: what is confirmed is in the log, in the order it was written. A marker is
    in the log when its own delivery report says so, and by nothing else: the client that has
    nothing under way may be another one than took the marker.

    Delivery reports are served by ``poll``, ``flush`` and ``wait_for``, by one thread at a time.
    They take locks of their own, so call none of these with one held that a report takes.
    """

    def __init__(self, namespace: Namespace) -> None:
        config = namespace.config
        self._servers = config.bootstrap_servers
        self.topic = config.marker_topic
        self.watch = ErrorWatch(self._servers)
        largest = namespace.facts().max_marker_bytes
        self._settings = marker_settings(
            config,
            **{
                "message.max.bytes": max(1_000_000, largest + 65_536),
                "queue.buffering.max.messages": MAX_QUEUED,
                "linger.ms": LINGER_MS,
            },
        )
        # Both are taken before ``_client`` is read. Calls that wait take the first; short ones the
        # second; who makes the client anew, or ends it, takes both, in this order.
        self._serving = threading.Lock()
        self._lock = threading.Lock()
        self._client = open_producer(self._settings, self.watch)
        self._served_ms = 0
        self._closed = False

    def __len__(self) -> int:
        """Markers, and reports of markers, that are under way."""
        with self._lock:
            return len(self._client)

    def write(self, value: bytes, key: bytes, partition: int, on_delivery: Report) -> None:
        """Queue one marker.

        Raises:
            BrokerError: The queue is full, or the client refuses it.
            StateError: Closed.
        """
        refused = self._produce(value, key, partition, on_delivery)
        if refused is not None and meaning(refused) is Meaning.NO_PARTITION:
            with self._serving:  # it takes seconds: others may write meanwhile
                refresh_topic(self._client, self.topic, refused)
            refused = self._produce(value, key, partition, on_delivery)
        if refused is not None:
            raise broker_error(refused, f"writing to {self.topic}") from refused

    def _produce(
        self, value: bytes, key: bytes, partition: int, on_delivery: Report
    ) -> KafkaException | None:
        with self._lock:
            self._check_open()
            client = self._client
            try:
                client.produce(self.topic, value, key, partition, on_delivery=on_delivery)
                return None
            except BufferError:
                full = KafkaError(KafkaError._QUEUE_FULL, "the markers queue is full")
                return KafkaException(full)
            except KafkaException as error:
                refused = error
        self._end_if_spent(client, refused)
        return refused

    def _end_if_spent(self, client: Producer, error: KafkaException) -> None:
        if has_ended(error):
            self._renew(client)

    def write_many(self, partition: int, markers: list[dict[str, Any]]) -> None:
        """Queue markers of one partition: value, key and callback of each.

        Raises:
            BrokerError: As ``write``; markers that are not queued have an ``_error``.
            StateError: Closed.
        """
        with self._lock:
            self._check_open()
            client = self._client
            try:
                queued = client.produce_batch(self.topic, markers, partition)
                error = None
            except KafkaException as refused:
                error = refused
        if error is not None:
            self._end_if_spent(client, error)
            for marker in markers:
                marker["_error"] = error
            raise broker_error(error, f"writing to {self.topic}") from error
        if queued == len(markers):
            return
        for marker in markers:
            if "_error" in marker:  # the queue is full, or the partition is new: it says which
                self.write(marker["value"], marker["key"], partition, marker["callback"])
                del marker["_error"]

    def wait_for(self, is_known: Callable[[], bool], timeout_s: float) -> bool:
        """Serve reports until ``is_known()``, which reads what they said; False: not in time.

        Other markers that are under way are not waited for. Also False, and at once, when nothing
        is under way any more: then the report will never come.

        Raises:
            BrokerError: As ``flush``.
        """
        deadline_s = time.monotonic() + timeout_s
        self.flush(min(timeout_s, _SET_OUT_S))
        while not is_known():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self.is_idle:
                return is_known()
            self._serve(methodcaller("poll", min(left_s, _SLICE_S)))
            time.sleep(_TURN_S)  # or other threads that wait would never get their turn
        return True

    @property
    def is_idle(self) -> bool:
        """Whether no marker is under way and all reports have run.

        A marker without a report was then in a client that is gone, or an interrupt took it.
        """
        with self._serving:  # a report that runs is not counted
            return len(self) == 0

    def flush(self, timeout_s: float) -> None:
        """Serve reports until nothing is under way, or the time is over.

        Raises:
            BrokerError: The client failed for good while it held markers. It was recreated; what
                it held is reported.
        """
        self._serve(methodcaller("flush", max(0.0, timeout_s)))

    def _serve(self, call: Callable[[Producer], int]) -> None:
        failure: KafkaException | None = None
        with self._serving:
            if self._closed:
                return
            client = self._client
            try:
                call(client)
            except (KafkaException, SystemError) as error:
                failure = raised_error(error)
                held = len(client)  # only now: before, the error itself was counted too
        self._served_ms = monotonic_ms()
        if failure is None:
            return
        self._renew(client)
        if held:  # else nobody's marker has failed: the next write meets the cause again
            raise broker_error(failure, f"writing to {self.topic}") from failure

    def poll(self) -> None:
        """Serve the reports that are there, unless another thread does so, or did a moment ago.

        Whoever serves takes turns with the application's thread, one per report, which is slow.

        Raises:
            BrokerError: As ``flush``.
        """
        if monotonic_ms() - self._served_ms < REPORTS_MS or self._serving.locked():
            return
        self._serve(methodcaller("poll", 0.0))

    def _renew(self, spent: Producer) -> None:
        """Make a new client after a fatal error; what the old one held is reported as failed."""
        with self._serving:
            with self._lock:
                if self._closed or self._client is not spent:  # another thread has
                    return
                self.watch = ErrorWatch(self._servers)
                self._client = open_producer(self._settings, self.watch)
            end_producer(spent)
        _log.warning("the markers producer was recreated after a fatal error")

    def close(self) -> None:
        """End the client; what is still queued fails. Idempotent."""
        with self._serving:
            with self._lock:
                if self._closed:
                    return
                self._closed = True
            end_producer(self._client)

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the consumer is closed; it writes no more")
