"""A message of a ``markers`` queue: its lease, its markers, and what became of its END."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

UNREPORTED = -2  # log time of an END without a delivery report; -1: Kafka gave none


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an END says; messages with equal ones may share a record (R30)."""

    outcome: Outcome
    reason: str = ""
    delay_ms: int | None = None  # of a NACK; None: by the back-off after
    delivery_count: int = 0  # so many deliveries


class EndReports(Protocol):
    """What becomes of ENDs; called while reports are served, with no lock held."""

    def end_delivered(self, end: EndRecord) -> None:
        """An END is in the log."""

    def check_late(self, messages: Sequence[MarkersMessage], log_ms: int) -> None:
        """Their END is in the log, after their leases' ends as far as these were known (R9)."""

    def end_failed(self, end: EndRecord) -> None:
        """An END was not delivered."""


class EndRecord:
    """The END of one message, or of several (R30), on its way into the log."""

    __slots__ = ("_reports", "error", "log_ms", "messages", "value")

    def __init__(
        self, reports: EndReports, messages: list[MarkersMessage], value: bytes = b""
    ) -> None:
        """With a ``value``, the messages have one verdict, holder and marker partition."""
        self._reports = reports
        self.messages = messages
        self.value = value
        self.log_ms = UNREPORTED
        self.error: KafkaError | None = None

    def reported(self, error: KafkaError | None, record: Record) -> None:
        """Kafka's delivery report."""
        # It may run with librdkafka's fatal error raised: Python then finds no base class's names.
        if error is not None:
            self.error = error
            self._reports.end_failed(self)
            return
        log_ms = record.timestamp()[1]
        # R9: late perhaps; asked with all facts.
        late = [each for each in self.messages if log_ms > each._lease.log_deadline_ms]
        if late:
            self._reports.check_late(late, log_ms)
        self.log_ms = log_ms
        for message in self.messages:
            message._lease.is_end_known = True
        self._reports.end_delivered(self)  # last: what an interrupt breaks off is found by it


class MarkersMessage(Message):
    """See ``Message``. Its START completes it; a redelivered message is another copy."""

    __slots__ = (
        "_basis",
        "_end",
        "_expiry_ms",
        "_lease",
        "_marker_key",
        "_route",
        "_start",
        "_verdict",
        "log",
        "offset",
        "partition",
        "polled_ms",
    )

    _record: Record
    _lease: Lease
    # Once its START is encoded:
    _start: bytes  # empty: by reference, together with others (R28)
    log: tuple[bytes, int]  # topic id and leader epoch
    _route: int  # the marker partition
    _marker_key: bytes
    # Once it has a verdict:
    _verdict: Verdict
    _end: EndRecord | None  # the last one that was written

    def __init__(
        self,
        ack_writer: Acknowledger,
        record: Record,
        partition: int,
        offset: int,
        polled_ms: int,
        headers: Sequence[tuple[str, bytes | None]],
    ) -> None:
        """Made when the record was polled; ``polled_ms`` is monotonic."""
        # As Message.__init__ does, whose call would take half as long as the rest.
        self._acknowledger = ack_writer
        self._record = record
        self._headers = headers
        self._count = 1
        self._read = None
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
