"""The record that a parallel consumer's handler gets; in a process, a copy of its fields."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, ClassVar

from kafkamq.parallel.rules.shards import PartitionPhase, PartitionState
from kafkamq.transport.record import Record, headers_of


@dataclass(frozen=True, slots=True)
class Failure:
    attempts: int
    # The last error; None: its handler returned a ``Nack``.
    error: BaseException | None
    reason: str
    # Attempts that were nobody's fault: a result was not written, a body was not read.
    unwritten: int = 0
    is_given_up: bool = False


# Frozen ones would take four times as long to make.
@dataclass(slots=True, unsafe_hash=True)
class PlainRecord:
    """What a handler in another process gets: a ``ParallelRecord``'s fields; read-only."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    timestamp_ms: int
    attempt: int
    # A handler's parameter of this type gets the record.
    is_kafkamq_message: ClassVar[bool] = True

    @property
    def payload(self) -> bytes | None:
        return self.value

    @property
    def delivery_count(self) -> int:
        return self.attempt

    @property
    def raw_headers(self) -> list[tuple[str, bytes | None]]:
        return self.headers


class ParallelRecord:
    """One record of Kafka; read-only.

    Attributes:
        offset: In its partition.
        key: As bytes; None: it has no key.
    """

    __slots__ = ("_assignment", "_failure", "_raw", "key", "offset")
    is_kafkamq_message: ClassVar[bool] = True

    def __init__(self, raw: Record, offset: int, key: bytes | None, assignment: Any = None) -> None:
        self._raw = raw
        self.offset = offset
        self.key = key
        # Of its partition, under which it was polled.
        self._assignment: PartitionState[ParallelRecord] = assignment
        self._failure: Failure | None = None

    @property
    def _is_ours(self) -> bool:
        """Return whether its partition is still assigned as it was when this was polled."""
        return self._assignment.phase is not PartitionPhase.CLOSED

    @property
    def value(self) -> bytes | None:
        """Return the payload; None: a tombstone."""
        value: bytes | None = self._raw.value()
        return value

    @property
    def payload(self) -> bytes | None:
        return self.value

    @property
    def topic(self) -> str:
        return self._raw.topic() or ""

    @property
    def partition(self) -> int:
        return self._raw.partition() or 0

    @property
    def place(self) -> tuple[str, int, int]:
        return self.topic, self.partition, self.offset

    @property
    def headers(self) -> list[tuple[str, bytes | None]]:
        """Return its headers, in order; names may repeat."""
        return list(headers_of(self._raw))

    @property
    def timestamp_ms(self) -> int:
        """Return its timestamp; -1: it has none."""
        return self._raw.timestamp()[1]

    @property
    def attempt(self) -> int:
        """Return which attempt this is, from 1; a restart or another owner begins again."""
        return 1 if self._failure is None else self._failure.attempts + 1

    @property
    def delivery_count(self) -> int:
        return self.attempt

    @property
    def raw_headers(self) -> list[tuple[str, bytes | None]]:
        return self.headers

    @property
    def last_error(self) -> BaseException | None:
        return None if self._failure is None else self._failure.error

    @property
    def is_given_up(self) -> bool:
        """Return whether it is a dead letter already, or is skipped."""
        return self._failure is not None and self._failure.is_given_up

    def fields(self) -> tuple[object, ...]:
        """Return those of a ``PlainRecord``: the same for another process."""
        raw = self._raw
        return (
            sys.intern(raw.topic() or ""),
            raw.partition(),
            self.offset,
            self.key,
            raw.value(),
            self.headers,
            raw.timestamp()[1],
            self.attempt,
        )

    def __repr__(self) -> str:
        return f"<ParallelRecord {self.topic}[{self.partition}]@{self.offset}>"


def make_records(messages: Sequence[Record], assignment: object) -> list[ParallelRecord]:
    offsets, keys = map(Record.offset, messages), map(Record.key, messages)
    every = (messages, offsets, keys, repeat(assignment))
    return list(map(ParallelRecord, *every))  # type: ignore[arg-type]  # all have an offset
