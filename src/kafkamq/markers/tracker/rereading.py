"""Reads again what a plan names: STARTs by their offsets, reasons, payloads by reference (R18)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kafkamq.config import ServiceConfig
from kafkamq.errors import WireError
from kafkamq.markers.rules.delivery import Carry, Settle
from kafkamq.markers.rules.rows import cut, size_of
from kafkamq.markers.tracker.message_lookup import MessageLookup, ReadingWindow, Span
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.markers.wire.mqgo import completed_start, is_foreign_start
from kafkamq.queue.wire.keys import join_key, split_key
from kafkamq.queue.wire.stamps import read_stamped_headers
from kafkamq.transport.patience import Patience
from kafkamq.transport.record import Record, headers_of
from kafkamq.transport.record_reader import RecordReader
from kafkamq.types import Marker

_MAX_TOPICS = 16  # of queues, whose readers are kept
_MAX_WINDOW = 5000  # rows whose reasons are held at once
_WINDOW_S = 0.25  # what reading the reasons of a window may take: rows wait for it
_AHEAD_S = 1.0  # rows wait so long for others whose messages are read with theirs


@dataclass(slots=True)
class Found:
    """One message of a plan and what the logs hold of it."""

    row: Settle | Carry
    start: Marker | None  # the START or SCHEDULE; None: gone, or unreadable
    timestamp_ms: int  # of the START
    error: str  # reason of the verdict; empty without one
    value: bytes | None = None  # the payload
    is_lost: bool = False  # the payload is gone: it was by reference, and the message was deleted


@dataclass(slots=True)
class FoundAction:
    """An action and what the logs hold of it; the fields that all of its messages share."""

    row: Settle | Carry
    start: Marker | None
    timestamp_ms: int
    error: str
    refers: bool = False  # its messages are read, too
    records: Sequence[Record | None] = ()  # these, one each; None: gone, or another one
    stamp: bytes = b""  # of our records in their topic (R38); empty: it is the namespace's

    @property
    def size(self) -> int:
        """How many messages it is about."""
        return size_of(self.row)

    def messages(self) -> Iterator[Found]:
        """Each with what is its own (R14)."""
        for number in range(self.size):
            yield self.message(number)

    def message(self, number: int) -> Found:
        """One of them."""
        row = cut(self.row, number, number + 1)
        found = Found(row, self.start, self.timestamp_ms, self.error)
        if self.start is not None:
            found.value = self.start.value
            if self.refers:
                _complete(found, self.start, self.records[number], self.stamp)
        return found

    def cut(self, begin: int, end: int) -> FoundAction:
        """The same of these messages only (half-open)."""
        records = self.records[begin:end]
        return replace(self, row=cut(self.row, begin, end), records=records)


class Rereader:
    """Reads of one namespace's markers and messages; one owner thread.

    ``max_ahead_bytes``: What messages that were read, and not asked for yet, may take; one that is
    larger comes alone. ``patience``: For messages that are not there yet.

    Attributes:
        messages: Of by-reference STARTs.
    """

    def __init__(
        self, config: ServiceConfig, *, max_ahead_bytes: int, patience: Patience | None = None
    ) -> None:
        self._config = config
        self._max_ahead_bytes = max_ahead_bytes
        self._patience = Patience() if patience is None else patience
        self.messages = MessageLookup(config, max_bytes=max_ahead_bytes, patience=self._patience)
        # Of queues that are topics of their own, by these and their ids; the last ones used.
        self._others: dict[tuple[str, bytes], MessageLookup] = {}
        self._markers = RecordReader(config, config.marker_topic)
        self._reasons_window = ReadingWindow(_MAX_WINDOW, _WINDOW_S)
        # Reasons of the last window, by marker partition and offset of their END.
        self._known: dict[tuple[int, int], str] = {}
        # What was read ahead and not taken: a transaction may end inside of a window.
        self._ready: deque[FoundAction] = deque()

    def close(self) -> None:
        """Close the clients; idempotent."""
        self._markers.close()
        self.messages.close()
        for lookup in self._others.values():
            lookup.close()
        self._others.clear()

    def lookup_of(self, start: Marker | None) -> MessageLookup:
        """Where the message of a START stands (R37)."""
        if start is None or not start.message_topic:
            return self.messages
        queue_id = split_key(start.key)[0]
        name = start.message_topic, queue_id
        lookup = self._others.pop(name, None)
        if lookup is None:
            lookup = MessageLookup(
                replace(self._config, message_topic=start.message_topic),
                max_bytes=self._max_ahead_bytes,
                patience=self._patience,
                queue_id=queue_id,
            )
        self._others[name] = lookup  # last: the one that was used last
        return lookup

    def prepare(self) -> None:
        """Connect and ask, so that the first rows need not; what fails is left to them."""
        self.messages.prepare()
        self._markers.prepare()

    def rows(
        self, partition: int, actions: Sequence[Settle | Carry], *, deadline_s: float
    ) -> Iterator[FoundAction]:
        """Each of these actions of one marker partition, in that order; a part of one at a time.

        Args:
            partition: Of the markers topic.
            actions: ``Rows`` of a plan.
            deadline_s: Monotonic time by which all must be read.

        Raises:
            BrokerError, DeadlineExceededError: The logs could not be read in time.
        """
        while len(self._others) > _MAX_TOPICS:
            self._others.pop(next(iter(self._others))).close()
        begin = 0
        for found in self._left_for(actions):
            yield found
            begin += 1
        self._ready.clear()
        has_reasons = any(_reason_at(row) >= 0 for row in actions[begin:])
        while begin < len(actions):
            size = self._reasons_window.rows if has_reasons else len(actions)
            window = self._window(partition, actions[begin : begin + size], deadline_s)
            yield from self._with_messages(window, deadline_s)
            begin += size

    def _left_for(self, actions: Sequence[Settle | Carry]) -> Iterator[FoundAction]:
        """What was read ahead of these; of the first one some messages may have been taken."""
        ready = self._ready
        if ready and actions:
            first, wanted = ready[0], actions[0]
            taken = first.size - size_of(wanted)
            if taken > 0 and cut(first.row, taken) == wanted:
                ready[0] = first.cut(taken, first.size)
            elif first.row != wanted:
                ready.popleft()  # all of it was
        for wanted in actions:
            if not ready or ready[0].row != wanted:
                return
            yield ready[0]
            ready.popleft()

    def _window(
        self, partition: int, rows: Sequence[Settle | Carry], deadline_s: float
    ) -> Iterator[FoundAction]:
        """As far as the markers say it."""
        reasons = self._reasons(partition, rows, deadline_s)
        offsets = list(dict.fromkeys(row.start_offset for row in rows))
        messages = self._markers.stream(partition, offsets, timeout_s=_left_s(deadline_s))
        offset, start, timestamp_ms, refers = -1, None, -1, False
        for row in rows:
            if row.start_offset != offset:
                offset, message = next(messages)
                start = _decoded(message)
                timestamp_ms = -1 if start is None or message is None else message.timestamp()[1]
                refers = start is not None and (
                    bool(start.batches) or start.by_reference or is_foreign_start(start)
                )
            error = reasons.get(_reason_at(row), "") if reasons else ""
            of_message = refers and not row.of_schedule
            yield FoundAction(row, start, timestamp_ms, error, of_message)

    def _with_messages(
        self, rows: Iterator[FoundAction], deadline_s: float
    ) -> Iterator[FoundAction]:
        """The same, with what the messages say where a START refers to them (R11, R18)."""
        waiting: list[FoundAction] = []
        count, size_bytes, full_s = 0, 0, time.monotonic() + _AHEAD_S
        lookup = self.messages
        for found in rows:
            if not waiting and not found.refers:
                yield found
                continue
            if found.refers and (of := self.lookup_of(found.start)) is not lookup:
                yield from self._complete_all(waiting, lookup, deadline_s)
                waiting, lookup = [], of
                count, size_bytes, full_s = 0, 0, time.monotonic() + _AHEAD_S
            waiting.append(found)
            count += found.size
            if found.start is not None:
                size_bytes += len(found.start.value or b"")
            if (
                count >= lookup.window.rows
                or size_bytes >= lookup.window.most_bytes
                or time.monotonic() > full_s
            ):
                yield from self._complete_all(waiting, lookup, deadline_s)
                waiting = []
                count, size_bytes, full_s = 0, 0, time.monotonic() + _AHEAD_S
        yield from self._complete_all(waiting, lookup, deadline_s)

    def _complete_all(
        self, rows: Sequence[FoundAction], lookup: MessageLookup, deadline_s: float
    ) -> Iterator[FoundAction]:
        rest = deque(rows)
        while rest:
            spans = [_span(each.row) if each.refers else None for each in rest]
            for records in lookup.read(spans, deadline_s=deadline_s):
                found = rest.popleft()
                if found.refers and len(records) < found.size:
                    rest.appendleft(found.cut(len(records), found.size))
                    found = found.cut(0, len(records))
                found.records, found.stamp = records, lookup.stamp
                self._ready.append(found)
            while self._ready:
                yield self._ready[0]  # which stays there if its owner takes but a part of it
                self._ready.popleft()

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
                self._reasons_window.took(len(reasons) - before, time.monotonic() - began_s)
            # Also where the time was too short: the next attempt goes on from here.
            self._known = {(partition, offset): reason for offset, reason in reasons.items()}
        return reasons


def _complete(found: Found, start: Marker, message: Record | None, stamp: bytes) -> None:
    """Put in what the message says; None: it is not there, or is another one."""
    sent_ms = start.message_timestamp_ms
    if message is not None and sent_ms and message.timestamp()[1] != sent_ms:
        message = None
    if is_foreign_start(start) and not start.batches:
        # Without it each copy would be the second delivery, and no limit ever be reached.
        if message is not None and (message.key(), message.value()) == (start.key, start.value):
            found.start = _completed(start, message, b"")
    elif message is None:
        found.is_lost, found.value = True, None
    elif start.batches:  # R29: all but T, the limits and the consumer is the message's own
        found.start, found.value = _completed(start, message, stamp), message.value()
    else:  # R11: key and headers, too, may have been too large for the START
        found.start = replace(start, key=_key_of(start, message), headers=headers_of(message))
        found.value = message.value()


def _key_of(start: Marker, message: Record) -> bytes:
    """The message's key with the queue's id in front; in a topic of a queue it has none (R37)."""
    key: bytes | None = message.key()
    return join_key(split_key(start.key)[0], key) if start.message_topic else key or b""


def _completed(start: Marker, message: Record, stamp: bytes) -> Marker:
    headers = headers_of(message)
    read = read_stamped_headers(headers, stamp) if start.message_topic else None
    known = _key_of(start, message), headers, message.timestamp()[1]
    return completed_start(start, *known, read=read)


def _span(row: Settle | Carry) -> Span:
    return row.message_id, row.bits


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
