"""Messages that markers refer to, read again where they stand (R18): in sweeps, each of all that
fits into memory, and only if they still are the same ones (R13).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DeadlineExceededError, KafkaMQError
from kafkamq.queue.wire.stamps import log_id_of, stamp_of
from kafkamq.transport.admin import Admin, TopicInfo
from kafkamq.transport.patience import Patience
from kafkamq.transport.record import Record, all_headers
from kafkamq.transport.record_reader import RecordReader
from kafkamq.types import MessageId

_FIRST_ROWS = 256
_LEAST_ROWS = 16  # of a read, unless they take longer than
_LEAST_S = 4.0  # this: a settlement may not take much longer
_MAX_AHEAD = 50_000  # messages that are held at once
_FIRST_AHEAD = 4096  # at first: what is too much of it is cut off while it is read
_AHEAD_S = 1.0  # what reading them may take: who asked waits for it
_FRESH_S = 0.5  # also between two questions for what is not known yet

Span = tuple[MessageId, int]
"""Messages of one page: bit i is the message at the id's offset + i; bit 0 is set."""

Records = list["Record | None"]

_Place = tuple[int, "Sequence[int]"]
"""Partition and offsets."""

_Found = dict[int, dict[int, "Record | None"]]
"""By partition and offset."""

_Log = tuple[int, bytes]
"""Partition and the topic's id."""


class ReadingWindow:
    """How many rows are read at once: rows wait for it, and it waits in memory.

    As many as take ``most_s``, but at least 16: where a read costs the same for one row and for
    many, fewer would only be slower. Where a seek takes seconds these would take longer than a
    settlement may, and it is fewer.
    """

    def __init__(
        self, most: int, most_s: float, most_bytes: int = 1 << 62, *, first: int = _FIRST_ROWS
    ) -> None:
        self.most_s = most_s
        self.most_bytes = most_bytes
        self.rows = first
        self._most = most

    def took(self, rows: int, seconds: float, size_bytes: int = 0) -> None:
        """So many were read: the next ones may be as many as fit at this rate."""
        if not rows:  # a partition that does not answer says nothing of those that do
            return
        share = max(seconds / self.most_s, size_bytes / self.most_bytes, 1e-9)
        fitting = min(int(rows / share), 4 * self.rows, self._most)
        least = min(_LEAST_ROWS, int(rows * _LEAST_S / max(seconds, 1e-9)))
        self.rows = max(1, least, fitting)


class MessageLookup:
    """Reads of one namespace's messages; one owner thread.

    Args:
        config: The namespace, whose ``message_topic`` is read.
        max_bytes: What messages that were read may take; one that is larger comes alone.
        patience: For what brokers do not know; None: one of its own.
        queue_id: Of the queue that the topic is (R37); empty: it is the namespace's.

    Attributes:
        stamp: Of our records in the topic of a queue, when it was asked for (R38); else empty.
    """

    def __init__(
        self,
        config: ServiceConfig,
        *,
        max_bytes: int,
        patience: Patience | None = None,
        queue_id: bytes = b"",
    ) -> None:
        self._queue_id = queue_id
        self.stamp = b""
        self._config = config
        self._patience = Patience() if patience is None else patience
        self._reader = RecordReader(config, config.message_topic)
        self._admin: Admin | None = None
        self._topics: dict[str, TopicInfo] = {}
        self._topics_s = 0.0  # monotonic: when they were asked for
        self.window = ReadingWindow(_MAX_AHEAD, _AHEAD_S, max_bytes, first=_FIRST_AHEAD)

    def close(self) -> None:
        """Close the clients; idempotent."""
        self._reader.close()
        if self._admin is not None:
            self._admin.close()
            self._admin = None

    def prepare(self) -> None:
        """Ask, so that the first reading need not; what fails is left to that.

        The reader itself connects when a message is needed: most trackers never need one.
        """
        with contextlib.suppress(KafkaMQError):
            self.topic(self._config.message_topic)

    def topic(self, name: str, *, timeout_s: float = 10.0, max_age_s: float = 60.0) -> TopicInfo:
        """What the messages or dead-letter topic is; partitions may be added at any time.

        Args:
            name: Of one of the two.
            timeout_s: Bound of the question.
            max_age_s: How old the answer may be; in an outage more, unless this is half a second.

        Raises:
            BrokerError: It does not exist.
        """
        now_s = time.monotonic()
        if not self._topics or now_s - self._topics_s >= max_age_s:
            admin = self._asked(timeout_s)
            names = (self._config.message_topic, self._config.dead_letter_topic)
            try:
                self._topics = {name: self._described(admin, name) for name in names}
            except DeadlineExceededError:
                if not self._topics or max_age_s <= _FRESH_S:
                    raise
            self._topics_s = now_s
        return self._topics[name]

    def _described(self, admin: Admin, name: str) -> TopicInfo:
        """A queue's own topic may be gone: it has no partitions then, and its messages are lost."""
        if not self._queue_id or name != self._config.message_topic:
            return admin.require_topic(name)
        topic = admin.topics([name]).get(name)
        if topic is None:
            return TopicInfo(name, b"", 0, 0)
        self.stamp = stamp_of(topic.topic_id, self._config.namespace, self._queue_id)
        return replace(topic, topic_id=log_id_of(topic.topic_id, self._queue_id))

    def require_place(self) -> TopicInfo | None:
        """The topic, to write to; None: it is gone, after it was looked for (R18).

        Raises:
            BrokerError: It is looked for.
        """
        name = self._config.message_topic
        topic = self.topic(name)
        if not topic.partitions:
            topic = self.topic(name, max_age_s=_FRESH_S)
        if topic.partitions:
            return topic
        if self._patience.is_over((name, -1)):
            return None
        raise BrokerError(f"topic {name} does not exist", code="UNKNOWN_TOPIC", is_retriable=True)

    def _id_now(self) -> bytes:
        topic_id = self._asked().topic_id(self._config.message_topic)
        return log_id_of(topic_id, self._queue_id) if self._queue_id else topic_id

    def _known(self, logs: Mapping[_Log, int]) -> tuple[TopicInfo, set[_Log], set[int | bytes]]:
        """The topic, which of these logs it has, and what of the others is still looked for.

        A topic loses no partitions. A broker that lags behind may not know a new one, or still
        tell the id of the topic that had this name before. So what a broker does not know is asked
        for again until ``patience`` is over.

        ``logs``: With the first offset that is wanted of each.
        """
        name = self._config.message_topic
        source = self.topic(name)
        unknown = {log for log in logs if not _is_in(log, source)}
        # Never refused on the word of an old answer: the partition may be a new one.
        if unknown and time.monotonic() - self._topics_s >= _FRESH_S:
            source = self.topic(name, max_age_s=_FRESH_S)
            unknown = {log for log in logs if not _is_in(log, source)}
        searches: dict[int | bytes, int] = {}
        for log in unknown:
            partition, topic_id = log
            if _is_same(topic_id, source):  # one search for it and for its end, as readers name it
                searches[partition] = min(logs[log], searches.get(partition, logs[log]))
            else:
                searches[topic_id] = 0
        over = self._patience.is_over
        awaited = {each for each, offset in searches.items() if not over((name, each), offset)}
        return source, logs.keys() - unknown, awaited

    def _asked(self, timeout_s: float = 10.0) -> Admin:
        if self._admin is None:
            self._admin = Admin(self._config, timeout_s=timeout_s)
        return self._admin

    def read(self, spans: Sequence[Span | None], *, deadline_s: float) -> list[Records]:
        """The records of these, in their order, as many as the bounds allow; ask for the rest.

        Of a single span there may be fewer than it names, but at least one. None stands for a
        message that is gone, or whose place another one has; a span that is None has no records.

        Raises:
            BrokerError, DeadlineExceededError: Not all could be read until then (monotonic).
        """
        name = self._config.message_topic
        wanted = spans[: self._fitting(spans)]
        logs = _logs(wanted)
        known: set[_Log] | None = None
        while True:
            source, there, awaited = self._known(logs)
            if there != known:  # what these lack is looked for while the others are
                known = there
                places: list[_Place | None] = [
                    None
                    if each is None or _log_of(each[0]) not in known
                    else (each[0].partition, _offsets(each[0].offset, each[1]))
                    for each in wanted
                ]
                count, found = self._sweep(places, deadline_s)
            if not awaited:
                break
            if time.monotonic() + _FRESH_S > deadline_s:
                raise BrokerError(
                    f"what markers name of topic {name} is not known yet: partitions or topic ids "
                    f"{sorted(map(str, awaited))}",
                    code="UNKNOWN_PARTITION",
                    is_retriable=True,
                )
            time.sleep(_FRESH_S)
        if found and not _is_same(self._id_now(), source):
            self._topics.clear()  # they may be of the new one
            raise BrokerError(
                f"topic {name} was recreated", code="TOPIC_RECREATED", is_retriable=True
            )
        return [
            _same(span, place, found)
            for span, place in zip(wanted[:count], places[:count], strict=True)
        ]

    def _fitting(self, spans: Sequence[Span | None]) -> int:
        """How many of the first ones are a window together."""
        left = self.window.rows
        for number, span in enumerate(spans):
            if left <= 0:
                return number
            left -= 1 if span is None else span[1].bit_count()
        return len(spans)

    def _sweep(self, places: Sequence[_Place | None], deadline_s: float) -> tuple[int, _Found]:
        """How many were read, and what; all partitions at once, each from front to back."""
        window = self.window
        began_s = time.monotonic()
        full_s = began_s + 2 * window.most_s
        count = len(places)
        found: _Found = {}
        size_bytes = 0
        while True:
            wanted = _by_partition(places[:count], found)
            is_full = size_bytes > window.most_bytes and count > 1
            for partition, records in (
                ()
                if is_full
                else self._reader.sweep(
                    wanted,
                    timeout_s=max(0.5, deadline_s - time.monotonic()),
                    patience=self._patience,
                )
            ):
                found.setdefault(partition, {}).update(records)
                size_bytes += _size(records.values())
                is_full = size_bytes > window.most_bytes or time.monotonic() > full_s
                if is_full:
                    break
            if not is_full or count == 1:
                window.took(sum(map(len, found.values())), time.monotonic() - began_s, size_bytes)
                return count, found
            count //= 2  # the others wait, and what was read of them is read again
            full_s += window.most_s
            found = _only(found, places[:count])
            size_bytes = sum(_size(records.values()) for records in found.values())


def _log_of(one: MessageId) -> _Log:
    return one.partition, one.topic_id


def _logs(spans: Iterable[Span | None]) -> dict[_Log, int]:
    """Of these spans, each with the first offset that they name."""
    logs: dict[_Log, int] = {}
    for span in spans:
        if span is not None:
            log, offset = _log_of(span[0]), span[0].offset
            logs[log] = min(offset, logs.get(log, offset))
    return logs


def _offsets(first: int, bits: int) -> Sequence[int]:
    """Where the messages of a span stand, ascending."""
    if not bits & (bits + 1):
        return range(first, first + bits.bit_length())
    return [first + number for number, bit in enumerate(bin(bits)[:1:-1]) if bit == "1"]


def _sets(places: Iterable[_Place | None]) -> dict[int, set[int]]:
    """Offsets by partition."""
    offsets: dict[int, set[int]] = {}
    for place in places:
        if place is not None:
            offsets.setdefault(place[0], set()).update(place[1])
    return offsets


def _only(found: _Found, places: Iterable[_Place | None]) -> _Found:
    """What was found at these places."""
    return {
        partition: {each: found[partition][each] for each in found[partition].keys() & offsets}
        for partition, offsets in _sets(places).items()
        if partition in found
    }


def _by_partition(places: Iterable[_Place | None], found: _Found) -> dict[int, list[int]]:
    """Offsets by partition that are not found yet, ascending."""
    return {
        partition: sorted(offsets - found[partition].keys() if partition in found else offsets)
        for partition, offsets in _sets(places).items()
    }


def _size(records: Iterable[Record | None]) -> int:
    """Bytes of what they hold; from here on their headers are safe to be read."""
    there = [each for each in records if each is not None]
    size = sum(map(len, there))  # their values
    for record, headers in zip(there, all_headers(there), strict=True):
        size += len(record.key() or b"")
        for name, content in headers:
            size += len(name) + len(content or b"")
    return size


def _same(span: Span | None, place: _Place | None, found: _Found) -> Records:
    """The records of a span that are of its leader epoch, where both are known."""
    if span is None:
        return []
    one, bits = span
    if place is None:
        return [None] * bits.bit_count()
    there = found[place[0]]
    records = [there[offset] for offset in place[1] if offset in there]
    if one.leader_epoch <= 0:
        return records
    epochs = (None, -1, one.leader_epoch - 1)
    return [
        each if each is not None and each.leader_epoch() in epochs else None for each in records
    ]


def _is_in(log: _Log, topic: TopicInfo) -> bool:
    """Whether the topic has such a partition, and is that of this id, where both are known."""
    partition, topic_id = log
    return partition < topic.partitions and _is_same(topic_id, topic)


def _is_same(topic_id: bytes, topic: TopicInfo) -> bool:
    """R13: an id that a broker does not tell counts as the same."""
    return not (topic_id and topic.topic_id) or topic_id == topic.topic_id
