"""A user enters here: one namespace on one cluster, and its queues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from kafkamq.config import (
    TOPICS,
    Backoff,
    DeadLetterWriter,
    Options,
    QueueConfig,
    ServiceConfig,
    milliseconds,
    wait_seconds,
)
from kafkamq.errors import ConfigError
from kafkamq.queue.backend import (
    Connections,
    ConsumerPlan,
    QueueBackend,
    Settler,
    check_order,
    load,
)
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.dead_letter_writer import checked_writer
from kafkamq.queue.handler import HandlerOptions, HandlerSpec, make_spec
from kafkamq.queue.message import Message
from kafkamq.queue.producer import Producer
from kafkamq.queue.rules.capabilities import Feature, backend_of, require
from kafkamq.queue.topics import create_topics
from kafkamq.types import Backend, Outcome

if TYPE_CHECKING:
    from typing_extensions import Unpack

DEFAULT_BACKOFF = Backoff()


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
        return self._config

    def create_topics(
        self,
        *,
        partitions: int = Options.partitions.default,
        marker_partitions: int = Options.marker_partitions.default,
        replication_factor: int = Options.replication_factor.default,
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
        redelivery_timeout: float | timedelta = Options.redelivery_timeout.default,
        max_deliveries: int = QueueConfig.max_deliveries,
        max_lease: float | timedelta = Options.max_lease.default,
        backoff: Backoff = DEFAULT_BACKOFF,
        max_in_flight: int = QueueConfig.max_in_flight,
        exactly_once: bool = QueueConfig.exactly_once,
        delivery: str = QueueConfig.delivery,
        batch_markers: bool = QueueConfig.batch_markers,
        receive_buffer: int = QueueConfig.receive_buffer,
        next_message_timeout: float | timedelta = Options.next_message_timeout.default,
        max_messages_per_commit: int = QueueConfig.max_messages_per_commit,
        on_data_loss: str = QueueConfig.on_data_loss,
        backend: str = "markers",
        topic: str | None = None,
        group: str | None = None,
        null_keys: str = QueueConfig.null_keys,
        dead_letter_writer: DeadLetterWriter | None = None,
    ) -> Queue:
        """Return a queue; it exists as soon as something is sent to it. Asks Kafka nothing.

        Args:
            queue_id: Its name, any text without NUL.
            redelivery_timeout: Seconds without a sign of life of the worker until redelivery.
            max_deliveries: The last one that fails ends in the dead letters.
            max_lease: Seconds that a message can be held in all, whatever renews it.
            backoff: Of nacked messages.
            max_in_flight: Messages held and not settled, per consumer.
            exactly_once: STARTs and offsets in one transaction (protocol.md): at some 50 ms.
            delivery: Or "at-most-once": acknowledged before it is handed out (protocol.md).
            batch_markers: One marker for many messages (R28-R30); False to go back (R33).
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
            redelivery_timeout_ms=Options.redelivery_timeout.convert(redelivery_timeout),
            max_deliveries=max_deliveries,
            max_lease_ms=Options.max_lease.convert(max_lease),
            backoff=backoff,
            max_in_flight=max_in_flight,
            receive_buffer=receive_buffer,
            next_message_timeout_ms=Options.next_message_timeout.convert(next_message_timeout),
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
        """Return where the brokers are; None: there are none (``testing.MemoryService``)."""
        return self.config

    @property
    def handlers(self) -> list[HandlerSpec]:
        return self._handlers

    def open_consumer(self, spec: HandlerSpec, plan: ConsumerPlan) -> Consumer:
        """Return a consumer for a handler; for ``Worker``."""
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
    for feature, name, is_asked in (
        (Feature.EXACTLY_ONCE, "exactly_once", queue.exactly_once),
        (Feature.AT_MOST_ONCE, "delivery='at-most-once'", queue.is_at_most_once),
        (Feature.RETRY_DELAY, "backoff", queue.backoff != DEFAULT_BACKOFF),
        (Feature.KEY_ORDER, "null_keys", queue.null_keys != Options.null_keys.default),
        (Feature.OWN_DEAD_LETTERS, "dead_letter_writer", queue.dead_letter_writer is not None),
    ):
        if is_asked:
            require(queue.backend, feature, f"queue {queue.queue_id!r}: {name}")
    return queue


Function = TypeVar("Function", bound=Callable[..., Any])


class Queue:
    """Makes producers and consumers of one queue; ``Service.queue`` makes it."""

    def __init__(
        self,
        connections: Connections,
        handlers: list[HandlerSpec],
        config: QueueConfig,
        load_backend: Callable[[Backend], QueueBackend] = load,
    ) -> None:
        """Asks Kafka nothing; ``handlers`` are the service's."""
        self._connections = connections
        self._handlers = handlers
        self._config = config
        self._load = load_backend

    def __repr__(self) -> str:
        return f"<Queue {self._config.queue_id!r}>"

    @property
    def queue_id(self) -> str:
        return self._config.queue_id

    @property
    def config(self) -> QueueConfig:
        return self._config

    def producer(self) -> Producer:
        """Return a producer; all of a service share one connection, which the service owns.

        Raises:
            BrokerError: The topics do not exist (says how to create them), wrong credentials.
            ConfigError: The topics cannot be used; says why.
            DeadlineExceededError: No broker answers.
        """
        self._connections.check()
        return self._backend.open_producer(self._connections, self._config)

    def consumer(
        self, *, on_lease_lost: Callable[[Message], None] | None = None, ordering: str | None = None
    ) -> Consumer:
        """Return a worker of the queue, with connections of its own; errors as for ``producer``.

        Args:
            on_lease_lost: Called with a message whose lease ended while it was handed out, or
                whose verdict came too late; by a thread of the consumer's, one call at a time.
                It may take long, and may close the consumer; while it does not return, up to
                ``max_in_flight`` messages wait for it, and what is lost beyond that is only logged.
            ordering: What stays in order: ``key``, ``partition`` or ``unordered``, as far as the
                backend has it (``kafkamq backends``); None: the first that it has.
        """
        return self.open_consumer(ConsumerPlan(on_lease_lost=on_lease_lost, ordering=ordering))

    def open_consumer(self, plan: ConsumerPlan) -> Consumer:
        """Open a consumer for a ``Worker``, which knows more than others of what it is for."""
        self._connections.check()
        plan = replace(plan, ordering=check_order(self._config, plan))
        consumer = self._backend.open_consumer(self._connections, self._config, plan)
        self._connections.add(consumer)
        return consumer

    # Verdicts from elsewhere.

    def ack(self, token: str, *, timeout: float | timedelta = 30.0) -> None:
        """A message is done, whichever process holds it; it waits for what the log says of that.

        Args:
            token: What ``Message.token`` or ``Message.hold`` gave.
            timeout: Seconds; also of its siblings below.

        Raises:
            StateError: It has a verdict already, or its topic was recreated since.
            LeaseLostError: Its lease ended before: it is delivered again.
            ConfigError: The token is damaged, or of another queue or namespace; or the backend has
                no tokens.
            BrokerError, DeadlineExceededError: Kafka did not confirm. The verdict may be in the
                log: when it is given again, StateError says so.
        """
        timeout_s = wait_seconds(timeout, may_be_endless=True)
        self._settler("ack").settle(token, Outcome.ACK, timeout_s=timeout_s)

    def nack(
        self,
        token: str,
        *,
        delay: float | timedelta | None = None,
        reason: str = "",
        timeout: float | timedelta = 30.0,
    ) -> None:
        """Give a message back, to be delivered again; see ``ack`` and ``Message.nack``.

        While it waits for its delay, an ``ack`` of somebody else's still ends it.
        """
        delay_ms = None if delay is None else milliseconds(delay, name="delay")
        timeout_s = wait_seconds(timeout, may_be_endless=True)
        settler = self._settler("nack")
        settler.settle(
            token, Outcome.NACK, reason=_text(reason), delay_ms=delay_ms, timeout_s=timeout_s
        )

    def reject(self, token: str, reason: str, *, timeout: float | timedelta = 30.0) -> None:
        """Give a message up, to the dead letters; see ``ack`` and ``Message.reject``."""
        timeout_s = wait_seconds(timeout, may_be_endless=True)
        settler = self._settler("reject")
        if not _text(reason):
            raise ConfigError("reason is empty: it must say why, for it stands in the dead letter")
        settler.settle(token, Outcome.REJECT, reason=reason, timeout_s=timeout_s)

    def extend(
        self, token: str, seconds: float | timedelta, *, timeout: float | timedelta = 30.0
    ) -> None:
        """Hold a message for at least so long from now, up to its max_lease; see ``ack``.

        It is for messages that were handed over by ``Message.hold``: of others the holder renews
        the lease as long as it lives, and may leave no more than the redelivery timeout.
        """
        extension_ms = milliseconds(seconds, name="seconds", minimum=1)
        timeout_s = wait_seconds(timeout, may_be_endless=True)
        self._settler("extend").extend(token, extension_ms, timeout_s=timeout_s)

    def _settler(self, what: str) -> Settler:
        require(self._config.backend, Feature.TOKENS, f"queue {self.queue_id!r}: {what}(token)")
        self._connections.check()
        connections, config = self._connections, self._config
        return connections.settler(config, lambda: self._backend.open_settler(connections, config))

    def handler(self, **options: Unpack[HandlerOptions]) -> Callable[[Function], Function]:
        """Registers the function below as the queue's handler; a ``Worker`` runs it.

        The function stays as it is. What its parameters are annotated with is what it gets: the
        body (``bytes``, ``str``, ``dict``, a dataclass, a pydantic model), a ``Message``, or both;
        with ``batch_size`` lists of these. Returning is an ack, an exception a nack with back-off;
        ``Ack``, ``Nack`` and ``Reject`` may be returned as well, of a list also one for each
        message. A body that cannot be read is rejected.

        Args:
            **options: See ``HandlerOptions``.

        Raises:
            ConfigError: It cannot work, or the backend lacks what is asked; names those that have
                it.
        """

        def register(function: Function) -> Function:
            self._handlers.append(make_spec(self._config, function, options))
            return function

        return register

    def create_topics(
        self,
        *,
        partitions: int = Options.partitions.default,
        replication_factor: int = Options.replication_factor.default,
    ) -> None:
        """Create what a queue with a topic of its own needs and does not exist.

        That is its topic and the namespace's dead letters; for ``claims`` also the coordination
        log. Queues of the markers backend share the topics that ``Service.create_topics`` makes.

        Args:
            partitions: Of the topic.
            replication_factor: -1: the cluster's default.

        Raises:
            ConfigError: A number cannot work, or the queue is one of the markers backend.
            BrokerError, DeadlineExceededError: The cluster refused, or does not answer.
        """
        self._backend.create_topics(
            self._connections.config,
            self._config,
            partitions=partitions,
            replication_factor=replication_factor,
        )

    @property
    def _backend(self) -> QueueBackend:
        return self._load(self._config.backend)


def _text(reason: str) -> str:
    if not isinstance(reason, str):
        raise ConfigError(f"reason is a {type(reason).__name__}: it must be a text")
    return reason
