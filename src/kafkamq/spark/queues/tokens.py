"""Ack tokens: what a row must carry so that its message can be acknowledged anywhere, later."""

from __future__ import annotations

from dataclasses import dataclass

from kafkamq.errors import StateError
from kafkamq.types import MessageId

ENDED = -1  # as start_offset: the message has its verdict and was not STARTed again
NACKED = -2  # so, and the verdict was a nack

_VERSION = "1"  # its batch's markers are single
_OF_BATCHES = "2"  # with one part more, the message's time
_PLANNED = 3  # parts of a consumer_id that names its batch's plan
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class AckToken:
    """One delivery of one message; opaque to users, readable to people."""

    message_id: MessageId
    marker_partition: int  # where its START is, and its END must go (R7, R26)
    consumer_id: str
    delivery_count: int
    timeout_ms: int  # redelivery timeout
    start_offset: int  # or ENDED, NACKED
    start_ms: int  # of the broker
    # Broker time of a message whose START refers to it (R28), -1 of another one; None: markers of
    # its batch are of one message each.
    message_ms: int | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Where the message is: partition and offset."""
        return self.message_id.partition, self.message_id.offset

    @property
    def plan(self) -> str:
        """Of its batch, the same in all runs of it; empty: an earlier release planned it."""
        parts = self.consumer_id.split("-")
        return parts[1] if len(parts) == _PLANNED else ""

    def encode(self) -> str:
        one = self.message_id
        is_single = self.message_ms is None
        return "/".join(
            (
                _VERSION if is_single else _OF_BATCHES,
                f"{one.partition}/{one.offset}/{one.leader_epoch}/{one.topic_id.hex()}",
                f"{self.marker_partition}/{self.consumer_id}/{self.delivery_count}",
                f"{self.timeout_ms}/{self.start_offset}/{self.start_ms}",
                *(() if is_single else (str(self.message_ms),)),
            )
        )


def decode_token(text: str | None) -> AckToken:
    """What ``AckToken.encode`` wrote."""
    try:
        parts = (text or "").split("/")
        message_ms = int(parts.pop()) if parts[0] == _OF_BATCHES else None
        version, partition, offset, epoch, topic_id, route, consumer, count, timeout, start, at = (
            parts
        )
        if version not in (_VERSION, _OF_BATCHES):
            raise ValueError
        return AckToken(
            MessageId(int(partition), int(offset), bytes.fromhex(topic_id), int(epoch)),
            int(route),
            consumer,
            int(count),
            int(timeout),
            int(start),
            int(at),
            message_ms,
        )
    except ValueError:
        shown = "null" if text is None else repr(text[:_SHOWN])
        raise StateError(
            f"ack_token is {shown}: rows must keep the column ack_token of read_queue() as it is"
        ) from None
