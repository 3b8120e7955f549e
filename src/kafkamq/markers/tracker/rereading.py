"""Reads again what a plan names: STARTs by their offsets, reasons, payloads by reference (R18)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DeadlineExceededError, KafkaMQError, WireError
from kafkamq.markers.rules.delivery import Carry, Settle
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.markers.wire.mqgo import completed_start, is_foreign_start
from kafkamq.transport.admin import Admin, TopicInfo
from kafkamq.transport.record import Record, headers_of
from kafkamq.transport.record_reader import RecordReader
from kafkamq.types import Marker, MessageId

__all__ = ["Found", "Rereader"]

_Number = tuple[int, int]
"""Partition and offset of a message."""

_MAX_WINDOW = 5000  # rows whose reasons are held at once
_MIN_WINDOW = 16
_WINDOW_S = 0.25  # what reading the reasons of a window may take: rows wait for it
_MAX_AHEAD = 50_000  # messages by reference that are held at once
_AHEAD_S = 1.0  # what reading them may take
_FRESH_S = 1.0
_END_GRACE_S = 3.0  # a new leader may know less for a moment than the old one served


@dataclass(slots=True)
class Found:
    """A row of a plan and what the logs hold of it."""

    row: Settle | Carry
    start: Marker | None  # the START or SCHEDULE; None: gone, or unreadable
    timestamp_ms: int  # of the START
    error: str  # reason of the verdict; empty without one
    value: bytes | None  # the payload
    is_lost: bool  # the payload is gone: it was by reference, and the message was deleted


class _Window:
    """How many rows are read at once: rows wait for it, and it waits in memory."""

    def __init__(self, most: int, most_s: float, most_bytes: int = 1 << 62) -> None:
        self.most_s = most_s
        self.most_bytes = most_bytes
        self.rows = 16 * _MIN_WINDOW
        self._most = most

    def took(self, rows: int, seconds: float, size_bytes: int = 0) -> None:
        """So many were read: the next ones may be as many as fit at this rate."""
        share = max(seconds / self.most_s, size_bytes / self.most_bytes, 1e-9)
        fitting = min(int(rows / share), 4 * self.rows, self._most)
        self.rows = max(_MIN_WINDOW, fitting)


class Rereader:
    """Reads of one namespace's markers and messages; one owner thread.

    ``max_ahead_bytes``: What messages that were read, and not asked for yet, may take; one that is
    larger comes alone.
    """

    def __init__(self, config: ServiceConfig, *, max_ahead_bytes: int) -> None:
        self._config = config
        self._markers = RecordReader(config, config.marker_topic)
        self._messages = RecordReader(config, config.message_topic)
        self._admin: Admin | None = None
        self._topics: dict[str, TopicInfo] = {}
        self._topics_s = 0.0  # monotonic: when they were asked for
        self._for_reasons = _Window(_MAX_WINDOW, _WINDOW_S)
        # Reasons of the last window, by marker partition and offset of their END.
        self._known: dict[tuple[int, int], str] = {}
        self._for_messages = _Window(_MAX_AHEAD, _AHEAD_S, max_ahead_bytes)
        self._ahead: dict[_Number, Record | None] = {}  # messages of the last window
        self._source: TopicInfo | None = None  # of which topic they are

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
        self._messages.prepare()

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
            admin = self._asked(timeout_s)
            names = (self._config.message_topic, self._config.dead_letter_topic)
            try:
                self._topics = {name: admin.require_topic(name) for name in names}
            except DeadlineExceededError:
                if not self._topics:
                    raise
            self._topics_s = now_s
        return self._topics[name]

    def _asked(self, timeout_s: float = 10.0) -> Admin:
        if self._admin is None:
            self._admin = Admin(self._config, timeout_s=timeout_s)
        return self._admin

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
            size = self._for_reasons.rows if has_reasons else len(rows)
            window = self._window(partition, rows[begin : begin + size], deadline_s)
            yield from self._with_messages(window, deadline_s)
            begin += size
        self._ahead = {}

    def _window(
        self, partition: int, rows: Sequence[Settle | Carry], deadline_s: float
    ) -> Iterator[Found]:
        """As far as the markers say it."""
        reasons = self._reasons(partition, rows, deadline_s)
        offsets = list(dict.fromkeys(row.start_offset for row in rows))
        messages = self._markers.stream(partition, offsets, timeout_s=_left_s(deadline_s))
        offset, message, start = -1, None, None
        for row in rows:
            if row.start_offset != offset:
                offset, message = next(messages)
                start = _decoded(message)
            found = Found(row, start, -1, "", None, False)
            if start is not None and message is not None:
                found.timestamp_ms = message.timestamp()[1]
                found.value = start.value
                found.error = reasons.get(_reason_at(row), "")
            yield found

    def _with_messages(self, rows: Iterator[Found], deadline_s: float) -> Iterator[Found]:
        """The same, with what the messages say where a START refers to them (R11, R18)."""
        waiting: list[Found] = []
        size_bytes, full_s = 0, 0.0
        for found in rows:
            if not waiting:
                if not _refers(found):
                    yield found
                    continue
                size_bytes, full_s = 0, time.monotonic() + _AHEAD_S
            waiting.append(found)
            size_bytes += len(found.value or b"")
            if (
                len(waiting) >= self._for_messages.rows
                or size_bytes >= self._for_messages.most_bytes
                or time.monotonic() > full_s
            ):
                yield from self._completed(waiting, deadline_s)
                waiting = []
        yield from self._completed(waiting, deadline_s)

    def _completed(self, rows: Sequence[Found], deadline_s: float) -> Iterator[Found]:
        begin = 0
        while begin < len(rows):
            window = rows[begin : begin + self._for_messages.rows]
            window = window[: self._read_ahead(window, deadline_s)]
            for found in window:
                if _refers(found):
                    self._complete(found)
                yield found
            begin += len(window)

    def _complete(self, found: Found) -> None:
        """Put in what the message says, if it still is the same one (R13)."""
        start, message_id = found.start, found.row.message_id
        message = self._ahead.get((message_id.partition, message_id.offset))
        assert start is not None, "it refers to a message"
        assert self._source is not None, "its message was asked for"
        if (
            message is None
            or not _is_of(message_id, self._source)
            or not _is_same(message, message_id, start)
        ):
            message = None
        if is_foreign_start(start):
            # Without it each copy would be the second delivery, and no limit ever be reached.
            if message is not None and (message.key(), message.value()) == (start.key, start.value):
                found.start = completed_start(start, headers_of(message), message.timestamp()[1])
        elif message is None:
            found.is_lost, found.value = True, None
        else:  # R11: key and headers, too, may have been too large for the START
            found.start = replace(start, key=message.key() or b"", headers=headers_of(message))
            found.value = message.value()

    def _read_ahead(self, rows: Sequence[Found], deadline_s: float) -> int:
        """Have the messages that rows refer to; of so many of the rows as the bounds allow.

        What the last window has is not read again: a transaction may end inside of a window.
        """
        name = self._config.message_topic
        source = self.topic(name)
        if not all(_is_of(found.row.message_id, source) for found in rows if _refers(found)):
            # Never refused on the word of an old answer: the partition may be a new one.
            source = self.topic(name, max_age_s=_FRESH_S)
        known = self._ahead if self._source == source else {}
        self._ahead, self._source = {}, source
        count, found = self._sweep(rows, known, deadline_s)
        if found.keys() - known.keys() and self._asked().topic_id(name) != source.topic_id:
            self._topics.clear()  # they may be of the new one
            raise BrokerError(
                f"topic {name} was made anew", code="TOPIC_MADE_ANEW", is_retriable=True
            )
        self._ahead = found
        return count

    def _sweep(
        self, rows: Sequence[Found], known: Mapping[_Number, Record | None], deadline_s: float
    ) -> tuple[int, dict[_Number, Record | None]]:
        """How many rows have theirs, and the messages; each partition is read in one go."""
        window, source = self._for_messages, self._source
        assert source is not None, "it was asked for"
        began_s = time.monotonic()
        full_s = began_s + 2 * window.most_s
        count = len(rows)
        found = {number: known[number] for number in _numbers(rows, source) if number in known}
        while True:
            wanted = _by_partition(_numbers(rows[:count], source) - found.keys())
            size_bytes = sum(map(_size, found.values()))
            is_cut = False
            for partition, offset, message in self._messages.sweep(
                wanted, timeout_s=_left_s(deadline_s), end_grace_s=_END_GRACE_S
            ):
                found[partition, offset] = message
                size_bytes += _size(message)
                is_full = size_bytes > window.most_bytes or time.monotonic() > full_s
                is_cut = is_full and count > 1
                if is_cut:
                    break
            if not is_cut:
                window.took(count, time.monotonic() - began_s, size_bytes)
                return count, found
            count //= 2  # the other rows wait, and what was read of them is read again
            full_s += window.most_s
            kept = _numbers(rows[:count], source)
            found = {number: message for number, message in found.items() if number in kept}

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
        began_s, before = time.monotonic(), len(reasons)
        try:
            for offset, message in self._markers.stream(
                partition, offsets, timeout_s=_left_s(deadline_s)
            ):
                end = _decoded(message)
                reasons[offset] = "" if end is None else end.reason
        finally:
            if offsets:
                self._for_reasons.took(len(reasons) - before, time.monotonic() - began_s)
        self._known = {(partition, offset): reason for offset, reason in reasons.items()}
        return reasons


def _refers(found: Found) -> bool:
    """Whether its message is to be read, too."""
    start, row = found.start, found.row
    if start is None or isinstance(row, Carry) or row.of_schedule:
        return False
    return start.by_reference or is_foreign_start(start)


def _numbers(rows: Sequence[Found], topic: TopicInfo) -> set[_Number]:
    """Of the messages that these rows refer to."""
    ids = (found.row.message_id for found in rows if _refers(found))
    return {(each.partition, each.offset) for each in ids if _is_of(each, topic)}


def _by_partition(numbers: Iterable[_Number]) -> dict[int, list[int]]:
    """Offsets by partition, ascending."""
    offsets: dict[int, list[int]] = {}
    for partition, offset in sorted(numbers):
        offsets.setdefault(partition, []).append(offset)
    return offsets


def _size(message: Record | None) -> int:
    if message is None:
        return 0
    return len(message.key() or b"") + len(message.value() or b"")


def _is_same(message: Record, message_id: MessageId, start: Marker) -> bool:
    """Whether the record at its place still is the message of this START (R13, R18)."""
    epoch = message.leader_epoch()
    is_known = message_id.leader_epoch > 0 and epoch is not None and epoch >= 0
    if is_known and epoch != message_id.leader_epoch - 1:
        return False
    sent_ms = start.message_timestamp_ms
    return not sent_ms or message.timestamp()[1] == sent_ms


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
