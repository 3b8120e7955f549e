"""Queues in memory: the queue API without Kafka, on a clock that a test sets.

    service = MemoryService(clock=Clock())
    orders = service.queue("orders")

    @orders.handler()
    def handle(order: dict) -> None: ...

    orders.producer().send(b'{"id": 1}')
    with Worker(service) as worker: ...

A queue behaves as on the backend that it names: what is refused, who counts deliveries, what ends
a lease, when a dead letter is written. Nothing outlives the process.
"""

from __future__ import annotations

import time

from kafkamq.config import QueueConfig
from kafkamq.errors import ConfigError
from kafkamq.queue.service import Queue, Service
from kafkamq.testing.memory_backend import MemoryBackend
from kafkamq.testing.memory_queue import Clock, MemoryDeadLetter

__all__ = ["Clock", "MemoryDeadLetter", "MemoryService"]


class _RealClock(Clock):
    """The machine's."""

    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


class MemoryService(Service):
    """A ``Service`` whose queues are in this process's memory; thread-safe."""

    def __init__(self, namespace: str = "memory", *, clock: Clock | None = None) -> None:
        """``clock``: None is the machine's."""
        super().__init__("memory:1", namespace)
        self.clock = clock if clock is not None else _RealClock()
        self._backend = MemoryBackend(self.clock)

    @property
    def cluster(self) -> None:
        """There are no brokers."""

    def create_topics(
        self, *, partitions: int = 8, marker_partitions: int = 8, replication_factor: int = -1
    ) -> None:
        """There is nothing to create, but queues that are used from now on have partitions."""
        if partitions < 1 or marker_partitions < 1:
            raise ConfigError("partitions and marker_partitions must be >= 1")
        self._backend.shared_partitions = partitions

    def dead_letters(self, queue_id: str | None = None) -> list[MemoryDeadLetter]:
        """What was given up, of one queue or of all, in order."""
        found: list[MemoryDeadLetter] = []
        for queue in self._backend.queues():
            if queue_id in (None, queue.queue_id):
                queue.tick()
                found += queue.letters
        return found

    def _queue(self, config: QueueConfig) -> Queue:
        return Queue(self._connections, self._handlers, config, lambda _: self._backend)
