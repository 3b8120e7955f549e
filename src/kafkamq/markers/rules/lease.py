"""A worker's hold on messages: what one START named, or what split off of it (``leases.py``)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kafkamq.markers.rules.batching import batch_of
from kafkamq.markers.rules.message_set import MessageSet
from kafkamq.types import MessageBatch, MessageId, Outcome


class LeaseState(Enum):
    """Where a lease is in its life."""

    STARTING = 0
    STARTED = 1
    HELD = 2
    ACKNOWLEDGED = 3
    LOST = 4  # ended by the worker's clock, or forgotten before it was handed out


class Sharing(Enum):
    """Whether verdicts on a message may come from elsewhere (R34)."""

    NONE = 0
    TOKEN = 1  # its token was asked for: the log says who was first
    HOLDING = 2  # the KEEPALIVE of its hold is under way: nothing else may renew it
    HELD = 3  # it was handed over


class Refusal(Enum):
    """Why a verdict is none."""

    ACKNOWLEDGED_BEFORE = 1
    LOST = 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an END says; messages with equal ones may share a record (R30)."""

    outcome: Outcome
    reason: str = ""
    delay_ms: int | None = None  # of a NACK; None: by the back-off after
    delivery_count: int = 0  # so many deliveries


@dataclass(frozen=True, slots=True)
class FirstStart:
    """A START of a batch that failed afterwards; the message will be polled again."""

    begin_ms: int
    deadline_ms: int
    log_begin_ms: int
    log_deadline_ms: int
    start_offset: int
    marker_partition: int  # where the second one goes, too: one tracker knows of both


@dataclass(slots=True)
class Overtaken:
    """What the markers say of messages whose former owner did not commit their offsets.

    Attributes:
        starts: Broker time, offset and marker partition of the first START of what has no END.
        redelivered: Those that have copies, or became dead letters.
        latest_ms: Broker time of the latest marker.
        is_whole: Whether all markers were read; else ``starts`` is empty, as an END may be missing.
    """

    starts: dict[MessageId, tuple[int, int, int]] = field(default_factory=dict)
    redelivered: MessageSet = field(default_factory=MessageSet)
    latest_ms: int = 0
    is_whole: bool = False


ACKED = Verdict(Outcome.ACK)
_NS_PER_MS = 1_000_000
_NEVER_MS = 1 << 53

# Looking a member up in its class takes as long as the rest of a line.
_STARTING, _, _HELD, _, _LOST = LeaseState


class Lease:
    """A worker's hold on messages of one chunk; changed by ``Leases``, and ``held`` by ACKs too."""

    __slots__ = (
        "asked_ms",
        "begin_ms",
        "deadline_ns",
        "end",
        "held",
        "holder_id",
        "is_end_known",
        "is_noted",
        "log",
        "log_begin_ms",
        "log_deadline_ms",
        "lost",
        "many_parts",
        "marker_partition",
        "next_holder_id",
        "number",
        "offsets",
        "oldest_ms",
        "partition",
        "parts",
        "sharing",
        "start_offset",
        "state",
        "uncollected",
        "verdict",
    )

    def __init__(
        self,
        partition: int,
        offsets: Sequence[int],
        log: tuple[bytes, int],
        marker_partition: int,
        holder_id: str,
    ) -> None:
        self.partition = partition
        self.offsets = offsets  # ascending, in one chunk
        self.log = log  # topic id and leader epoch
        self.marker_partition = marker_partition  # of its START, KEEPALIVE and END (R7)
        self.holder_id = holder_id  # whom trackers take for its holder; a RELEASE names it (R8)
        self.next_holder_id = ""  # whom a KEEPALIVE that is not reported makes its holder
        self.state = _STARTING
        self.begin_ms = -1  # its first START, which was delivered, was written
        self.deadline_ms = -1  # kept as ``deadline_ns``, which an ACK compares with its clock
        self.asked_ms = -1  # until when ``extend`` asked to hold it, or a tracker may hold it
        self.log_begin_ms = -1
        self.log_deadline_ms = -1
        self.start_offset = -1  # of its first START in the markers
        self.sharing = Sharing.NONE  # of one message: whether others give verdicts, too
        self.oldest_ms = -1  # broker time of its oldest message, if its START has no payload
        self.held = set(offsets)  # offsets without a verdict
        self.uncollected = self.held.copy()  # these, and those that ``collect`` will find missing
        self.lost: Collection[int] = ()  # offsets that get no verdict any more: it has ended
        self.is_noted = False  # ``collect`` is going to look at it
        self.parts: list[Lease] = []  # what has split off with a verdict
        self.many_parts = 16  # so many are looked through for those whose ENDs are known
        self.number = 0  # of a part: behind the renewals with smaller numbers
        self.verdict = ACKED  # of a part
        self.end: object = None  # of a part: the last END of it that was written
        self.is_end_known = False  # its END is in the log, or nobody waits for that

    @classmethod
    def unwatched(
        cls, partition: int, offsets: Sequence[int], log: tuple[bytes, int], log_ms: int
    ) -> Lease:
        """At most once: once they are committed no tracker answers for these messages.

        Nothing ends it, nobody renews it, and what becomes of its messages is told to nobody.
        """
        lease = cls(partition, offsets, log, -1, "")
        lease.state, lease.is_noted = _HELD, True
        lease.begin_ms, lease.deadline_ms, lease.log_begin_ms = 0, _NEVER_MS, log_ms
        return lease

    @property
    def deadline_ms(self) -> int:
        """When it ends unless it is renewed; monotonic."""
        return self.deadline_ns // _NS_PER_MS

    @deadline_ms.setter
    def deadline_ms(self, value_ms: int) -> None:
        self.deadline_ns = value_ms * _NS_PER_MS

    def message_ids(self) -> list[MessageId]:
        """Of its messages."""
        return [MessageId(self.partition, offset, *self.log) for offset in self.offsets]

    def batch(self) -> MessageBatch:
        """Its messages as markers name them."""
        return batch_of(self.partition, self.log, self.offsets)

    def held_batch(self) -> MessageBatch | None:
        """Those of its messages that have no verdict; None: there is none any more."""
        held = sorted(self.held)  # once: an ACK takes messages out of it without a lock
        return batch_of(self.partition, self.log, held) if held else None

    def take_held(self) -> Collection[int]:
        """The messages without a verdict, which get none any more; broken off, it is repeated."""
        lost = self.lost = set(self.lost)
        for offset in list(self.held):  # one by one: each goes here or to an ACK
            lost.add(offset)
            self.uncollected.discard(offset)  # first: what only ``held`` lacks is acked
            try:
                self.held.remove(offset)
            except KeyError:  # by another thread, just now
                self.uncollected.add(offset)
                lost.discard(offset)
        return lost

    def holds(self, offset: int) -> bool:
        """Whether this message was handed out, or may be, and has no verdict."""
        return self.state is _HELD and offset in self.held

    def is_over(self, monotonic_ms: int) -> bool:
        """Whether nothing that happens to this process can count against the message any more.

        A verdict alone does not do: until its END is in the log it dies with the process.
        """
        if self.state is _LOST:
            return True
        return not self.held and (self.is_end_known or monotonic_ms >= self.deadline_ms)


@dataclass(frozen=True, slots=True)
class Renewal:
    """Ask the shell for one KEEPALIVE; ``Leases.renewed`` takes its delivery report."""

    marker_partition: int
    consumer_id: str
    message_id: MessageId | None  # None, and no batches: all of the consumer in that partition
    redeliver_after_ms: int
    leases: tuple[Lease, ...]
    written_ms: int  # monotonic, not after it is written
    number: int  # what splits off of these later has a larger one
    batches: tuple[MessageBatch, ...] = ()  # in place of one message_id (R30)

    @property
    def is_by_id(self) -> bool:
        """Whether it names messages, so that its writer holds them from then on."""
        return self.message_id is not None or bool(self.batches)

    def names(self, lease: Lease) -> bool:
        """Whether it renews a part of its leases; one that was acked before is in no batch."""
        if not self.batches:
            return True
        return any(
            batch.partition == lease.partition
            and all(
                at >= batch.base_offset and batch.bits >> (at - batch.base_offset) & 1
                for at in lease.offsets
            )
            for batch in self.batches
        )
