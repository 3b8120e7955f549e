"""The quarantine log: records that no tracker could decode, with where they came from (R21)."""

from __future__ import annotations

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from kafkamq.clients.errors import ErrorWatch, broker_error, raised_error
from kafkamq.clients.producers import end_producer
from kafkamq.clients.settings import connect, producer_settings
from kafkamq.config import ServiceConfig
from kafkamq.wire.headers import ERROR, ORIGIN, Origin, cut_text

__all__ = ["Quarantine"]


class Quarantine:
    """Writes to a namespace's quarantine topic; one owner thread.

    At least once: a tracker that restarts reads some records again. ``kafkamq-origin`` names the
    record; two with the same one are the same record.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._watch = ErrorWatch(config.bootstrap_servers)
        self._producer: Producer | None = None
        self._failure: KafkaError | None = None
        self.dropped = 0
        """Records that were too large for the topic: only their place and error were kept."""

    def put(self, origin: Origin, *, key: bytes | None, value: bytes | None, error: str) -> None:
        """Queue one record.

        Args:
            origin: Where it stands.
            key: Its key.
            value: Its value.
            error: What is wrong with it.
        """
        if self._producer is None:
            self._producer = connect(Producer, producer_settings(self._config), self._watch)
        headers: list[tuple[str, str | bytes | None]] = [
            (ORIGIN, origin.encode()),
            (ERROR, cut_text(error).encode()),
        ]
        for content in (value, None):
            try:
                self._producer.produce(
                    self._config.quarantine_topic,
                    content,
                    key,
                    headers=headers,
                    on_delivery=self._delivered,
                )
                return
            except BufferError:  # noqa: PERF203 - two turns at most
                self.flush()
            except KafkaException as refused:
                if content is None:
                    raise broker_error(refused, self._doing()) from refused
                self.dropped += 1

    def flush(self, *, timeout_s: float = 10.0) -> None:
        """Wait until all is in the log, so that a position behind it may be committed.

        Raises:
            BrokerError, DeadlineExceededError: It is not; may be repeated.
        """
        if self._producer is None:
            return
        try:
            left = self._producer.flush(timeout_s)
        except (KafkaException, SystemError) as error:
            cause = raised_error(error)
            raise broker_error(cause, self._doing()) from cause
        self._watch.check(self._doing())
        failure, self._failure = self._failure, None
        if failure is not None:
            raise broker_error(failure, self._doing())
        if left:
            raise self._watch.deadline(self._doing(), timeout_s)

    def close(self) -> None:
        """End the client; what is not confirmed is read again by the next tracker."""
        producer, self._producer = self._producer, None
        if producer is not None:
            end_producer(producer, flush_s=2.0)

    def _doing(self) -> str:
        return f"writing to {self._config.quarantine_topic}"

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            return
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            self.dropped += 1  # its place is in the tracker's log line; the record stays as it is
        else:
            self._failure = error
