"""From polled messages to held ones: STARTs for a batch, their reports, and who may be handed out.

R5 in the order of the calls: ``plan`` takes messages and encodes their STARTs, a handover
(``handover.py``) brings them and the offsets into Kafka, ``finish`` says what may be handed out.
Whatever fails in between, ``Consumer`` gives the batch up, under a new consumer_id.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from kafkamq.markers.ack_writer import AckWriter
from kafkamq.markers.last_delivery import process_gate
from kafkamq.markers.message import MarkersMessage
from kafkamq.markers.rules.batching import gather, oldest_by_reference_ms
from kafkamq.markers.rules.fetch_buffer import FetchBuffer
from kafkamq.markers.rules.handout import has_expired, is_last_delivery
from kafkamq.markers.rules.leases import Lease, LeaseState
from kafkamq.markers.start_reports import RouteStarts
from kafkamq.markers.state import ConsumerState
from kafkamq.markers.wire.markers import (
    MAX_MARKER_BYTES,
    encode_batch_start,
    encode_reference,
    identity_encoder,
)
from kafkamq.queue.wire.partitions import CHUNK_OFFSETS, marker_key, marker_partition
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.errors import KafkaError, broker_error
from kafkamq.transport.producer import NEVER_REPORTED
from kafkamq.transport.record import LOG_APPEND_TIME
from kafkamq.types import MessageId

MAX_TRANSACTION_BYTES = 16 * 1024 * 1024  # of payloads in one, as for trackers (R16)
_STARTED, _HELD = LeaseState.STARTED, LeaseState.HELD  # a look-up per message costs 0.4 us
PATIENCE_MS = 1000  # so long everything waits for a marker partition that does not answer
_END_S = 0.05  # how long one step waits for an END that is under way


_PARTITION = attrgetter("partition")
_OFFSET = attrgetter("offset")
_ROUTE = attrgetter("_route")


def _is_since(message: MarkersMessage, oldest_ms: int) -> bool:
    kind, time_ms = message._record.timestamp()
    return kind == LOG_APPEND_TIME and time_ms >= oldest_ms


class Batch:
    """Messages whose STARTs are under way."""

    def __init__(self) -> None:
        self.messages: list[MarkersMessage] = []
        self.routes: dict[int, RouteStarts] = {}  # by marker partition
        self.is_last = False  # a last delivery, alone (R6)
        self.is_late = False  # it was set aside: its partitions are held back
        self.waited_ms = 0  # monotonic; since when its STARTs are waited for
        self.is_started = False  # every START is in the log
        self.is_committed = False  # ... and the offsets behind them are committed

    def partitions(self) -> set[int]:
        """Of the messages topic."""
        return {message.partition for message in self.messages}

    def leases(self) -> list[Lease]:
        """One per message."""
        return [message._lease for message in self.messages]

    def starts(self) -> dict[int, list[dict[str, Any]]]:
        """By marker partition, as produce_batch takes them: it knows one partition per call."""
        return {partition: route.starts() for partition, route in self.routes.items()}

    def error(self) -> KafkaError | None:
        """A failed START, if any."""
        for route in self.routes.values():
            if route.error is not None:
                return route.error
        return None

    @property
    def is_reported(self) -> bool:
        """Whether every START is known to be in the log or failed."""
        return all(route.is_reported for route in self.routes.values())

    def late_routes(self) -> set[int]:
        """Marker partitions whose STARTs are not all known to be in the log."""
        return {number for number, route in self.routes.items() if not route.is_reported}

    def is_overdue(self, known: Collection[int]) -> bool:
        """Whether those that are late are not to be waited for; ``known``: are so anyway."""
        if self.is_last or self.is_late:
            return False
        late = self.late_routes()
        has_waited = monotonic_ms() - self.waited_ms >= PATIENCE_MS
        return bool(late) and (has_waited or late.issubset(known))

    def late_part(self) -> Batch:
        """What is not reported, and what is behind such a message in its partition.

        This batch is as it was; ``keep_but`` takes the part out.
        """
        part, behind = Batch(), set()
        part.is_late = True
        late = self.late_routes()
        for message in self.messages:
            if message._lease.marker_partition in late:
                behind.add(message.partition)
            if message.partition in behind:
                part.messages.append(message)
        part.routes = {number: self.routes[number] for number in late}
        return part

    def keep_but(self, part: Batch) -> None:
        """Go on without that part; in one statement, which an interrupt does or does not see."""
        gone = set(map(id, part.messages))
        rest = [message for message in self.messages if id(message) not in gone]
        routes = {number: of for number, of in self.routes.items() if number not in part.routes}
        self.messages, self.routes = rest, routes

    def first_offsets(self) -> dict[int, int]:
        """Of its messages in each partition."""
        first: dict[int, int] = {}
        for message in self.messages:
            first.setdefault(message.partition, message.offset)
        return first


class Starter:
    """Plans the STARTs of one consumer and follows them; its owner thread calls it."""

    def __init__(
        self, state: ConsumerState, buffer: FetchBuffer[MarkersMessage], ack_writer: AckWriter
    ) -> None:
        self._state = state
        self._buffer = buffer
        self._ack_writer = ack_writer
        self._max_deliveries = state.queue.max_deliveries
        self._max_inline_bytes = state.queue.max_inline_payload_bytes
        # More takes longer than a transaction may, and would be begun again forever.
        self._max_bytes = MAX_TRANSACTION_BYTES if state.queue.exactly_once else 0
        self.facts = state.namespace.facts()  # which STARTs name the messages' topic by
        self._basis: tuple[object, ...] = ()  # what STARTs were encoded with
        self._queue_key = state.queue.queue_id.encode()

    def _enter(self, now_ms: int, is_last: bool) -> bool:
        """R6; an END that is under way is waited for, as nothing may start beside it."""
        leases, writer = self._state.leases, self._state.writer
        if process_gate.enter(leases, now_ms, last=is_last):
            return True
        if leases.open_count:
            return False
        self._ack_writer.write_queued()
        return writer.wait_for(
            lambda: process_gate.enter(leases, monotonic_ms(), last=is_last), _END_S
        )

    def plan(self, wanted: int) -> Batch | None:
        """Take up to ``wanted`` messages and encode their STARTs; None: R6 lets none start now."""
        state, buffer = self._state, self._buffer
        leases = state.leases
        now_ms = monotonic_ms()
        head = buffer.head()
        if head is None:
            return None
        is_last = self._is_last(head)
        if not self._enter(now_ms, is_last):
            return None
        batch = Batch()
        batch.is_last = is_last
        try:
            with state.lock:
                state.renew_id()
                self._fill(batch, buffer.take_many(self._count(wanted, is_last)), now_ms)
        except BaseException:
            self.abandon(batch)
            raise
        finally:
            alone = batch.messages[0]._lease if is_last and batch.messages else None
            process_gate.entered(leases, alone)
        return batch

    def _is_last(self, message: MarkersMessage) -> bool:
        count = message._count
        return count > 1 and is_last_delivery(count, self._max_deliveries)

    def _count(self, wanted: int, is_last: bool) -> int:
        """How many of the next messages make a batch: a last delivery is one by itself (R6)."""
        if is_last:
            return 1
        count = size = 0
        for message in self._buffer.upcoming(wanted):
            if message._count > 1 and self._is_last(message):
                break  # when these are settled
            if self._max_bytes:
                size += min(len(message._record), self._max_inline_bytes)
                if size > self._max_bytes and count:
                    break
            count += 1
        return count

    def _fill(self, batch: Batch, taken: list[MarkersMessage], now_ms: int) -> None:
        """Give the messages leases, and the batch their STARTs."""
        leases = self._state.leases
        self._encode(taken)
        if leases.may_be_lapsed:  # R5: a START is in the log, its lease over: a tracker answers
            taken = [
                each
                for each in taken
                if not leases.is_lapsed(MessageId(each.partition, each.offset, *each.log), now_ms)
            ]
        by_reference: dict[int, list[MarkersMessage]] = {}
        for number, group in groupby(taken, _ROUTE):
            run = list(group)
            for message, lease in zip(run, leases.start_all(run, number), strict=True):
                message._lease = lease
            batch.messages += run
            route = batch.routes.setdefault(number, RouteStarts())
            named = by_reference.setdefault(number, [])
            for message in run:
                if not message._start:
                    named.append(message)
                else:
                    route.groups.append((message,))
                    route.values.append(message._start)
        for number, named in by_reference.items():
            route = batch.routes[number]
            for batches, members in gather(named):
                route.groups.append(members)
                start = encode_batch_start(self._state.encoder, batches, self._queue_key)
                route.values.append(start)

    def prepare(self, wanted: int) -> None:
        """Encode what the next batch will need, while there is nothing else to do."""
        self._encode(list(self._buffer.upcoming(wanted)))

    def _encode(self, messages: list[MarkersMessage]) -> None:
        """Encode the STARTs that are not, or not for this consumer_id and these topics."""
        encoder, facts = self._state.encoder, self.facts
        oldest_ms = self._oldest_by_reference_ms()
        if self._basis != (encoder, facts, oldest_ms is None):
            self._basis = (encoder, facts, oldest_ms is None)
        basis = self._basis
        for _, group in groupby(
            [each for each in messages if each._basis is not basis], _PARTITION
        ):
            rest = list(group)
            while rest:
                end = (rest[0].offset // CHUNK_OFFSETS + 1) * CHUNK_OFFSETS
                count = bisect_left(rest, end, key=_OFFSET)
                self._encode_run(rest[:count], oldest_ms)
                rest = rest[count:]

    def _encode_run(self, run: list[MarkersMessage], oldest_ms: int | None) -> None:
        """Messages of one chunk, ascending; epochs ascend with offsets, as do broker times."""
        first, last, facts, basis = run[0], run[-1], self.facts, self._basis
        epoch = first._record.leader_epoch()
        if last._record.leader_epoch() != epoch:
            middle = len(run) // 2
            self._encode_run(run[:middle], oldest_ms)
            self._encode_run(run[middle:], oldest_ms)
            return
        partition, offset = first.partition, first.offset
        log = facts.message_topic_id, 0 if epoch is None else epoch + 1
        identify = identity_encoder(partition, offset, *log)
        number = marker_partition(partition, offset, facts.marker_partitions)
        key = marker_key(partition, offset)
        # R13: without topic id and epoch nothing tells a message from another in its place.
        is_known = oldest_ms is not None and bool(log[0]) and log[1] > 0
        stays = is_known and all(_is_since(each, oldest_ms or 0) for each in (first, last))
        for message in run:
            message.log, message._route, message._marker_key = log, number, key
            if stays and not (message._count > 1 and self._is_last(message)):  # R28, R6
                message._start = b""
            else:
                message._start = self._encoded(message, identify(message.offset))
            message._basis = basis

    def _oldest_by_reference_ms(self) -> int | None:
        """Broker time since which messages may be STARTed by reference (R28); None: none may be."""
        queue = self._state.queue
        now_ms = self._state.broker_ms() if queue.batch_markers else None
        if now_ms is None:
            return None
        return oldest_by_reference_ms(
            now_ms,
            max_lease_ms=queue.max_lease_ms,
            retention_ms=self.facts.message_retention_ms,
        )

    def _encoded(self, message: MarkersMessage, identity: bytes) -> bytes:
        """A START of one message, with its payload unless that is too large (R11)."""
        encoder, record = self._state.encoder, message._record
        max_bytes = min(self.facts.max_marker_bytes, MAX_MARKER_BYTES)
        key, value = record.key() or b"", record.value()
        known = message._count, message._headers, message._expiry_ms, message.timestamp_ms
        if value is None or len(value) <= self._max_inline_bytes:
            start = encoder.encode_known(identity, key, value, *known, False)
            if len(start) <= max_bytes:
                return start
        return encode_reference(encoder, identity, key, *known, max_bytes)

    def write(self, batch: Batch) -> None:
        """Queue the STARTs outside of a transaction.

        Raises:
            BrokerError: They could not be queued; ``abandon`` the batch.
        """
        for partition, starts in batch.starts().items():
            self._state.writer.write_many(partition, starts)

    def is_settled(self, batch: Batch) -> bool:
        """Whether ``wait`` says at once what became of its STARTs."""
        is_known = batch.is_reported or batch.error() is not None
        return is_known or self._state.writer.is_idle

    def wait(self, batch: Batch, timeout_s: float, known: Collection[int] = ()) -> bool:
        """Whether all that was written is in the log, by its own reports; waits for it.

        Not for longer than until it is overdue, where these marker partitions are late anyway.

        Raises:
            BrokerError: One of them failed, or will never be reported; ``abandon`` the batch.
        """
        writer = self._state.writer
        doing = f"writing STARTs to {writer.topic}"
        batch.waited_ms = batch.waited_ms or monotonic_ms()
        writer.wait_for(lambda: batch.is_reported or batch.is_overdue(known), timeout_s)
        is_known, error = batch.is_reported, batch.error()
        if not is_known and error is None:
            writer.watch.check(doing)
            if writer.is_idle and not batch.is_reported:
                error = NEVER_REPORTED
        if error is not None:
            raise broker_error(error, doing)
        if not is_known:
            return False
        self._buffer.started()
        self.started(batch)
        return True

    def started(self, batch: Batch) -> None:
        """All its STARTs are in the log."""
        state = self._state
        with state.lock:
            for route in batch.routes.values():
                for group, log_ms in route.delivered():
                    state.broker_clock.reported(log_ms, route.written_ms)
                    leases = [message._lease for message in group]
                    state.leases.started_all(leases, route.written_ms, log_ms)
        batch.is_started = True

    def finish(self, batch: Batch) -> list[MarkersMessage]:
        """The offsets are committed: what may be handed out, unless its lease has ended (R5)."""
        state = self._state
        with state.lock:
            # The others are so already, or over: this was broken off and is repeated.
            started = [each for each in batch.leases() if each.state is _STARTED]
            state.leases.committed(started, monotonic_ms())
            state.renew_id()
        held = [m for m in batch.messages if m._lease.state is _HELD]
        expired = [
            m for m in held if m._expiry_ms and has_expired(m._expiry_ms, m._lease.log_begin_ms)
        ]
        if not expired:
            return held
        self._ack_writer.reject_expired(expired)
        return [m for m in held if m._lease.state is _HELD]

    def abandon(self, batch: Batch) -> None:
        """Forget the batch, under a new consumer_id (R5, R7)."""
        leases = self._state.leases
        with self._state.lock:
            self._fail(batch.messages)
            # A START may be in the log although its batch failed; so may one whose report is not
            # there yet: it finds the lease lost.
            for route in batch.routes.values():
                route.give_up(partial(self._started_late, route.written_ms))
                for group, log_ms in route.delivered():
                    for message in group:
                        leases.started(message._lease, route.written_ms, log_ms)

    def sweep(self) -> None:
        """Forget what a call that was broken off left, under a new consumer_id; no batch is open.

        A lease that is not held then is nobody's. Nor may anything be renewed for all: a message
        may have been settled whose END was never written.
        """
        leases = self._state.leases
        process_gate.entered(leases)
        with self._state.lock:
            states = (LeaseState.STARTING, LeaseState.STARTED)
            leases.failed([lease for lease in leases.open() if lease.state in states])
            self._state.renew_id()

    def _started_late(self, written_ms: int, message: MarkersMessage, log_ms: int) -> None:
        with self._state.lock:
            self._state.leases.started(message._lease, written_ms, log_ms)

    def drop(self, batch: Batch, partitions: Iterable[int]) -> None:
        """Forget those of the batch whose partitions went to another member."""
        gone = set(partitions)
        lost = [m for m in batch.messages if m.partition in gone]
        if lost:
            batch.messages[:] = [m for m in batch.messages if m.partition not in gone]
            with self._state.lock:
                self._fail(lost)

    def _fail(self, messages: list[MarkersMessage]) -> None:
        leases = self._state.leases
        leases.failed(m._lease for m in messages if m._lease.state is not LeaseState.LOST)
        self._state.renew_id()

    def undo(self, batch: Batch) -> None:
        """Forget a batch whose transaction did not happen (exactly once)."""
        with self._state.lock:
            self._state.leases.aborted(batch.leases())
            self._state.renew_id()
