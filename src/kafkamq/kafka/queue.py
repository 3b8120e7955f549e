"""One logical queue of a namespace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kafkamq.config import QueueConfig
from kafkamq.core.backends import Feature, require
from kafkamq.kafka.backends.opening import ConsumerPlan
from kafkamq.kafka.backends.topic import create_queue_topics
from kafkamq.kafka.consumer import Consumer
from kafkamq.kafka.message import Message
from kafkamq.kafka.producer import Producer

if TYPE_CHECKING:
    from kafkamq.kafka.service import Service

__all__ = ["Queue"]


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
            ordering: What stays in order: ``key``, ``partition`` or ``unordered``, as far as the
                backend has it (``kafkamq backends``); None: the first that it has.
        """
        plan = ConsumerPlan(on_lease_lost=on_lease_lost, ordering=ordering)
        return self._service._consumer(self._config, plan)

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
