"""The one producer of a service for messages and SCHEDULEs, and the thread that serves it."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import Message as Record

from kafkamq.errors import KafkaMQError, StateError
from kafkamq.queue.namespace import Namespace
from kafkamq.queue.recorder import SendTally
from kafkamq.transport.clients import open_producer
from kafkamq.transport.errors import (
    ErrorWatch,
    Meaning,
    broker_error,
    has_ended,
    kafka_error,
    meaning,
    raised_error,
)
from kafkamq.transport.fork_check import ForkGuard
from kafkamq.transport.port import Producer
from kafkamq.transport.producer import end_producer
from kafkamq.transport.settings import producer_settings
from kafkamq.types import Headers

__all__ = ["Sender", "refresh_topic"]

MAX_QUEUED = 100_000  # librdkafka's queue.buffering.max.messages; reached: send waits
MAX_EXIT_S = 10.0  # how long the interpreter's end waits for what was not flushed
_POLL_S = 0.5
_TURN_S = 0.002
_METADATA_S = 5.0
_log = logging.getLogger(__name__)


def refresh_topic(client: Producer, topic: str, error: KafkaException) -> bool:
    """After a refused ``produce``: True if the client may not have known a new partition, and does.

    librdkafka looks for new partitions every five minutes; R26 lets them be added at any time.
    """
    if meaning(error) is not Meaning.NO_PARTITION:
        return False
    try:
        client.list_topics(topic, timeout=_METADATA_S)
    except KafkaException:
        return False
    return True


class Sender:
    """An idempotent producer (acks=all) shared by all producers of a service; thread-safe."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        config = namespace.config
        self.watch = ErrorWatch(config.bootstrap_servers)
        self._guard = ForkGuard("Producer")
        facts = namespace.facts()
        largest = max(facts.max_message_bytes, facts.max_marker_bytes)
        self._settings = producer_settings(
            config,
            **{
                "message.max.bytes": max(1_000_000, largest + 65_536),
                "queue.buffering.max.messages": MAX_QUEUED,
            },
        )
        self._client = open_producer(self._settings, self.watch)
        self.tally = SendTally()
        self._must_renew = False
        self._fatal: KafkaError | None = None  # what ended the client
        self._is_ending = False  # the former client's reports are served
        # Taken before ``_client`` is read. Only ``_thread`` serves the client and makes it anew:
        # with ``_asking``, too, which a call holds that waits for a broker's answer.
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._queued = 0  # sends; with the lock
        self.reported = 0
        """Of them; each ``on_delivery`` counts itself, last. Reports run in the thread alone."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kafkamq-sender", daemon=True)
        self._thread.start()
        atexit.register(self._flush_at_exit)

    def check(self, doing: str) -> None:
        """Raise what no waiting can mend.

        Raises:
            StateError: Closed, or in a forked child.
            BrokerError: Wrong credentials.
        """
        self._guard.check()
        if self._closed.is_set():
            raise StateError("the Service is closed; it sends no more")
        if not self._must_renew:  # a fatal error of the old client is no reason to stop
            self.watch.check(doing)

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int,
        headers: Headers | None,
        on_delivery: Callable[[KafkaError | None, Record], None],
        timeout_s: float = 30.0,
    ) -> None:
        """Queue one record; waits while the queue is full.

        ``on_delivery`` ends with ``sender.reported += 1``, whatever becomes of it: a wrapper that
        did so would cost a sixth of a send.

        Raises:
            StateError, BrokerError: As ``check``.
            DeadlineExceededError: The queue stayed full; the record is not sent.
        """
        deadline_s, is_refreshed = 0.0, False
        own: list[tuple[str, str | bytes | None]] | None = None if headers is None else [*headers]
        while True:
            self.check("sending")
            try:
                with self._lock:
                    self._queued += 1  # first: what an interrupt breaks off is never "confirmed"
                    try:
                        self._client.produce(
                            topic, value, key, partition, on_delivery=on_delivery, headers=own
                        )
                        return
                    except BufferError:
                        self._queued -= 1
                        full = "the queue is full"
                    except KafkaException as error:
                        self._queued -= 1
                        if not has_ended(error):
                            raise
                        self._must_renew = True
                        full = "the producer is being recreated"
            except KafkaException as error:
                if is_refreshed or not self._refresh(topic, error):
                    raise broker_error(error, f"sending to {topic}") from error
                is_refreshed = True
                continue
            now_s = time.monotonic()
            deadline_s = deadline_s or now_s + timeout_s
            if now_s >= deadline_s:
                raise self.watch.deadline(f"sending ({full})", timeout_s)
            time.sleep(0.005)  # the serving thread makes room

    def _refresh(self, topic: str, error: KafkaException) -> bool:
        with self._asking:
            return not self._closed.is_set() and refresh_topic(self._client, topic, error)

    @property
    def is_full(self) -> bool:
        """Whether the queue is (nearly) full."""
        with self._lock:
            return len(self._client) >= MAX_QUEUED - 1000

    def failed(self, error: KafkaError) -> KafkaError:
        """A delivery failed, for the reason that is returned; a fatal one ends the client."""
        if error.fatal():
            self._must_renew = self._must_renew or not self._is_ending
        elif self._fatal is not None and meaning(error) is Meaning.PURGED:
            return self._fatal
        return error

    def flush(self, timeout_s: float) -> None:
        """Wait until everything queued so far is confirmed or failed, each by its own report.

        Raises:
            DeadlineExceededError: Not in time; nothing was dropped.
        """
        deadline_s = time.monotonic() + timeout_s
        while self.reported < self._queued:
            self.check("flushing")
            if time.monotonic() >= deadline_s:
                count = self._queued - self.reported
                raise self.watch.deadline(f"confirming {count} sends", timeout_s)
            time.sleep(_TURN_S)

    def close(self, timeout_s: float) -> None:
        """Flush and end; idempotent.

        Raises:
            DeadlineExceededError: Some sends were not confirmed in time; they are given up.
        """
        if self._closed.is_set() or self._guard.is_foreign:
            return
        try:
            self.flush(timeout_s)
        finally:
            atexit.unregister(self._flush_at_exit)
            self._closed.set()
            self._thread.join(_POLL_S * 4)
            end_producer(self._client)
            self.tally.close()

    def _serve(self) -> None:
        """The thread: delivery reports, errors, and new partitions now and then."""
        while not self._closed.is_set():
            try:
                self._client.poll(_POLL_S)
            except (KafkaException, SystemError) as error:
                # Fatal, which librdkafka raises out of poll instead of reporting it.
                self._fatal = kafka_error(raised_error(error))
                self._must_renew = True
            if self._must_renew:
                self._renew()
            self.namespace.refresh_if_old()

    def _renew(self) -> None:
        """A new client after a fatal error; what the old one held fails at once, with that error.

        It would never be sent.
        """
        said = "a fatal error" if self._fatal is None else self._fatal.str()
        watch = ErrorWatch(self.namespace.config.bootstrap_servers)
        client = open_producer(self._settings, watch)
        with self._asking:
            with self._lock:
                old, self._client, self.watch = self._client, client, watch
                self._must_renew = False
            self._is_ending = True
            end_producer(old)
            self._is_ending = False
        self._fatal = None
        _log.error("the producer failed for good and was recreated: %s", said)

    def _flush_at_exit(self) -> None:
        if self._closed.is_set() or self._guard.is_foreign:
            return
        try:
            self.flush(MAX_EXIT_S)
        except KafkaMQError as error:
            _log.error("the process ends with unconfirmed sends", extra={"said": str(error)})
