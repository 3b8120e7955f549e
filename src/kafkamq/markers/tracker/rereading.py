"""Reads again what a plan names: STARTs by their offsets, reasons, payloads by reference (R18)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kafkamq.config import ServiceConfig
from kafkamq.errors import DeadlineExceededError, KafkaMQError, WireError
from kafkamq.markers.rules.delivery import Carry, Settle
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.markers.wire.mqgo import completed_start, is_foreign_start
from kafkamq.transport.admin import Admin, TopicInfo
from kafkamq.transport.record import Record, headers_of
from kafkamq.transport.record_reader import RecordReader
from kafkamq.types import Marker, MessageId

__all__ = ["Found", "Rereader"]

_MAX_WINDOW = 5000  # rows whose reasons are held at once
_MIN_WINDOW = 16
_WINDOW_S = 0.25  # what reading the reasons of a window may take: rows wait for it
_FRESH_S = 1.0


@dataclass(slots=True)
class Found:
    """A row of a plan and what the logs hold of it."""

    row: Settle | Carry
    start: Marker | None  # the START or SCHEDULE; None: gone, or unreadable
    timestamp_ms: int  # of the START
    error: str  # reason of the verdict; empty without one
    value: bytes | None  # the payload
    is_lost: bool  # the payload is gone: it was by reference, and the message was deleted


class Rereader:
    """Reads of one namespace's markers and messages; one owner thread."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._markers = RecordReader(config, config.marker_topic)
        self._messages = RecordReader(config, config.message_topic)
        self._admin: Admin | None = None
        self._topics: dict[str, TopicInfo] = {}
        self._topics_s = 0.0  # monotonic: when they were asked for
        self._window_rows = 16 * _MIN_WINDOW  # follows what reading costs
        # Reasons of the last window, by marker partition and offset of their END.
        self._known: dict[tuple[int, int], str] = {}

    def close(self) -> None:
        """Close the clients; idempotent."""
        self._markers.close()
        self._messages.close()
        if self._admin is not None:
            self._admin.close()
            self._admin = None

    def prepare(self) -> None:
        """Connect and ask, so that the first rows need not; what fails is left to them."""
        with contextlib.suppress(KafkaMQError):
            self.topic(self._config.message_topic)
        self._markers.prepare()

    def topic(self, name: str, *, timeout_s: float = 10.0, max_age_s: float = 60.0) -> TopicInfo:
        """What the messages or dead-letter topic is; partitions may be added at any time.

        Args:
            name: Of one of the two.
            timeout_s: Bound of the question.
            max_age_s: How old the answer may be; in an outage it may be older.

        Raises:
            BrokerError: It does not exist.
        """
        now_s = time.monotonic()
        if not self._topics or now_s - self._topics_s >= max_age_s:
            if self._admin is None:
                self._admin = Admin(self._config, timeout_s=timeout_s)
            names = (self._config.message_topic, self._config.dead_letter_topic)
            try:
                self._topics = {name: self._admin.require_topic(name) for name in names}
            except DeadlineExceededError:
                if not self._topics:
                    raise
            self._topics_s = now_s
        return self._topics[name]

    def rows(
        self, partition: int, rows: Sequence[Settle | Carry], *, deadline_s: float
    ) -> Iterator[Found]:
        """Each of ``rows`` (ascending by START offset) of one marker partition, in that order.

        Args:
            partition: Of the markers topic.
            rows: A plan, or a part of it.
            deadline_s: Monotonic time by which all must be read.

        Raises:
            BrokerError, DeadlineExceededError: The logs could not be read in time.
        """
        has_reasons = any(_reason_at(row) >= 0 for row in rows)
        begin = 0
        while begin < len(rows):
            size = self._window_rows if has_reasons else len(rows)
            yield from self._window(partition, rows[begin : begin + size], deadline_s)
            begin += size

    def _window(
        self, partition: int, rows: Sequence[Settle | Carry], deadline_s: float
    ) -> Iterator[Found]:
        reasons = self._reasons(partition, rows, deadline_s)
        offsets = list(dict.fromkeys(row.start_offset for row in rows))
        messages = self._markers.stream(partition, offsets, timeout_s=_left_s(deadline_s))
        offset, message = -1, None
        for row in rows:
            if row.start_offset != offset:
                offset, message = next(messages)
            start = _decoded(message)
            found = Found(row, start, -1, "", None, False)
            if start is not None and message is not None:
                found.timestamp_ms = message.timestamp()[1]
                found.value = start.value
                found.error = reasons.get(_reason_at(row), "")
                if isinstance(row, Settle) and not row.of_schedule and is_foreign_start(start):
                    found.start = self._completed(row.message_id, start, deadline_s)
                if start.by_reference:
                    payload = self._payload(row.message_id, start, deadline_s)
                    if payload is None:
                        found.is_lost, found.value = True, None
                    else:  # R11: key and headers, too, may have been too large for the START
                        key, headers = payload.key() or b"", headers_of(payload)
                        found.start = replace(start, key=key, headers=headers)
                        found.value = payload.value()
            yield found

    def _reasons(
        self, partition: int, rows: Sequence[Settle | Carry], deadline_s: float
    ) -> dict[int, str]:
        """Reason texts of the verdicts, by the offset of their END.

        What the last window knew is not read again: a transaction may end inside of a window.
        """
        wanted = sorted({_reason_at(row) for row in rows} - {-1})
        known = {offset: self._known.get((partition, offset)) for offset in wanted}
        reasons = {offset: reason for offset, reason in known.items() if reason is not None}
        offsets = [offset for offset in wanted if offset not in reasons]
        began_s = time.monotonic()
        for offset, message in self._markers.stream(
            partition, offsets, timeout_s=_left_s(deadline_s)
        ):
            end = _decoded(message)
            reasons[offset] = "" if end is None else end.reason
        if offsets:
            each_s = max(1e-6, (time.monotonic() - began_s) / len(offsets))
            fitting = min(round(_WINDOW_S / each_s), 4 * self._window_rows, _MAX_WINDOW)
            self._window_rows = max(_MIN_WINDOW, fitting)
        self._known = {(partition, offset): reason for offset, reason in reasons.items()}
        return reasons

    def _completed(self, message_id: MessageId, start: Marker, deadline_s: float) -> Marker:
        """A START of kafka-mq-go's, with headers and count of the message that still stands there.

        Without them each copy would be the second delivery, and no limit would ever be reached.
        """
        message = self._payload(message_id, start, deadline_s)
        if message is None or message.key() != start.key or message.value() != start.value:
            return start  # deleted, or another message in its place
        return completed_start(start, headers_of(message), message.timestamp()[1])

    def _payload(self, message_id: MessageId, start: Marker, deadline_s: float) -> Record | None:
        """The message of a START by reference, if it still is the same one (R13, R18)."""
        name = self._config.message_topic
        # Never refused on the word of an old answer: the partition may be a new one.
        if not _is_of(message_id, self.topic(name)) and not _is_of(
            message_id, self.topic(name, max_age_s=_FRESH_S)
        ):
            return None
        message = self._messages.read(
            message_id.partition, message_id.offset, timeout_s=_left_s(deadline_s)
        )
        if message is None:
            return None
        epoch = message.leader_epoch()
        is_known = message_id.leader_epoch > 0 and epoch is not None and epoch >= 0
        if is_known and epoch != message_id.leader_epoch - 1:
            return None
        if start.message_timestamp_ms and message.timestamp()[1] != start.message_timestamp_ms:
            return None
        return message


def _is_of(message_id: MessageId, topic: TopicInfo) -> bool:
    """Whether the message can be in this topic: its partition exists, and it was not made anew."""
    if message_id.partition >= topic.partitions:
        return False
    return not (message_id.topic_id and topic.topic_id) or message_id.topic_id == topic.topic_id


def _reason_at(row: Settle | Carry) -> int:
    """Offset of the END with the reason; -1: there is none."""
    return row.verdict_offset if isinstance(row, Settle) else -1


def _decoded(message: Record | None) -> Marker | None:
    if message is None:
        return None
    try:
        return decode_marker(message.value())
    except WireError:
        return None


def _left_s(deadline_s: float) -> float:
    return max(0.5, deadline_s - time.monotonic())
