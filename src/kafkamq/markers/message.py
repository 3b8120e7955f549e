"""A message of a ``markers`` queue: its lease, its markers, and what became of its END."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kafkamq.markers.rules.handout import expires_at_ms
from kafkamq.markers.rules.leases import Lease
from kafkamq.queue.message import Acknowledger, Message
from kafkamq.queue.wire.headers import ID, read_message_headers
from kafkamq.queue.wire.keys import split_key
from kafkamq.transport.clock import public_s
from kafkamq.transport.errors import KafkaError
from kafkamq.transport.record import Record
from kafkamq.types import MessageId, Outcome

__all__ = ["EndReports", "MarkersMessage"]

_begin = Message.__init__  # super() would take half as long as the rest, for every message
UNREPORTED = -2  # log time of an END without a delivery report; -1: Kafka gave none


class EndReports(Acknowledger, Protocol):
    """What becomes of the ENDs of messages; called while reports are served, with no lock held."""

    def end_delivered(self, message: MarkersMessage) -> None:
        """An END is in the log."""

    def check_late(self, message: MarkersMessage, log_ms: int) -> None:
        """An END is in the log, after the lease's end as far as it was known (R9)."""

    def end_failed(self, message: MarkersMessage) -> None:
        """An END was not delivered."""


class MarkersMessage(Message):
    """See ``Message``. Its START completes it; a redelivered message is another copy."""

    __slots__ = (
        "_acknowledger",  # again: see _end_reported
        "_basis",
        "_end",
        "_end_error",
        "_end_log_ms",
        "_expiry_ms",
        "_identity",
        "_lease",
        "_log",
        "_marker_key",
        "_outcome",
        "_route",
        "_start",
        "offset",
        "partition",
        "polled_ms",
    )

    _record: Record
    _acknowledger: EndReports
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
        ack_writer: EndReports,
        record: Record,
        partition: int,
        offset: int,
        polled_ms: int,
        headers: Sequence[tuple[str, bytes | None]],
    ) -> None:
        """Made when the record was polled; ``polled_ms`` is monotonic."""
        _begin(self, ack_writer, record, headers)
        self.partition = partition
        self.offset = offset
        self.polled_ms = polled_ms
        self._basis: object = None  # what its START was encoded with
        self._expiry_ms = 0
        if headers and (len(headers) > 1 or headers[0][0] != ID):  # an id alone is read later
            self._read = read = read_message_headers(headers)
            self._count = read.delivery_count
            if read.ttl_ms is not None:  # R10
                first = read.origin
                since_ms = record.timestamp()[1] if first is None else first.timestamp_ms
                self._expiry_ms = expires_at_ms(read.ttl_ms, since_ms)

    @property
    def key(self) -> bytes | None:
        """The sender's key, without the queue id; None: it gave none."""
        return split_key(self._record.key())[1]

    @property
    def message_id(self) -> MessageId:
        """Where this copy stands; a redelivered message has another one."""
        return self._lease.message_id

    @property
    def deadline(self) -> float:
        """See ``Message.deadline``."""
        return public_s(self._lease.deadline_ms)

    # Delivery reports.

    def _end_reported(self, error: KafkaError | None, record: Record) -> None:
        # It may run with librdkafka's fatal error raised: Python then finds no base class's names.
        if error is None:
            log_ms = record.timestamp()[1]
            if log_ms > self._lease.log_deadline_ms:  # R9: perhaps; asked with all facts
                self._acknowledger.check_late(self, log_ms)
            self._end_log_ms = log_ms
            self._lease.is_end_known = True
            self._acknowledger.end_delivered(
                self
            )  # last: what an interrupt breaks off is found by it
        else:
            self._end_error = error
            self._acknowledger.end_failed(self)
