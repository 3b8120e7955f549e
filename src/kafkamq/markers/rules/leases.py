"""What a worker holds and until when: leases, their renewals and their ends (R5, R7-R10); pure.

Two clocks, never mixed and never compared. Names with ``log`` are broker timestamps and serve R9
alone; all others are a monotonic clock of the process, which goes on while the machine is
suspended, and say what the worker may do. By that clock a lease ends T after its START, or after
the last KEEPALIVE that was delivered, was *written*: the broker appended it later than that, so no
tracker ends the lease before the worker does, however late a delivery report is served. What has
ended once does not come back.

A lease is of what one START named. It is STARTING while that is under way, STARTED until the
offsets are committed, and then HELD until its messages have verdicts, or is LOST. What becomes of
some of its messages alone splits off as a *part* with all of its facts. The caller of ``Leases``
serialises, but for what happens to each message: an ACK takes it out of ``Lease.held``, which is
one step for all threads, and ``collect`` finds out later what is missing there.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kafkamq.markers.rules.batching import MessageSet, batch_of, join
from kafkamq.types import MessageBatch, MessageId, Outcome

NEW_PARTITION_MS = 60_000
"""How long after getting a partition its messages are renewed one by one (R7)."""

_LEASES_PER_MS = 500
"""``expire`` looks through so many per ms at most; through one in about 0.1 us."""

_NEVER_MS = 1 << 62

MAX_REMEMBERED_STARTS = 100_000
"""First STARTs of failed batches, and of former owners; the oldest are dropped."""


class LeaseState(Enum):
    """LOST ones ended by the worker's clock, or were forgotten before they were handed out."""

    STARTING = 0
    STARTED = 1
    HELD = 2
    ACKNOWLEDGED = 3
    LOST = 4


class Sharing(Enum):
    """Whether verdicts on a message may come from elsewhere (R34): its token was asked for, the
    KEEPALIVE of its hold is under way and nothing else may renew it, or it was handed over.
    """

    NONE = 0
    TOKEN = 1
    HOLDING = 2
    HELD = 3


class Refusal(Enum):
    ACKNOWLEDGED_BEFORE = 1
    LOST = 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an END says, of all that share the record (R30); ``delay_ms`` None: the back-off's."""

    outcome: Outcome
    reason: str = ""
    delay_ms: int | None = None
    delivery_count: int = 0


@dataclass(frozen=True, slots=True)
class FirstStart:
    """A START of a batch that failed; a second one goes where this one did, to the same tracker."""

    begin_ms: int
    deadline_ms: int
    log_begin_ms: int
    log_deadline_ms: int
    start_offset: int
    marker_partition: int


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
_ENDLESS_MS = 1 << 53

# Looking a member up in its class takes as long as the rest of a line.
_STARTING, _STARTED, _HELD, _ACKNOWLEDGED, _LOST = LeaseState


@dataclass(slots=True, eq=False)
class Lease:
    """A worker's hold on messages of one chunk; changed by ``Leases``, and ``held`` by ACKs too."""

    partition: int
    # In ascending order, of one chunk of ``log``: topic id and leader epoch.
    offsets: Sequence[int]
    log: tuple[bytes, int]
    marker_partition: int
    # Whom trackers take for its holder (a RELEASE names it, R8), and whom a KEEPALIVE that is not
    # reported makes its holder.
    holder_id: str
    next_holder_id: str = ""
    state: LeaseState = _STARTING
    # When its first START, which was delivered, was written.
    begin_ms: int = -1
    # The ``deadline_ms``, as an ACK compares it with its clock.
    deadline_ns: int = -1
    # Until when ``extend`` asked to hold it, or a tracker may hold it.
    asked_ms: int = -1
    log_begin_ms: int = -1
    log_deadline_ms: int = -1
    # Of its first START in the markers.
    start_offset: int = -1
    # The broker's time of its oldest message, if its START has no payload.
    oldest_ms: int = -1
    # Of a part: it is behind the renewals with smaller numbers.
    number: int = 0
    sharing: Sharing = field(default=Sharing.NONE, init=False)
    # The offsets without a verdict; of ``lost`` ones none comes any more.
    held: set[int] = field(init=False)
    lost: Collection[int] = field(default=(), init=False)
    # Those in ``held``, and those that ``collect`` will find missing there.
    uncollected: set[int] = field(init=False)
    is_noted: bool = field(default=False, init=False)
    # What has split off with a verdict; ``many_parts`` are looked through for known ENDs.
    parts: list[Lease] = field(default_factory=list, init=False)
    many_parts: int = field(default=16, init=False)
    # Of a part with its verdict: the last END of it that was written.
    verdict: Verdict = field(default=ACKED, init=False)
    end: object = field(default=None, init=False)
    # Its END is in the log, or nobody waits for that.
    is_end_known: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.held = set(self.offsets)
        self.uncollected = self.held.copy()

    @classmethod
    def unwatched(
        cls, partition: int, offsets: Sequence[int], log: tuple[bytes, int], log_ms: int
    ) -> Lease:
        """At most once: once they are committed no tracker answers for these messages.

        Nothing ends it, nobody renews it, and what becomes of its messages is told to nobody.
        """
        lease = cls(partition, offsets, log, -1, "")
        lease.state, lease.is_noted = _HELD, True
        lease.begin_ms, lease.deadline_ms, lease.log_begin_ms = 0, _ENDLESS_MS, log_ms
        return lease

    @property
    def deadline_ms(self) -> int:
        """Return when it ends unless it is renewed; monotonic."""
        return self.deadline_ns // _NS_PER_MS

    @deadline_ms.setter
    def deadline_ms(self, value_ms: int) -> None:
        self.deadline_ns = value_ms * _NS_PER_MS

    def message_ids(self) -> list[MessageId]:
        return [MessageId(self.partition, offset, *self.log) for offset in self.offsets]

    def batch(self) -> MessageBatch:
        return batch_of(self.partition, self.log, self.offsets)

    def held_batch(self) -> MessageBatch | None:
        """Return those of its messages that have no verdict; None: there is none any more."""
        # It is read once: an ACK takes messages out of it without a lock.
        held = sorted(self.held)
        return batch_of(self.partition, self.log, held) if held else None

    def take_held(self) -> Collection[int]:
        """Return the messages without a verdict, which get none any more; it may be repeated.

        Each goes here or to an ACK: out of ``uncollected`` first, as what only ``held`` lacks is
        acked. So it is wherever a message leaves both.
        """
        lost = self.lost = set(self.lost)
        for offset in list(self.held):
            lost.add(offset)
            self.uncollected.discard(offset)
            try:
                self.held.remove(offset)
            except KeyError:
                self.uncollected.add(offset)
                lost.discard(offset)
        return lost

    def holds(self, offset: int) -> bool:
        """Return whether this message was handed out, or may be, and has no verdict."""
        return self.state is _HELD and offset in self.held

    def is_over(self, monotonic_ms: int) -> bool:
        """Return whether an end of this process cannot count against the message any more.

        A verdict alone does not do: until its END is in the log it dies with the process.
        """
        if self.state is _LOST:
            return True
        return not self.held and (self.is_end_known or monotonic_ms >= self.deadline_ms)


@dataclass(frozen=True, slots=True)
class Renewal:
    """Ask the shell for one KEEPALIVE; ``Leases.renewed`` takes its delivery report.

    It names ``message_id`` or ``batches`` (R30), or all of the consumer in the marker partition.
    What splits off of its leases after ``written_ms``, when it is planned, has a larger ``number``.
    """

    marker_partition: int
    consumer_id: str
    message_id: MessageId | None
    redeliver_after_ms: int
    leases: tuple[Lease, ...]
    written_ms: int
    number: int
    batches: tuple[MessageBatch, ...] = ()

    @property
    def is_by_id(self) -> bool:
        """Return whether it names messages, so that its writer holds them from then on."""
        return self.message_id is not None or bool(self.batches)

    def names(self, lease: Lease) -> bool:
        """Say whether it renews a part of its leases; one that was acked before is in no batch."""
        if not self.batches:
            return True
        # Bits are compared all at once: a part may have thousands, and the caller holds a lock.
        part = lease.batch()
        log = part.partition, part.topic_id, part.leader_epoch
        return any(
            (each.partition, each.topic_id, each.leader_epoch) == log
            and part.base_offset >= each.base_offset
            and each.bits >> (part.base_offset - each.base_offset) & part.bits == part.bits
            for each in self.batches
        )


class Leases:
    def __init__(
        self,
        consumer_id: str,
        *,
        redelivery_timeout_ms: int,
        max_lease_ms: int,
        batch_markers: bool = False,
    ) -> None:
        self.consumer_id = consumer_id
        # Something that was started under that id must not be renewed: change it (R7).
        self.id_is_spent = False
        self._timeout_ms = redelivery_timeout_ms
        self._max_lease_ms = max_lease_ms
        self._is_batched = batch_markers
        self._open: dict[Lease, None] = {}
        # Leases with messages that were acked since, and parts whose ENDs are to be written.
        self._noted: deque[Lease] = deque()
        self._settled: list[Lease] = []
        self._number = 0
        # A dict finds its oldest entry by walking over all that were dropped before.
        self._first_starts = OrderedDict[MessageId, FirstStart]()
        self._answered = MessageSet()
        # Until when messages of a partition are renewed by id, or its first STARTs remembered.
        self._new_partitions: dict[int, int] = {}
        self._lost_partitions: dict[int, int] = {}
        # What is over and was not told yet; no HELD lease ends before the time.
        self._ended: list[Lease] = []
        self._look_ms = _NEVER_MS

    # Views.

    @property
    def open_count(self) -> int:
        return sum(len(lease.held) for lease in list(self._open))

    @property
    def has_verdicts(self) -> bool:
        """Return whether verdicts may have been given that were not collected."""
        return bool(self._noted or self._settled)

    def open(self) -> tuple[Lease, ...]:
        return tuple(self._open)

    # Facts about the consumer.

    def change_id(self, consumer_id: str) -> None:
        """Go on under a fresh id; what is held is renewed by message_id from here on (R7)."""
        self.consumer_id = consumer_id
        self.id_is_spent = False

    def gained_partition(self, partition: int, monotonic_ms: int) -> None:
        """A partition of the messages topic was assigned (R7's 60 s)."""
        self._new_partitions[partition] = monotonic_ms + NEW_PARTITION_MS
        self._lost_partitions.pop(partition, None)

    def lost_partition(self, partition: int, monotonic_ms: int) -> None:
        """It went, perhaps to come back at once (eager groups); its reports may be late."""
        self._lost_partitions[partition] = monotonic_ms + NEW_PARTITION_MS

    # From START to hand-out (R5).

    @property
    def may_be_lapsed(self) -> bool:
        """Return whether ``is_lapsed`` can be true of any message: seldom."""
        return bool(self._first_starts or self._answered)

    def is_lapsed(self, message_id: MessageId, monotonic_ms: int) -> bool:
        """A message polled again whose first START is in the log and whose lease is over.

        Its START answers for it, so it needs no other one and must not be handed out.
        """
        first = self._first_starts.get(message_id)
        if first is not None and monotonic_ms >= first.deadline_ms:
            # It gets no lease, whose commit would forget it; these go with what lies before one.
            self._answered.add(batch_of(message_id.partition, message_id.log, [message_id.offset]))
            del self._first_starts[message_id]
        return message_id in self._answered

    def first_route(self, message_id: MessageId) -> int | None:
        first = self._first_starts.get(message_id)
        return None if first is None else first.marker_partition

    def answered(self, messages: MessageSet) -> None:
        """Their STARTs are in the log, by any worker; polled again, they are lapsed (R5).

        For a worker that begins at an older position than the last one that was committed. They
        are remembered until what is behind them is committed.
        """
        self._answered.update(messages)

    def overtaken(
        self, starts: Mapping[MessageId, tuple[int, int, int]], monotonic_ms: int, broker_ms: int
    ) -> None:
        """First STARTs by a former owner: broker time, offset, marker partition of each (R5).

        They count as those of our own failed batches, which are known better and stay. Their
        leases end a little earlier here than they do, as the brokers' time is never exact.
        """
        lasts_ms = self._timeout_ms - self._timeout_ms // 16
        for message_id, (log_ms, *place) in starts.items():
            begin_ms = monotonic_ms + log_ms - broker_ms
            first = FirstStart(
                begin_ms, begin_ms + lasts_ms, log_ms, log_ms + self._timeout_ms, *place
            )
            self._first_starts.setdefault(message_id, first)
        self._drop_oldest()

    def start(
        self, partition: int, offsets: Sequence[int], log: tuple[bytes, int], marker_partition: int
    ) -> Lease:
        """A START of messages of one chunk, ascending, is about to be written."""
        lease = Lease(partition, offsets, log, marker_partition, self.consumer_id)
        self._open[lease] = None
        return lease

    def started(self, lease: Lease, written_ms: int, log_ms: int, offset: int = -1) -> None:
        """Its START was delivered. A second START of a message moves nothing but log time.

        Args:
            written_ms: Monotonic, not after the START was written.
            log_ms: Its broker timestamp.
            offset: Its offset.
        """
        lease.start_offset = offset
        is_late = lease.state is _LOST
        first = self._first_of(lease) if self._first_starts and not is_late else None
        if first is None:
            lease.begin_ms = written_ms
            lease.deadline_ms = written_ms + self._timeout_ms
            lease.log_begin_ms = log_ms
            lease.log_deadline_ms = log_ms + self._timeout_ms
            if is_late:
                self._remember(lease, unless_known=True)
            else:
                # This comes last: an interrupt leaves no lease half started.
                lease.state = _STARTED
            return
        lease.begin_ms, lease.deadline_ms = first.begin_ms, first.deadline_ms
        lease.log_begin_ms, lease.log_deadline_ms = first.log_begin_ms, first.log_deadline_ms
        lease.start_offset = first.start_offset
        if log_ms <= lease.log_deadline_ms:
            last_ms = lease.log_begin_ms + self._max_lease_ms
            until_ms = min(log_ms + self._timeout_ms, last_ms)
            lease.log_deadline_ms = max(lease.log_deadline_ms, until_ms)
        lease.state = _STARTED

    def _first_of(self, lease: Lease) -> FirstStart | None:
        """Return what is known of a former START of these; of several the one that ends first."""
        found = map(self._first_starts.get, lease.message_ids())
        known = [first for first in found if first is not None]
        return min(known, key=lambda first: first.deadline_ms) if known else None

    def committed(self, batch: Iterable[Lease], monotonic_ms: int) -> None:
        """The offsets behind these STARTs are committed: they are HELD, or LOST if too late."""
        for lease in batch:
            if self._first_starts:
                for message_id in lease.message_ids():
                    self._first_starts.pop(message_id, None)
            if self._answered:
                self._answered.drop_before(lease.partition, lease.offsets[0])
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
        self.id_is_spent = True

    def aborted(self, batch: Iterable[Lease]) -> None:
        """Their STARTs were in a transaction that did not happen, or nobody knows (exactly once).

        Nothing of them is remembered: what is polled again has no START, and what was committed
        after all is not polled again.
        """
        for lease in batch:
            self._lose(lease)
        self.id_is_spent = True

    def may_hand_out(self, lease: Lease, monotonic_ms: int) -> bool:
        """Return whether it stands; else it is LOST, and a tracker redelivers its messages (R5)."""
        if lease.state is _HELD and monotonic_ms < lease.deadline_ms:
            return True
        if lease.state is _HELD:
            self._end(lease)
        return False

    def _end(self, lease: Lease) -> None:
        """Its time is over; the next ``expire`` tells of it. What is broken off is repeated."""
        is_lost = bool(lease.take_held())
        self._collect(lease)
        if is_lost:
            self._ended.append(lease)
            self._lose(lease)

    def _remember(self, lease: Lease, *, unless_known: bool = False) -> None:
        times = lease.begin_ms, lease.deadline_ms, lease.log_begin_ms, lease.log_deadline_ms
        first = FirstStart(*times, lease.start_offset, lease.marker_partition)
        for message_id in lease.message_ids():
            if not (unless_known and message_id in self._first_starts):
                self._first_starts[message_id] = first
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        while len(self._first_starts) > MAX_REMEMBERED_STARTS:
            self._first_starts.popitem(last=False)

    def _lose(self, lease: Lease) -> None:
        # A KEEPALIVE of the consumer would keep it alive.
        self.id_is_spent = True
        self._open.pop(lease, None)
        lease.held.clear()
        # This comes last: a call that is broken off before is repeated.
        lease.state = _LOST

    # Renewal (R7).

    def plan_renewals(self, monotonic_ms: int) -> list[Renewal]:
        """Return the KEEPALIVEs to write now; the shell asks every T/3."""
        self._drop_old_partitions(monotonic_ms)
        self._number += 1
        self.look_again()
        held = [each for each in self._open if each.state is not _STARTING and each.held]
        return self._written(self.renewals_of(held, monotonic_ms))

    def renewals_of(self, held: Iterable[Lease], now_ms: int) -> list[Renewal]:
        """Get the fewest KEEPALIVEs that renew these, each of which had messages a moment ago."""
        together, named = defaultdict[int, list[Lease]](list), defaultdict[int, list[Lease]](list)
        single: list[Renewal] = []
        for lease in held:
            # It would cut what was asked for (R34).
            if lease.sharing is Sharing.HOLDING:
                continue
            # R7: an older owner's START may come late, a commit take longer than a lease lasts.
            # R34: who extended it by its token may hold it.
            is_ours = lease.holder_id == self.consumer_id and lease.sharing is Sharing.NONE
            if is_ours and lease.partition not in self._new_partitions:
                together[lease.marker_partition].append(lease)
            # R30: one time for all of a record would cut what was extended.
            elif self._is_batched and lease.asked_ms <= now_ms + self._timeout_ms:
                named[lease.marker_partition].append(lease)
            else:
                single.append(self._renewal(lease, now_ms))
        known = self.consumer_id, None, self._timeout_ms
        shared = [
            Renewal(partition, *known, tuple(leases), now_ms, self._number)
            for partition, leases in together.items()
        ]
        for partition, leases in named.items():
            still = ((lease.held_batch(), lease) for lease in leases)
            for batches, of in join((batch, lease) for batch, lease in still if batch is not None):
                if len(of) == 1 and len(of[0].offsets) == 1:
                    single.append(self._renewal(of[0], now_ms))
                    continue
                single.append(Renewal(partition, *known, tuple(of), now_ms, self._number, batches))
        return shared + single

    def _written(self, renewals: list[Renewal]) -> list[Renewal]:
        """What is written behind those by id is told to their new holder (R8)."""
        for renewal in renewals:
            if renewal.is_by_id:
                for lease in renewal.leases:
                    lease.next_holder_id = renewal.consumer_id
        return renewals

    def keep(self, lease: Lease) -> None:
        """What ``apart`` gave is in use; or it ends earlier than it was to."""
        self._open[lease] = None
        self._look_ms = min(self._look_ms, lease.deadline_ms)

    def extend(self, lease: Lease, extension_ms: int, monotonic_ms: int) -> Renewal | None:
        """Return a KEEPALIVE of one message for at least ``extension_ms``, up to its max_lease.

        None when the lease, which is of this message alone, is not held any more.
        """
        if not self.may_hand_out(lease, monotonic_ms):
            return None
        until_ms = min(monotonic_ms + extension_ms, lease.begin_ms + self._max_lease_ms)
        lease.asked_ms = max(lease.asked_ms, until_ms)
        return self._written([self._renewal(lease, monotonic_ms)])[0]

    def renewed(self, renewal: Renewal, monotonic_ms: int, log_ms: int) -> None:
        """A KEEPALIVE was delivered; it does not revive what has ended."""
        for lease in renewal.leases:
            for part in lease.parts:
                # A verdict that came since; an ACK may have come before its KEEPALIVE was made.
                if part.number >= renewal.number and renewal.names(part):
                    self._renew(part, renewal, monotonic_ms, log_ms)
            self._renew(lease, renewal, monotonic_ms, log_ms)

    def renewal_failed(self, renewal: Renewal) -> None:
        """A KEEPALIVE was not delivered: nobody has become a holder by it."""
        for lease in renewal.leases:
            if lease.next_holder_id == renewal.consumer_id:
                lease.next_holder_id = ""

    def _renew(self, lease: Lease, renewal: Renewal, monotonic_ms: int, log_ms: int) -> None:
        after_ms = renewal.redeliver_after_ms
        if lease.state is _LOST:
            return
        if lease.log_deadline_ms >= log_ms:  # R9
            until_ms = min(log_ms + after_ms, lease.log_begin_ms + self._max_lease_ms)
            # One by id sets the deadline, as trackers fold it. An outage writes several at one log
            # time, of which each asks for less than the one before.
            if renewal.is_by_id or until_ms > lease.log_deadline_ms:
                lease.log_deadline_ms = until_ms
        if lease.state is _ACKNOWLEDGED or monotonic_ms >= lease.deadline_ms:
            return
        until_ms = min(renewal.written_ms + after_ms, lease.begin_ms + self._max_lease_ms)
        lease.deadline_ms = max(lease.deadline_ms, until_ms)
        if renewal.is_by_id:
            lease.holder_id = renewal.consumer_id
            # What a tracker holds it for, at most: the next one must not cut that (R9).
            lease.asked_ms = max(lease.asked_ms, monotonic_ms + after_ms)

    def hand_over(self, lease: Lease, offset: int) -> bool:
        """A message of a lease of its own gets its verdict elsewhere (R34); False: it has one."""
        if offset not in lease.held:
            return False
        lease.uncollected.discard(offset)
        lease.held.discard(offset)
        lease.is_end_known = True
        self._close(lease)
        return True

    def expire(self, monotonic_ms: int) -> list[Lease]:
        """Return held leases that have ended by now and were not told of yet; each is told once.

        Costs nothing while none can have ended. Where very many are held, one that ended behind
        another one is told a moment later; it is not handed out and takes no verdict all the same.
        """
        if monotonic_ms >= self._look_ms:
            self._look(monotonic_ms)
        ended, self._ended = self._ended, []
        return list(dict.fromkeys(ended))

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
        for partition in [p for p, end in self._lost_partitions.items() if monotonic_ms >= end]:
            del self._lost_partitions[partition]
            self._answered.drop_before(partition, _NEVER_MS)
            for each in [each for each in self._first_starts if each.partition == partition]:
                del self._first_starts[each]

    def _renewal(self, lease: Lease, monotonic_ms: int) -> Renewal:
        # The tracker sets clock + this, so no renewal may cut what was asked for before it.
        after_ms = max(self._timeout_ms, lease.asked_ms - monotonic_ms)
        (message_id,) = lease.message_ids()
        to, by = lease.marker_partition, self.consumer_id
        return Renewal(to, by, message_id, after_ms, (lease,), monotonic_ms, self._number)

    # Verdicts (R8, R9).

    def note(self, lease: Lease) -> None:
        """A message was acked: it was taken out of ``held``. From any thread, without a lock."""
        lease.is_noted = True
        self._noted.append(lease)

    def acknowledge(
        self, lease: Lease, offset: int, monotonic_ms: int, verdict: Verdict = ACKED
    ) -> Lease | Refusal:
        """A verdict on a message that was handed out; the part that ``collect`` gives, or why not.

        An interrupt leaves it given, or not given.
        """
        if not self.may_hand_out(lease, monotonic_ms) or offset not in lease.held:
            is_lost = offset in lease.lost or lease.state is _LOST
            return Refusal.LOST if is_lost else Refusal.ACKNOWLEDGED_BEFORE
        part = self._part(lease, [offset], verdict)
        try:
            self._settled.append(part)
            lease.uncollected.discard(offset)
            # This comes last: what is broken off before can be settled again.
            lease.held.remove(offset)
        except BaseException as error:
            if isinstance(error, KeyError) or offset in lease.held:
                self._settled = [each for each in self._settled if each is not part]
                lease.uncollected.add(offset)
            if not isinstance(error, KeyError):
                raise
            return Refusal.ACKNOWLEDGED_BEFORE
        self._close(lease)
        return part

    def take_back(
        self, lease: Lease, offsets: Collection[int], monotonic_ms: int, verdict: Verdict
    ) -> Lease | None:
        """A verdict on what nobody has seen; the part, which ``collect`` does not give."""
        if not self.may_hand_out(lease, monotonic_ms):
            return None
        taken = sorted(lease.held.intersection(offsets))
        if not taken:
            return None
        part = self._part(lease, taken, verdict)
        # It is written behind a KEEPALIVE that is under way, and that one's writer holds it then.
        part.holder_id = lease.next_holder_id or lease.holder_id
        lease.uncollected.difference_update(taken)
        lease.held.difference_update(taken)
        self._close(lease)
        return part

    def collect(self) -> list[Lease]:
        """Parts with verdicts whose ENDs are to be written: call ``collected`` when they are taken.

        Until then it gives them again.
        """
        while self._noted:
            lease = self._noted[0]
            # This comes first: an ACK from here on notes it again.
            lease.is_noted = False
            self._collect(lease)
            self._noted.popleft()
        return list(self._settled)

    def look_again(self) -> None:
        """Collect also what an interrupt kept from being noted."""
        for lease in list(self._open):
            lease.is_noted = False
            self._collect(lease)

    def collected(self) -> None:
        """What ``collect`` gave is in the caller's hands."""
        self._settled.clear()

    def _collect(self, lease: Lease) -> None:
        if lease.state is not _HELD:
            return
        acked = lease.uncollected - lease.held if lease.held else lease.uncollected
        if acked:
            are_all = len(acked) == len(lease.offsets)
            offsets = lease.offsets if are_all else sorted(acked)
            self._settled.append(self._part(lease, offsets, ACKED))
            # This comes last: an interrupt lets it be written twice, not never.
            lease.uncollected -= acked
        self._close(lease)

    def _close(self, lease: Lease) -> None:
        if not lease.held and not lease.uncollected and not lease.lost:
            self._open.pop(lease, None)
            lease.state = _ACKNOWLEDGED

    def _part(self, lease: Lease, offsets: Sequence[int], verdict: Verdict) -> Lease:
        """Return what has this verdict; of all messages it is the lease itself."""
        if len(offsets) == len(lease.offsets):
            lease.verdict = verdict
            return lease
        part = self.apart(lease, offsets)
        part.held.clear()
        part.uncollected.clear()
        part.state, part.verdict = _ACKNOWLEDGED, verdict
        lease.parts.append(part)
        if len(lease.parts) > lease.many_parts:
            lease.parts = [each for each in lease.parts if not each.is_end_known]
            lease.many_parts = max(16, 2 * len(lease.parts))
        return part

    def apart(self, lease: Lease, offsets: Sequence[int]) -> Lease:
        """Return a lease of these messages of ``lease`` alone, which still has them, too.

        The caller takes them out there, uses this one, and then ``keep``s it.
        """
        of = lease.partition, offsets, lease.log, lease.marker_partition, lease.holder_id
        now = lease.next_holder_id, lease.state, lease.begin_ms, lease.deadline_ns, lease.asked_ms
        log = lease.log_begin_ms, lease.log_deadline_ms, lease.start_offset, lease.oldest_ms
        # ``replace`` takes longer than all the rest.
        return Lease(*of, *now, *log, self._number)

    def ended(self, lease: Lease, log_ms: int) -> bool:
        """Note that its END is in the log; False: it came behind the lease's end (R2, R9)."""
        # Without LogAppendTime nothing is known.
        if lease.log_begin_ms < 0 or log_ms < 0 or log_ms <= lease.log_deadline_ms:
            return True
        lease.state = _LOST
        return False

    def end_failed(self, lease: Lease, monotonic_ms: int) -> bool:
        """An END was not delivered; True: the lease still stands, write it again."""
        # A KEEPALIVE of the consumer would keep the settled message alive.
        self.id_is_spent = True
        if monotonic_ms < lease.deadline_ms:
            return True
        lease.state = _LOST
        return False

    def check(self) -> None:
        for lease in self._open:
            assert lease.state not in (_ACKNOWLEDGED, _LOST)
            assert lease.held <= lease.uncollected
            if lease.state is not _STARTING:
                assert 0 <= lease.deadline_ms <= lease.begin_ms + self._max_lease_ms
