"""TICKs, statuses, signs and quarantine: what trackers write outside of transactions.

TICKs (R4, R17), and statuses (R24) and signs of life (R36) on the compacted tracker topic, are
written by one idempotent producer: a TICK must become readable while a transaction is under way
elsewhere. A status that is refused is written again, unless there is a newer one of its partition;
what the process had not written when it dies is lost. The quarantine has records that no tracker
could decode, with where they came from (R21).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, KafkaMQError, WireError
from kafkamq.markers.wire.marker_writer import encode_tick
from kafkamq.markers.wire.records import (
    Sign,
    TrackerStatus,
    decode_sign,
    decode_status,
    decode_status_key,
    encode_sign,
    encode_status,
    is_sign_key,
    sign_key,
    status_key,
)
from kafkamq.queue.wire.headers import ERROR, ORIGIN, Origin, cut_text
from kafkamq.transport.admin import Admin
from kafkamq.transport.errors import (
    REFUSALS,
    KafkaError,
    Meaning,
    broker_error,
    is_fatal,
    is_retriable,
    meaning,
)
from kafkamq.transport.follower import Follower
from kafkamq.transport.producer import IdempotentProducer
from kafkamq.transport.record import Record
from kafkamq.transport.settings import producer_settings
from kafkamq.types import Headers

_TICK_TIMEOUT_MS = 5_000
# Of the tracker topic: all signs are in one log, whose order decides.
SIGNS_PARTITION = 0
AGAIN_S = 1.0
_REFUSED_S = 0.1
_log = logging.getLogger(__name__)
_BATCH = 1000
_READ_S = 10.0
# So many signs are kept that nobody has asked for: the newest.
_MAX_SIGNS = 1000
_MAX_PENDING = 5_000


class Ticker:
    """Appends TICKs and status records; thread-safe but for ``close``."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._unwritten: dict[bytes, TrackerStatus] = {}
        self._refused: dict[bytes, None] = {}
        self._lock = threading.Lock()
        # A TICK that waits longer than this says nothing any more, and the next one may follow.
        settings = producer_settings(config)
        for name in ("message.timeout.ms", "delivery.timeout.ms"):
            settings.pop(name, None)
        settings["message.timeout.ms"] = _TICK_TIMEOUT_MS
        # Nothing is written again before this monotonic time.
        self._again_s = 0.0
        self._has_warned = False
        self._producer = IdempotentProducer(config, settings, owner="Ticker")

    def tick(
        self,
        partition: int,
        *,
        engine: str,
        epoch: int,
        on_done: Callable[[int, int], None],
    ) -> None:
        """Append a TICK to a marker partition, without waiting.

        Args:
            engine: The ``consumer_id`` of the TICK: who waits for it (R17).
            epoch: Its ``engine_epoch``.
            on_done: Called from ``poll`` with (partition, offset); offset -1: it failed. A TICK
                fails after 5 s, so that the next one may be appended (R4).
        """

        def delivered(error: KafkaError | None, message: Record) -> None:
            offset = message.offset()
            on_done(partition, -1 if error is not None or offset is None else offset)

        try:
            value = encode_tick(engine, epoch)
            self._producer.produce(
                self._config.marker_topic, value, None, partition, None, delivered
            )
        except BrokerError:
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
            # Where all is refused at once it makes room, or tells why.
            self.poll(0)
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
        with suppress(BrokerError):
            # The next one follows soon.
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
        except BrokerError as error:
            self._published(status, error)

    def _published(self, status: TrackerStatus, error: KafkaError | BrokerError | None) -> None:
        key = status_key(status.topic, status.partition)
        with self._lock:
            if self._unwritten.get(key) is status:
                if error is None:
                    del self._unwritten[key]
                else:
                    self._refused[key] = None
        if error is None or self._has_warned or is_retriable(error):
            return
        self._has_warned = True
        _log.warning("%s", broker_error(error, f"writing to {self._config.tracker_topic}"))

    def _publish_again(self) -> None:
        """Publish what was refused, at most once in ``AGAIN_S``: a refusal may come at once."""
        now_s = time.monotonic()
        if not self._refused or now_s < self._again_s:
            return
        self._again_s = now_s + AGAIN_S
        with self._lock:
            refused = [(key, self._unwritten[key]) for key in self._refused]
            # Each key of them has a status: both change under the lock.
            self._refused.clear()
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


class StatusReader:
    """The latest status per (topic, partition) of a namespace; one owner thread.

    Attributes:
        latest: What was read so far.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self.latest: dict[tuple[str, int], TrackerStatus] = {}
        self._signs: deque[Sign] = deque(maxlen=_MAX_SIGNS)
        topic = config.tracker_topic
        with Admin(config) as admin:
            bounds = admin.log_bounds(topic, range(admin.require_topic(topic).partitions))
        self._left = {
            (topic, number): end for number, (first, end) in bounds.items() if first < end
        }
        self._follower = Follower(
            config,
            f"reading {topic}",
            ignores=lambda error: not is_fatal(error),
            enable_partition_eof=True,
        )
        self._follower.place({(topic, number): first for number, (first, _) in bounds.items()})

    def read_to_end(self) -> dict[tuple[str, int], TrackerStatus]:
        """Read up to what was there when this reader was made, and return ``latest``.

        Raises:
            DeadlineExceededError: The broker did not answer in time.
        """
        deadline_s = time.monotonic() + _READ_S
        while self._left:
            self.poll(0.2)
            if time.monotonic() > deadline_s:
                raise self._follower.deadline(_READ_S)
        return self.latest

    def poll(self, timeout_s: float = 0.1) -> list[TrackerStatus]:
        """New statuses since the last call, oldest first; malformed ones are passed.

        Raises:
            BrokerError: Reading is not possible any more.
            DataLossError: Statuses were deleted before they were read.
        """
        records = self._follower.poll(_BATCH, timeout_s)
        self._follower.require_inside()
        found = [self._fold(record) for record in records]
        if self._left:
            reached = self._follower.positions(self._left) | self._follower.ends
            self._left = {
                place: end for place, end in self._left.items() if reached.get(place, 0) < end
            }
        return [status for status in found if status is not None]

    def take_signs(self) -> list[Sign]:
        """Signs of life that were read since the last call, oldest first."""
        signs = list(self._signs)
        self._signs.clear()
        return signs

    def _fold(self, record: Record) -> TrackerStatus | None:
        try:
            if is_sign_key(record.key()):
                if record.value() is not None:
                    self._signs.append(decode_sign(record.value()))
                return None
            key = decode_status_key(record.key())
            value = record.value()
            if value is None:
                self.latest.pop(key, None)
                return None
            status = decode_status(value)
        except WireError:
            # A later release's, or nobody's.
            return None
        self.latest[key] = status
        return status

    def close(self) -> None:
        self._follower.close()


@dataclass(frozen=True, slots=True)
class _Kept:
    origin: Origin
    key: bytes | None
    value: bytes | None
    error: str

    @property
    def place(self) -> tuple[int, int]:
        return self.origin.partition, self.origin.offset


class Quarantine:
    """Writes to a namespace's quarantine topic; one owner thread.

    At least once: a tracker that restarts reads some records again. ``kafkamq-origin`` names the
    record; two with the same one are the same record. What is refused for a while is written again,
    by ``poll``; a position behind ``first_pending`` may not be written before that.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._doing = f"writing to {config.quarantine_topic}"
        self._producer: IdempotentProducer | None = None
        self._pending: dict[tuple[int, int], _Kept] = {}
        self._failure: KafkaMQError | None = None
        self._refused: list[_Kept] = []
        self._again_s = 0.0
        self._has_warned = False

    @property
    def is_full(self) -> bool:
        """Return whether so many are on their way that no more should be read."""
        return len(self._pending) >= _MAX_PENDING

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def first_pending(self) -> dict[int, int]:
        """Return by marker partition the offset of the first record that is not in the log yet."""
        first: dict[int, int] = {}
        for number, offset in self._pending:
            first[number] = min(offset, first.get(number, offset))
        return first

    def passed(self, partition: int, position: int) -> None:
        """Its owners have seen to all of this marker partition before the position."""
        for place in [place for place in self._pending if place[0] == partition]:
            if place[1] < position:
                del self._pending[place]

    def put(self, origin: Origin, *, key: bytes | None, value: bytes | None, error: str) -> None:
        """Queue one record, which stands at ``origin``; ``error`` says what is wrong with it."""
        kept = _Kept(origin, key, value, error)
        self._pending[kept.place] = kept
        self._send(kept)

    def _send(self, kept: _Kept) -> None:
        if self._producer is None:
            settings = producer_settings(self._config)
            self._producer = IdempotentProducer(self._config, settings, owner="tracker")
        headers = (
            (ORIGIN, kept.origin.encode()),
            (ERROR, cut_text(kept.error).encode()),
        )
        try:
            self._produce(kept, kept.value, headers)
        except BrokerError as error:
            self._delivered(kept, error)

    def _produce(self, kept: _Kept, value: bytes | None, headers: Headers) -> None:
        assert self._producer is not None, "it is opened"
        try:
            self._producer.produce(
                self._config.quarantine_topic,
                value,
                kept.key,
                -1,
                headers,
                lambda error, _: self._delivered(kept, error),
            )
        except BrokerError as error:
            if value is None or meaning(error) is not Meaning.TOO_LARGE:
                raise
            self._produce(kept, None, headers)

    def poll(self, timeout_s: float = 0.0) -> None:
        """Serve reports, and write again what was refused a while ago.

        Raises:
            BrokerError: What waiting does not mend: credentials, rights.
        """
        if self._producer is None or not self._pending:
            return
        self._producer.serve(timeout_s)
        if self._failure is not None:
            raise self._failure
        now_s = time.monotonic()
        if self._refused and now_s >= self._again_s:
            self._again_s = now_s + AGAIN_S
            refused, self._refused = self._refused, []
            for kept in refused:
                if self._pending.get(kept.place) is kept:
                    self._send(kept)

    def flush(self, *, timeout_s: float = 10.0) -> None:
        """Wait until all is in the log, so that a position behind it may be committed.

        Raises:
            BrokerError, DeadlineExceededError: It is not; may be repeated.
        """
        deadline_s = time.monotonic() + timeout_s
        while self._pending:
            self.poll(0.1)
            if self._pending and time.monotonic() > deadline_s and self._producer is not None:
                raise self._producer.watch.deadline(self._doing, timeout_s)

    def close(self) -> None:
        """End the client; what is not confirmed is read again by the next tracker."""
        if self._producer is not None:
            self._producer.close(2.0)

    def _delivered(self, kept: _Kept, error: KafkaError | BrokerError | None) -> None:
        if error is not None and meaning(error) is not Meaning.TOO_LARGE:
            self._refused.append(kept)
            ours = broker_error(error, self._doing)
            if meaning(error) in REFUSALS:
                self._failure = ours
            if not is_retriable(ours) and not self._has_warned:
                self._has_warned = True
                _log.warning("%s", ours)
            return
        # Too large: its place is in the tracker's log line; the record stays as it is.
        self._pending.pop(kept.place, None)
