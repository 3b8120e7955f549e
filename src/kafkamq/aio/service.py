"""The entry, for asyncio: a namespace and its queues."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import kafkamq as sync
from kafkamq.aio.consumer import Consumer, OnLeaseLost
from kafkamq.aio.producer import Producer
from kafkamq.aio.threads import in_thread
from kafkamq.config import Backoff, QueueConfig, ServiceConfig
from kafkamq.queue.service import DEFAULT_BACKOFF

__all__ = ["Queue", "Service"]


class Service:
    """One namespace on one cluster; the arguments are those of ``kafkamq.Service``."""

    def __init__(
        self,
        bootstrap_servers: str,
        namespace: str = "kafkamq",
        *,
        kafka: Mapping[str, str] | None = None,
        **topic_names: str,
    ) -> None:
        self._sync = sync.Service(bootstrap_servers, namespace, kafka=kafka, **topic_names)
        self._consumers: list[Consumer] = []

    async def __aenter__(self) -> Service:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return repr(self._sync)

    @property
    def config(self) -> ServiceConfig:
        """Where it is and what its topics are called."""
        return self._sync.config

    async def create_topics(
        self, *, partitions: int = 8, marker_partitions: int = 8, replication_factor: int = -1
    ) -> None:
        """See ``kafkamq.Service.create_topics``."""
        await in_thread(
            self._sync.create_topics,
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
        receive_buffer: int = 100,
        next_message_timeout: float | timedelta = 1.0,
        max_messages_per_commit: int = 1000,
        on_data_loss: str = "raise",
        backend: str = "markers",
        topic: str | None = None,
        group: str | None = None,
    ) -> Queue:
        """See ``kafkamq.Service.queue``."""
        queue = self._sync.queue(
            queue_id,
            redelivery_timeout=redelivery_timeout,
            max_deliveries=max_deliveries,
            max_lease=max_lease,
            backoff=backoff,
            max_in_flight=max_in_flight,
            exactly_once=exactly_once,
            receive_buffer=receive_buffer,
            next_message_timeout=next_message_timeout,
            max_messages_per_commit=max_messages_per_commit,
            on_data_loss=on_data_loss,
            backend=backend,
            topic=topic,
            group=group,
        )
        return Queue(self, queue)

    async def close(self, timeout: float = 30.0) -> None:
        """See ``kafkamq.Service.close``."""
        consumers, self._consumers = self._consumers, []
        for consumer in consumers:
            await consumer.close(timeout)
        await in_thread(self._sync.close, timeout)


class Queue:
    """One logical queue; ``Service.queue`` makes it."""

    def __init__(self, service: Service, queue: sync.Queue) -> None:
        self._service = service
        self._sync = queue

    def __repr__(self) -> str:
        return repr(self._sync)

    @property
    def queue_id(self) -> str:
        """Its name."""
        return self._sync.queue_id

    @property
    def config(self) -> QueueConfig:
        """How it is worked on."""
        return self._sync.config

    def producer(self) -> Producer:
        """A producer. It connects at its first use, or when it is awaited or entered."""
        return Producer(self._sync)

    async def create_topics(self, *, partitions: int = 8, replication_factor: int = -1) -> None:
        """See ``kafkamq.Queue.create_topics``."""
        await in_thread(
            self._sync.create_topics, partitions=partitions, replication_factor=replication_factor
        )

    def consumer(
        self, *, on_lease_lost: OnLeaseLost | None = None, ordering: str | None = None
    ) -> Consumer:
        """A worker. It connects at its first use, or when it is awaited or entered.

        Args:
            on_lease_lost: A function or a coroutine function; runs in the event loop.
            ordering: See ``kafkamq.Queue.consumer``.
        """
        consumer = Consumer(self._sync, on_lease_lost, ordering)
        self._service._consumers = [each for each in self._service._consumers if not each.is_closed]
        self._service._consumers.append(consumer)
        return consumer
