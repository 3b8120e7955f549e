"""One logical queue of a namespace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kafkamq.config import QueueConfig
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

    def consumer(self, *, on_lease_lost: Callable[[Message], None] | None = None) -> Consumer:
        """A worker of the queue, with connections of its own; errors as for ``producer``.

        Args:
            on_lease_lost: Called with a message whose lease ended while it was handed out, or
                whose verdict came too late; by a thread of the consumer's, one call at a time.
        """
        return self._service._consumer(self._config, on_lease_lost)
