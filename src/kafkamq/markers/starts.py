"""From polled messages to held ones: STARTs for a batch, their reports, and who may be handed out.

R5 in the order of the calls: ``plan`` takes messages and encodes their STARTs, a handover
(``handover.py``) brings them and the offsets into Kafka, ``finish`` says what may be handed out.
Whatever fails in between, ``Consumer`` gives the batch up, under a new consumer_id.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from kafkamq.errors import KafkaMQError
from kafkamq.markers.ack_writer import AckWriter
from kafkamq.markers.last_delivery import process_gate
from kafkamq.markers.message import MarkersMessage
from kafkamq.markers.rules.batching import join, oldest_by_reference_ms
from kafkamq.markers.rules.fetch_buffer import FetchBuffer, Run
from kafkamq.markers.rules.handout import has_expired, is_last_delivery
from kafkamq.markers.rules.lease import Lease, LeaseState
from kafkamq.markers.start_reports import RouteStarts
from kafkamq.markers.state import ConsumerState
from kafkamq.markers.wire.markers import (
    MAX_MARKER_BYTES,
    encode_batch_start,
    encode_reference,
    identity_encoder,
)
from kafkamq.queue.wire.keys import join_key
from kafkamq.queue.wire.partitions import CHUNK_OFFSETS, marker_partition
from kafkamq.transport.clock import NS_PER_MS, monotonic_ms
from kafkamq.transport.errors import KafkaError, broker_error
from kafkamq.transport.producer import NEVER_REPORTED
from kafkamq.transport.record import LOG_APPEND_TIME, Record
from kafkamq.types import MessageId

MAX_TRANSACTION_BYTES = 16 * 1024 * 1024  # of payloads in one, as for trackers (R16)
_STARTED, _HELD = LeaseState.STARTED, LeaseState.HELD  # a look-up per message costs 0.4 us
PATIENCE_MS = 1000  # so long everything waits for a marker partition that does not answer
FIRST_COUNT = 100  # messages that are STARTed before the brokers' time is known: one by one (R28)
_END_S = 0.05  # how long one step waits for an END that is under way


Piece: TypeAlias = "tuple[Lease, Sequence[MarkersMessage]]"


def _is_since(record: Record, oldest_ms: int) -> bool:
    kind, time_ms = record.timestamp()
    return kind == LOG_APPEND_TIME and time_ms >= oldest_ms


class Batch:
    """Messages whose STARTs are under way."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []  # in the order of the messages
        self.routes: dict[int, RouteStarts] = {}  # by marker partition
        self.is_plain = True  # each is a first delivery, without a TTL
        self.is_last = False  # a last delivery, alone (R6)
        self.is_late = False  # it was set aside: its partitions are held back
        self.waited_ms = 0  # monotonic; since when its STARTs are waited for
        self.is_started = False  # every START is in the log
        self.is_committed = False  # ... and the offsets behind them are committed

    @property
    def count(self) -> int:
        """Messages."""
        return sum(len(messages) for _, messages in self.pieces)

    def partitions(self) -> set[int]:
        """Of the messages topic."""
        return {lease.partition for lease, _ in self.pieces}

    def leases(self) -> list[Lease]:
        """In the order of their messages."""
        return [lease for lease, _ in self.pieces]

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
        for piece in self.pieces:
            lease = piece[0]
            if lease.marker_partition in late:
                behind.add(lease.partition)
            if lease.partition in behind:
                part.pieces.append(piece)
        part.routes = {number: self.routes[number] for number in late}
        return part

    def keep_but(self, part: Batch) -> None:
        """Go on without that part; in one statement, which an interrupt does or does not see."""
        gone = set(part.leases())
        rest = [piece for piece in self.pieces if piece[0] not in gone]
        routes = {number: of for number, of in self.routes.items() if number not in part.routes}
        self.pieces, self.routes = rest, routes

    def first_offsets(self) -> dict[int, int]:
        """Of its messages in each partition."""
        first: dict[int, int] = {}
        for lease, _ in self.pieces:
            first.setdefault(lease.partition, lease.offsets[0])
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
        self._is_at_most_once = state.queue.is_at_most_once
        self._max_inline_bytes = state.queue.max_inline_payload_bytes
        # More takes longer than a transaction may, and would be begun again forever.
        self._max_bytes = MAX_TRANSACTION_BYTES if state.queue.exactly_once else 0
        self.facts = state.namespace.facts()  # which STARTs name the messages' topic by
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
            alone = batch.pieces[0][0] if is_last and batch.pieces else None
            process_gate.entered(leases, alone)
        return batch

    def _is_last(self, message: MarkersMessage) -> bool:
        count = message._count
        if count == 1 or self._is_at_most_once:  # then no delivery follows any more
            return False
        return is_last_delivery(count, self._max_deliveries)

    def _count(self, wanted: int, is_last: bool) -> int:
        """How many of the next messages make a batch: a last delivery is one by itself (R6)."""
        if is_last:
            return 1
        if self._is_at_most_once:
            return wanted
        if self._state.queue.batch_markers and self._state.broker_ms() is None:
            wanted = min(wanted, FIRST_COUNT)
        if not self._max_bytes and all(run.is_plain for run in self._buffer.upcoming()):
            return wanted
        count = size = 0
        oldest_ms = self._oldest_by_reference_ms()
        for run in self._buffer.upcoming():
            ends = run.messages[0]._record, run.messages[-1]._record
            carries = self._max_bytes and not self._outlives(*ends, oldest_ms)
            for message in run.messages:
                if count == wanted or (message._count > 1 and self._is_last(message)):
                    return count  # when these are settled
                if carries:
                    size += min(len(message._record), self._max_inline_bytes)
                    if size > self._max_bytes and count:
                        return count
                count += 1
        return count

    def _outlives(self, first: Record, last: Record, oldest_ms: int | None) -> bool:
        """Whether STARTs may refer to these messages and those between them (R28)."""
        if oldest_ms is None or not self.facts.message_topic_id:
            return False
        # R13: without topic id and epoch nothing tells a message from another in its place.
        return all(
            record.leader_epoch() is not None and _is_since(record, oldest_ms)
            for record in (first, last)
        )

    def _fill(self, batch: Batch, taken: list[Run[MarkersMessage]], now_ms: int) -> None:
        """Give the messages leases, and the batch their STARTs."""
        oldest_ms = self._oldest_by_reference_ms()
        named: dict[int, list[Lease]] = {}
        for run in taken:
            batch.is_plain = batch.is_plain and run.is_plain
            begin, count = 0, len(run.offsets)
            while begin < count:  # R26: by chunks
                end_offset = (run.offsets[begin] // CHUNK_OFFSETS + 1) * CHUNK_OFFSETS
                end = bisect_left(run.offsets, end_offset, begin)
                part = run if end - begin == count else run.cut(begin, end)
                self._start(batch, part, named, oldest_ms, now_ms)
                begin = end
        for number, leases in named.items():
            route = batch.routes[number]
            for batches, members in join((lease.batch(), lease) for lease in leases):
                route.groups.append(members)
                start = encode_batch_start(self._state.encoder, batches, self._queue_key)
                route.values.append(start)

    def _start(
        self,
        batch: Batch,
        run: Run[MarkersMessage],
        named: dict[int, list[Lease]],
        oldest_ms: int | None,
        now_ms: int,
    ) -> None:
        """Messages of one chunk, ascending; epochs ascend with offsets, as do broker times."""
        facts, leases = self.facts, self._state.leases
        first, last = run.messages[0]._record, run.messages[-1]._record
        epoch = first.leader_epoch()
        if last.leader_epoch() != epoch:
            middle = len(run.offsets) // 2
            for part in (run.cut(0, middle), run.cut(middle, len(run.offsets))):
                self._start(batch, part, named, oldest_ms, now_ms)
            return
        log = facts.message_topic_id, 0 if epoch is None else epoch + 1
        if leases.may_be_lapsed:  # R5: a START is in the log, its lease over: a tracker answers
            run = self._not_lapsed(run, log, now_ms)
            if not run.offsets:
                return
        if self._is_at_most_once:
            _add(batch, Lease.unwatched(run.partition, run.offsets, log, self.now_ms()), run)
            return
        number = marker_partition(run.partition, run.offsets[0], facts.marker_partitions)
        route = batch.routes.setdefault(number, RouteStarts())
        is_last = not run.is_plain and self._is_last(run.messages[0])  # R6
        if self._outlives(first, last, oldest_ms) and not is_last:
            lease = leases.start(run.partition, run.offsets, log, number)
            lease.oldest_ms = min(first.timestamp()[1], last.timestamp()[1])
            _add(batch, lease, run)
            named.setdefault(number, []).append(lease)
            return
        identify = identity_encoder(run.partition, run.offsets[0], *log)
        for message, offset in zip(run.messages, run.offsets, strict=True):
            lease = leases.start(run.partition, [offset], log, number)
            batch.pieces.append((lease, [message]))
            message._lease = lease
            route.groups.append((lease,))
            route.values.append(self._encoded(message, identify(offset)))

    def _not_lapsed(
        self, run: Run[MarkersMessage], log: tuple[bytes, int], now_ms: int
    ) -> Run[MarkersMessage]:
        is_lapsed = self._state.leases.is_lapsed
        rest = [
            at
            for at, offset in enumerate(run.offsets)
            if not is_lapsed(MessageId(run.partition, offset, *log), now_ms)
        ]
        return replace(
            run,
            offsets=[run.offsets[at] for at in rest],
            messages=[run.messages[at] for at in rest],
        )

    def now_ms(self) -> int:
        """The brokers' time, as well as it is known."""
        return self._state.broker_ms() or time.time_ns() // NS_PER_MS

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
        key, value = self._key_of(record), record.value()
        known = message._count, message.raw_headers, message._expiry_ms, message.timestamp_ms
        if value is None or len(value) <= self._max_inline_bytes:
            start = encoder.encode_known(identity, key, value, *known, False)
            if len(start) <= max_bytes:
                return start
        return encode_reference(encoder, identity, key, *known, max_bytes)

    def _key_of(self, record: Record) -> bytes:
        """The message's key as markers have it: the queue's id is in front."""
        key: bytes | None = record.key()
        return join_key(self._queue_key, key) if self._state.queue.topic else key or b""

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

    def is_in_log(self, batch: Batch) -> bool:
        """Whether all its STARTs are known to be in the log by now; waits for nothing."""
        with suppress(KafkaMQError):  # ``wait`` raises it
            self._state.writer.wait_for(lambda: batch.is_reported, 0.0)
        return batch.is_reported and batch.error() is None

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
                for group, log_ms, offset in route.delivered():
                    state.namespace.broker_clock.reported(log_ms, route.written_ms)
                    for lease in group:
                        state.leases.started(lease, route.written_ms, log_ms, offset)
        batch.is_started = True

    def finish(self, batch: Batch) -> list[Piece]:
        """The offsets are committed: what may be handed out, unless its lease has ended (R5)."""
        state = self._state
        with state.lock:
            # The others are so already, or over: this was broken off and is repeated.
            started = [each for each in batch.leases() if each.state is _STARTED]
            state.leases.committed(started, monotonic_ms())
            state.renew_id()
        expired = [
            message
            for lease, messages in (() if batch.is_plain else batch.pieces)
            for message in messages
            if message._expiry_ms and has_expired(message._expiry_ms, lease.log_begin_ms)
        ]
        if expired:
            self._ack_writer.reject_expired(expired)
        return [
            (lease, messages)
            if len(lease.held) == len(messages)
            else (lease, [each for each in messages if each.offset in lease.held])
            for lease, messages in batch.pieces
            if lease.state is _HELD
        ]

    def abandon(self, batch: Batch) -> None:
        """Forget the batch, under a new consumer_id (R5, R7)."""
        leases = self._state.leases
        with self._state.lock:
            self._fail(batch.leases())
            # A START may be in the log although its batch failed; so may one whose report is not
            # there yet: it finds the lease lost.
            for route in batch.routes.values():
                route.give_up(partial(self._started_late, route.written_ms))
                for group, log_ms, offset in route.delivered():
                    for lease in group:
                        leases.started(lease, route.written_ms, log_ms, offset)

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

    def _started_late(self, written_ms: int, lease: Lease, log_ms: int, offset: int) -> None:
        with self._state.lock:
            self._state.leases.started(lease, written_ms, log_ms, offset)

    def drop(self, batch: Batch, partitions: Iterable[int]) -> None:
        """Forget those of the batch whose partitions went to another member."""
        gone = set(partitions)
        lost = [lease for lease in batch.leases() if lease.partition in gone]
        if lost:
            batch.pieces[:] = [each for each in batch.pieces if each[0].partition not in gone]
            with self._state.lock:
                self._fail(lost)

    def _fail(self, leases: list[Lease]) -> None:
        lost = LeaseState.LOST
        self._state.leases.failed(lease for lease in leases if lease.state is not lost)
        self._state.renew_id()

    def undo(self, batch: Batch) -> None:
        """Forget a batch whose transaction did not happen (exactly once)."""
        with self._state.lock:
            self._state.leases.aborted(batch.leases())
            self._state.renew_id()


def _add(batch: Batch, lease: Lease, run: Run[MarkersMessage]) -> None:
    """All messages of a run have this lease."""
    batch.pieces.append((lease, run.messages))
    for message in run.messages:
        message._lease = lease
