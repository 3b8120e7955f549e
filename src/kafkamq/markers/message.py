"""A message that a consumer handed out, and the verdicts on it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError
from confluent_kafka import Message as Record

from kafkamq.config import milliseconds
from kafkamq.markers.rules.handout import expires_at_ms
from kafkamq.markers.rules.leases import Lease
from kafkamq.queue.wire.headers import ID, MessageHeaders, read_message_headers
from kafkamq.queue.wire.keys import split_key
from kafkamq.transport.clock import public_s
from kafkamq.types import Headers, MessageId, Outcome

if TYPE_CHECKING:
    from kafkamq.markers.ack_writer import Verdicts

__all__ = ["Message"]

_ACK = Outcome.ACK  # looking it up in its class takes long
_log = logging.getLogger(__name__)

UNREPORTED = -2  # log time of an END without a delivery report; -1: Kafka gave none


class Message:
    """One delivery of a message. Its verdicts may come from any thread, one in all.

    Leaving ``with message:`` normally is an ack; by an exception it is a nack with the queue's
    back-off, and the exception as its reason.
    """

    __slots__ = (
        "_basis",
        "_count",
        "_end",
        "_end_error",
        "_end_log_ms",
        "_expiry_ms",
        "_headers",
        "_identity",
        "_lease",
        "_log",
        "_marker_key",
        "_outcome",
        "_read",
        "_record",
        "_route",
        "_start",
        "_verdicts",
        "offset",
        "partition",
        "polled_ms",
    )

    _lease: Lease
    # Once its START is encoded:
    _start: bytes
    _log: tuple[bytes, int]  # topic id and leader epoch
    _route: int  # the marker partition
    _identity: bytes  # of the message, as its markers have it
    _marker_key: bytes
    # Once it has a verdict:
    _outcome: Outcome
    _end: bytes
    _end_log_ms: int
    _end_error: KafkaError | None

    def __init__(
        self,
        verdicts: Verdicts,
        record: Record,
        partition: int,
        offset: int,
        polled_ms: int,
        headers: Sequence[tuple[str, bytes | None]],
    ) -> None:
        """Made by ``Consumer`` alone, when the record was polled; its START completes it."""
        self._verdicts = verdicts
        self._record = record
        self.partition = partition
        self.offset = offset
        self.polled_ms = polled_ms  # monotonic
        self._headers = headers
        self._basis: object = None  # what its START was encoded with
        self._read: MessageHeaders | None = None
        self._count = 1
        self._expiry_ms = 0
        if headers and (len(headers) > 1 or headers[0][0] != ID):  # an id alone is read later
            self._read = read = read_message_headers(headers)
            self._count = read.delivery_count
            if read.ttl_ms is not None:  # R10
                first = read.origin
                since_ms = record.timestamp()[1] if first is None else first.timestamp_ms
                self._expiry_ms = expires_at_ms(read.ttl_ms, since_ms)

    # What it is.

    @property
    def payload(self) -> bytes | None:
        """What the sender gave; None is a null payload."""
        value: bytes | None = self._record.value()
        return value

    @property
    def key(self) -> bytes | None:
        """The sender's key, without the queue id; None: it gave none."""
        return split_key(self._record.key())[1]

    @property
    def headers(self) -> Mapping[str, bytes | None]:
        """The sender's headers; the last of a name counts (``raw_headers`` has all)."""
        return dict(self._own_headers().user)

    @property
    def raw_headers(self) -> Headers:
        """All headers of the record in their order, the protocol's own among them."""
        return tuple(self._headers)

    @property
    def id(self) -> str:
        """The label that travels with every copy; empty when the sender gave none."""
        return self._own_headers().id

    @property
    def queue_id(self) -> str:
        """Its queue."""
        return self._verdicts.queue_id

    @property
    def delivery_count(self) -> int:
        """Deliveries so far, this one included: 1 at the first."""
        return self._count

    @property
    def timestamp_ms(self) -> int:
        """The broker's time when this copy was appended."""
        return self._record.timestamp()[1]

    @property
    def topic(self) -> str:
        """The topic that this copy stands in."""
        return self._record.topic() or ""

    @property
    def message_id(self) -> MessageId:
        """Where this copy stands; a redelivered message has another one."""
        return self._lease.message_id

    @property
    def deadline(self) -> float:
        """When the lease ends unless it is renewed, in seconds of ``time.monotonic()``.

        Leases go on while the machine is suspended, where that clock may stand still: then the
        deadline comes nearer.
        """
        return public_s(self._lease.deadline_ms)

    def _own_headers(self) -> MessageHeaders:
        if self._read is None:
            self._read = read_message_headers(self._headers)
        return self._read

    def __repr__(self) -> str:
        place = self._lease.message_id
        return (
            f"<Message {place.partition}/{place.offset} of {self.queue_id!r}, "
            f"delivery {self._count}>"
        )

    # Verdicts.

    def ack(self, *, wait: bool = False) -> None:
        """It is done.

        Args:
            wait: Until Kafka has confirmed the verdict.

        Raises:
            StateError: It has a verdict already, or the consumer is closed.
            LeaseLostError: The lease has ended; with ``wait``, also that the verdict came late.
            BrokerError, DeadlineExceededError: Only with ``wait``: Kafka did not confirm.
        """
        self._verdicts.settle(self, _ACK, wait=wait)

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
        self._verdicts.settle(self, Outcome.NACK, wait=wait, reason=reason, delay_ms=delay_ms)

    def reject(self, reason: str, *, wait: bool = False) -> None:
        """Give it up: it goes to the dead letters with this reason, which must not be empty.

        Raises:
            ConfigError: No reason, or one that is no text: the message is still held.
            StateError, LeaseLostError, BrokerError, DeadlineExceededError: As for ``ack``.
        """
        self._verdicts.settle(self, Outcome.REJECT, wait=wait, reason=reason)

    def extend(self, seconds: float | timedelta) -> None:
        """Hold it for at least so long from now, whatever becomes of this process.

        The consumer renews every lease by itself as long as it lives; this is for more than the
        redelivery timeout. What is left of the queue's max_lease is the limit.

        Raises:
            LeaseLostError, StateError: As for ``ack``.
            ConfigError: Not a positive number.
        """
        self._verdicts.extend(self, milliseconds(seconds, name="seconds", minimum=1))

    def __enter__(self) -> Message:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._verdicts.leave(self, error)

    # Delivery reports.

    def _end_reported(self, error: KafkaError | None, record: Record) -> None:
        if error is None:
            log_ms = record.timestamp()[1]
            if log_ms > self._lease.log_deadline_ms:  # R9: perhaps; asked with all facts
                self._verdicts.check_late(self, log_ms)
            self._end_log_ms = log_ms
            self._lease.is_end_known = True
            self._verdicts.end_delivered(self)  # last: what an interrupt breaks off is found by it
        else:
            self._end_error = error
            self._verdicts.end_failed(self)
