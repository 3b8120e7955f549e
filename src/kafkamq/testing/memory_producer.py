"""Sends to queues in memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.markers.producer import MAX_DELAY_MS
from kafkamq.queue.namespace import NamespaceFacts
from kafkamq.queue.producer import Delivery, Destination, Producer, Sender, SendRecorder
from kafkamq.queue.rules.capabilities import Feature
from kafkamq.testing.memory_queue import MemoryQueue
from kafkamq.transport.producer import NewRecord, Report
from kafkamq.types import Backend, Headers, ScheduleToken

RETENTION_MS = 7 * 86_400_000
"""Of messages and markers."""

_FACTS = NamespaceFacts(  # of the topics that ``create_topics`` makes
    message_topic_id=b"",
    message_partitions=1,
    marker_partitions=1,
    message_retention_ms=RETENTION_MS,
    marker_retention_ms=RETENTION_MS,
    max_message_bytes=1_047_564,
    max_marker_bytes=1_113_100,
)
_OWN_TOPIC_BYTES = 1_114_112


class MemorySender:
    """What a ``Producer`` needs of a ``Sender``, and of its namespace."""

    is_full = False

    def __init__(self, queue: MemoryQueue, config: ServiceConfig, is_shared: bool) -> None:
        self.config = config
        self.namespace = self
        self.recorder = SendRecorder()
        self.reported = 0
        self._queue = queue
        self._is_shared = is_shared

    def facts(self) -> NamespaceFacts:
        facts = replace(_FACTS, message_partitions=self._queue.partitions)
        return facts if self._is_shared else replace(facts, max_message_bytes=_OWN_TOPIC_BYTES)

    def check(self, doing: str) -> None:
        """It does not fail."""

    def flush(self, timeout_s: float) -> None:
        """Each send has happened."""

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int,
        headers: Headers | None,
        on_delivery: Report,
    ) -> None:
        with self._queue.changed:
            record = self._queue.record(topic, partition, key, value, headers or ())
            self._queue.add(record)
        on_delivery(None, cast("Any", record))

    def produce_all(self, topic: str, records: Sequence[NewRecord]) -> int:
        for record in records:
            self.produce(topic, *record)
        return len(records)


class MemoryProducer(Producer):
    """See ``Producer``: what is sent is there at once."""

    def __init__(self, queue: MemoryQueue, config: ServiceConfig, settings: QueueConfig) -> None:
        sender = MemorySender(queue, config, settings.backend is Backend.MARKERS)
        super().__init__(cast("Sender", sender), settings)
        self._memory = queue

    def cancel(self, token: ScheduleToken) -> None:
        self._require(Feature.DELAYED_SEND, "cancel()")
        if not isinstance(token, ScheduleToken):
            raise ConfigError(f"token is a {type(token).__name__}: give a schedule")
        with self._memory.changed:
            self._memory.cancel(token.offset)

    def _schedule(
        self, payload: bytes | None, key: bytes | None, headers: Headers, id: str, delay_ms: int
    ) -> Delivery:
        if delay_ms > MAX_DELAY_MS:
            raise ConfigError(f"delay is {delay_ms / 1000:g} s: ten years at most")
        queue, topic = self._memory, self._topic
        log = self._namespace.config.marker_topic
        partition = int(random.random() * queue.partitions)

        def append() -> None:
            queue.add(queue.record(topic, partition, key, payload, headers))

        delivery = Delivery(Destination(self._sender, self.queue_id, log, is_delayed=True), id)
        with queue.changed:
            marker = queue.record(log, 0, None, None, ())
            queue.schedule(marker, queue.clock.now_ms() + delay_ms, append)
        delivery._report(None, cast("Any", marker))
        return delivery
