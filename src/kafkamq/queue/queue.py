"""One logical queue of a namespace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from kafkamq.config import QueueConfig, milliseconds, wait_seconds
from kafkamq.errors import ConfigError
from kafkamq.queue.backend import ConsumerPlan, QueueBackend, check_order, load
from kafkamq.queue.connections import Connections, Settler
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.handler import HandlerOptions, HandlerSpec, make_spec
from kafkamq.queue.message import Message
from kafkamq.queue.producer import Producer
from kafkamq.queue.rules.capabilities import Feature, require
from kafkamq.types import Backend, Outcome

if TYPE_CHECKING:
    from typing_extensions import Unpack

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
        """Its name."""
        return self._config.queue_id

    @property
    def config(self) -> QueueConfig:
        """How it is worked on."""
        return self._config

    def producer(self) -> Producer:
        """A producer; all of a service share one connection, which the service owns.

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
        """A worker of the queue, with connections of its own; errors as for ``producer``.

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
        """As ``consumer``; for ``Worker``, which knows more of what it is for."""
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

    def create_topics(self, *, partitions: int = 8, replication_factor: int = -1) -> None:
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
