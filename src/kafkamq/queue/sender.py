"""The one producer of a service for messages and SCHEDULEs, and what it counts."""

from __future__ import annotations

import atexit
import logging
import threading
from collections import Counter, deque
from typing import TypeAlias

from kafkamq.errors import KafkaMQError
from kafkamq.metrics import catalog
from kafkamq.queue.namespace import Namespace
from kafkamq.transport.producer import ThreadedProducer
from kafkamq.transport.settings import producer_settings

MAX_QUEUED = 100_000  # librdkafka's queue.buffering.max.messages; reached: send waits
MAX_EXIT_S = 10.0  # how long the interpreter's end waits for what was not flushed
SEND_TIMEOUT_S = 30.0  # how long a send waits while the queue is full
_FOLD = 1000  # notes of a queue after which they are counted
Notes: TypeAlias = "deque[tuple[int, float]]"  # of sends: partition and latency in seconds
_log = logging.getLogger(__name__)


class Sender(ThreadedProducer):
    """All producers of a service share it; thread-safe."""

    def __init__(self, namespace: Namespace, **more: object) -> None:
        config = namespace.config
        settings = producer_settings(config, queue_buffering_max_messages=MAX_QUEUED, **more)
        self.namespace = namespace
        self.recorder = SendRecorder()
        super().__init__(
            config,
            settings,
            name="kafkamq-sender",
            owner="Service",
            verb="sending",
            max_block_s=SEND_TIMEOUT_S,
            on_turn=self._look_after,
        )
        atexit.register(self._flush_at_exit)

    @property
    def is_full(self) -> bool:
        return len(self) >= MAX_QUEUED - 1000

    def close(self, timeout_s: float = 0.0) -> None:
        try:
            super().close(timeout_s)
        finally:
            atexit.unregister(self._flush_at_exit)
            self.recorder.close()
            self.namespace.close()

    def _look_after(self) -> None:
        self.namespace.refresh_if_old()
        self.recorder.fold()

    def _flush_at_exit(self) -> None:
        if self._is_closed or self._fork.is_forked:
            return
        try:
            self.flush(MAX_EXIT_S)
        except KafkaMQError as error:
            _log.error("the process ends with unconfirmed sends", extra={"error": str(error)})


class SendRecorder:
    """Counts for the producers of one service; thread-safe.

    A delivery report only notes two values; they are counted by the thousand, and when asked.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notes: dict[tuple[str, bool], Notes] = {}
        self._forget = catalog.SENT.watch(self._fold_now)

    def notes_of(self, queue_id: str, *, is_delayed: bool) -> Notes:
        """Make, or find, what delivery reports of a queue note their sends in."""
        with self._lock:
            return self._notes.setdefault((queue_id, is_delayed), deque())

    def failed(self, queue_id: str) -> None:
        catalog.SEND_FAILED.add(1, queue_id)

    def close(self) -> None:
        self._fold_now()
        self._forget()

    def _fold_now(self) -> dict[tuple[str, ...], float]:
        self.fold(least=1)
        return {}

    def fold(self, *, least: int = _FOLD) -> None:
        """Count what is noted, of queues with at least so many notes."""
        with self._lock:
            for (queue_id, is_delayed), notes in self._notes.items():
                if len(notes) < least:
                    continue
                noted = [notes.popleft() for _ in range(len(notes))]
                partitions, seconds = zip(*noted, strict=True)
                for partition, count in Counter(partitions).items():
                    # A delayed message is in no partition of the queue yet.
                    catalog.SENT.add(count, queue_id, "" if is_delayed else partition)
                catalog.SEND_SECONDS.observe_each(seconds, queue_id)
