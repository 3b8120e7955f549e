"""What leaves a queue with a topic of its own: dead letters, and copies to the queue's tail.

``DeadLetterWriter`` is what consumers need of a place for dead letters; ``TopicDeadLetterWriter``
is the one on Kafka, which ``TopicBackend.open_consumer`` makes: one for another place would stand
beside it and be chosen there. Two write their own, to Kafka alone: the tracker of ``markers``, in
its transactions, and a ``ParallelConsumer`` without a queue (``parallel/dead_letters.py``).
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.queue.message import Message
from kafkamq.queue.queue_topic import QueueTopic
from kafkamq.queue.sender import Sender
from kafkamq.queue.sure_writer import Form, SureWriter
from kafkamq.queue.wire import headers as names
from kafkamq.queue.wire.headers import (
    Origin,
    cut_text,
    dead_letter_headers,
    read_message_headers,
    redrive_headers,
)
from kafkamq.queue.wire.keys import join_key
from kafkamq.types import DeadLetterReason, Headers

Verdict = tuple[DeadLetterReason, str]
"""Why a message is given up, and the text for people."""

_ANY_PARTITION = -1
_log = logging.getLogger(__name__)


class DeadLetterWriter(Protocol):
    """Where a consumer puts what it gives up."""

    def write(self, message: Message, reason: DeadLetterReason, error: str) -> Future[None]:
        """Write a dead letter, however long that takes; done when it is kept."""

    def close(self, timeout_s: float) -> None:
        """Write no more; what is not written by then has failed."""


class RequeueWriter(DeadLetterWriter, Protocol):
    """And where it puts what must leave the place where it stands, and is not done."""

    def copy(self, message: Message, count: int, verdict: Verdict | None) -> Future[None]:
        """Write it once more; the copy's next delivery is ``count``, or ``verdict`` is waiting."""


def origin_of(message: Message) -> Origin:
    """Where the first copy of a message stands in its queue's topic.

    What another queue's message says, which somebody has sent on with all its headers, is not it.
    """
    known = read_message_headers(message.raw_headers).origin
    return known if known is not None and known.topic == message.topic else _place_of(message)


def earlier_deliveries(message: Message) -> int:
    """How many a message had where its former copy stood; 0: it is the first one."""
    read = read_message_headers(message.raw_headers)
    if read.origin is None or read.origin.topic != message.topic:
        return 0
    return read.delivery_count - 1


def carried_verdict(message: Message) -> Verdict | None:
    """What was decided of a copy before it was written: it only lacks its dead letter."""
    if not earlier_deliveries(message):
        return None
    texts = dict(message.raw_headers)
    try:
        reason = DeadLetterReason((texts.get(names.REASON) or b"").decode())
    except ValueError:
        return None
    return reason, (texts.get(names.ERROR) or b"").decode("utf-8", "replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingDeadLetter:
    """A dead letter; where it is too large it refers to its payload (R11)."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers
    reason: DeadLetterReason
    error: str
    delivery_count: int
    place: Origin  # of the record that is given up
    origin: Origin  # of its first copy
    queue_id: str

    def form(self, refusals: int) -> Form:
        """It as it is, without its payload, and without key and headers of the user's."""
        if refusals:
            _log.warning(
                "a dead letter did not fit: it refers to its payload",
                extra={"topic": self.place.topic, "place": repr(self.place)},
            )
        is_bare = refusals > 1
        headers = dead_letter_headers(
            () if is_bare else self.headers,
            reason=self.reason,
            error=cut_text(self.error, 256) if is_bare else self.error,
            delivery_count=self.delivery_count,
            origin=self.origin,
            queue_id=self.queue_id,
            payload_at=self.place if refusals else None,
        )
        key = None if is_bare else self.key
        return Form(self.topic, _ANY_PARTITION, key, None if refusals else self.value, headers)


class TopicDeadLetterWriter:
    """Writes to the namespace's dead letters, with the key that messages of a namespace have."""

    def __init__(self, config: ServiceConfig, queue: QueueConfig) -> None:
        self._topic = config.dead_letter_topic
        self._queue_id = queue.queue_id
        place = QueueTopic(config, queue)
        # Kafka refuses a whole batch for its size: each letter has its own.
        dead_letters = partial(Sender, place, batch_num_messages=1)
        self._writer = SureWriter(dead_letters, f"a dead letter of queue {queue.queue_id!r}")
        # Apart: what waits for one topic would hold up the other one in the same producer.
        self._copier = SureWriter(
            partial(Sender, place), f"a copy of a message of queue {queue.queue_id!r}"
        )

    def write(self, message: Message, reason: DeadLetterReason, error: str) -> Future[None]:
        letter = OutgoingDeadLetter(
            topic=self._topic,
            key=join_key(self._queue_id, message.key),
            value=message.payload,
            headers=_without_origin(message),
            reason=reason,
            error=error,
            delivery_count=message.delivery_count,
            place=_place_of(message),
            origin=origin_of(message),
            queue_id=self._queue_id,
        )
        return self._writer.write(letter.form).last

    def copy(self, message: Message, count: int, verdict: Verdict | None) -> Future[None]:
        """Write it once more to its own partition; see ``RequeueWriter``."""

        def form(refusals: int) -> Form:
            headers = list(redrive_headers(message.raw_headers))
            headers.append((names.ORIGIN, origin_of(message).encode()))
            headers.append((names.DELIVERY_COUNT, b"%d" % count))
            if verdict is not None:
                reason, error = verdict
                headers.append((names.REASON, reason.value.encode()))
                headers.append((names.ERROR, cut_text(error, 256 if refusals else 4096).encode()))
            partition = message.message_id.partition
            return Form(message.topic, partition, message.key, message.payload, tuple(headers))

        return self._copier.write(form).last

    def close(self, timeout_s: float) -> None:
        try:
            self._writer.close(timeout_s / 2)
        finally:
            self._copier.close(timeout_s / 2)


def _without_origin(message: Message) -> Headers:
    """Its headers; ``origin_of`` says whence it came."""
    return tuple(header for header in message.raw_headers if header[0] != names.ORIGIN)


def _place_of(message: Message) -> Origin:
    place = message.message_id
    return Origin(message.topic, place.partition, place.offset, max(0, message.timestamp_ms))
