"""The parts of one consumer share this: its leases, lock, bells, and markers' producer."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from operator import methodcaller
from typing import Any

from kafkamq.config import Backoff, QueueConfig
from kafkamq.errors import StateError
from kafkamq.markers.rules.batching import delay_by_reference_ms
from kafkamq.markers.rules.handout import nack_delay_ms
from kafkamq.markers.rules.leases import Leases
from kafkamq.markers.wire.marker_writer import MAX_DURATION_MS, StartEncoder
from kafkamq.queue.names import new_consumer_id
from kafkamq.queue.namespace import Namespace
from kafkamq.transport.clients import ForkCheck, Producer
from kafkamq.transport.clock import NS_PER_MS, monotonic_ms
from kafkamq.transport.errors import KafkaException
from kafkamq.transport.producer import IdempotentProducer, Report
from kafkamq.transport.settings import marker_settings

REPORTS_MS = 100
# ``max_in_flight`` bounds markers long before.
MAX_QUEUED = 1_000_000
# Markers of one batch go in few requests; a thread that waits for one flushes, so it sets out.
LINGER_MS = 0.5


class Bell:
    """Rung by any thread, heard by one; a ring that nobody waits for is kept, once.

    It is one lock that the waiting thread takes and the others release, both in C: Python runs a
    signal's handler before or behind that, but not within.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake who waits, or who waits next."""
        with suppress(RuntimeError):
            self._lock.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it was rung; False: not in time."""
        return self._lock.acquire(timeout=max(0.0, timeout_s))


class MarkerWriter(IdempotentProducer):
    """The markers producer of one consumer (R5); thread-safe."""

    def __init__(self, namespace: Namespace) -> None:
        config = namespace.config
        self.topic = config.marker_topic
        self._served_ms = 0
        settings = marker_settings(
            config, queue_buffering_max_messages=MAX_QUEUED, linger_ms=LINGER_MS
        )
        super().__init__(config, settings)

    def write(self, value: bytes, key: bytes, partition: int, on_delivery: Report) -> None:
        """Queue one marker; raises what ``produce`` does."""
        self.produce(self.topic, value, key, partition, None, on_delivery)

    def write_many(self, partition: int, markers: list[dict[str, Any]]) -> None:
        """Queue markers of one partition; those that are not queued have an ``_error``."""
        self.produce_many(self.topic, partition, markers)

    def poll(self) -> None:
        """Serve the reports that are there, unless another thread does so, or did a moment ago.

        A thread that serves takes turns with the application's, one per report, which is slow.

        Raises:
            BrokerError: As ``flush``.
        """
        if monotonic_ms() - self._served_ms < REPORTS_MS or self._serving.locked():
            return
        self._raise(self._serve(methodcaller("poll", 0.0)))

    def _serve(self, call: Callable[[Producer], int]) -> KafkaException | None:
        try:
            return super()._serve(call)
        finally:
            self._served_ms = monotonic_ms()


def broker_ms(namespace: Namespace) -> int | None:
    """Return the brokers' time, by which the ages of messages count (R28); None: not known."""
    return namespace.broker_clock.now_ms(time.time_ns() // NS_PER_MS, monotonic_ms())


def now_ms(namespace: Namespace) -> int:
    return broker_ms(namespace) or time.time_ns() // NS_PER_MS


def nack_ms(
    namespace: Namespace,
    backoff: Backoff,
    requested_ms: int | None,
    *,
    delivery_count: int,
    message_ms: int,
    since_ms: int = 0,
) -> int:
    """Return the delay that an END(NACK) carries (R8); ``requested_ms`` None: the back-off's.

    ``message_ms`` is the broker's time of a message that its START refers to (R28), else negative.
    A worker that wrote such a START knows the brokers' time; who has a token may have the wall
    clock alone, and what the token says: it is ``since_ms`` at least.
    """
    facts = namespace.facts()
    delay_ms = nack_delay_ms(
        requested_ms,
        backoff=backoff,
        delivery_count=delivery_count,
        retention_ms=facts.marker_retention_ms,
        random_unit=random.random(),
    )
    delay_ms = min(delay_ms, MAX_DURATION_MS)
    if message_ms < 0:
        return delay_ms
    kept_ms = facts.message_retention_ms
    at_ms = max(since_ms, now_ms(namespace))
    return delay_by_reference_ms(delay_ms, message_ms, at_ms, retention_ms=kept_ms)


class ConsumerState:
    """The state behind one ``Consumer``.

    ``lock`` guards ``leases`` (and ``encoder``); never write, poll or call the application while
    it is held, except that markers may be queued.

    Attributes:
        facts: Of the topics, by which STARTs name the messages'; the intake follows what the
            namespace finds.
    """

    def __init__(self, namespace: Namespace, queue: QueueConfig) -> None:
        self.namespace = namespace
        self.queue = queue
        self.facts = namespace.require(queue.max_lease_ms)
        self.lock = threading.Lock()
        self.leases = Leases(
            new_consumer_id(),
            redelivery_timeout_ms=queue.redelivery_timeout_ms,
            max_lease_ms=queue.max_lease_ms,
            batch_markers=queue.batch_markers,
        )
        self.encoder = self._new_encoder()
        self.writer = MarkerWriter(namespace)
        self.is_closed = False
        self.fork_check = ForkCheck("Consumer")
        self.intake, self.keeper, self.application = Bell(), Bell(), Bell()

    def check(self) -> None:
        """Refuse work on a closed consumer, and in a forked child.

        Raises:
            StateError: As said.
        """
        self.fork_check.check()
        if self.is_closed:
            raise StateError(f"the consumer of queue {self.queue.queue_id!r} is closed")

    def renew_id(self) -> None:
        """Take a fresh consumer_id if the old one is spent (R7); call with ``lock`` held."""
        if self.leases.id_is_spent:
            self.leases.change_id(new_consumer_id())
            self.encoder = self._new_encoder()

    def broker_ms(self) -> int | None:
        return broker_ms(self.namespace)

    def now_ms(self) -> int:
        return now_ms(self.namespace)

    def _new_encoder(self) -> StartEncoder:
        queue = self.queue
        return StartEncoder(
            consumer_id=self.leases.consumer_id,
            redeliver_after_ms=queue.redelivery_timeout_ms,
            max_deliveries=queue.max_deliveries,
            max_lease_ms=queue.max_lease_ms,
            message_topic=queue.topic,
        )
