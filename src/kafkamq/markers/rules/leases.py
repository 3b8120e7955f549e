"""What a worker holds and until when: leases, their renewals and their ends (R5, R7-R10); pure.

Two clocks, never mixed and never compared. Names with ``log`` are broker timestamps and serve R9
alone; all others are a monotonic clock of the process, which goes on while the machine is
suspended, and say what the worker may do. By that clock a lease ends T after its START, or after
the last KEEPALIVE that was delivered, was *written*: the broker appended it later than that, so no
tracker ends the lease before the worker does, however late a delivery report is served. What has
ended once does not come back.

A lease is STARTING while its START is under way, STARTED until the offsets are committed, and then
HELD until its message is ACKNOWLEDGED by a verdict or LOST. The caller of ``Leases`` serialises.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from kafkamq.markers.rules.batching import Placed, gather
from kafkamq.types import MessageBatch, MessageId

NEW_PARTITION_MS = 60_000
"""How long after getting a partition its messages are renewed one by one (R7)."""

_LEASES_PER_MS = 500
"""``expire`` looks through so many per ms at most; through one in about 0.1 us."""

_NEVER_MS = 1 << 62

MAX_REMEMBERED_STARTS = 100_000
"""First STARTs of failed batches that are remembered; the oldest are dropped."""


class LeaseState(Enum):
    """Where a lease is in its life."""

    STARTING = 0
    STARTED = 1
    HELD = 2
    ACKNOWLEDGED = 3
    LOST = 4  # ended by the worker's clock, or forgotten before it was handed out


class Acknowledgement(Enum):
    """Whether a verdict may be written."""

    WRITE = 0
    ACKNOWLEDGED_BEFORE = 1
    LOST = 2


# Looking a member up in its class takes as long as the rest of a line.
_STARTING, _STARTED, _HELD, _ACKNOWLEDGED, _LOST = LeaseState
_WRITE = Acknowledgement.WRITE


class Lease:
    """A worker's hold on one message; changed by ``Leases`` alone."""

    __slots__ = (
        "asked_ms",
        "begin_ms",
        "deadline_ms",
        "holder_id",
        "is_end_known",
        "log",
        "log_begin_ms",
        "log_deadline_ms",
        "marker_partition",
        "offset",
        "partition",
        "state",
    )

    def __init__(
        self,
        partition: int,
        offset: int,
        log: tuple[bytes, int],
        marker_partition: int,
        holder_id: str,
    ) -> None:
        self.partition = partition
        self.offset = offset
        self.log = log  # topic id and leader epoch
        self.marker_partition = marker_partition  # of its START, KEEPALIVE and END (R7)
        self.holder_id = holder_id  # whom trackers take for its holder; a RELEASE names it (R8)
        self.state = _STARTING
        self.begin_ms = -1  # its first START, which was delivered, was written
        self.deadline_ms = -1
        self.asked_ms = -1  # until when ``extend`` asked to hold it, or a tracker may hold it
        self.log_begin_ms = -1
        self.log_deadline_ms = -1
        self.is_end_known = False  # its END is in the log, or nobody waits for that

    @property
    def message_id(self) -> MessageId:
        """Of the message."""
        return MessageId(self.partition, self.offset, *self.log)

    def is_over(self, monotonic_ms: int) -> bool:
        """Whether nothing that happens to this process can count against the message any more.

        A verdict alone does not do: until its END is in the log it dies with the process.
        """
        if self.state is _ACKNOWLEDGED:
            return self.is_end_known or monotonic_ms >= self.deadline_ms
        return self.state is _LOST


@dataclass(frozen=True, slots=True)
class _FirstStart:
    """A START of a batch that failed afterwards; the message will be polled again."""

    begin_ms: int
    deadline_ms: int
    log_begin_ms: int
    log_deadline_ms: int


@dataclass(frozen=True, slots=True)
class Renewal:
    """Ask the shell for one KEEPALIVE; ``Leases.renewed`` takes its delivery report."""

    marker_partition: int
    consumer_id: str
    message_id: MessageId | None  # None, and no batches: all of the consumer in that partition
    redeliver_after_ms: int
    leases: tuple[Lease, ...]
    written_ms: int  # monotonic, not after it is written
    batches: tuple[MessageBatch, ...] = ()  # in place of one message_id (R30)

    @property
    def is_by_id(self) -> bool:
        """Whether it names messages, so that its writer holds them from then on."""
        return self.message_id is not None or bool(self.batches)


class Leases:
    """All leases of one consumer."""

    def __init__(
        self,
        consumer_id: str,
        *,
        redelivery_timeout_ms: int,
        max_lease_ms: int,
        batch_markers: bool = False,
    ) -> None:
        self._consumer_id = consumer_id
        self._timeout_ms = redelivery_timeout_ms
        self._max_lease_ms = max_lease_ms
        self._is_batched = batch_markers
        self._open: dict[Lease, None] = {}  # STARTING, STARTED, HELD; in their order
        self._first_starts: dict[MessageId, _FirstStart] = {}
        self._new_partitions: dict[int, int] = {}  # message partition -> renew by id until
        self._ended: list[Lease] = []  # found to be over, and not told yet
        self._look_ms = _NEVER_MS  # no HELD lease ends before that
        self._id_is_spent = False

    # Views.

    @property
    def consumer_id(self) -> str:
        """Whom new STARTs name."""
        return self._consumer_id

    @property
    def id_is_spent(self) -> bool:
        """Something that was started under ``consumer_id`` must not be renewed: change it (R7)."""
        return self._id_is_spent

    @property
    def open_count(self) -> int:
        """Messages that this worker holds, or is about to."""
        return len(self._open)

    def open(self) -> tuple[Lease, ...]:
        """The open leases, in no order."""
        return tuple(self._open)

    # Facts about the consumer.

    def change_id(self, consumer_id: str) -> None:
        """Go on under a fresh id; what is held is renewed by message_id from here on (R7)."""
        self._consumer_id = consumer_id
        self._id_is_spent = False

    def gained_partition(self, partition: int, monotonic_ms: int) -> None:
        """A partition of the messages topic was assigned (R7's 60 s)."""
        self._new_partitions[partition] = monotonic_ms + NEW_PARTITION_MS

    # From START to hand-out (R5).

    @property
    def may_be_lapsed(self) -> bool:
        """Whether ``is_lapsed`` can be true of any message: False but after a failed batch."""
        return bool(self._first_starts)

    def is_lapsed(self, message_id: MessageId, monotonic_ms: int) -> bool:
        """A message polled again whose first START is in the log and whose lease is over.

        Its START answers for it, so it needs no other one and must not be handed out.
        """
        if not self._first_starts:
            return False
        first = self._first_starts.get(message_id)
        return first is not None and monotonic_ms >= first.deadline_ms

    def answered(self, message_ids: Iterable[MessageId]) -> None:
        """Their STARTs are in the log, by whoever; polled again, they are lapsed (R5).

        For a worker that begins at an older position than the last one that was committed.
        """
        for message_id in message_ids:
            self._keep_first(message_id, _FirstStart(-1, -1, -1, -1))

    def start(self, message_id: MessageId, marker_partition: int) -> Lease:
        """Its START is about to be written, under ``consumer_id``."""
        log = message_id.topic_id, message_id.leader_epoch
        place = message_id.partition, message_id.offset
        lease = Lease(*place, log, marker_partition, self._consumer_id)
        self._open[lease] = None
        return lease

    def start_all(self, messages: Iterable[Placed], marker_partition: int) -> list[Lease]:
        """``start`` of each."""
        holder_id = self._consumer_id
        leases = [
            Lease(each.partition, each.offset, each.log, marker_partition, holder_id)
            for each in messages
        ]
        self._open.update(dict.fromkeys(leases))
        return leases

    def started_all(self, leases: Iterable[Lease], written_ms: int, log_ms: int) -> None:
        """``started`` of each: one START has named them."""
        if self._first_starts:
            for lease in leases:
                self.started(lease, written_ms, log_ms)
            return
        deadline_ms, log_deadline_ms = written_ms + self._timeout_ms, log_ms + self._timeout_ms
        for lease in leases:
            if lease.state is _LOST:
                self.started(lease, written_ms, log_ms)
                continue
            lease.begin_ms = written_ms
            lease.deadline_ms = deadline_ms
            lease.log_begin_ms = log_ms
            lease.log_deadline_ms = log_deadline_ms
            lease.state = _STARTED  # last: an interrupt leaves no lease half started

    def started(self, lease: Lease, written_ms: int, log_ms: int) -> None:
        """Its START was delivered. A second START of the message moves nothing but log time.

        Args:
            lease: Of the message.
            written_ms: Monotonic, not after the START was written.
            log_ms: Its broker timestamp.
        """
        is_late = lease.state is _LOST  # its batch failed before this was known
        first = self._first_starts.get(lease.message_id) if self._first_starts else None
        if is_late and first is not None:
            return
        if first is None:
            lease.begin_ms = written_ms
            lease.deadline_ms = written_ms + self._timeout_ms
            lease.log_begin_ms = log_ms
            lease.log_deadline_ms = log_ms + self._timeout_ms
            if is_late:
                self._remember(lease)
            else:
                lease.state = _STARTED  # last: an interrupt leaves no lease half started
            return
        lease.begin_ms = first.begin_ms
        lease.deadline_ms = first.deadline_ms
        lease.log_begin_ms = first.log_begin_ms
        lease.log_deadline_ms = first.log_deadline_ms
        self._renew_in_log(lease, log_ms, self._timeout_ms)
        lease.state = _STARTED

    def committed(self, batch: Iterable[Lease], monotonic_ms: int) -> None:
        """The offsets behind these STARTs are committed: they are HELD, or LOST if too late."""
        for lease in batch:
            if self._first_starts:
                self._first_starts.pop(lease.message_id, None)
            lease.state = _HELD
            if monotonic_ms >= lease.deadline_ms:
                self._end(lease)
            elif lease.deadline_ms < self._look_ms:
                self._look_ms = lease.deadline_ms

    def failed(self, batch: Iterable[Lease]) -> None:
        """These STARTs failed, or their commit did, or their partition is gone (R5)."""
        for lease in batch:
            if lease.state is _STARTED:
                self._remember(lease)
            self._lose(lease)
        self._id_is_spent = True

    def aborted(self, batch: Iterable[Lease]) -> None:
        """Their STARTs were in a transaction that did not happen, or nobody knows (exactly once).

        Nothing of them is remembered: what is polled again has no START, and what was committed
        after all is not polled again.
        """
        for lease in batch:
            self._lose(lease)
        self._id_is_spent = True

    def may_hand_out(self, lease: Lease, monotonic_ms: int) -> bool:
        """Whether it is still held; otherwise it is LOST and a tracker brings it back (R5)."""
        if lease.state is _HELD and monotonic_ms < lease.deadline_ms:
            return True
        if lease.state is _HELD:
            self._end(lease)
        return False

    def _end(self, lease: Lease) -> None:
        """Its time is over; the next ``expire`` tells of it."""
        self._lose(lease)
        self._ended.append(lease)

    def _remember(self, lease: Lease) -> None:
        first = _FirstStart(
            lease.begin_ms, lease.deadline_ms, lease.log_begin_ms, lease.log_deadline_ms
        )
        self._keep_first(lease.message_id, first)

    def _keep_first(self, message_id: MessageId, first: _FirstStart) -> None:
        self._first_starts[message_id] = first
        while len(self._first_starts) > MAX_REMEMBERED_STARTS:
            del self._first_starts[next(iter(self._first_starts))]

    def _lose(self, lease: Lease) -> None:
        lease.state = _LOST
        self._open.pop(lease, None)
        self._id_is_spent = True  # a KEEPALIVE of the consumer would keep it alive

    # Renewal (R7).

    def plan_renewals(self, monotonic_ms: int) -> list[Renewal]:
        """The KEEPALIVEs to write now; the shell asks every T/3."""
        self._drop_old_partitions(monotonic_ms)
        together, named = defaultdict[int, list[Lease]](list), defaultdict[int, list[Lease]](list)
        single: list[Renewal] = []
        consumer_id, new_partitions = self._consumer_id, self._new_partitions
        for lease in self._open:
            if lease.state is _STARTING:
                continue
            # R7: an older owner's START may come late, a commit take longer than a lease lasts.
            if lease.holder_id != consumer_id or lease.partition in new_partitions:
                # R30: one time for all of a record would cut what was extended.
                if self._is_batched and lease.asked_ms <= monotonic_ms + self._timeout_ms:
                    named[lease.marker_partition].append(lease)
                else:
                    single.append(self._renewal(lease, monotonic_ms))
            else:
                together[lease.marker_partition].append(lease)
        shared = [
            Renewal(partition, consumer_id, None, self._timeout_ms, tuple(leases), monotonic_ms)
            for partition, leases in together.items()
        ]
        for partition, leases in named.items():
            known = partition, consumer_id, None, self._timeout_ms
            for batches, of in gather(leases):
                if len(of) == 1:
                    single.append(self._renewal(of[0], monotonic_ms))
                else:
                    single.append(Renewal(*known, tuple(of), monotonic_ms, batches))
        return shared + single

    def extend(self, lease: Lease, extension_ms: int, monotonic_ms: int) -> Renewal | None:
        """A KEEPALIVE of one message for at least ``extension_ms``, up to its max_lease.

        None when the lease is not held any more.
        """
        if not self.may_hand_out(lease, monotonic_ms):
            return None
        until_ms = min(monotonic_ms + extension_ms, lease.begin_ms + self._max_lease_ms)
        lease.asked_ms = max(lease.asked_ms, until_ms)
        return self._renewal(lease, monotonic_ms)

    def renewed(self, renewal: Renewal, monotonic_ms: int, log_ms: int) -> None:
        """A KEEPALIVE was delivered; it does not revive what has ended."""
        after_ms, max_lease_ms = renewal.redeliver_after_ms, self._max_lease_ms
        by_id = renewal.is_by_id
        until_ms = renewal.written_ms + after_ms
        log_until_ms = log_ms + after_ms
        for lease in renewal.leases:  # all that the worker holds, every T/3: no call in here
            state = lease.state
            if state is _LOST:
                continue
            if lease.log_deadline_ms >= log_ms:  # also of a settled one: R9
                last_ms = lease.log_begin_ms + max_lease_ms
                new_ms = last_ms if last_ms < log_until_ms else log_until_ms  # noqa: FURB136
                if new_ms > lease.log_deadline_ms:
                    lease.log_deadline_ms = new_ms
            if state is _ACKNOWLEDGED or monotonic_ms >= lease.deadline_ms:
                continue
            last_ms = lease.begin_ms + max_lease_ms
            new_ms = last_ms if last_ms < until_ms else until_ms  # noqa: FURB136
            if new_ms > lease.deadline_ms:
                lease.deadline_ms = new_ms
            if by_id:
                lease.holder_id = renewal.consumer_id
                # What a tracker holds it for, at most: the next one must not cut that (R9).
                lease.asked_ms = max(lease.asked_ms, monotonic_ms + after_ms)

    def expire(self, monotonic_ms: int) -> list[Lease]:
        """Held leases that have ended by now, whoever noticed; each is told once.

        Costs nothing while none can have ended. Where very many are held, one that ended behind
        another one is told a moment later; it is not handed out and takes no verdict all the same.
        """
        if monotonic_ms >= self._look_ms:
            self._look(monotonic_ms)
        ended, self._ended = self._ended, []
        return ended

    def _look(self, monotonic_ms: int) -> None:
        held = [lease for lease in self._open if lease.state is _HELD]
        self._look_ms = _NEVER_MS
        for lease in held:
            deadline_ms = lease.deadline_ms
            if monotonic_ms >= deadline_ms:
                self._end(lease)
            elif deadline_ms < self._look_ms:
                self._look_ms = deadline_ms
        self._look_ms = max(self._look_ms, monotonic_ms + len(held) // _LEASES_PER_MS)

    def _drop_old_partitions(self, monotonic_ms: int) -> None:
        for partition in [p for p, end in self._new_partitions.items() if monotonic_ms >= end]:
            del self._new_partitions[partition]

    def _renewal(self, lease: Lease, monotonic_ms: int) -> Renewal:
        # The tracker sets clock + this, so no renewal may cut what was asked for before it.
        after_ms = max(self._timeout_ms, lease.asked_ms - monotonic_ms)
        to, by = lease.marker_partition, self._consumer_id
        return Renewal(to, by, lease.message_id, after_ms, (lease,), monotonic_ms)

    def _renew_in_log(self, lease: Lease, log_ms: int, after_ms: int) -> None:
        if log_ms <= lease.log_deadline_ms:
            last_ms = lease.log_begin_ms + self._max_lease_ms
            lease.log_deadline_ms = max(lease.log_deadline_ms, min(log_ms + after_ms, last_ms))

    # Verdicts (R8, R9).

    def acknowledge(self, lease: Lease, monotonic_ms: int) -> Acknowledgement:
        """A verdict on a message that was handed out."""
        if lease.state is _HELD and monotonic_ms < lease.deadline_ms:
            self._open.pop(lease, None)
            lease.state = _ACKNOWLEDGED  # last: what is broken off before can be settled again
            return _WRITE
        if lease.state is _ACKNOWLEDGED:
            return Acknowledgement.ACKNOWLEDGED_BEFORE
        self.may_hand_out(lease, monotonic_ms)  # never: it is lost, if it was not before
        return Acknowledgement.LOST

    def ended(self, lease: Lease, log_ms: int) -> bool:
        """Its END is in the log; whether it came before the lease's end (R2, R9)."""
        if lease.log_begin_ms < 0 or log_ms < 0:  # not LogAppendTime: nothing is known
            return True
        if log_ms <= lease.log_deadline_ms:
            return True
        lease.state = _LOST
        return False

    def end_failed(self, lease: Lease, monotonic_ms: int) -> bool:
        """An END was not delivered; True: the lease still stands, write it again."""
        self._id_is_spent = True  # or the settled message would be kept alive
        if monotonic_ms < lease.deadline_ms:
            return True
        lease.state = _LOST
        return False

    def check(self) -> None:
        """Assert the invariants."""
        for lease in self._open:
            assert lease.state not in (_ACKNOWLEDGED, _LOST)
            if lease.state is not _STARTING:
                assert 0 <= lease.deadline_ms <= lease.begin_ms + self._max_lease_ms
