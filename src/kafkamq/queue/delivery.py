"""What becomes of one send: a small future, filled by Kafka's delivery report."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from kafkamq.config import wait_seconds
from kafkamq.errors import DeadlineExceededError
from kafkamq.transport.errors import KafkaError, broker_error
from kafkamq.transport.record import Record
from kafkamq.types import ScheduleToken, SentMessage

if TYPE_CHECKING:
    from kafkamq.queue.sender import Notes, Sender

Place = tuple[int, int, int]
"""Where a message stands: partition and offset; and the broker's time in milliseconds."""

_SLICE_S = 0.25  # how often a waiting caller looks for wrong credentials
_log = logging.getLogger(__name__)
_lock = threading.Lock()  # of all deliveries: only taken where somebody waits


class Destination:
    """It says where messages of a queue go, and has notes of those that are there.

    Delayed ones are SCHEDULEs (``is_delayed``); cancellations are not counted (``is_counted``).
    """

    __slots__ = ("is_delayed", "notes", "queue_id", "sender", "topic")

    def __init__(
        self,
        sender: Sender,
        queue_id: str,
        topic: str,
        *,
        is_delayed: bool = False,
        is_counted: bool = True,
    ) -> None:
        self.sender = sender
        self.queue_id = queue_id
        self.topic = topic
        self.is_delayed = is_delayed
        self.notes: Notes = deque(maxlen=0)
        if is_counted:
            self.notes = sender.recorder.notes_of(queue_id, is_delayed=is_delayed)

    def doing(self) -> str:
        """Say for people what is done there."""
        return f"sending to {self.topic}"


class Delivery:
    """The outcome of one send, like a future; thread-safe.

    Kafka confirms or fails every send within ``message.timeout.ms`` (30 s).
    """

    __slots__ = ("_callbacks", "_destination", "_id", "_outcome")

    def __init__(self, destination: Destination, id: str) -> None:
        self._destination = destination
        self._id = id
        self._outcome: Place | KafkaError | None = None
        self._callbacks: list[Callable[[Delivery], None]] | None = None

    def done(self) -> bool:
        """Whether Kafka has confirmed or failed it."""
        return self._outcome is not None

    def result(self, timeout: float | timedelta | None = None) -> SentMessage:
        """Where the message stands; waits for it.

        Args:
            timeout: Seconds; None: until Kafka has decided.

        Raises:
            ConfigError: ``timeout`` is no time.
            BrokerError: It failed.
            DeadlineExceededError: Not known in time; the send goes on, ask again.
        """
        if not self.done():
            self._wait(None if timeout is None else wait_seconds(timeout, may_be_endless=True))
        outcome = self._outcome
        if not isinstance(outcome, tuple):
            assert outcome is not None
            raise broker_error(outcome, self._destination.doing()) from None
        queue_id, topic, token = self._destination.queue_id, self._destination.topic, None
        partition, offset, timestamp_ms = outcome
        if self._destination.is_delayed:
            token = ScheduleToken(queue_id, partition, offset)
        return SentMessage(queue_id, self._id, topic, partition, offset, timestamp_ms, token)

    def add_done_callback(self, function: Callable[[Delivery], None]) -> None:
        """Call ``function(delivery)`` when it is done, at once if it is done already.

        It is called by the thread that serves delivery reports: keep it short.
        """
        with _lock:
            self._callbacks = [*(self._callbacks or ()), function]
        if self.done():  # perhaps since: whoever takes the callbacks calls them
            self._call_back()

    def _wait(self, timeout: float | None) -> None:
        is_done = threading.Event()

        def told(_: Delivery) -> None:
            is_done.set()

        self.add_done_callback(told)
        deadline_s = None if timeout is None else time.monotonic() + timeout
        doing = self._destination.doing()
        try:
            while True:
                left_s = _SLICE_S if deadline_s is None else deadline_s - time.monotonic()
                if is_done.wait(max(0.0, min(left_s, _SLICE_S))) or self.done():
                    return
                self._destination.sender.check(doing)
                if left_s <= 0:
                    raise self._late(doing, timeout or 0.0)
        finally:
            with _lock:
                left = [each for each in self._callbacks or () if each is not told]
                self._callbacks = left or None

    def _late(self, doing: str, timeout: float) -> DeadlineExceededError:
        return self._destination.sender.watch.deadline(doing, timeout)

    def _report(self, error: KafkaError | None, record: Record) -> None:
        destination = self._destination
        try:
            if error is None:
                partition = record.partition() or 0
                self._outcome = partition, record.offset() or 0, record.timestamp()[1]
                destination.notes.append((partition, record.latency() or 0.0))
            else:
                # First: after a fatal error of the client the next line may fail.
                self._outcome = error
                self._outcome = destination.sender.failed(error)
                destination.sender.recorder.failed(destination.queue_id)
            if self._callbacks is not None:
                self._call_back()
        finally:
            destination.sender.reported += 1

    def _call_back(self) -> None:
        with _lock:
            callbacks, self._callbacks = self._callbacks, None
        for function in callbacks or ():
            try:
                function(self)
            except Exception:  # noqa: BLE001, PERF203 - the user's code must not stop reports
                _log.exception("a done callback of a delivery failed")
