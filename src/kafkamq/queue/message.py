"""A message that a consumer handed out, and the verdicts on it: what all backends have."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, Protocol

from kafkamq.config import milliseconds
from kafkamq.errors import ConfigError, LeaseLostError, StateError
from kafkamq.queue.wire.headers import ID, MessageHeaders, read_message_headers, reason_of
from kafkamq.transport.record import RecordLike, headers_of
from kafkamq.types import Headers, MessageId, Outcome

# Looking it up in its class takes long.
_ACK = Outcome.ACK
_log = logging.getLogger(__name__)


class Acknowledger(Protocol):
    """Applies the verdicts on messages of one consumer; ``message`` is one of its own."""

    @property
    def queue_id(self) -> str: ...

    def acknowledge(
        self,
        message: Any,
        outcome: Outcome,
        *,
        wait: bool = False,
        reason: str = "",
        delay_ms: int | None = None,
    ) -> None:
        """Apply the one verdict on a message; see ``Message.ack`` for the errors."""

    def extend(self, message: Any, extension_ms: int) -> None:
        """Hold a message longer; see ``Message.extend``."""

    def token(self, message: Any) -> str:
        """Return what a verdict from elsewhere needs; see ``Message.token``."""

    def hold(self, message: Any, hold_ms: int) -> None:
        """Hand a message over to another process, which has its token (``Message.hold``)."""

    def has_verdict(self, message: Any) -> bool:
        """Return whether a verdict was given already."""


# This is no ABC: isinstance would cost several times as much, for every message.
class Message:
    """One delivery of a message. Its verdicts may come from any thread, one in all.

    Leaving ``with message:`` normally is an ack; by an exception it is a nack with the queue's
    back-off, and the exception as its reason. Each backend has a subclass.
    """

    __slots__ = ("_acknowledger", "_count", "_headers", "_read", "_record")

    def __init__(
        self,
        acknowledger: Acknowledger,
        record: RecordLike,
        headers: Sequence[tuple[str, bytes | None]],
        delivery_count: int = 1,
    ) -> None:
        """Only consumers make messages."""
        self._acknowledger = acknowledger
        self._record = record
        # None: as its record has them; bytes: its id, which is its only one.
        self._headers: Sequence[tuple[str, bytes | None]] | bytes | None = headers
        self._count = delivery_count
        self._read: MessageHeaders | None = None

    # What it is.

    @property
    def payload(self) -> bytes | None:
        """Return what the sender gave; None is a null payload."""
        value: bytes | None = self._record.value()
        return value

    @property
    def key(self) -> bytes | None:
        """Return the sender's key; None: it gave none."""
        key: bytes | None = self._record.key()
        return key

    @property
    def headers(self) -> Mapping[str, bytes | None]:
        """Return the sender's headers; the last of a name counts (``raw_headers`` has all)."""
        return dict(self._own_headers().user)

    @property
    def raw_headers(self) -> Headers:
        """Return all headers of the record in their order, the protocol's own among them."""
        if self._headers is None:
            self._headers = headers_of(self._record)
        if isinstance(self._headers, bytes):
            self._headers = ((ID, self._headers),)
        return tuple(self._headers)

    @property
    def id(self) -> str:
        """Return the label that travels with every copy; empty when the sender gave none."""
        return self._own_headers().id

    @property
    def queue_id(self) -> str:
        return self._acknowledger.queue_id

    @property
    def delivery_count(self) -> int:
        """Return the deliveries so far, this one included: 1 at the first."""
        return self._count

    @property
    def timestamp_ms(self) -> int:
        """Return the broker's time when this copy was appended."""
        return self._record.timestamp()[1]

    @property
    def topic(self) -> str:
        return self._record.topic() or ""

    @property
    def message_id(self) -> MessageId:
        """Say where this copy stands; a copy that is written for a redelivery has another place."""
        return MessageId(self._record.partition() or 0, self._record.offset() or 0)

    @property
    @abstractmethod
    def deadline(self) -> float:
        """Return when the lease ends unless it is renewed, in seconds of ``time.monotonic()``.

        Infinite where nothing ends by time. Leases go on while the machine is suspended, where
        that clock may stand still: then the deadline comes nearer.
        """

    def _own_headers(self) -> MessageHeaders:
        if self._read is None:
            self._read = read_message_headers(self.raw_headers)
        return self._read

    def __repr__(self) -> str:
        place = self.message_id
        return (
            f"<Message {place.partition}/{place.offset} of {self.queue_id!r}, "
            f"delivery {self._count}>"
        )

    # Verdicts.

    def ack(self, *, wait: bool = False) -> None:
        """Say that the message is done.

        Args:
            wait: Until Kafka has confirmed the verdict.

        Raises:
            StateError: It has a verdict already, or the consumer is closed.
            LeaseLostError: The lease has ended; with ``wait``, also that the verdict came late.
            BrokerError, DeadlineExceededError: Only with ``wait``: Kafka did not confirm.
        """
        self._acknowledger.acknowledge(self, _ACK, wait=wait)

    def nack(
        self, *, delay: float | timedelta | None = None, reason: str = "", wait: bool = False
    ) -> None:
        """Give it back, to be delivered again after a delay; counts as a delivery.

        Args:
            delay: Seconds; None: the queue's back-off. At most a quarter of the time that the
                markers topic keeps its records.
            reason: For the audit and, after the last delivery, the dead letter.
            wait: As for ``ack``; the errors too.

        Raises:
            ConfigError: A negative delay, or a reason that is no text: the message is still held.
        """
        delay_ms = None if delay is None else milliseconds(delay, name="delay")
        self._acknowledger.acknowledge(
            self, Outcome.NACK, wait=wait, reason=reason, delay_ms=delay_ms
        )

    def reject(self, reason: str, *, wait: bool = False) -> None:
        """Give it up: it goes to the dead letters with this reason, which must not be empty.

        Raises:
            ConfigError: No reason, or one that is no text: the message is still held.
            StateError, LeaseLostError, BrokerError, DeadlineExceededError: As for ``ack``.
        """
        self._acknowledger.acknowledge(self, Outcome.REJECT, wait=wait, reason=reason)

    def extend(self, seconds: float | timedelta) -> None:
        """Hold it for at least so long from now, whatever becomes of this process.

        The consumer renews every lease by itself as long as it lives; this is for more than the
        redelivery timeout. What is left of the queue's max_lease is the limit.

        Raises:
            LeaseLostError, StateError: As for ``ack``.
            ConfigError: Not a positive number.
        """
        self._acknowledger.extend(self, milliseconds(seconds, name="seconds", minimum=1))

    @property
    def token(self) -> str:
        """Names this delivery for verdicts elsewhere: ``Queue.ack`` and its siblings.

        A text of some 200 characters for URLs, and no secret. Of a message that was not handed over
        by ``hold``, this consumer keeps renewing the lease until a verdict comes, here or there;
        its own verdicts then wait for the log, which says whose was first.

        Raises:
            ConfigError: The backend has none; names those that have.
        """
        return self._acknowledger.token(self)

    def hold(
        self, seconds: float | timedelta | None = None, *, until: datetime | None = None
    ) -> str:
        """Hand it over: it is held until then, also when this process ends.

        The verdict is given by the token that this returns, from any process. The message counts
        in ``max_in_flight`` no more, is not renewed and not released; without a verdict it is
        delivered again. Waits until Kafka has it.

        Args:
            seconds: From now; at most what is left of the queue's max_lease.
            until: In its place, a moment with a time zone, by this machine's clock.

        Raises:
            ConfigError: Neither or both are given, or the time is over; or as ``token``.
            LeaseLostError, StateError: As for ``ack``.
            BrokerError, DeadlineExceededError: Kafka did not confirm; it is held as before.
        """
        if (seconds is None) == (until is None):
            raise ConfigError("hold() takes either seconds or until")
        if until is not None:
            if until.tzinfo is None:
                raise ConfigError(f"until is {until}: it must have a time zone")
            seconds = until - datetime.now(timezone.utc)
        assert seconds is not None, "one of them is given"
        self._acknowledger.hold(self, milliseconds(seconds, name="seconds", minimum=1))
        return self.token

    @property
    def is_shared(self) -> bool:
        """Return whether verdicts may come from elsewhere: those given here wait for the log."""
        return False

    def __enter__(self) -> Message:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        acknowledger = self._acknowledger
        if acknowledger.has_verdict(self):
            return
        if error is None:
            acknowledger.acknowledge(self, _ACK)
            return
        try:
            acknowledger.acknowledge(self, Outcome.NACK, reason=reason_of(error))
        except (LeaseLostError, StateError) as refusal:
            # The handler's own error goes on.
            _log.warning(
                "a failed message could not be given back",
                extra={"queue": self.queue_id, "error": str(refusal)},
            )


def only_ack(message: Message, verdict: str) -> None:
    """Checks that it is none but ``ack``, on a queue with ``delivery="at-most-once"``.

    Raises:
        StateError: It is another one.
    """
    if verdict != Outcome.ACK.name.lower():
        raise StateError(
            f"{verdict} of {message!r}: with delivery='at-most-once' a message is acknowledged "
            "before it is handed out"
        )
