"""The one producer of a service for messages and SCHEDULEs, and what it counts."""

from __future__ import annotations

import atexit
import logging
from collections import Counter, defaultdict, deque

from kafkamq.errors import KafkaMQError
from kafkamq.metrics import catalog
from kafkamq.queue.namespace import Namespace
from kafkamq.transport.producer import ThreadedProducer
from kafkamq.transport.record import Record
from kafkamq.transport.settings import producer_settings

MAX_QUEUED = 100_000  # librdkafka's queue.buffering.max.messages; reached: send waits
MAX_EXIT_S = 10.0  # how long the interpreter's end waits for what was not flushed
SEND_TIMEOUT_S = 30.0  # how long a send waits while the queue is full
_FOLD = 1000  # sends after which what was noted is counted
_log = logging.getLogger(__name__)


class Sender(ThreadedProducer):
    """Shared by all producers of a service; thread-safe."""

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
            on_turn=namespace.refresh_if_old,
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

    def _flush_at_exit(self) -> None:
        if self._is_closed or self._fork.is_forked:
            return
        try:
            self.flush(MAX_EXIT_S)
        except KafkaMQError as error:
            _log.error("the process ends with unconfirmed sends", extra={"error": str(error)})


class SendRecorder:
    """Counts for the producers of one service; thread-safe.

    A delivery report only notes three values; they are counted by the thousand, and when asked.
    """

    def __init__(self) -> None:
        self._noted: deque[tuple[str, int | str | None, float]] = deque()
        self._forget = catalog.SENT.watch(self._fold_now)

    def sent(self, queue_id: str, record: Record, *, is_delayed: bool) -> None:
        """A delivery report; a delayed message is in no partition of the queue yet."""
        partition = "" if is_delayed else record.partition()
        self._noted.append((queue_id, partition, record.latency() or 0.0))
        if len(self._noted) >= _FOLD:
            self._fold()

    def failed(self, queue_id: str) -> None:
        catalog.SEND_FAILED.add(1, queue_id)

    def close(self) -> None:
        self._fold()
        self._forget()

    def _fold_now(self) -> dict[tuple[str, ...], float]:
        self._fold()
        return {}

    def _fold(self) -> None:
        counts: Counter[tuple[str, int | str | None]] = Counter()
        seconds: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        try:
            while True:  # other threads may add, and fold
                queue_id, partition, latency_s = self._noted.popleft()
                counts[queue_id, partition] += 1
                seconds[queue_id].append((latency_s, 1))
        except IndexError:
            pass
        for (queue_id, partition), count in counts.items():
            catalog.SENT.add(count, queue_id, partition)
        for queue_id, observed in seconds.items():
            catalog.SEND_SECONDS.observe_all(observed, queue_id)
