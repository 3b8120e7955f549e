"""Writes results and dead letters; one producer and the thread that serves it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from time import monotonic, sleep

from kafkamq.errors import KafkaMQError, StateError
from kafkamq.parallel.config import ParallelConfig
from kafkamq.parallel.record import ParallelRecord
from kafkamq.queue.wire.headers import Origin, dead_letter_headers
from kafkamq.runtime.inside import enter
from kafkamq.transport.clients import open_producer
from kafkamq.transport.errors import (
    ErrorWatch,
    KafkaError,
    KafkaException,
    Meaning,
    broker_error,
    has_ended,
    kafka_error,
    meaning,
)
from kafkamq.transport.port import Producer
from kafkamq.transport.producer import end_producer
from kafkamq.transport.record import Record
from kafkamq.transport.settings import producer_settings
from kafkamq.types import DeadLetterReason, Headers

__all__ = ["Delivered", "Outbox"]

_POLL_S = 0.1
_log = logging.getLogger(__name__)

Delivered = Callable[["KafkaError | None", Record], None]
_Form = tuple["bytes | None", "bytes | None", Headers]  # value, key, headers


class Outbox:
    """An idempotent producer (acks=all), made when it is first needed; thread-safe."""

    def __init__(self, config: ParallelConfig) -> None:
        self._config = config
        self._service = config.service
        self._send_timeout_s = config.send_timeout_ms / 1000
        self._watch = ErrorWatch(self._service.bootstrap_servers)
        self._lock = threading.Lock()
        self._client: Producer | None = None
        self._alone: Producer | None = None  # of the thread: each record in a batch of its own
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._spent: list[Producer] = []  # for the thread to end, as it may be inside of them

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: Sequence[tuple[str, bytes | None]],
        on_delivery: Delivered,
        partition: int = -1,
    ) -> None:
        """Queue one record; waits while the queue is full.

        Raises:
            BrokerError: librdkafka refuses it.
            DeadlineExceededError: The queue stayed full.
            StateError: Closed.
        """

        def delivered(error: KafkaError | None, message: Record) -> None:
            if error is not None and meaning(error) is Meaning.TOO_LARGE:
                # Kafka refuses a whole batch for its size: whose fault it is shows alone.
                self._send_alone(message, topic, value, key, headers, on_delivery, partition)
            else:
                on_delivery(error, message)

        deadline_s = 0.0
        while True:
            client = self._connected()
            try:
                client.produce(
                    topic,
                    value,
                    key,
                    partition,
                    on_delivery=delivered,
                    headers=list(headers) if headers else None,
                )
                return
            except BufferError:
                now_s = monotonic()
                deadline_s = deadline_s or now_s + self._send_timeout_s
                if now_s >= deadline_s:
                    raise self._watch.deadline(
                        "sending (the queue is full)", self._send_timeout_s
                    ) from None
                sleep(0.005)  # the thread makes room
            except KafkaException as error:
                if not has_ended(error):
                    raise broker_error(error, f"sending to {topic}") from error
                self._renew(client)

    def _send_alone(
        self,
        refused: Record,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: Sequence[tuple[str, bytes | None]],
        on_delivery: Delivered,
        partition: int,
    ) -> None:
        """In a delivery report: send it again, in a batch of its own."""
        while True:
            client = self._alone
            try:
                if client is None:
                    client = self._alone = self._made(batch_num_messages=1)
                client.produce(
                    topic,
                    value,
                    key,
                    partition,
                    on_delivery=on_delivery,
                    headers=list(headers) if headers else None,
                )
            except KafkaException as error:
                if client is not None and has_ended(error):
                    self._renew(client)
                    continue
                on_delivery(kafka_error(error), refused)
            except (KafkaMQError, BufferError):  # it may fit another time
                on_delivery(KafkaError(KafkaError._QUEUE_FULL), refused)
            return

    def park(
        self, topic: str, group_id: str, record: ParallelRecord, reason: DeadLetterReason, said: str
    ) -> Future[None]:
        """Write a dead letter; the future is done when Kafka has it.

        One that is too large is written without its payload, then without key and headers: it says
        where its record stands, and lives as long as that.
        """
        parked: Future[None] = Future()
        parked.set_running_or_notify_cancel()  # who gives up waiting for it does not cancel it
        forms = _forms(record, reason, said, group_id)

        def delivered(error: KafkaError | None, message: Record) -> None:
            if error is None:
                parked.set_result(None)
                return
            is_too_large = meaning(error) is Meaning.TOO_LARGE
            form = next(forms, None) if is_too_large else None
            if form is None:
                parked.set_exception(broker_error(error, f"writing a dead letter to {topic}"))
            else:
                self._send_alone(message, topic, *form, delivered, -1)

        failure: KafkaMQError | None = None
        for form in forms:
            try:
                self.send(topic, *form, delivered)
                return parked
            except KafkaMQError as error:  # noqa: PERF203 - two at most
                failure = error
                if meaning(error) is not Meaning.TOO_LARGE:
                    break
        parked.set_exception(failure)
        return parked

    def close(self, timeout_s: float) -> None:
        """Flush, and end; what is not confirmed by then fails. Idempotent."""
        with self._lock:
            self._is_closed = True
            client = self._client
        if client is not None:
            client.flush(max(0.0, timeout_s))
            if self._thread is not None:
                self._thread.join(_POLL_S * 20)
            self._end_spent()
            end_producer(client)
            self._client = None
            if self._alone is not None:
                end_producer(self._alone, flush_s=_POLL_S * 20)

    def _connected(self) -> Producer:
        client = self._client
        if client is not None and not self._is_closed:
            return client
        with self._lock:
            if self._is_closed:
                raise StateError("the consumer is closed; it sends no more")
            if self._client is None:
                self._client = self._made()
                self._thread = threading.Thread(
                    target=self._serve, name="kafkamq-outbox", daemon=True
                )
                self._thread.start()
            return self._client

    def _made(self, **more: object) -> Producer:
        settings = producer_settings(self._service, partitioner="murmur2_random", **more)
        return open_producer(settings, self._watch)

    def _renew(self, failed: Producer) -> None:
        """A fatal error ended one of the producers: the next send finds another."""
        with self._lock:
            if self._client is failed:
                self._watch = ErrorWatch(self._service.bootstrap_servers)
                self._client = self._made()
            elif self._alone is failed:
                self._alone = None
            else:  # another thread was quicker
                return
            self._spent.append(failed)
        _log.warning("the producer was recreated after a fatal error")

    def _serve(self) -> None:
        """The thread: delivery reports."""
        enter(self._config)
        while not self._is_closed:
            for client, wait_s in ((self._client, _POLL_S), (self._alone, 0.0)):
                if client is None:
                    continue
                try:
                    client.poll(wait_s)
                except BaseException:  # noqa: BLE001 - the other reports must come all the same
                    _log.exception("a delivery report could not be passed on")
            self._end_spent()

    def _end_spent(self) -> None:
        while self._spent:
            end_producer(self._spent.pop())


def _forms(
    record: ParallelRecord, reason: DeadLetterReason, said: str, group_id: str
) -> Iterator[_Form]:
    """A dead letter, from whole to bare."""
    origin = Origin(record.topic, record.partition, record.offset, record.timestamp_ms)
    failure = record._failure

    def headers(kept: Sequence[tuple[str, bytes | None]], payload_at: Origin | None) -> Headers:
        return dead_letter_headers(
            kept,
            reason=reason,
            error=said,
            delivery_count=1 if failure is None else failure.attempts,
            origin=origin,
            queue_id=group_id,
            payload_at=payload_at,
        )

    yield record.value, record.key, headers(record.headers, None)
    _log.warning(
        "a dead letter is too large: it refers to its record", extra={"record": repr(record)}
    )
    yield None, record.key, headers(record.headers, origin)
    yield None, None, headers((), origin)
