"""Messages that markers refer to, read again where they stand (R18): in sweeps, each of all that
fits into memory, and only if they still are the same ones (R13).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DeadlineExceededError, KafkaMQError
from kafkamq.transport.admin import Admin, TopicInfo
from kafkamq.transport.patience import Patience
from kafkamq.transport.record import Record
from kafkamq.transport.record_reader import RecordReader
from kafkamq.types import MessageId

_MIN_ROWS = 16
_MAX_AHEAD = 50_000  # messages that are held at once
_FIRST_AHEAD = 4096  # at first: what is too much of it is cut off while it is read
_AHEAD_S = 1.0  # what reading them may take: who asked waits for it
_FRESH_S = 0.5  # also between two questions for what is not known yet

_Number = tuple[int, int]
"""Partition and offset."""

_Log = tuple[int, bytes]
"""Partition and the topic's id."""


class ReadingWindow:
    """How many rows are read at once: rows wait for it, and it waits in memory."""

    def __init__(
        self, most: int, most_s: float, most_bytes: int = 1 << 62, *, first: int = 16 * _MIN_ROWS
    ) -> None:
        self.most_s = most_s
        self.most_bytes = most_bytes
        self.rows = first
        self._most = most

    def took(self, rows: int, seconds: float, size_bytes: int = 0) -> None:
        """So many were read: the next ones may be as many as fit at this rate."""
        share = max(seconds / self.most_s, size_bytes / self.most_bytes, 1e-9)
        fitting = min(int(rows / share), 4 * self.rows, self._most)
        self.rows = max(_MIN_ROWS, fitting)


class MessageLookup:
    """Reads of one namespace's messages; one owner thread.

    Args:
        config: The namespace.
        max_bytes: What messages that were read may take; one that is larger comes alone.
        patience: For what brokers do not know; None: one of its own.
    """

    def __init__(
        self, config: ServiceConfig, *, max_bytes: int, patience: Patience | None = None
    ) -> None:
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
                self._topics = {name: admin.require_topic(name) for name in names}
            except DeadlineExceededError:
                if not self._topics or max_age_s <= _FRESH_S:
                    raise
            self._topics_s = now_s
        return self._topics[name]

    def _known(
        self, logs: Collection[_Log], deadline_s: float
    ) -> tuple[TopicInfo, Collection[_Log]]:
        """The topic, and which of these logs it has.

        A topic loses no partitions, and a broker may not have heard of the one that has the name
        now: what it does not know is asked for again, until that was in vain for long.

        Raises:
            BrokerError: There was no time for that; ask again.
        """
        name = self._config.message_topic
        source = self.topic(name)
        while True:
            unknown = {log for log in logs if not _is_in(log, source)}
            # Never refused on the word of an old answer: the partition may be a new one.
            if unknown and time.monotonic() - self._topics_s >= _FRESH_S:
                source = self.topic(name, max_age_s=_FRESH_S)
                unknown = {log for log in logs if not _is_in(log, source)}
            places = {each if _is_same(log_id, source) else log_id for each, log_id in unknown}
            awaited = [each for each in places if not self._patience.is_over((name, each))]
            if not awaited:
                return source, set(logs) - unknown
            if time.monotonic() + _FRESH_S > deadline_s:
                raise BrokerError(
                    f"what markers name of topic {name} is not known yet: partitions or topic ids "
                    f"{sorted(map(str, awaited))}",
                    code="UNKNOWN_PARTITION",
                    is_retriable=True,
                )
            time.sleep(_FRESH_S)

    def _asked(self, timeout_s: float = 10.0) -> Admin:
        if self._admin is None:
            self._admin = Admin(self._config, timeout_s=timeout_s)
        return self._admin

    def read(
        self, message_ids: Sequence[MessageId | None], *, deadline_s: float
    ) -> list[Record | None]:
        """Of these, in their order, as many as the bounds allow, at least one; ask for the rest.

        None stands for one that is gone, or whose place another message has, and for None.

        Raises:
            BrokerError, DeadlineExceededError: Not all could be read until then (monotonic).
        """
        name = self._config.message_topic
        wanted = message_ids[: self.window.rows]
        logs = {(each.partition, each.topic_id) for each in wanted if each is not None}
        source, known = self._known(logs, deadline_s)
        if len(known) < len(logs):
            wanted = [
                None if each is None or (each.partition, each.topic_id) not in known else each
                for each in wanted
            ]
        numbers = [None if each is None else (each.partition, each.offset) for each in wanted]
        count, found = self._sweep(numbers, deadline_s)
        if found and not _is_same(self._asked().topic_id(name), source):
            self._topics.clear()  # they may be of the new one
            raise BrokerError(
                f"topic {name} was recreated", code="TOPIC_RECREATED", is_retriable=True
            )
        return [
            None if each is None or number is None else _same(found[number], each.leader_epoch)
            for each, number in zip(wanted[:count], numbers, strict=False)
        ]

    def _sweep(
        self, numbers: Sequence[_Number | None], deadline_s: float
    ) -> tuple[int, dict[_Number, Record | None]]:
        """How many were read, and what; all partitions at once, each from front to back."""
        window = self.window
        began_s = time.monotonic()
        full_s = began_s + 2 * window.most_s
        count = len(numbers)
        places = set(filter(None, numbers))
        found: dict[_Number, Record | None] = {}
        while True:
            wanted = _by_partition(places - found.keys())
            size_bytes = sum(map(_size, found.values()))
            is_cut = False
            for partition, offset, message in self._reader.sweep(
                wanted,
                timeout_s=max(0.5, deadline_s - time.monotonic()),
                patience=self._patience,
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
            count //= 2  # the others wait, and what was read of them is read again
            full_s += window.most_s
            places = set(filter(None, numbers[:count]))
            found = {place: message for place, message in found.items() if place in places}


def _by_partition(numbers: Collection[_Number]) -> dict[int, list[int]]:
    """Offsets by partition, ascending."""
    offsets: dict[int, list[int]] = {}
    for partition, offset in sorted(numbers):
        offsets.setdefault(partition, []).append(offset)
    return offsets


def _size(message: Record | None) -> int:
    return 0 if message is None else len(message.key() or b"") + len(message.value() or b"")


def _same(message: Record | None, leader_epoch: int) -> Record | None:
    """The record, if it is of this leader epoch, where both are known."""
    if message is not None and leader_epoch > 0:
        epoch = message.leader_epoch()
        if epoch is not None and 0 <= epoch != leader_epoch - 1:
            return None
    return message


def _is_in(log: _Log, topic: TopicInfo) -> bool:
    """Whether the topic has such a partition, and is that of this id, where both are known."""
    partition, topic_id = log
    return partition < topic.partitions and _is_same(topic_id, topic)


def _is_same(topic_id: bytes, topic: TopicInfo) -> bool:
    """R13: an id that a broker does not tell counts as the same."""
    return not (topic_id and topic.topic_id) or topic_id == topic.topic_id
