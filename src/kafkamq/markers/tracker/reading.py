"""Reads again what a plan names: STARTs by their offsets, reasons, and the messages (R18).

What is read of a window of rows is found, gone, or awaited: a broker does not know it yet, or does
not answer. Nothing here waits for what is awaited, and nothing of it is taken for gone before R18's
minute is over. Messages count only if they still are the same ones (R13).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TypeAlias

from kafkamq.config import ServiceConfig
from kafkamq.errors import DeadlineExceededError, KafkaMQError, WireError
from kafkamq.markers.rules.delivery import Carry, DueCause, Settle, cut, size_of
from kafkamq.markers.wire.interop import completed_start, is_go_start
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.wire.headers import log_id_of, read_stamped_headers, stamp_of
from kafkamq.queue.wire.keys import join_key, split_key
from kafkamq.transport.admin import Admin, TopicInfo
from kafkamq.transport.log_reader import Patience, RecordReader
from kafkamq.transport.record import Record, all_headers, headers_of
from kafkamq.types import Marker, MessageId

_log = logging.getLogger(__name__)

_MAX_TOPICS = 16
_MISSING_S = 10.0
# The longest sweep of a window: rows wait for it.
_READ_S = 1.0
_NOTHING = None, -1, 0
_FRESH_S = 0.5

Span: TypeAlias = tuple[MessageId, int]
"""Messages of one page: bit i is the message at the id's offset + i; bit 0 is set."""

_PartitionOffsets: TypeAlias = tuple[int, Sequence[int]]
"""Partition and offsets, ascending."""

_Read: TypeAlias = dict[int, dict[int, "Record | None"]]
"""By partition and offset."""

_Log: TypeAlias = tuple[int, bytes]
"""Partition and the topic's id."""

_Decoded: TypeAlias = tuple[Marker | None, int, int]
"""A marker, its time, and the size of its record."""


@dataclass(slots=True)
class Found:
    """One message of a plan and what the logs hold of it."""

    row: Settle | Carry
    # The START or SCHEDULE; None: it is gone, or cannot be read.
    start: Marker | None
    timestamp_ms: int
    error: str
    value: bytes | None = None
    # The payload is gone: it was by reference, and the message was deleted.
    is_lost: bool = False


@dataclass(slots=True)
class FoundAction:
    """An action and what the logs hold of it; the fields that all of its messages share."""

    row: Settle | Carry
    start: Marker | None
    timestamp_ms: int
    error: str
    refers: bool = False
    # The first of its messages, one each; None: it is gone, or another one.
    records: Sequence[Record | None] = ()
    # What our records have in their topic (R38); empty: it is the namespace's.
    stamp: bytes = b""

    @property
    def size(self) -> int:
        return size_of(self.row)

    @property
    def known(self) -> int:
        """How many of them are found or gone; the others are awaited."""
        return len(self.records) if self.refers else self.size

    def message(self, number: int) -> Found:
        """Return one of the known messages, with what is its own (R14)."""
        row = cut(self.row, number, number + 1)
        found = Found(row, self.start, self.timestamp_ms, self.error)
        if self.start is not None:
            found.value = self.start.value
            if self.refers:
                _complete(found, self.start, self.records[number], self.stamp)
        return found

    def first(self, size: int) -> FoundAction:
        """Return this action for the first ``size`` of its messages only."""
        return replace(self, row=cut(self.row, 0, size), records=self.records[:size])


class MessageLookup:
    """Reads of one topic of messages; one owner thread.

    Args:
        config: The namespace, whose ``message_topic`` is read.
        patience: For what brokers do not know.
        admin: To ask with.
        queue_id: Of the queue that the topic is (R37); empty: it is the namespace's.
        missing: Topics that brokers do not know, and the monotonic time until which they are not
            asked again.

    Attributes:
        stamp: Of our records in the topic of a queue, when it was asked for (R38); else empty.
    """

    def __init__(
        self,
        config: ServiceConfig,
        patience: Patience,
        admin: Admin,
        queue_id: bytes = b"",
        missing: Mapping[str, float] | None = None,
    ) -> None:
        self.stamp = b""
        self._missing = missing or {}
        self._queue_id = queue_id
        self._config = config
        self._patience = patience
        self._reader = RecordReader(config, config.message_topic)
        self._admin = admin
        self._topics: dict[str, TopicInfo] = {}
        self._topics_s = 0.0

    def close(self) -> None:
        self._reader.close()

    def topic(self, name: str, *, max_age_s: float = 60.0) -> TopicInfo:
        """What the messages or dead-letter topic is; partitions may be added at any time.

        Args:
            name: Of one of the two.
            max_age_s: How old the answer may be; in an outage more, unless this is half a second.

        Raises:
            BrokerError: It does not exist.
        """
        now_s = time.monotonic()
        if not self._topics_s or now_s - self._topics_s >= max_age_s:
            names = [self._config.message_topic]
            if not self._queue_id:
                names.append(self._config.dead_letter_topic)
            try:
                self._topics = {name: self._described(name) for name in names}
            except DeadlineExceededError:
                if not self._topics or max_age_s <= _FRESH_S:
                    raise
            self._topics_s = now_s
        return self._topics[name]

    def ask_again(self) -> None:
        """Ask for the topics again when they are needed next."""
        self._topics_s = 0.0

    def _described(self, name: str) -> TopicInfo:
        """A queue's own topic may be gone: it has no partitions then, and its messages are lost."""
        if not self._queue_id or name != self._config.message_topic:
            return self._admin.require_topic(name)
        is_missing = time.monotonic() < self._missing.get(name, 0.0)
        topic = None if is_missing else self._admin.topics([name]).get(name)
        if topic is None:
            return TopicInfo(name, b"", 0, 0)
        self.stamp = stamp_of(topic.topic_id, self._config.namespace, self._queue_id)
        return replace(topic, topic_id=log_id_of(topic.topic_id, self._queue_id))

    def place(self) -> TopicInfo | None:
        """The topic, to write to; None: brokers do not know it.

        Raises:
            BrokerError, DeadlineExceededError: No answer.
        """
        name = self._config.message_topic
        topic = self.topic(name)
        if not topic.partitions:
            topic = self.topic(name, max_age_s=_FRESH_S)
        return topic if topic.partitions else None

    def is_gone(self) -> bool:
        """Return whether a topic that brokers do not know was looked for long enough (R18)."""
        return self._patience.is_over((self._config.message_topic, -1))

    def _id_now(self) -> bytes:
        topic_id = self._admin.topic_id(self._config.message_topic)
        return log_id_of(topic_id, self._queue_id) if self._queue_id else topic_id

    def _known(self, logs: Mapping[_Log, int]) -> tuple[TopicInfo, set[_Log], set[_Log]]:
        """The topic, which of these logs it has, and which of the others are awaited.

        A topic loses no partitions. A broker that lags behind may not know a new one, or still
        tell the id of the topic that had this name before. So what a broker does not know is asked
        for again until ``patience`` is over.

        ``logs``: With the first offset that is wanted of each.
        """
        name = self._config.message_topic
        source = self.topic(name)
        unknown = {log for log in logs if not _is_in(log, source)}
        # Never refused on the word of an old answer: the partition may be a new one, or led again.
        if unknown and time.monotonic() - self._topics_s >= _FRESH_S:
            source = self.topic(name, max_age_s=_FRESH_S)
            unknown = {log for log in logs if not _is_in(log, source)}
        if source.partitions:
            self._patience.found((name, -1))
        for _, topic_id in logs.keys() - unknown:
            self._patience.found((name, topic_id))
        awaited = set()
        for log in unknown:
            partition, topic_id = log
            if not source.partitions:
                is_over = self.is_gone()
            elif partition in source.leaderless:
                is_over = False
            elif _is_same(topic_id, source):
                # One search for it and for its end, as readers name it.
                is_over = self._patience.is_over((name, partition), logs[log])
            else:
                is_over = self._patience.is_over((name, topic_id))
            if not is_over:
                awaited.add(log)
        return source, logs.keys() - unknown, awaited

    def read(
        self, spans: Sequence[Span], *, deadline_s: float, max_bytes: int
    ) -> list[tuple[Sequence[Record | None], bool]]:
        """The records of the first of these spans, as many as the bounds allow: ask for the rest.

        Of each span its records, one for each message, and whether messages behind them are
        awaited. None stands for a message that is gone, or whose place another one has. Of a first
        span that is too large by itself only some records come, one at least.

        Raises:
            BrokerError, DeadlineExceededError: Brokers did not tell what the topic is.
        """
        logs: dict[_Log, int] = {}
        for one, _ in spans:
            log = one.partition, one.topic_id
            logs[log] = min(one.offset, logs.get(log, one.offset))
        source, known, awaited = self._known(logs)
        places: list[_PartitionOffsets] = [
            (one.partition, _offsets(one.offset, bits))
            if (one.partition, one.topic_id) in known
            else (one.partition, ())
            for one, bits in spans
        ]
        left: dict[int, int] = {}
        count, found = sweep(
            self._reader, places, left, self._patience, deadline_s=deadline_s, max_bytes=max_bytes
        )
        if left:
            # Some may have no leader.
            self.ask_again()
        if any(found.values()) and not _is_same(self._id_now(), source):
            # It was recreated: what was read may be of the new one.
            self.ask_again()
            found, awaited = {}, awaited | known
        result: list[tuple[Sequence[Record | None], bool]] = []
        for (one, bits), place in zip(spans[: count or 1], places, strict=False):
            log = one.partition, one.topic_id
            if log in awaited:
                result.append(((), True))
            elif log in known:
                records = _same(one, place, found)
                result.append((records, count > 0 and len(records) < len(place[1])))
            else:
                result.append(((None,) * bits.bit_count(), False))
        return result


class Rereader:
    """Reads of one namespace's markers and messages; one owner thread.

    ``patience``: For messages that are not there yet.

    Attributes:
        messages: Of the namespace's topic.
    """

    def __init__(self, config: ServiceConfig, patience: Patience | None = None) -> None:
        self._config = config
        self._patience = Patience() if patience is None else patience
        self._admin = Admin(config, timeout_s=10.0)
        self.messages = MessageLookup(config, self._patience, self._admin)
        # Of queues that are topics of their own, by these and their ids; the last ones used.
        self._others: dict[tuple[str, bytes], MessageLookup] = {}
        self._markers = RecordReader(config, config.marker_topic)
        self._is_stale = False
        self._missing = {"": 0.0}
        # Markers of one partition, by offset, that were read for rows behind the last window.
        self._partition, self._ahead = -1, dict[int, _Decoded]()

    def close(self) -> None:
        self._markers.close()
        self.messages.close()
        for lookup in self._others.values():
            lookup.close()
        self._others.clear()
        self._admin.close()

    def prepare(self) -> None:
        """Connect and ask, so that the first rows need not; what fails is left to them.

        The reader of messages connects when one is needed: most trackers never need one.
        """
        with contextlib.suppress(KafkaMQError):
            self.messages.topic(self._config.message_topic)
        self._markers.prepare()

    def ask_again(self) -> None:
        """Have the next window ask for the topics again."""
        self._is_stale = True

    def forget(self) -> None:
        """Hold nothing for the next window: a settlement has ended."""
        self._ahead = {}

    def lookup_of(self, start: Marker | None) -> MessageLookup:
        """Return where to look up the message of a START (R37)."""
        if start is None or not start.message_topic:
            return self.messages
        name = start.message_topic, split_key(start.key)[0]
        lookup = self._others.pop(name, None)
        if lookup is None:
            config = replace(self._config, message_topic=start.message_topic)
            lookup = MessageLookup(config, self._patience, self._admin, name[1], self._missing)
        # The last one is the one that was used last.
        self._others[name] = lookup
        return lookup

    def window(
        self, partition: int, rows: Sequence[Settle | Carry], *, deadline_s: float, max_bytes: int
    ) -> list[FoundAction]:
        """The first of these actions, as many as the bounds allow, at least one message.

        Args:
            partition: Of the markers topic.
            rows: Of a plan, in its order.
            deadline_s: Monotonic time by which they must be read.
            max_bytes: What may be held of the logs, and as much again for the next windows; one
                that is larger comes alone.

        Raises:
            BrokerError, DeadlineExceededError: The markers could not be read in time, or brokers
                did not tell what the messages topic is.
        """
        while len(self._others) > _MAX_TOPICS:
            self._others.pop(next(iter(self._others))).close()
        if self._is_stale:
            self._is_stale = False
            for lookup in (self.messages, *self._others.values()):
                lookup.ask_again()
        if partition != self._partition:
            self._partition, self._ahead = partition, {}
        found = self._starts(partition, rows, deadline_s, max_bytes)
        self._look_for({each.start.message_topic for each in found if each.start is not None})
        asked: dict[MessageLookup, list[int]] = {}
        for at, each in enumerate(found):
            if each.refers:
                asked.setdefault(self.lookup_of(each.start), []).append(at)
        full_s = time.monotonic() + 2 * _READ_S
        for lookup, places in asked.items():
            mine = [at for at in places if at < len(found)]
            if mine and mine[0] and time.monotonic() > full_s:
                del found[mine[0] :]
            elif mine:
                spans = [(found[at].row.message_id, found[at].row.bits) for at in mine]
                self._fill(found, mine, self._read(lookup, spans, deadline_s, max_bytes), lookup)
        return found

    def _look_for(self, topics: set[str]) -> None:
        """Find out in one question which topics of queues there are: somebody may invent many."""
        now_s = time.monotonic()
        known = {name for name, _ in self._others} | {""}
        names = {name for name in topics - known if now_s > self._missing.get(name, 0.0)}
        if len(names) < 2:
            return
        for name in [name for name, until_s in self._missing.items() if now_s > until_s and name]:
            del self._missing[name]
        with contextlib.suppress(KafkaMQError):
            there = self._admin.topics(sorted(names)).keys()
            self._missing.update(dict.fromkeys(names - there, now_s + _MISSING_S))

    def _read(
        self, lookup: MessageLookup, spans: Sequence[Span], deadline_s: float, max_bytes: int
    ) -> list[tuple[Sequence[Record | None], bool]]:
        try:
            return lookup.read(spans, deadline_s=deadline_s, max_bytes=max_bytes)
        except KafkaMQError as error:
            if lookup is self.messages:
                raise
            # The writer of a START chooses the topic: no error of it stops others.
            _log.warning("a topic that a START names cannot be read", extra={"error": str(error)})
            return [((), True)] * len(spans)

    def _fill(
        self,
        found: list[FoundAction],
        places: Sequence[int],
        read: Sequence[tuple[Sequence[Record | None], bool]],
        lookup: MessageLookup,
    ) -> None:
        """Put in what was read; what is behind it is left for the next window."""
        for at, (records, is_awaited) in zip(places, read, strict=False):
            each = found[at]
            each.records, each.stamp = records, lookup.stamp
            if len(records) < each.size and not is_awaited:
                found[at] = each.first(len(records))
                del found[at + 1 :]
                return
        if len(read) < len(places):
            del found[places[len(read)] :]

    def _starts(
        self,
        partition: int,
        rows: Sequence[Settle | Carry],
        deadline_s: float,
        max_bytes: int,
    ) -> list[FoundAction]:
        """Return the STARTs that the markers have, each with the reason of its verdict."""
        full_s = time.monotonic() + _READ_S
        whole = size_bytes = 0
        while not whole:
            there, wanted = self._ahead, _wanted(rows)
            missing, bound_s = sorted(wanted - there.keys()), _left_s(deadline_s)
            for offset, record in self._markers.stream(partition, missing, timeout_s=bound_s):
                there[offset] = decoded = _decoded(record)
                size_bytes += decoded[2]
                if (size_bytes > max_bytes or time.monotonic() > full_s) and len(rows) > 1:
                    # A difference with all of them would look at each of them, for each row.
                    held = there.keys()
                    unread = (at for at, row in enumerate(rows) if not _wanted([row]) <= held)
                    whole = next(unread, len(rows))
                    if 8 * whole <= missing.index(offset):
                        rows, whole = rows[: len(rows) // 4 or 1], 0
                        full_s += _READ_S
                        if size_bytes > max_bytes:
                            self._ahead = {at: there[at] for at in there.keys() & _wanted(rows)}
                            size_bytes = _held(self._ahead)
                    break
            else:
                whole = len(rows)
        if whole < len(rows) or len(there) > len(wanted):
            ahead = {at: there[at] for at in there.keys() - _wanted(rows[:whole])}
            self._ahead = ahead if _held(ahead) <= max_bytes else {}
        else:
            self._ahead = {}
        found: list[FoundAction] = []
        for row in rows[:whole]:
            start, timestamp_ms, _ = there[row.start_offset]
            end = there[row.verdict_offset][0] if row.verdict_offset >= 0 else None
            error = "" if end is None else end.reason
            refers = (
                start is not None
                and not row.of_schedule
                and (bool(start.batches) or start.by_reference or is_go_start(start))
            )
            is_copied = isinstance(row, Carry) or row.cause is not DueCause.ALREADY_ENDED
            found.append(FoundAction(row, start, timestamp_ms, error, refers and is_copied))
        return found


def sweep(
    reader: RecordReader,
    places: Sequence[_PartitionOffsets],
    left: dict[int, int],
    patience: Patience,
    *,
    deadline_s: float,
    max_bytes: int,
) -> tuple[int, _Read]:
    """How many of the first places were read, and what; all partitions at once, front to back.

    Where that takes too long, or too much memory, the last places are left for another time. It is
    none where even the first one is too much; some of its offsets were read then. What is not had
    now counts as read: ``left`` says from which offset on (``RecordReader.sweep``).
    """
    full_s = time.monotonic() + _READ_S
    found: _Read = {}
    size_bytes = 0
    while True:
        for partition, records in reader.sweep(
            _missing(places, found, left),
            timeout_s=_left_s(deadline_s),
            patience=patience,
            left=left,
        ):
            found.setdefault(partition, {}).update(records)
            size_bytes += _size(records.values())
            if size_bytes > max_bytes or time.monotonic() > full_s:
                unread = (at for at, each in enumerate(places) if not _is_read(each, found, left))
                whole = next(unread, len(places))
                if whole or places[0][1][0] in found.get(places[0][0], ()):
                    return whole, found
                if len(places) > 1:
                    break
        else:
            return len(places), found
        # What was read is of others, which lie behind the first one.
        places = places[: len(places) // 4 or 1]
        found = {
            partition: {at: found[partition][at] for at in offsets if at in found[partition]}
            for partition, offsets in _missing(places, {}, {}).items()
            if partition in found
        }
        full_s += _READ_S
        size_bytes = sum(_size(records.values()) for records in found.values())


def _is_read(place: _PartitionOffsets, found: _Read, left: Mapping[int, int]) -> bool:
    """Return whether a partition was read behind these offsets, or they are not had now."""
    partition, offsets = place
    if not offsets:
        return True
    last = offsets[-1]
    return last in found.get(partition, ()) or last >= left.get(partition, last + 1)


def _offsets(first: int, bits: int) -> Sequence[int]:
    if not bits & (bits + 1):
        return range(first, first + bits.bit_length())
    return [first + number for number, bit in enumerate(bin(bits)[:1:-1]) if bit == "1"]


def _missing(
    places: Iterable[_PartitionOffsets], found: _Read, left: Mapping[int, int]
) -> dict[int, list[int]]:
    """Return by partition the offsets that were not read and can be had, ascending."""
    wanted: dict[int, set[int]] = {}
    for partition, offsets in places:
        wanted.setdefault(partition, set()).update(offsets)
    for partition in wanted.keys() & found.keys():
        wanted[partition] -= found[partition].keys()
    for partition in wanted.keys() & left.keys():
        wanted[partition] = {each for each in wanted[partition] if each < left[partition]}
    return {partition: sorted(offsets) for partition, offsets in wanted.items()}


def _size(records: Iterable[Record | None]) -> int:
    """Bytes of what they hold; from here on their headers are safe to be read."""
    there = [each for each in records if each is not None]
    size = sum(map(len, there))
    for record, headers in zip(there, all_headers(there), strict=True):
        size += len(record.key() or b"")
        for name, content in headers:
            size += len(name) + len(content or b"")
    return size


def _same(one: MessageId, place: _PartitionOffsets, found: _Read) -> Sequence[Record | None]:
    """The records of a span that are of its leader epoch, where both are known."""
    there = found.get(place[0], {})
    records = [there[offset] for offset in takewhile(there.__contains__, place[1])]
    if one.leader_epoch <= 0:
        return records
    epochs = (None, -1, one.leader_epoch - 1)
    return [
        each if each is not None and each.leader_epoch() in epochs else None for each in records
    ]


def _is_in(log: _Log, topic: TopicInfo) -> bool:
    """Return whether it can be read: the topic has the partition, and is that of this id (R13)."""
    partition, topic_id = log
    is_there = partition < topic.partitions and partition not in topic.leaderless
    return is_there and _is_same(topic_id, topic)


def _is_same(topic_id: bytes, topic: TopicInfo) -> bool:
    """R13: an id that a broker does not tell counts as the same."""
    return not (topic_id and topic.topic_id) or topic_id == topic.topic_id


def _complete(found: Found, start: Marker, message: Record | None, stamp: bytes) -> None:
    """Put in what the message says; None: it is not there, or is another one."""
    sent_ms = start.message_timestamp_ms
    if message is not None and sent_ms and message.timestamp()[1] != sent_ms:
        message = None
    if is_go_start(start) and not start.batches:
        # Without it each copy would be the second delivery, and no limit ever be reached.
        if message is not None and (message.key(), message.value()) == (start.key, start.value):
            found.start = _completed(start, message, b"")
    elif message is None:
        found.is_lost, found.value = True, None
    elif start.batches:
        # All but T, the limits and the consumer is the message's own (R29).
        found.start, found.value = _completed(start, message, stamp), message.value()
    else:
        # Key and headers, too, may have been too large for the START (R11).
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


def _wanted(rows: Sequence[Settle | Carry]) -> set[int]:
    """Offsets of the markers that are read for these rows."""
    starts, reasons = {row.start_offset for row in rows}, {row.verdict_offset for row in rows}
    return starts | reasons - {-1}


def _held(markers: Mapping[int, _Decoded]) -> int:
    return sum(size for _, _, size in markers.values())


def _decoded(record: Record | None) -> _Decoded:
    """Return the marker of a record; None: it is gone, or no marker."""
    if record is None:
        return _NOTHING
    try:
        return decode_marker(record.value()), record.timestamp()[1], len(record)
    except WireError:
        return _NOTHING


def _left_s(deadline_s: float) -> float:
    return max(0.5, deadline_s - time.monotonic())
