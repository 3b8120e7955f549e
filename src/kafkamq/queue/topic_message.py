"""A message of a queue with a topic of its own."""

from __future__ import annotations

import math
from enum import Enum
from typing import Generic, Protocol, TypeVar

from kafkamq.queue.message import Acknowledger, Message
from kafkamq.transport.record import RecordLike, headers_of

P = TypeVar("P")


class TopicAcknowledger(Acknowledger, Protocol):
    """The consumer of such messages."""

    def moment_s(self, clock_ms: float) -> float:
        """A moment of its clock in seconds of ``time.monotonic()``."""


class MessageState(Enum):
    """Whose a delivery is."""

    HELD = "held"
    ACKNOWLEDGED = "settled"  # it has its verdict
    LOST = "lost"  # its lease or partition went before


class TopicMessage(Message, Generic[P]):
    """One delivery; see ``Message``.

    Attributes:
        state: Guarded by its consumer.
        place: What its backend finds it by.
    """

    __slots__ = ("_deadline_ms", "place", "state")

    _acknowledger: TopicAcknowledger

    def __init__(
        self,
        consumer: TopicAcknowledger,
        record: RecordLike,
        *,
        delivery_count: int = 1,
        deadline_ms: float = math.inf,
        place: P,
    ) -> None:
        """Made by its consumer; ``deadline_ms`` is of its clock."""
        super().__init__(consumer, record, headers_of(record), delivery_count)
        self._deadline_ms = deadline_ms
        self.place = place
        self.state = MessageState.HELD

    @property
    def deadline(self) -> float:
        return self._acknowledger.moment_s(self._deadline_ms)
