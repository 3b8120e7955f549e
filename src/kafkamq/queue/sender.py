"""The one producer of a service for messages and SCHEDULEs."""

from __future__ import annotations

import atexit
import logging

from kafkamq.errors import KafkaMQError
from kafkamq.queue.namespace import Namespace
from kafkamq.queue.recorder import SendRecorder
from kafkamq.transport.producer import ThreadedProducer
from kafkamq.transport.settings import producer_settings

__all__ = ["Sender"]

MAX_QUEUED = 100_000  # librdkafka's queue.buffering.max.messages; reached: send waits
MAX_EXIT_S = 10.0  # how long the interpreter's end waits for what was not flushed
SEND_TIMEOUT_S = 30.0  # how long a send waits while the queue is full
_log = logging.getLogger(__name__)


class Sender(ThreadedProducer):
    """Shared by all producers of a service; thread-safe."""

    def __init__(self, namespace: Namespace, **more: object) -> None:
        config = namespace.config
        facts = namespace.facts()
        largest = max(facts.max_message_bytes, facts.max_marker_bytes)
        settings = producer_settings(
            config,
            **{
                "message.max.bytes": max(1_000_000, largest + 65_536),
                "queue.buffering.max.messages": MAX_QUEUED,
                **more,
            },
        )
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

    def _flush_at_exit(self) -> None:
        if self._is_closed or self._fork.is_forked:
            return
        try:
            self.flush(MAX_EXIT_S)
        except KafkaMQError as error:
            _log.error("the process ends with unconfirmed sends", extra={"error": str(error)})
