"""What becomes of one send: a small future, filled by Kafka's delivery report."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from kafkamq.config import wait_seconds
from kafkamq.errors import DeadlineExceededError
from kafkamq.transport.errors import KafkaError, broker_error
from kafkamq.transport.record import Record
from kafkamq.types import ScheduleToken, SentMessage

if TYPE_CHECKING:
    from kafkamq.queue.sender import Sender

_SLICE_S = 0.25  # how often a waiting caller looks for wrong credentials
_log = logging.getLogger(__name__)
_lock = threading.Lock()  # of all deliveries: only taken where somebody waits


class Delivery:
    """The outcome of one send, like a future; thread-safe.

    Kafka confirms or fails every send within ``message.timeout.ms`` (30 s).
    """

    __slots__ = (
        "_callbacks",
        "_error",
        "_event",
        "_id",
        "_offset",
        "_partition",
        "_queue_id",
        "_sender",
        "_timestamp_ms",
        "_token",
        "_topic",
    )

    def __init__(self, sender: Sender, queue_id: str, id: str, topic: str, token: bool) -> None:
        self._sender = sender
        self._queue_id = queue_id
        self._id = id
        self._topic = topic
        self._token = token
        self._partition = -1
        self._offset = -1
        self._timestamp_ms = -1
        self._error: KafkaError | None = None
        self._event: threading.Event | None = None
        self._callbacks: list[Callable[[Delivery], None]] | None = None

    def done(self) -> bool:
        """Whether Kafka has confirmed or failed it."""
        return self._offset >= 0 or self._error is not None

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
        if self._error is not None:
            error = broker_error(self._error, f"sending to {self._topic}")
            raise error from None
        token = None
        if self._token:
            token = ScheduleToken(self._queue_id, self._partition, self._offset)
        return SentMessage(
            self._queue_id,
            self._id,
            self._topic,
            self._partition,
            self._offset,
            self._timestamp_ms,
            token,
        )

    def add_done_callback(self, function: Callable[[Delivery], None]) -> None:
        """Call ``function(delivery)`` when it is done, at once if it is done already.

        It is called by the thread that serves delivery reports: keep it short.
        """
        with _lock:
            self._callbacks = [*(self._callbacks or ()), function]
        if self.done():  # perhaps since: whoever takes the callbacks calls them
            self._call_back()

    def _wait(self, timeout: float | None) -> None:
        with _lock:
            event = self._event = self._event or threading.Event()
        if self.done():  # reported before the event was there to be set
            return
        deadline_s = None if timeout is None else time.monotonic() + timeout
        doing = f"sending to {self._topic}"
        while True:
            left_s = _SLICE_S if deadline_s is None else deadline_s - time.monotonic()
            if event.wait(max(0.0, min(left_s, _SLICE_S))) or self.done():
                return
            self._sender.check(doing)
            if left_s <= 0:
                raise self._late(doing, timeout or 0.0)

    def _late(self, doing: str, timeout: float) -> DeadlineExceededError:
        return self._sender.watch.deadline(doing, timeout)

    def _report(self, error: KafkaError | None, record: Record) -> None:
        try:
            self._take(error, record)
        finally:
            self._sender.reported += 1

    def _take(self, error: KafkaError | None, record: Record) -> None:
        if error is not None:
            self._error = error  # first: after a fatal error of the client the next line may fail
            self._error = self._sender.failed(error)
            self._sender.recorder.failed(self._queue_id)
        else:
            self._partition = record.partition() or 0
            self._timestamp_ms = record.timestamp()[1]
            self._offset = record.offset() or 0  # last: from here on it is done
            if self._id:  # else a cancellation
                self._sender.recorder.sent(self._queue_id, record, is_delayed=self._token)
        if self._event is not None:
            self._event.set()
        if self._callbacks is not None:
            self._call_back()

    def _call_back(self) -> None:
        with _lock:
            callbacks, self._callbacks = self._callbacks, None
        for function in callbacks or ():
            try:
                function(self)
            except Exception:  # noqa: BLE001, PERF203 - the user's code must not stop reports
                _log.exception("a done callback of a delivery failed")
