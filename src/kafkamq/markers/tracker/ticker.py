"""Writes TICKs (R4, R17), and the status of every marker partition on its compacted topic (R24).

Both are written by one idempotent producer outside of transactions: a TICK must become readable
while a transaction is under way elsewhere. A status that is refused is written again, unless there
is a newer one of its partition; what the process had not written when it dies is lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError
from kafkamq.markers.wire.markers import encode_tick
from kafkamq.markers.wire.signs import Sign, encode_sign, sign_key
from kafkamq.markers.wire.status import TrackerStatus, encode_status, status_key
from kafkamq.transport.errors import KafkaError, broker_error, is_retriable
from kafkamq.transport.producer import IdempotentProducer
from kafkamq.transport.record import Record
from kafkamq.transport.settings import producer_settings

_TICK_TIMEOUT_MS = 5_000
SIGNS_PARTITION = 0  # of the tracker topic: all in one log, whose order decides
AGAIN_S = 1.0
_REFUSED_S = 0.1  # until a TICK that is waited for is written again
_log = logging.getLogger(__name__)


class Ticker:
    """Appends TICKs and status records; thread-safe but for ``close``.

    Args:
        config: Names the topics.
        timeout_ms: After which a record that could not be written is given up: 5 s for TICKs.
            More where only statuses are written, and ``poll`` is called seldom.
    """

    def __init__(self, config: ServiceConfig, *, timeout_ms: int = _TICK_TIMEOUT_MS) -> None:
        self._config = config
        self._unwritten: dict[bytes, TrackerStatus] = {}  # by key: the newest one
        self._refused: dict[bytes, None] = {}  # keys of those that are to be written again
        self._lock = threading.Lock()
        # A TICK that waits longer than this says nothing any more, and the next one may follow.
        settings = producer_settings(config)
        for name in ("message.timeout.ms", "delivery.timeout.ms"):
            settings.pop(name, None)
        settings["message.timeout.ms"] = timeout_ms
        self._again_s = 0.0  # monotonic: not before
        self._has_warned = False
        self._producer = IdempotentProducer(config, settings, owner="Ticker")

    def tick(
        self,
        partition: int,
        *,
        engine: str,
        epoch: int,
        on_done: Callable[[int, int], None] | None = None,
    ) -> None:
        """Append a TICK to a marker partition, without waiting.

        Args:
            partition: Of the markers topic.
            engine: The ``consumer_id`` of the TICK: who waits for it (R17).
            epoch: Its ``engine_epoch``.
            on_done: Called from ``poll`` with (partition, offset); offset -1: it failed. A TICK
                fails after 5 s, so that the next one may be appended (R4).
        """

        def delivered(error: KafkaError | None, message: Record) -> None:
            if on_done is not None:
                offset = message.offset()
                on_done(partition, -1 if error is not None or offset is None else offset)

        try:
            value = encode_tick(engine, epoch)
            self._producer.produce(
                self._config.marker_topic, value, None, partition, None, delivered
            )
        except BrokerError:
            if on_done is not None:
                on_done(partition, -1)

    def tick_all(
        self, partitions: Sequence[int], *, engine: str, epoch: int, timeout_s: float = 30.0
    ) -> dict[int, int]:
        """Append a TICK to each partition, wait, and return their offsets.

        Raises:
            BrokerError, DeadlineExceededError: Not all were written.
        """
        deadline_s = time.monotonic() + timeout_s
        offsets: dict[int, int] = {}
        missing = list(partitions)
        while missing:
            for partition in missing:
                self.tick(partition, engine=engine, epoch=epoch, on_done=offsets.__setitem__)
            self.poll(0)  # also where all is refused at once: it makes room, or tells why
            while len(offsets) < len(partitions) and time.monotonic() < deadline_s:
                self.poll(0.1)
            missing = [number for number in partitions if offsets.get(number, -1) < 0]
            if missing and time.monotonic() >= deadline_s:
                raise self._producer.watch.deadline(
                    f"appending a TICK to {self._config.marker_topic} partitions {missing}",
                    timeout_s,
                )
            if missing:
                time.sleep(_REFUSED_S)
            for partition in missing:
                offsets.pop(partition, None)
        return offsets

    def publish(self, status: TrackerStatus) -> None:
        """Write a status record, without waiting; ``poll`` writes it again when it was refused."""
        key = status_key(status.topic, status.partition)
        with self._lock:
            self._unwritten[key] = status
            self._refused.pop(key, None)
        self._send(key, status)

    def sign(self, sign: Sign) -> None:
        """Write a sign of life (R36), without waiting; one that is refused is lost."""
        with suppress(BrokerError):  # the next one follows soon
            self._producer.produce(
                self._config.tracker_topic,
                encode_sign(sign),
                sign_key(sign),
                SIGNS_PARTITION,
                None,
                lambda *_: None,
            )

    def _send(self, key: bytes, status: TrackerStatus) -> None:
        try:
            self._producer.produce(
                self._config.tracker_topic,
                encode_status(status),
                key,
                -1,
                None,
                lambda error, _: self._published(status, error),
            )
        except BrokerError as error:  # such as that there is no such topic
            self._published(status, error)

    def _refuse(self, key: bytes, status: TrackerStatus) -> None:
        """Write it again later, unless there is a newer one."""
        with self._lock:
            if self._unwritten.get(key) is status:
                self._refused[key] = None

    def _published(self, status: TrackerStatus, error: KafkaError | BrokerError | None) -> None:
        """What a status has become."""
        key = status_key(status.topic, status.partition)
        if error is not None:
            self._refuse(key, status)
        else:
            with self._lock:
                if self._unwritten.get(key) is status:
                    del self._unwritten[key]
        if error is None or self._has_warned or is_retriable(error):
            return
        self._has_warned = True
        _log.warning("%s", broker_error(error, f"writing to {self._config.tracker_topic}"))

    def _publish_again(self) -> None:
        """Those that were refused, at most once in ``AGAIN_S``: a refusal may come at once."""
        now_s = time.monotonic()
        if not self._refused or now_s < self._again_s:
            return
        self._again_s = now_s + AGAIN_S
        with self._lock:
            refused = [(key, self._unwritten[key]) for key in self._refused]
            self._refused.clear()  # each key of them has a status: both change under the lock
        for key, status in refused:
            self._send(key, status)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Serve delivery reports, and write again what they refuse.

        Raises:
            BrokerError: Credentials are refused.
            StateError: Closed.
        """
        self._producer.serve(timeout_s)
        self._publish_again()

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Flush (bounded) and end; idempotent.

        TICKs and statuses may be lost, the next owner writes its own.
        """
        self._producer.close(timeout_s)
