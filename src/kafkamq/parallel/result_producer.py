"""Writes results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeAlias

from kafkamq.errors import BrokerError, DeadlineExceededError, KafkaMQError, StateError
from kafkamq.parallel.config import ParallelConfig
from kafkamq.runtime.inside import enter
from kafkamq.transport.errors import KafkaError, Meaning, meaning
from kafkamq.transport.producer import ThreadedProducer
from kafkamq.transport.record import Record
from kafkamq.transport.settings import producer_settings
from kafkamq.types import Headers

Delivered = Callable[["KafkaError | KafkaMQError | None", Record], None]
_Record: TypeAlias = "tuple[str, bytes | None, bytes | None, int, Headers | None]"


class ResultProducer:
    """Two producers, made when they are first needed; thread-safe."""

    def __init__(self, config: ParallelConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        # By whether each record goes in a batch of its own.
        self._producers: dict[bool, ThreadedProducer] = {}
        self._is_closed = False

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: Sequence[tuple[str, bytes | None]],
        on_delivery: Delivered,
        partition: int = -1,
        timeout_s: float = 0.0,
    ) -> bool:
        """Queue one record; False: there is no room for it, for ``timeout_s``."""
        record = (topic, value, key, partition, tuple(headers) or None)

        def delivered(error: KafkaError | KafkaMQError | None, message: Record) -> None:
            if error is None or meaning(error) is not Meaning.TOO_LARGE:
                on_delivery(error, message)
                return
            try:  # Kafka refuses a whole batch for its size: whose fault it is shows alone
                self._send(self._open(is_alone=True), record, on_delivery)
            except KafkaMQError as failure:  # it may fit another time
                on_delivery(failure, message)

        try:
            self._send(self._open(is_alone=False), record, delivered, timeout_s)
        except DeadlineExceededError:
            return False
        except BrokerError as error:
            if meaning(error) is not Meaning.QUEUE_FULL and not error.is_fatal:
                raise
            return False
        return True

    def _send(
        self,
        producer: ThreadedProducer,
        record: _Record,
        on_delivery: Delivered,
        timeout_s: float = 0.0,
    ) -> None:
        def reported(error: KafkaError | None, message: Record) -> None:
            try:
                on_delivery(None if error is None else producer.failed(error), message)
            finally:
                producer.reported += 1

        producer.produce(*record, reported, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Flush, and end; what is not confirmed by then fails. Idempotent."""
        with self._lock:
            self._is_closed = True
            producers = list(self._producers.values())
        for producer in producers:
            with suppress(KafkaMQError):
                producer.close(timeout_s)

    def _open(self, *, is_alone: bool) -> ThreadedProducer:
        settings = {"batch_num_messages": 1} if is_alone else {}
        with self._lock:
            if is_alone not in self._producers:
                if self._is_closed:
                    raise StateError("the consumer is closed; it sends no more")
                service = self._config.service
                self._producers[is_alone] = ThreadedProducer(
                    service,
                    producer_settings(service, partitioner="murmur2_random", **settings),
                    name="kafkamq-results",
                    verb="sending",
                    on_start=partial(enter, self._config),
                )
            return self._producers[is_alone]
