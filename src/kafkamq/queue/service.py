"""The entry: one namespace on one cluster."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from kafkamq.config import (
    TOPICS,
    Backoff,
    DeadLetterWriter,
    QueueConfig,
    ServiceConfig,
    milliseconds,
    wait_seconds,
)
from kafkamq.errors import ConfigError
from kafkamq.queue.backend import ConsumerPlan
from kafkamq.queue.connections import Connections
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.dead_letter_writer import checked_writer
from kafkamq.queue.handler import HandlerSpec
from kafkamq.queue.queue import Queue
from kafkamq.queue.rules.capabilities import Feature, backend_of, require
from kafkamq.queue.topics import create_topics
from kafkamq.types import Backend

DEFAULT_BACKOFF = Backoff(first=1.0, max=600.0, jitter=0.2)


class Service:
    """One namespace on one cluster; owns the clients; a context manager; thread-safe.

    Connects when the first producer or consumer is made. Made before a fork it refuses to work in
    the child (StateError): make another one there.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        namespace: str = "kafkamq",
        *,
        kafka: Mapping[str, str] | None = None,
        **topic_names: str,
    ) -> None:
        """Names a namespace.

        Args:
            bootstrap_servers: host:port[,host:port...].
            namespace: Prefix of its topics' names.
            kafka: Kafka's own properties, verbatim, for every client; may hold secrets.
            **topic_names: message_topic, marker_topic, dead_letter_topic, tracker_topic,
                ledger_topic, quarantine_topic, where they are not called after the namespace.
        """
        for name in topic_names:
            if name not in TOPICS:
                raise ConfigError(f"{name} is no setting of Service: {', '.join(TOPICS)}")
        self._config = ServiceConfig(
            bootstrap_servers=bootstrap_servers,
            namespace=namespace,
            kafka={} if kafka is None else kafka,
            **topic_names,
        )
        self._connections = Connections(self._config)
        self._handlers: list[HandlerSpec] = []

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Service {self._config.namespace!r} at {self._config.bootstrap_servers}>"

    @property
    def config(self) -> ServiceConfig:
        """Where it is and what its topics are called."""
        return self._config

    def create_topics(
        self, *, partitions: int = 8, marker_partitions: int = 8, replication_factor: int = -1
    ) -> None:
        """Create the topics of the namespace that do not exist, and check those that do.

        Args:
            partitions: Of messages: at most so many workers of one queue share it.
            marker_partitions: Of markers: at most so many trackers share the work.
            replication_factor: -1: the cluster's default.

        Raises:
            ConfigError: A number, or an existing topic, cannot work; says why.
            BrokerError, DeadlineExceededError: The cluster refused, or does not answer.
        """
        self._connections.check()
        create_topics(
            self._config,
            partitions=partitions,
            marker_partitions=marker_partitions,
            replication_factor=replication_factor,
        )

    def queue(
        self,
        queue_id: str,
        *,
        redelivery_timeout: float | timedelta = 10.0,
        max_deliveries: int = 5,
        max_lease: float | timedelta = 43_200.0,
        backoff: Backoff = DEFAULT_BACKOFF,
        max_in_flight: int = 1000,
        exactly_once: bool = False,
        delivery: str = QueueConfig.delivery,
        batch_markers: bool = QueueConfig.batch_markers,
        receive_buffer: int = 100,
        next_message_timeout: float | timedelta = 1.0,
        max_messages_per_commit: int = 1000,
        on_data_loss: str = "raise",
        backend: str = "markers",
        topic: str | None = None,
        group: str | None = None,
        null_keys: str = "parallel",
        dead_letter_writer: DeadLetterWriter | None = None,
    ) -> Queue:
        """A queue; it exists as soon as something is sent to it. Asks Kafka nothing.

        Args:
            queue_id: Its name, any text without NUL.
            redelivery_timeout: Seconds without a sign of life of the worker until redelivery.
            max_deliveries: The last one that fails ends in the dead letters.
            max_lease: Seconds that a message can be held in all, whatever renews it.
            backoff: Of nacked messages.
            max_in_flight: Messages held and not settled, per consumer.
            exactly_once: STARTs and offsets in one transaction (protocol.md): at some 50 ms.
            delivery: Or "at-most-once": acknowledged before it is handed out (protocol.md).
            batch_markers: One marker for many messages (R28-R30); False beside older releases.
            receive_buffer: STARTed ahead of ``receive``, at first.
            next_message_timeout: Longest wait of one turn of an iteration.
            max_messages_per_commit: Messages of other queues that are passed before a commit.
            on_data_loss: "raise", or "skip" what was deleted before it was read.
            backend: "markers", "offsets", "share" or "claims" (``kafkamq backends``); it is fixed.
            topic: Any; None: the namespace's, or of other backends ``NAMESPACE.q.QUEUE_ID``.
            group: None: by namespace and queue; "kafka-mq-QUEUE_ID": with kafka-mq-go's workers.
            null_keys: Of offsets, by key: without one "parallel", or "serial" in each partition.
            dead_letter_writer: Keeps dead letters elsewhere than on Kafka; not of markers.

        Raises:
            ConfigError: A value cannot work; names it and its limit.
        """
        self._connections.check()
        kind = backend_of(backend)
        config = QueueConfig(
            backend=kind,
            topic=self._own_topic(kind, queue_id) if topic is None else topic,
            group_id=group or "",
            queue_id=queue_id,
            redelivery_timeout_ms=milliseconds(redelivery_timeout, name="redelivery_timeout"),
            max_deliveries=max_deliveries,
            max_lease_ms=milliseconds(max_lease, name="max_lease"),
            backoff=backoff,
            max_in_flight=max_in_flight,
            receive_buffer=receive_buffer,
            next_message_timeout_ms=milliseconds(next_message_timeout, name="next_message_timeout"),
            max_messages_per_commit=max_messages_per_commit,
            on_data_loss=on_data_loss,
            exactly_once=exactly_once,
            delivery=delivery,
            batch_markers=batch_markers,
            null_keys=null_keys,
            dead_letter_writer=checked_writer(dead_letter_writer),
        )
        return self._queue(_checked(config))

    def _own_topic(self, kind: Backend, queue_id: str) -> str:
        return "" if kind is Backend.MARKERS else f"{self._config.namespace}.q.{queue_id}"

    @property
    def cluster(self) -> ServiceConfig | None:
        """Where the brokers are; None: there are none (``testing.MemoryService``)."""
        return self.config

    @property
    def handlers(self) -> list[HandlerSpec]:
        """What ``Queue.handler`` has registered; a ``Worker`` runs them."""
        return self._handlers

    def open_consumer(self, spec: HandlerSpec, plan: ConsumerPlan) -> Consumer:
        """A consumer for a handler; for ``Worker``."""
        return self._queue(spec.queue).open_consumer(plan)

    def close(self, timeout: float | timedelta = 30.0) -> None:
        """Close all consumers and confirm all sends; idempotent.

        Raises:
            ConfigError: ``timeout`` is no time; nothing is closed.
            KafkaMQError: The first failure of these; everything is closed nevertheless.
        """
        self._connections.close(wait_seconds(timeout, may_be_endless=True))

    def _queue(self, config: QueueConfig) -> Queue:
        return Queue(self._connections, self._handlers, config)


def _checked(queue: QueueConfig) -> QueueConfig:
    """A queue whose backend has what its settings ask for."""
    for feature, name, is_asked in (
        (Feature.EXACTLY_ONCE, "exactly_once", queue.exactly_once),
        (Feature.AT_MOST_ONCE, "delivery='at-most-once'", queue.is_at_most_once),
        (Feature.RETRY_DELAY, "backoff", queue.backoff != DEFAULT_BACKOFF),
        (Feature.KEY_ORDER, "null_keys", queue.null_keys != "parallel"),
        (Feature.OWN_DEAD_LETTERS, "dead_letter_writer", queue.dead_letter_writer is not None),
    ):
        if is_asked:
            require(queue.backend, feature, f"queue {queue.queue_id!r}: {name}")
    return queue
