"""Writes what leaves a queue with a topic of its own: dead letters, and copies to its tail.

``DeadLetterOutbox`` is what consumers need of a place for dead letters; ``TopicOutbox`` is that of
queues, which ``TopicBackend.open_consumer`` makes. Its letters go to Kafka, or to the user's own
writer. A ``ParallelConsumer`` without a queue has ``parallel/failure_policy.py``. The tracker of
``markers`` writes its own, in the transaction that ends the message, which only Kafka can be part
of.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

from kafkamq.config import DeadLetterWriter, QueueConfig, ServiceConfig
from kafkamq.errors import ConfigError, StateError
from kafkamq.queue.handler import is_async_function, refuse_generator
from kafkamq.queue.message import Message
from kafkamq.queue.namespace import QueueTopic
from kafkamq.queue.producer import Sender
from kafkamq.queue.sure_writer import Form, KafkaOutlet, SureWriter, Told, always
from kafkamq.queue.wire import headers as names
from kafkamq.queue.wire.headers import (
    Origin,
    cut_text,
    dead_letter_headers,
    read_message_headers,
    redrive_headers,
)
from kafkamq.queue.wire.keys import join_key
from kafkamq.transport.producer import ThreadedProducer
from kafkamq.types import DeadLetterReason, Headers

Verdict = tuple[DeadLetterReason, str]
"""It holds why a message is given up, and the text for people."""

_ANY_PARTITION = -1
_log = logging.getLogger(__name__)


class DeadLetterOutbox(Protocol):
    """A consumer puts here what it gives up."""

    def write(
        self,
        message: Message,
        reason: DeadLetterReason,
        error: str,
        is_wanted: Callable[[], bool] = always,
    ) -> Future[None]:
        """Write a dead letter, however long that takes; the future is done when it is kept.

        It is cancelled when ``is_wanted``, which is asked before each try, says no.
        """

    def prune(self) -> None:
        """Forget what waits and is not wanted any more."""

    def close(self, timeout_s: float) -> None:
        """Write no more; what is not written by then has failed."""


class RequeueWriter(DeadLetterOutbox, Protocol):
    """A consumer also puts here what is not done and must leave the place where it stands."""

    def copy(self, message: Message, count: int, verdict: Verdict | None) -> Future[None]:
        """Write a message once more; ``count`` is its next delivery, but with a ``verdict``."""


def origin_of(message: Message) -> Origin:
    """Find where the first copy of a message stands in its queue's topic.

    A message that somebody has sent on with all its headers names another queue's: that is ignored.
    """
    known = read_message_headers(message.raw_headers).origin
    return known if known is not None and known.topic == message.topic else _place_of(message)


def earlier_deliveries(message: Message) -> int:
    """Count the deliveries that a message had in its former copies; the first one had none."""
    read = read_message_headers(message.raw_headers)
    if read.origin is None or read.origin.topic != message.topic:
        return 0
    return read.delivery_count - 1


def carried_verdict(message: Message) -> Verdict | None:
    """Read what was decided of a copy before it was written, which only lacks its dead letter."""
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
    """A message that is given up, as a ``dead_letter_writer`` gets it.

    Attributes:
        payload: The message's.
        key: The sender's; None: it has none.
        headers: Of the message, with ``kafkamq-id`` if it has an id.
        reason: Why it is given up; ``reason.value`` is the text of ``kafkamq-reason``.
        error: What the handler said, for people.
        delivery_count: Deliveries that it had.
        place: Of the record that is given up: topic, partition, offset, timestamp_ms.
        origin: Of its first copy, in the same form: what tells it from all others.
        queue_id: Its queue, or the group of a ``ParallelConsumer``.
        topic: Of dead letters on Kafka.
        record_key: The key that it has there.
    """

    payload: bytes | None
    key: bytes | None
    headers: Headers
    reason: DeadLetterReason
    error: str
    delivery_count: int
    place: Origin
    origin: Origin
    queue_id: str
    topic: str
    record_key: bytes | None

    def form(self, refusals: int) -> Form:
        """Make its record, smaller after each refusal for its size.

        The second one refers to its payload (R11), the third one also leaves out the user's headers
        and key.
        """
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
        key = None if is_bare else self.record_key
        value = None if refusals else self.payload
        return Form(self.topic, _ANY_PARTITION, key, value, headers, self)


class _OwnOutlet:
    """It gives letters to the user's own writer, which has answered when it returns."""

    report_s = math.inf

    def __init__(self, writer: DeadLetterWriter) -> None:
        self._writer = writer

    def send(self, form: Form, told: Told) -> None:
        kept = self._writer.write(cast("OutgoingDeadLetter", form.source))
        if isinstance(kept, Awaitable | Iterator | Future):
            # What the writer has to do is still to come.
            raise StateError(f"write returned a {type(kept).__name__} and not when it had written")
        told(None)

    def close(self, timeout_s: float) -> None:
        """Nothing is closed: the writer is the user's, and several consumers may share it."""


def checked_writer(writer: DeadLetterWriter | None) -> DeadLetterWriter | None:
    """Check a ``dead_letter_writer``; raises ConfigError where the object cannot be one."""
    write = getattr(writer, "write", None)
    if writer is not None and not callable(write):
        raise ConfigError(
            f"dead_letter_writer is {writer!r}: give an object with write(letter), which returns"
            " when the letter is kept"
        )
    if write is not None:
        refuse_generator(write)
        if is_async_function(write):
            raise ConfigError(
                "dead_letter_writer: write is async; it is called in a thread: declare it with def"
            )
    return writer


def letter_writer(
    own: DeadLetterWriter | None, open_producer: Callable[[], ThreadedProducer], what: str
) -> SureWriter:
    """Make what writes dead letters, to the user's ``own`` writer or else to Kafka."""
    if own is not None:
        return SureWriter(lambda: _OwnOutlet(own), what)
    return SureWriter(lambda: KafkaOutlet(open_producer(), what), what)


class TopicOutbox:
    """Dead letters have the key that messages of a namespace have; copies are Kafka's alone."""

    def __init__(self, config: ServiceConfig, queue: QueueConfig) -> None:
        self._topic = config.dead_letter_topic
        self._queue_id = queue.queue_id
        place = QueueTopic(config, queue)
        # Kafka refuses a whole batch for its size: each letter has its own.
        dead_letters = partial(Sender, place, batch_num_messages=1)
        what = f"a dead letter of queue {queue.queue_id!r}"
        self._writer = letter_writer(queue.dead_letter_writer, dead_letters, what)
        # Apart: what waits for one topic would hold up the other one in the same producer.
        copy = f"a copy of a message of queue {queue.queue_id!r}"
        self._copier = SureWriter(lambda: KafkaOutlet(Sender(place), copy), copy)
        self.prune = self._writer.prune

    def write(
        self,
        message: Message,
        reason: DeadLetterReason,
        error: str,
        is_wanted: Callable[[], bool] = always,
    ) -> Future[None]:
        letter = OutgoingDeadLetter(
            topic=self._topic,
            key=message.key,
            record_key=join_key(self._queue_id, message.key),
            payload=message.payload,
            headers=tuple(each for each in message.raw_headers if each[0] != names.ORIGIN),
            reason=reason,
            error=error,
            delivery_count=message.delivery_count,
            place=_place_of(message),
            origin=origin_of(message),
            queue_id=self._queue_id,
        )
        return self._writer.write(letter.form, is_wanted).last

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


def _place_of(message: Message) -> Origin:
    place = message.message_id
    return Origin(message.topic, place.partition, place.offset, max(0, message.timestamp_ms))
