"""A message of a queue with a topic of its own."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, cast

from confluent_kafka import Message as Record

from kafkamq.queue.message import Message, RecordLike
from kafkamq.transport.record import headers_of

if TYPE_CHECKING:
    from kafkamq.queue.topic_consumer import TopicConsumer

__all__ = ["MessageState", "TopicMessage"]


class MessageState(Enum):
    """Whose a delivery is."""

    HELD = "held"
    SETTLED = "settled"  # it has its verdict
    LOST = "lost"  # its lease or partition went before


class TopicMessage(Message):
    """One delivery; see ``Message``.

    Attributes:
        state: Guarded by its consumer.
        place: What its backend finds it by.
    """

    __slots__ = ("_deadline_ms", "place", "state")

    _settler: TopicConsumer

    def __init__(
        self,
        consumer: TopicConsumer,
        record: RecordLike,
        *,
        delivery_count: int = 1,
        deadline_ms: float = math.inf,
        place: object = None,
    ) -> None:
        """Made by its consumer; ``deadline_ms`` is of its clock."""
        super().__init__(consumer, record, headers_of(cast("Record", record)), delivery_count)
        self._deadline_ms = deadline_ms
        self.place = place
        self.state = MessageState.HELD

    @property
    def deadline(self) -> float:
        """See ``Message.deadline``."""
        return self._settler._moment_s(self._deadline_ms)
