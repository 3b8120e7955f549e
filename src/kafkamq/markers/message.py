"""A message of a ``markers`` queue is what its record and its lease say, and its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kafkamq.markers.rules.handout import expires_at_ms
from kafkamq.markers.rules.leases import Lease, Sharing
from kafkamq.markers.state import ConsumerState
from kafkamq.metrics.catalog import NAMES_OF_OURS
from kafkamq.queue.message import Acknowledger, Message
from kafkamq.queue.wire.headers import (
    has_names_of_ours,
    is_of_another_queue,
    read_stamped_headers,
)
from kafkamq.queue.wire.keys import split_key
from kafkamq.transport.clock import now_ns, public_s
from kafkamq.transport.record import Record, all_headers
from kafkamq.types import Headers, MessageId, Outcome

_ACK = Outcome.ACK


class MarkersAcknowledger(Acknowledger, Protocol):
    """What a message of a ``markers`` queue needs of its consumer."""

    state: ConsumerState

    def note(self, lease: Lease) -> None: ...


class MarkersMessage(Message):
    """A message with a lease, which its START gives it; a redelivered one is another copy."""

    __slots__ = ("_expiry_ms", "_lease", "offset", "payload")

    _acknowledger: MarkersAcknowledger
    _record: Record
    _lease: Lease
    payload: bytes | None

    def __init__(
        self,
        ack_writer: MarkersAcknowledger,
        record: Record,
        offset: int,
        headers: bytes | Headers | None = None,
    ) -> None:
        """Make it of a polled record; ``read`` its headers if they are more than an id."""
        # As Message.__init__ does, whose call would take half as long as the rest.
        self._acknowledger = ack_writer
        self._record = record
        # None: they are read when they are asked for.
        self._headers = headers
        self._count = 1
        self._read = None
        self._expiry_ms = 0
        self.offset = offset
        # A property would take longer to read than this.
        self.payload = record.value()

    def read(self) -> None:
        """Find the delivery count and, with a TTL, the broker time of its end (R10)."""
        found = self._own_headers()
        self._count = found.delivery_count
        if found.ttl_ms is not None:
            first = found.origin
            since_ms = self.timestamp_ms if first is None else first.timestamp_ms
            self._expiry_ms = expires_at_ms(found.ttl_ms, since_ms)

    @property
    def key(self) -> bytes | None:
        """Return the sender's key, without the queue id; None: it gave none."""
        return split_key(self._record.key())[1]

    @property
    def message_id(self) -> MessageId:
        """Return where this copy stands; a redelivered message has another one."""
        lease = self._lease
        return MessageId(lease.partition, self.offset, *lease.log)

    @property
    def deadline(self) -> float:
        return public_s(self._lease.deadline_ms)

    @property
    def is_shared(self) -> bool:
        return self._lease.sharing is not Sharing.NONE

    def ack(self, *, wait: bool = False) -> None:
        lease = self._lease
        acknowledger = self._acknowledger
        state = acknowledger.state
        # A call would take longer.
        is_refused = state.is_closed or state.fork_check.is_forked
        if wait or is_refused or now_ns() >= lease.deadline_ns:
            acknowledger.acknowledge(self, _ACK, wait=wait)
            return
        try:
            # This is one step for all threads: one of them succeeds.
            lease.held.remove(self.offset)
        except KeyError:
            # It says why not, or the message has another lease by now.
            acknowledger.acknowledge(self, _ACK)
            return
        if not lease.is_noted:
            acknowledger.note(lease)


class AnyTopicMessage(MarkersMessage):
    """A message of a topic that anybody writes to (R37): its key is the sender's."""

    __slots__ = ()

    def __init__(
        self, ack_writer: MarkersAcknowledger, record: Record, headers: Headers, stamp: bytes
    ) -> None:
        super().__init__(ack_writer, record, record.offset() or 0, headers)
        self._read = read_stamped_headers(headers, stamp)
        self.read()

    @property
    def key(self) -> bytes | None:
        """Return the sender's key; None: it gave none."""
        key: bytes | None = self._record.key()
        return key


def messages_of(
    ack_writer: MarkersAcknowledger, records: Sequence[Record], stamp: bytes
) -> list[MarkersMessage]:
    """Return the queue's of these: not the copies for other queues of the topic."""
    messages: list[MarkersMessage] = []
    theirs = 0
    for record, headers in zip(records, all_headers(records), strict=True):
        if headers and is_of_another_queue(headers, stamp):
            continue
        message = AnyTopicMessage(ack_writer, record, tuple(headers), stamp)
        theirs += bool(headers) and has_names_of_ours(message._own_headers().user)
        messages.append(message)
    if theirs:
        NAMES_OF_OURS.add(theirs, ack_writer.queue_id)
    return messages
