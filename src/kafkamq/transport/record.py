"""What a consumed record says, where confluent-kafka needs care."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any, Protocol, cast

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, AcknowledgeType, Message, TopicPartition

from kafkamq.types import Headers, PartitionId

__all__ = ["AcknowledgeType", "TopicPartition"]

Record = Message
"""A record as the client gives it; without a wrapper, as there are many."""

LOG_APPEND_TIME = TIMESTAMP_LOG_APPEND_TIME
"""The kind of a timestamp that the broker has set."""

_log = logging.getLogger(__name__)

# Through C: the interpreter's own fast path for calls does not look whether the client has set an
# exception beside its result, and goes on with the null pointers in it.
_read = methodcaller("headers")
_read_each = cast("Callable[[RecordLike], Headers | None]", Message.headers)


class RecordLike(Protocol):
    """A consumed record, as confluent-kafka has it."""

    def topic(self) -> str | None: ...
    def partition(self) -> int | None: ...
    def offset(self) -> int | None: ...
    def key(self) -> Any: ...
    def value(self) -> Any: ...
    def timestamp(self) -> tuple[int, int]: ...
    def headers(self) -> Any: ...
    def set_headers(self, value: Any) -> None: ...


def place_of(record: Record) -> PartitionId:
    """Return the topic and the partition of a record, or of an event; ``("", -1)``: it has none."""
    partition = record.partition()
    return record.topic() or "", -1 if partition is None else partition


def headers_or_none(record: RecordLike) -> Headers | None:
    """Return the headers of a consumed record, in order; None: confluent-kafka can't give them.

    Kafka lets names be any bytes; the client decodes all of a record's headers or none of them. It
    fails once, and hands out null pointers when it is asked again: so the record's headers are
    emptied then, and a second call finds none.
    """
    try:
        found = _read(record)
        return tuple(found) if found else ()
    except (UnicodeDecodeError, SystemError):
        # The second has the first as its cause.
        record.set_headers([])
        return None


def headers_of(record: RecordLike) -> Headers:
    """Return the headers of a consumed record; none, with a warning, when a name is not UTF-8."""
    headers = headers_or_none(record)
    return _unreadable(record) if headers is None else headers


def all_headers(records: Sequence[RecordLike]) -> list[Sequence[tuple[str, bytes | None]]]:
    """``headers_of`` each record, in a third of the time."""
    found: list[Sequence[tuple[str, bytes | None]]] = []
    rest = iter(records)
    while len(found) < len(records):
        try:
            # What was read stays, whatever comes then.
            found.extend(map(_read, rest))
        except (UnicodeDecodeError, SystemError):  # noqa: PERF203 - once for each such record
            record = records[len(found)]
            record.set_headers([])
            found.append(_unreadable(record))
    return found if all(found) else [headers or () for headers in found]


def take_only(
    name: str, records: Sequence[RecordLike]
) -> tuple[list[bytes | Headers | None], list[int]]:
    """Take the headers of those records that have one of this name, or none.

    A record keeps what was read of it for as long as it lives, which is more memory than the rest
    of a small one, and slower than to read the next one's where the last one's were.

    Returns:
        For each record the value of its one header, which it has no more; ``()``: it had none, or
        they cannot be read; None: it has others. And the indexes of the latter.
    """
    taken: list[bytes | Headers | None] = []
    others: list[int] = []
    # They run side by side, also where one is broken off.
    each, rest = iter(records), iter(records)
    while len(taken) < len(records):
        try:
            for record, headers in zip(each, map(_read_each, rest), strict=True):
                if not headers:
                    taken.append(())
                    continue
                found, value = headers[0]
                if found == name and value is not None and len(headers) == 1:
                    record.set_headers(())
                    taken.append(value)
                else:
                    others.append(len(taken))
                    taken.append(None)
        except (UnicodeDecodeError, SystemError):
            record = records[len(taken)]
            # Asked again, it would give null pointers.
            record.set_headers([])
            taken.append(_unreadable(record))
    return taken, others


def _unreadable(record: RecordLike) -> Headers:
    _log.warning(
        "headers of a record cannot be read: a name is not UTF-8",
        extra={"topic": record.topic(), "partition": record.partition(), "offset": record.offset()},
    )
    return ()
