"""The quarantine log: records that no tracker could decode, with where they came from (R21)."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, KafkaMQError
from kafkamq.queue.wire.headers import ERROR, ORIGIN, Origin, cut_text
from kafkamq.transport.errors import (
    REFUSALS,
    KafkaError,
    Meaning,
    broker_error,
    is_retriable,
    meaning,
)
from kafkamq.transport.producer import IdempotentProducer
from kafkamq.transport.settings import producer_settings
from kafkamq.types import Headers

_log = logging.getLogger(__name__)
_MAX_PENDING = 5_000
_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class _Kept:
    """A record that is on its way."""

    origin: Origin
    key: bytes | None
    value: bytes | None
    error: str

    @property
    def place(self) -> tuple[int, int]:
        """Marker partition and offset."""
        return self.origin.partition, self.origin.offset


class Quarantine:
    """Writes to a namespace's quarantine topic; one owner thread.

    At least once: a tracker that restarts reads some records again. ``kafkamq-origin`` names the
    record; two with the same one are the same record. What is refused for a while is written again,
    by ``poll``; a position behind ``first_pending`` may not be written before that.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._producer: IdempotentProducer | None = None
        self._pending: dict[tuple[int, int], _Kept] = {}  # by the place where it stands
        self._failure: KafkaMQError | None = None  # one that waiting does not mend
        self._refused: list[_Kept] = []
        self._again_s = 0.0  # monotonic: not before
        self._has_warned = False
        self.dropped = 0
        """Records that were too large for the topic: only their place and error were kept."""

    @property
    def is_full(self) -> bool:
        """Whether so many are on their way that no more should be read."""
        return len(self._pending) >= _MAX_PENDING

    @property
    def has_pending(self) -> bool:
        """Whether something is on its way."""
        return bool(self._pending)

    def first_pending(self) -> dict[int, int]:
        """By marker partition: offset of the first record that is not in the log yet."""
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
        """Queue one record.

        Args:
            origin: Where it stands.
            key: Its key.
            value: Its value.
            error: What is wrong with it.
        """
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
            self.dropped += 1
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
            self._again_s = now_s + _AGAIN_S
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
                raise self._producer.watch.deadline(self._doing(), timeout_s)

    def close(self) -> None:
        """End the client; what is not confirmed is read again by the next tracker."""
        if self._producer is not None:
            self._producer.close(2.0)

    def _doing(self) -> str:
        return f"writing to {self._config.quarantine_topic}"

    def _delivered(self, kept: _Kept, error: KafkaError | BrokerError | None) -> None:
        if error is not None and meaning(error) is not Meaning.TOO_LARGE:
            self._refused.append(kept)
            ours = broker_error(error, self._doing())
            if meaning(error) in REFUSALS:
                self._failure = ours
            if not is_retriable(ours) and not self._has_warned:
                self._has_warned = True
                _log.warning("%s", ours)
            return
        # Too large: its place is in the tracker's log line; the record stays as it is.
        self.dropped += error is not None
        self._pending.pop(kept.place, None)
