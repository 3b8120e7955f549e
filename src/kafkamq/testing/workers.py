"""Simulated workers: R5-R10 on the real cores of a worker, with a simulated world around them.

A worker is a process with the threads of a real one: the owner, who polls, STARTs, commits and
hands out; the heart, who renews; and handlers. What a handler does with a message is written in the
message's payload, so that a message stays what it is through every copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from kafkamq.config import Backoff
from kafkamq.errors import BrokerError, KafkaMQError
from kafkamq.markers.rules.fetch_buffer import Intake, Polled
from kafkamq.markers.rules.handout import (
    expires_at_ms,
    has_expired,
    is_last_delivery,
    nack_delay_ms,
)
from kafkamq.markers.rules.leases import Lease, Leases, LeaseState, Renewal, Settlement
from kafkamq.markers.wire.markers import encode_end, encode_keepalive, encode_start
from kafkamq.queue.wire.headers import read_message_headers
from kafkamq.queue.wire.keys import split_key
from kafkamq.queue.wire.partitions import marker_key, marker_partition
from kafkamq.testing.world import Network, Process, Thread, Ticket, World, wait
from kafkamq.transport.memory import Committed, LogRecord, MemoryKafka
from kafkamq.types import MessageId, Outcome

__all__ = ["Behaviour", "Group", "ToldAck", "Topics", "Worker", "WorkerSettings", "payload_of"]

_SESSION_MS = 10_000
_COMMIT_MS = 10_000  # R5: a bounded wait
_Steps = Generator["int | Ticket[object]", None, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topics:
    """Names of a namespace's topics."""

    messages: str = "sim.messages"
    markers: str = "sim.markers"
    dead_letters: str = "sim.dead-letters"


class Behaviour(Enum):
    """What handling a message is like."""

    QUICK = "quick"
    SLOW = "slow"  # longer than its redelivery timeout
    NACKS = "nacks"  # every time
    REJECTS = "rejects"
    POISON = "poison"  # kills the process that handles it
    HANGS = "hangs"  # the first delivery never ends


def payload_of(behaviour: Behaviour, number: int) -> bytes:
    """The payload of a message that behaves like that."""
    return b"%s %d" % (behaviour.value.encode(), number)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Of one queue's workers."""

    queue_id: str = "queue"
    redelivery_timeout_ms: int = 3000
    max_deliveries: int = 3
    max_lease_ms: int = 60_000
    batch: int = 10
    handlers: int = 4
    max_in_flight: int = 20
    poll_ms: int = 100
    backoff: Backoff = field(default_factory=lambda: Backoff(first=0.5, max=8.0))
    retention_ms: int = 400_000
    max_inline_payload_bytes: int = 1 << 16


class Group:
    """A consumer group of one queue: who reads which partition, and what is committed."""

    def __init__(self, world: World, kafka: MemoryKafka, topic: str, name: str) -> None:
        self.name = name
        self.generation = 0
        self._world = world
        self._kafka = kafka
        self._topic = topic
        self._seen_ms: dict[str, int] = {}
        self._owners: list[str] = []

    def poll(self, member: str) -> tuple[int, frozenset[int]]:
        """A member is alive: the generation, and the partitions that are its own."""
        now_ms = self._world.now_ms
        is_new = member not in self._seen_ms
        self._seen_ms[member] = now_ms
        gone = [name for name, at_ms in self._seen_ms.items() if now_ms - at_ms > _SESSION_MS]
        for name in gone:
            del self._seen_ms[name]
        if is_new or gone:
            self._rebalance()
        mine = frozenset(p for p, owner in enumerate(self._owners) if owner == member)
        return self.generation, mine

    def leave(self, member: str) -> None:
        """A member says goodbye."""
        if self._seen_ms.pop(member, None) is not None:
            self._rebalance()

    def _rebalance(self) -> None:
        self.generation += 1
        members = sorted(self._seen_ms)
        count = self._kafka.partition_count(self._topic)
        shift = self._world.rng.randrange(max(1, len(members)))
        self._owners = [
            members[(number + shift) % len(members)] if members else "" for number in range(count)
        ]

    def position(self, partition: int) -> int:
        """Where reading begins."""
        committed = self._kafka.committed(self.name, self._topic, partition)
        return 0 if committed is None else committed.offset

    def commit(self, generation: int, offsets: Mapping[int, int]) -> None:
        """Commit for a member of that generation.

        Raises:
            BrokerError: The group has moved on.
        """
        if generation != self.generation:
            raise BrokerError(f"{self.name}: not a member any more", code="ILLEGAL_GENERATION")
        self._kafka.commit(
            self.name,
            {(self._topic, number): Committed(offset) for number, offset in offsets.items()},
        )


@dataclass(frozen=True, slots=True)
class ToldAck:
    """An ACK whose delivery report came: what the worker makes of it (R9)."""

    marker_partition: int
    marker_offset: int
    is_in_time: bool


@dataclass(slots=True)
class _Held:
    """A message that this worker holds."""

    record: LogRecord
    lease: Lease
    delivery_count: int
    expiry_ms: int


class Worker:
    """One worker process."""

    def __init__(
        self, network: Network, topics: Topics, group: Group, settings: WorkerSettings, name: str
    ) -> None:
        self.settings = settings
        self.process = Process(network.world, name)
        self.acks: list[ToldAck] = []
        self.is_closing = False
        self.is_closed = False
        self._network = network
        self._kafka = network.kafka
        self._topics = topics
        self._group = group
        self._intake: Intake[Polled[LogRecord]] = Intake()
        self._ids = 0
        self._leases = Leases(
            self._new_id(),
            redelivery_timeout_ms=settings.redelivery_timeout_ms,
            max_lease_ms=settings.max_lease_ms,
        )
        self._generation = -1
        self._mine: frozenset[int] = frozenset()
        self._buffer: deque[_Held] = deque()
        self._handling = 0
        self._alone: Lease | None = None
        self.process.spawn(self._own())
        self.process.spawn(self._beat())
        for _ in range(settings.handlers):
            self.process.spawn(self._handle_all())

    @property
    def _now_ms(self) -> int:
        return self._network.world.now_ms  # monotonic enough

    def _new_id(self) -> str:
        self._ids += 1
        return f"{self.process.name}.{self._ids}"

    def _renew_id(self) -> None:
        if self._leases.id_is_spent:
            self._leases.change_id(self._new_id())

    # ---- the owner: poll, START, commit, hand out (R5)

    def _own(self) -> Thread:
        world = self._network.world
        while not self.is_closing:
            yield world.rng.randint(1, self.settings.poll_ms)
            self._leases.check()
            self._join()
            self._poll()
            batch = self._plan()
            if batch:
                yield from self._start(batch)
            elif self._intake.uncommitted_count > self.settings.batch:
                try:
                    yield from self._commit()
                except KafkaMQError:
                    self._intake.rewind()
        yield from self._drain()

    def _join(self) -> None:
        if not self._network.is_up(None):
            return
        self._generation, mine = self._group.poll(self.process.name)
        if mine == self._mine:
            return
        self._intake.revoked(self._mine - mine)
        for number in mine - self._mine:
            self._intake.placed(number, self._group.position(number))
            self._leases.gained_partition(number, self._now_ms)
        self._mine = mine

    def _poll(self) -> None:
        for number in self._mine:
            place = (self._topics.messages, number)
            if len(self._intake) >= 2 * self.settings.batch or not self._network.is_up(place):
                continue
            position = self._intake.positions().get(number, 0)
            records, after = self._kafka.read(*place, position, self.settings.batch)
            if after == position:
                continue
            own = [
                Polled(record, number, record.offset, self._now_ms)
                for record in records
                if split_key(record.key)[0] == self.settings.queue_id.encode()
            ]
            self._intake.polled(
                own,
                first_offsets={number: position},
                next_offsets={number: after},
                count=len(records),
            )

    def _plan(self) -> list[_Held]:
        """STARTs for what fits; the last allowed delivery alone (R6)."""
        if self._intake.is_stale(self._now_ms):
            self._intake.rewind()
            return []
        batch: list[_Held] = []
        settings, leases = self.settings, self._leases
        if self._alone is not None and not self._alone.is_over(self._now_ms):
            return []
        self._alone = None
        self._renew_id()
        while leases.open_count < settings.max_in_flight and len(batch) < settings.batch:
            head = self._intake.head()
            if head is None:
                break
            headers = read_message_headers(head.record.headers)
            is_last = is_last_delivery(headers.delivery_count, settings.max_deliveries)
            if is_last and (batch or leases.open_count):
                break
            self._intake.take()
            message_id = MessageId(head.partition, head.offset, b"", 1)
            if leases.is_lapsed(message_id, self._now_ms):
                continue
            count = self._kafka.partition_count(self._topics.markers)
            lease = leases.start(message_id, marker_partition(head.partition, head.offset, count))
            origin_ms = head.record.timestamp_ms
            if headers.origin is not None:
                origin_ms = headers.origin.timestamp_ms
            expiry_ms = expires_at_ms(headers.ttl_ms, origin_ms)
            batch.append(_Held(head.record, lease, headers.delivery_count, expiry_ms))
            if is_last:
                self._alone = lease
                break
        return batch

    def _start(self, batch: list[_Held]) -> _Steps:
        try:
            tickets = []
            written_ms = self._now_ms
            for held in batch:
                value = self._start_marker(held)
                tickets.append(self._write(held.lease, value))
                yield 0
            for held, ticket in zip(batch, tickets, strict=True):
                record = yield from wait(ticket)
                self._leases.started(held.lease, written_ms, record.timestamp_ms)
            self._intake.started()
            yield 0
            yield from self._commit()
        except KafkaMQError:
            self._leases.failed(h.lease for h in batch if h.lease.state is not LeaseState.LOST)
            self._intake.rewind()
            self._renew_id()
            return
        yield 0
        self._leases.committed([held.lease for held in batch], self._now_ms)
        self._renew_id()
        for held in batch:
            if held.lease.state is not LeaseState.HELD:
                continue
            if has_expired(held.expiry_ms, held.lease.log_begin_ms):  # R10
                if self._leases.settle(held.lease, self._now_ms) is Settlement.WRITE:
                    yield from self._end(held.lease, Outcome.REJECT, reason="expired")
            else:
                self._buffer.append(held)

    def _start_marker(self, held: _Held) -> bytes:
        record, settings = held.record, self.settings
        by_reference = len(record.value or b"") > settings.max_inline_payload_bytes
        return encode_start(
            held.lease.message_id,
            split_key(record.key)[0] if by_reference else record.key or b"",
            record.value,
            redeliver_after_ms=settings.redelivery_timeout_ms,
            consumer_id=self._leases.consumer_id,
            delivery_count=held.delivery_count,
            headers=() if by_reference else record.headers,  # the smallest form that R11 allows
            expires_at_ms=held.expiry_ms,
            message_timestamp_ms=record.timestamp_ms,
            by_reference=by_reference,
            max_deliveries=settings.max_deliveries,
            max_lease_ms=settings.max_lease_ms,
        )

    def _commit(self) -> _Steps:
        offsets = self._intake.committable()
        if not offsets:
            return
        call = partial(self._group.commit, self._generation, offsets)
        yield from wait(self._network.request(self.process.name, None, call, timeout_ms=_COMMIT_MS))
        self._intake.committed(offsets)

    def _write(self, lease: Lease, value: bytes) -> Ticket[LogRecord]:
        message_id = lease.message_id
        key = marker_key(message_id.partition, message_id.offset)
        place = (self._topics.markers, lease.marker_partition)
        call = partial(self._kafka.append, *place, key, value)
        return self._network.request(self.process.name, place, call)

    # ---- the heart (R7)

    def _beat(self) -> Thread:
        period_ms = max(1, self.settings.redelivery_timeout_ms // 3)
        while not self.is_closed:
            yield period_ms
            self._leases.expire(self._now_ms)
            self._renew_id()
            for renewal in self._leases.plan_renewals(self._now_ms):
                value = encode_keepalive(
                    renewal.message_id,
                    consumer_id=renewal.consumer_id,
                    redeliver_after_ms=renewal.redeliver_after_ms,
                )
                self.process.spawn(self._renewed(renewal, value))

    def _renewed(self, renewal: Renewal, value: bytes) -> Thread:
        try:
            record = yield from wait(self._write(renewal.leases[0], value))
        except KafkaMQError:
            return
        self._leases.renewed(renewal, self._now_ms, record.timestamp_ms)

    # ---- handlers, and verdicts (R8, R9)

    def _handle_all(self) -> Thread:
        while not self.is_closed:
            yield 20
            if not self._buffer or self.is_closing:
                continue
            held = self._buffer.popleft()
            if self._leases.may_hand_out(held.lease, self._now_ms):
                self._handling += 1
                yield from self._handle(held)
                self._handling -= 1

    def _handle(self, held: _Held) -> _Steps:
        rng, timeout_ms = self._network.world.rng, self.settings.redelivery_timeout_ms
        value = held.record.value or b"quick 0"
        behaviour = Behaviour(value.split(b" ")[0].decode())
        if behaviour is Behaviour.HANGS and held.delivery_count == 1:
            while held.lease.state in _OPEN and not self.is_closing:
                yield 1000
            return
        slow = behaviour is Behaviour.SLOW
        yield timeout_ms + rng.randint(1, timeout_ms) if slow else rng.randint(0, timeout_ms // 4)
        if behaviour is Behaviour.POISON:
            self.process.die()
            yield 0
        if self._leases.settle(held.lease, self._now_ms) is not Settlement.WRITE:
            return
        if behaviour is Behaviour.NACKS:
            delay_ms = nack_delay_ms(
                None,
                backoff=self.settings.backoff,
                delivery_count=held.delivery_count,
                retention_ms=self.settings.retention_ms,
                random_unit=rng.random(),
            )
            yield from self._end(held.lease, Outcome.NACK, reason="again", delay_ms=delay_ms)
        elif behaviour is Behaviour.REJECTS:
            yield from self._end(held.lease, Outcome.REJECT, reason="no good")
        else:
            yield from self._end(held.lease, Outcome.ACK)

    def _end(
        self, lease: Lease, outcome: Outcome, *, reason: str = "", delay_ms: int = 0
    ) -> _Steps:
        value = encode_end(
            lease.message_id,
            outcome,
            consumer_id=lease.holder_id,
            redeliver_after_ms=delay_ms,
            reason=reason,
        )
        while True:
            try:
                record = yield from wait(self._write(lease, value))
            except KafkaMQError:
                if not self._leases.end_failed(lease, self._now_ms):
                    return
                self._renew_id()
                continue
            is_in_time = self._leases.ended(lease, record.timestamp_ms)
            lease.is_end_known = True
            if outcome is Outcome.ACK:
                self.acks.append(ToldAck(lease.marker_partition, record.offset, is_in_time))
            return

    # ---- the end

    def _drain(self) -> _Steps:
        """Release what was never handed out (R8), let handlers end, leave."""
        waiting = [held.lease for held in self._buffer]
        self._buffer.clear()
        for lease in waiting:
            if self._leases.settle(lease, self._now_ms) is Settlement.WRITE:
                yield from self._end(lease, Outcome.RELEASE)
        while self._handling:
            yield 100
        self._group.leave(self.process.name)
        self.is_closed = True
        self.process.die()


_OPEN = (LeaseState.STARTING, LeaseState.STARTED, LeaseState.HELD)
