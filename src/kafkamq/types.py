"""Values that every layer shares: markers, message ids, outgoing and sent messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, IntEnum

Header = tuple[str, "bytes | None"]
Headers = tuple[Header, ...]
"""Record headers in their order; Kafka allows a name more than once and null values."""

PartitionId = tuple[str, int]
"""Topic and partition."""

PartitionOffset = tuple[int, int]
"""Partition and offset of a record whose topic is known."""

RecordId = tuple[str, int, int]
"""Topic, partition and offset of a record."""


class MarkerType(IntEnum):
    """Kinds of marker record; 0-2 are kafka-mq-go's numbers."""

    START = 0
    END = 1
    KEEPALIVE = 2
    SCHEDULE = 16
    TICK = 17


class Outcome(IntEnum):
    """What an END says; kafka-mq-go only knows ACK."""

    ACK = 0
    NACK = 1
    REJECT = 2
    REDELIVERED = 3
    DEAD_LETTERED = 4
    RELEASE = 5
    ALREADY_ENDED = 6


class Backend(Enum):
    """Who remembers which messages of a queue are done; fixed when the queue is created."""

    MARKERS = "markers"
    OFFSETS = "offsets"
    SHARE = "share"
    CLAIMS = "claims"


class DeadLetterReason(Enum):
    """Values of the ``kafkamq-reason`` header of a dead letter."""

    REJECTED = "rejected"
    MAX_DELIVERIES = "max-deliveries"
    MAX_LEASE = "max-lease"
    EXPIRED = "expired"
    PAYLOAD_LOST = "payload-lost"


@dataclass(slots=True, unsafe_hash=True)
class MessageId:
    """Identity of a message (R13); empty parts match only empty parts. Never mutated.

    For a SCHEDULE: the marker partition and offset of its first record, other parts empty.
    """

    partition: int
    offset: int
    # 16 bytes, or empty: it is not known.
    topic_id: bytes = b""
    # As on the wire, plus one; 0: it is not known.
    leader_epoch: int = 0

    @property
    def log(self) -> tuple[bytes, int]:
        return self.topic_id, self.leader_epoch


@dataclass(slots=True)
class MessageBatch:
    """Messages of one partition and leader epoch, within one chunk of 4096 offsets; never mutated.

    Bit i of ``bits`` set: the message at ``base_offset`` + i.
    """

    partition: int
    topic_id: bytes
    # Both are as a MessageId has them.
    leader_epoch: int
    base_offset: int
    bits: int

    def message_ids(self) -> Iterator[MessageId]:
        for number, bit in enumerate(bin(self.bits)[:1:-1]):
            if bit == "1":
                offset = self.base_offset + number
                yield MessageId(self.partition, offset, self.topic_id, self.leader_epoch)

    def __contains__(self, one: MessageId) -> bool:
        bit = one.offset - self.base_offset
        is_of_log = one.partition == self.partition and one.log == (
            self.topic_id,
            self.leader_epoch,
        )
        return is_of_log and bit >= 0 and self.bits >> bit & 1 == 1


@dataclass(slots=True)
class Marker:
    """One decoded marker record, fields as in ``markers/wire/markers.proto``; never mutated.

    ``message_id`` is None where the wire has none (marker with batches, KEEPALIVE of a consumer,
    SCHEDULE that was not carried, TICK).
    """

    type: MarkerType
    message_id: MessageId | None = None
    redeliver_after_ms: int = 0
    key: bytes = b""
    # None: a null payload (on the wire ``null_value``).
    value: bytes | None = b""
    delivery_count: int = 1
    headers: Headers = ()
    expires_at_ms: int = 0
    consumer_id: str = ""
    message_timestamp_ms: int = 0
    by_reference: bool = False
    outcome: Outcome = Outcome.ACK
    reason: str = ""
    max_deliveries: int = 0
    max_lease_ms: int = 0
    carried_forward: bool = False
    of_schedule: bool = False
    engine_epoch: int = 0
    # Of a START (R37); empty: the namespace's.
    message_topic: str = ""
    # At most one of each chunk.
    batches: tuple[MessageBatch, ...] = ()

    @property
    def named(self) -> tuple[MessageBatch, ...]:
        """Return the messages that it names; a single one is a batch of its own."""
        one = self.message_id
        if one is None:
            return self.batches
        return (MessageBatch(one.partition, *one.log, one.offset, 1),)


def expand(marker: Marker) -> Iterator[Marker]:
    """Get the markers of one message each that one with batches means (R27); any other as it is."""
    if not marker.batches:
        yield marker
    for batch in marker.batches:
        for message_id in batch.message_ids():
            yield replace(marker, message_id=message_id, batches=())


@dataclass(frozen=True, slots=True)
class ScheduleToken:
    """Names a delayed message until it fires; what ``Producer.cancel`` takes."""

    queue_id: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A confirmed send; with ``schedule`` the place is in the markers topic."""

    queue_id: str
    id: str
    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    schedule: ScheduleToken | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingMessage:
    """One message for ``Producer.send_many``; the same fields as ``Producer.send``, times in s."""

    payload: bytes | None
    key: bytes | str | None = None
    headers: Mapping[str, bytes] | None = None
    delay: float = 0.0
    ttl: float | None = None
    id: str | None = None


class MarshalType(Enum):
    """Kinds of record on Marshal's coordination topic, by their names on the wire."""

    HEARTBEAT = "Heartbeat"
    CLAIMING_PARTITION = "ClaimingPartition"
    RELEASING_PARTITION = "ReleasingPartition"
    CLAIMING_MESSAGES = "ClaimingMessages"
    RELEASE_GROUP = "ReleaseGroup"


@dataclass(slots=True)
class MarshalRecord:
    """One record of Marshal's coordination topic, as ``claims/wire/marshal.py`` reads it; frozen.

    ``offset`` is the next offset to consume in the claimed partition: where the sender stands
    (HEARTBEAT, RELEASING_PARTITION), or would stand after the batch that it wants to hand out
    (CLAIMING_MESSAGES); 0 in the other two. A RELEASE_GROUP names no topic and partition 0.
    """

    type: MarshalType
    # Epoch seconds by the sender's clock.
    time_s: int
    # Random, of one start of the sender's process.
    instance: str
    # Unique within the group; it may outlive a restart.
    client: str
    group: str
    topic: str = ""
    partition: int = 0
    offset: int = 0
    # Of a RELEASE_GROUP: the group is paused until then.
    expires_at_s: int = 0
    # Of the peer's writer: 1, in a RELEASE_GROUP 0; no reader compares it.
    version: int = 1


@dataclass(frozen=True, slots=True)
class Ack:
    """A handler's verdict: done; as returning None."""


@dataclass(frozen=True, slots=True)
class Nack:
    """A handler's verdict: try again, after ``delay`` s (None: the back-off)."""

    delay: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Reject:
    """A handler's verdict: give up, to the dead letters."""

    reason: str = ""


class RangeType(Enum):
    """Kinds of record on the topic of range claims, by their names on the wire."""

    CLAIM = "ClaimRange"
    BEAT = "RangeBeat"
    DONE = "RangeDone"
    FREE = "RangeFree"


@dataclass(slots=True)
class RangeRecord:
    """One record of the topic of range claims, as ``claims/rules/ranges.py`` reads it."""

    type: RangeType
    instance: str
    client: str
    group: str
    topic: str
    partition: int
    first: int = 0
    next: int = 0
    # The first offset that nobody has claimed, as the sender knows.
    frontier: int = 0
    # The sender had read all range records before this offset.
    seen: int = 0
