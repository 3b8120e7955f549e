"""Writes TICKs (R4, R17), and the status of every marker partition on its compacted topic (R24).

Both are written by one idempotent producer outside of transactions: a TICK must become readable
while a transaction is under way elsewhere. A status that is refused is written again, unless there
is a newer one of its partition; what the process had not written when it dies is lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from confluent_kafka import KafkaError, KafkaException, Message

from kafkamq.config import ServiceConfig
from kafkamq.errors import StateError
from kafkamq.markers.wire.markers import encode_tick
from kafkamq.markers.wire.status import TrackerStatus, encode_status, status_key
from kafkamq.transport.clients import open_producer
from kafkamq.transport.errors import (
    ErrorWatch,
    broker_error,
    is_retriable,
    kafka_error,
    raised_error,
)
from kafkamq.transport.port import Producer
from kafkamq.transport.producer import end_producer
from kafkamq.transport.settings import producer_settings

__all__ = ["Ticker"]

_TICK_TIMEOUT_MS = 5_000
_AGAIN_S = 1.0
_log = logging.getLogger(__name__)


class Ticker:
    """Appends TICKs and status records; thread-safe but for ``close``.

    Args:
        config: Names the topics.
        timeout_ms: After which a record that could not be written is given up: 5 s for TICKs.
            More where only statuses are written, and ``poll`` is called seldom.
    """

    def __init__(self, config: ServiceConfig, *, timeout_ms: int = _TICK_TIMEOUT_MS) -> None:
        self._config = config
        self._unwritten: dict[bytes, TrackerStatus] = {}  # by key: the newest one
        self._refused: set[bytes] = set()  # keys of those that are to be written again
        self._lock = threading.Lock()
        self._watch = ErrorWatch(config.bootstrap_servers)
        # A TICK that waits longer than this says nothing any more, and the next one may follow.
        settings = producer_settings(config)
        for name in ("message.timeout.ms", "delivery.timeout.ms"):
            settings.pop(name, None)
        settings["message.timeout.ms"] = timeout_ms
        self._again_s = 0.0  # monotonic: not before
        self._has_warned = False
        self._producer: Producer | None = open_producer(settings, self._watch)

    def tick(
        self,
        partition: int,
        *,
        engine: str,
        epoch: int,
        on_done: Callable[[int, int], None] | None = None,
    ) -> None:
        """Append a TICK to a marker partition, without waiting.

        Args:
            partition: Of the markers topic.
            engine: The ``consumer_id`` of the TICK: who waits for it (R17).
            epoch: Its ``engine_epoch``.
            on_done: Called from ``poll`` with (partition, offset); offset -1: it failed. A TICK
                fails after 5 s, so that the next one may be appended (R4).
        """

        def delivered(error: KafkaError | None, message: Message) -> None:
            if on_done is not None:
                offset = message.offset()
                on_done(partition, -1 if error is not None or offset is None else offset)

        try:
            self._open().produce(
                self._config.marker_topic,
                encode_tick(engine, epoch),
                partition=partition,
                on_delivery=delivered,
            )
        except (BufferError, KafkaException):
            if on_done is not None:
                on_done(partition, -1)

    def tick_all(
        self, partitions: Sequence[int], *, engine: str, epoch: int, timeout_s: float = 30.0
    ) -> dict[int, int]:
        """Append a TICK to each partition, wait, and return their offsets.

        Raises:
            BrokerError, DeadlineExceededError: Not all were written.
        """
        deadline_s = time.monotonic() + timeout_s
        offsets: dict[int, int] = {}
        missing = list(partitions)
        while missing:
            for partition in missing:
                self.tick(partition, engine=engine, epoch=epoch, on_done=offsets.__setitem__)
            while len(offsets) < len(partitions) and time.monotonic() < deadline_s:
                self.poll(0.1)
            missing = [number for number in partitions if offsets.get(number, -1) < 0]
            if missing and time.monotonic() >= deadline_s:
                raise self._watch.deadline(
                    f"appending a TICK to {self._config.marker_topic} partitions {missing}",
                    timeout_s,
                )
            for partition in missing:
                offsets.pop(partition, None)
        return offsets

    def publish(self, status: TrackerStatus) -> None:
        """Write a status record, without waiting; ``poll`` writes it again when it was refused."""
        key = status_key(status.topic, status.partition)
        with self._lock:
            self._unwritten[key] = status
            self._refused.discard(key)
        self._send(key, status)

    def _send(self, key: bytes, status: TrackerStatus) -> None:
        try:
            self._open().produce(
                self._config.tracker_topic,
                encode_status(status),
                key,
                on_delivery=lambda error, _: self._published(status, error),
            )
        except BufferError:
            self._refuse(key, status)
        except KafkaException as error:  # such as that there is no such topic
            self._published(status, kafka_error(error))

    def _refuse(self, key: bytes, status: TrackerStatus) -> None:
        """Write it again later, unless there is a newer one."""
        with self._lock:
            if self._unwritten.get(key) is status:
                self._refused.add(key)

    def _published(self, status: TrackerStatus, error: KafkaError | None) -> None:
        """What a status has become."""
        key = status_key(status.topic, status.partition)
        if error is not None:
            self._refuse(key, status)
        else:
            with self._lock:
                if self._unwritten.get(key) is status:
                    del self._unwritten[key]
        if error is None or self._has_warned:
            return
        wrapped = broker_error(error, f"writing to {self._config.tracker_topic}")
        if not is_retriable(wrapped):
            self._has_warned = True
            _log.warning("%s", wrapped)

    def _publish_again(self) -> None:
        """Those that were refused, at most once in ``_AGAIN_S``: a refusal may come at once."""
        now_s = time.monotonic()
        if not self._refused or now_s < self._again_s:
            return
        self._again_s = now_s + _AGAIN_S
        with self._lock:
            refused = [(key, self._unwritten[key]) for key in self._refused]
            self._refused.clear()  # each key of them has a status: both change under the lock
        for key, status in refused:
            self._send(key, status)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Serve delivery reports, and write again what they refuse.

        Raises:
            BrokerError: What broke the client for good: credentials, a fatal error.
        """
        doing = f"writing to {self._config.marker_topic}"
        try:
            self._open().poll(timeout_s)
        except (KafkaException, SystemError) as error:
            cause = raised_error(error)
            raise broker_error(cause, doing) from cause
        self._watch.check(doing)
        self._publish_again()

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Flush (bounded) and end; idempotent."""
        producer, self._producer = self._producer, None
        if producer is not None:
            # TICKs and statuses may be lost, the next owner writes its own.
            end_producer(producer, flush_s=timeout_s)

    def _open(self) -> Producer:
        if self._producer is None:
            raise StateError("this Ticker is closed")
        return self._producer
