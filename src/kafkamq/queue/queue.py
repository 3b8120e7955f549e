"""One logical queue of a namespace."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from kafkamq.config import Backoff, QueueConfig
from kafkamq.queue.backend import ConsumerPlan
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.handler import make_spec
from kafkamq.queue.message import Message
from kafkamq.queue.producer import Producer
from kafkamq.queue.queue_topic import create_queue_topics
from kafkamq.queue.rules.capabilities import Feature, require

if TYPE_CHECKING:
    from kafkamq.queue.service import Service

__all__ = ["Queue"]

Function = TypeVar("Function", bound=Callable[..., Any])


class Queue:
    """Makes producers and consumers of one queue; ``Service.queue`` makes it."""

    def __init__(self, service: Service, config: QueueConfig) -> None:
        self._service = service
        self._config = config

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
        return self._service._producer(self._config)

    def consumer(
        self,
        *,
        on_lease_lost: Callable[[Message], None] | None = None,
        ordering: str | None = None,
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
        plan = ConsumerPlan(on_lease_lost=on_lease_lost, ordering=ordering)
        return self._service._consumer(self._config, plan)

    def handler(
        self,
        *,
        concurrency: int | None = None,
        ordering: str | None = None,
        backend: str | None = None,
        retry: Backoff | None = None,
        timeout: float | timedelta | None = None,
        processes: int = 0,
    ) -> Callable[[Function], Function]:
        """Registers the function below as the queue's handler; a ``Worker`` runs it.

        The function stays as it is. What its parameters are annotated with is what it gets: the
        body (``bytes``, ``str``, ``dict``, a dataclass, a pydantic model), a ``Message``, or both.
        Returning is an ack, an exception a nack with back-off; ``Ack``, ``Nack`` and ``Reject`` may
        be returned as well. A body that cannot be read is rejected.

        Args:
            concurrency: Handlers at once; 16.
            ordering: What stays in order; None: what the backend has (``kafkamq backends``).
            backend: The backend that the handler counts on; must be the queue's.
            retry: The delay after a failure; None: the queue's back-off.
            timeout: s after which it has failed: a coroutine is cancelled, a process ended, a
                thread left alone.
            processes: Run it in so many processes.

        Raises:
            ConfigError: It cannot work, or the backend lacks what is asked; names those that have
                it.
        """

        def register(function: Function) -> Function:
            spec = make_spec(
                self._config,
                function,
                concurrency=concurrency,
                processes=processes,
                ordering=ordering,
                backend=backend,
                retry=retry,
                timeout=timeout,
            )
            self._service.handlers.append(spec)
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
        require(self._config.backend, Feature.OWN_TOPIC, f"queue {self.queue_id!r}")
        create_queue_topics(
            self._service.config,
            self._config,
            partitions=partitions,
            replication_factor=replication_factor,
        )
