"""A message of a queue with a topic of its own."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, Protocol, cast

from confluent_kafka import Message as Record

from kafkamq.markers.message import Message
from kafkamq.transport.record import headers_of
from kafkamq.types import MessageId

if TYPE_CHECKING:
    from kafkamq.markers.ack_writer import Verdicts
    from kafkamq.queue.topic_consumer import TopicConsumer

__all__ = ["MessageState", "RecordLike", "TopicMessage"]


class RecordLike(Protocol):
    """A consumed record, as confluent-kafka has it."""

    def topic(self) -> str | None: ...
    def partition(self) -> int | None: ...
    def offset(self) -> int | None: ...
    def key(self) -> bytes | None: ...
    def value(self) -> bytes | None: ...
    def timestamp(self) -> tuple[int, int]: ...


class MessageState(Enum):
    """Whose a delivery is."""

    HELD = "held"
    SETTLED = "settled"  # it has its verdict
    LOST = "lost"  # its lease or partition went before


class TopicMessage(Message):
    """One delivery; what it is and its verdicts are as of any ``Message``.

    Attributes:
        state: Guarded by its consumer.
        place: What its backend finds it by.
    """

    __slots__ = ("_deadline_ms", "place", "state")

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
        # A consumer of a topic's own queue does for its messages what Verdicts does for markers.
        self._verdicts = cast("Verdicts", consumer)
        self._record = cast("Record", record)
        self._headers = headers_of(self._record)
        self._read = None
        self._count = delivery_count
        self._deadline_ms = deadline_ms
        self.place = place
        self.state = MessageState.HELD

    @property
    def key(self) -> bytes | None:
        """The sender's key; None: it gave none."""
        key: bytes | None = self._record.key()
        return key

    @property
    def message_id(self) -> MessageId:
        """Where it stands; a redelivery has the same place."""
        return MessageId(self._record.partition() or 0, self._record.offset() or 0)

    @property
    def deadline(self) -> float:
        """When the lease ends, in seconds of ``time.monotonic()``; infinite where there is none."""
        return cast("TopicConsumer", self._verdicts)._moment_s(self._deadline_ms)

    def __repr__(self) -> str:
        place = self.message_id
        return (
            f"<Message {place.partition}/{place.offset} of {self.queue_id!r}, "
            f"delivery {self._count}>"
        )
