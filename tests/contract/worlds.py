"""One service per backend, on Kafka and in memory: what the contract's tests run on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tests.integration.queue_logs import make_service, tracked
from tests.waiting import deadline_after

from kafkamq import Backoff, Consumer, Message, Queue, Service
from kafkamq.queue.dead_letters import read_dead_letters
from kafkamq.queue.rules.capabilities import Feature, has
from kafkamq.testing import MemoryService
from kafkamq.types import Backend

__all__ = ["BACKENDS", "WORLDS", "Letter", "World", "receive", "world_of"]

BACKENDS = ("markers", "offsets", "share", "claims")
DOUBLES = tuple(f"memory-{name}" for name in BACKENDS)
SINGLE = "markers-single"  # without batch_markers
WORLDS = (*BACKENDS, SINGLE, *DOUBLES)
_BACKOFF = Backoff(first=0.05, max=0.05, jitter=0.0)


@dataclass
class Letter:
    """A dead letter."""

    payload: bytes | None
    key: bytes | None
    reason: str
    error: str
    delivery_count: int
    headers: dict[str, bytes | None]
    origin: str  # topic/partition/offset/timestamp of its first copy


@dataclass
class World:
    """A service and the backend that its queues get, on Kafka or in memory."""

    name: str
    service: Service

    @property
    def backend(self) -> str:
        """Of its queues."""
        return self.name.removeprefix("memory-").removesuffix("-single")

    def has(self, feature: Feature) -> bool:
        """Whether its backend has that."""
        return has(Backend(self.backend), feature)

    def queue(self, queue_id: str, **options: object) -> Queue:
        """A queue with its topics; times that suit tests."""
        options.setdefault("max_deliveries", 3)
        if self.name == SINGLE:
            options.setdefault("batch_markers", False)
        if self.backend != "share":
            options.setdefault("backoff", _BACKOFF)
            options.setdefault("redelivery_timeout", 20.0)
        queue = self.service.queue(queue_id, backend=self.backend, **options)
        if self.backend != "markers":
            queue.create_topics(partitions=2)
        return queue

    def letters(self, queue: Queue) -> list[Letter]:
        """Its dead letters."""
        if isinstance(self.service, MemoryService):
            return [
                Letter(
                    letter.payload,
                    letter.key,
                    letter.reason,
                    letter.error,
                    letter.delivery_count,
                    dict(letter.headers),
                    (letter.headers["kafkamq-origin"] or b"").decode(),
                )
                for letter in self.service.dead_letters(queue.queue_id)
            ]
        return [
            Letter(
                letter.payload,
                letter.user_key,
                letter.reason,
                letter.error,
                letter.delivery_count,
                dict(letter.headers),
                "" if letter.origin is None else letter.origin.encode().decode(),
            )
            for letter in read_dead_letters(self.service.config)
            if letter.queue_id == queue.queue_id
        ]


@contextmanager
def world_of(name: str, bootstrap: str, namespace: str) -> Iterator[World]:
    """A service, and a tracker where there are markers."""
    with ExitStack() as stack:
        service: Service
        if name in DOUBLES:
            service = stack.enter_context(MemoryService(namespace))
            service.create_topics(partitions=2, marker_partitions=2)
        else:
            service = stack.enter_context(make_service(bootstrap, namespace))
        if name in ("markers", SINGLE):
            stack.enter_context(tracked(service.config))
        yield World(name, service)


def receive(consumer: Consumer, count: int, timeout_s: float = 60.0) -> list[Message]:
    """``count`` messages, however many calls that takes."""
    messages: list[Message] = []
    deadline_s = deadline_after(timeout_s)
    while len(messages) < count:
        assert time.monotonic() < deadline_s, f"{len(messages)} of {count} messages came"
        messages += consumer.receive_many(count - len(messages), 0.5)
    return messages
