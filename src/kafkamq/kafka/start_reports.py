"""Delivery reports of a batch's STARTs, for one marker partition at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic_ns
from typing import Any

from confluent_kafka import KafkaError
from confluent_kafka import Message as Record

from kafkamq.kafka.clock import NS_PER_MS
from kafkamq.kafka.message import Message

__all__ = ["RouteStarts"]


class RouteStarts:
    """The STARTs that a batch writes to one marker partition, in the order of its messages.

    The producer is idempotent, so they lie in the log in that order: when all are there, reports
    and messages are paired by their places, and nothing is looked up.
    """

    __slots__ = ("_begin_ns", "_on_late", "_records", "error", "failed", "messages", "starts")

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.starts: list[dict[str, Any]] = []  # as produce_batch takes them
        self.error: KafkaError | None = None  # the first one
        self.failed = 0
        self._records: list[Record] = []  # those in the log
        self._begin_ns = 0
        self._on_late: Callable[[Message, int, int], None] | None = None

    def report(self, error: KafkaError | None, record: Record) -> None:
        """Kafka's delivery report of one of them."""
        if error is not None:
            self.failed += 1
            self.error = self.error or error
            return
        if not self._records:
            self._begin_ns = monotonic_ns()
        self._records.append(record)
        if self._on_late is not None:
            (message,) = [m for m, s in self._pairs() if s["value"] == record.value()]
            self._on_late(message, monotonic_ns() // NS_PER_MS, record.timestamp()[1])

    def _pairs(self) -> Iterable[tuple[Message, dict[str, Any]]]:
        return zip(
            self.messages, self.starts, strict=False
        )  # interrupted, the last lacks its START

    @property
    def is_reported(self) -> bool:
        """Whether each is known to be in the log or failed."""
        return len(self._records) + self.failed == len(self.starts)

    @property
    def begin_ms(self) -> int:
        """Monotonic: the first of them was delivered; no lease may begin later for the worker."""
        return self._begin_ns // NS_PER_MS

    def delivered(self) -> Iterable[tuple[Message, int]]:
        """Those in the log, with their log times."""
        records = self._records
        if len(records) == len(self.messages):
            records.sort(key=_offset)
            return zip(self.messages, [each.timestamp()[1] for each in records], strict=True)
        known = {start["value"]: message for message, start in self._pairs()}
        return [(known[each.value()], each.timestamp()[1]) for each in records]

    def give_up(self, on_late: Callable[[Message, int, int], None]) -> None:
        """The batch has failed: tell of STARTs that prove to be in the log after all.

        Args:
            on_late: Gets the message, the monotonic ms and the log time; called while reports are
                served.
        """
        self._on_late = on_late


def _offset(record: Record) -> int:
    offset = record.offset()
    assert offset is not None, "it is in the log"
    return offset
