"""From polled messages to held ones: their STARTs, the reports of these, and what is handed out.

R5 in the order of the calls: ``plan`` takes runs and encodes their STARTs, ``write`` sends them (or
``Transactor`` does, exactly once), ``see_reports`` finds what is in the log, ``finish`` says what
may be handed out once the offsets are committed. Runs that something fails of are given up, under a
new consumer_id, and polled again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any, TypeAlias

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DeadlineExceededError, KafkaMQError
from kafkamq.markers.ack_writer import AckWriter
from kafkamq.markers.message import MarkersMessage
from kafkamq.markers.rules.batching import join, oldest_by_reference_ms
from kafkamq.markers.rules.handout import LastDeliveries, has_expired, is_last_delivery
from kafkamq.markers.rules.leases import Lease, LeaseState
from kafkamq.markers.rules.pipeline import Pipeline, Run, RunState
from kafkamq.markers.state import ConsumerState
from kafkamq.markers.wire.marker_writer import (
    MAX_MARKER_BYTES,
    encode_batch_start,
    encode_reference,
    identity_encoder,
)
from kafkamq.queue.wire.keys import join_key, marker_key, marker_partition
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.errors import KafkaError, Meaning, meaning
from kafkamq.transport.job_thread import JobThread
from kafkamq.transport.producer import NEVER_REPORTED
from kafkamq.transport.record import LOG_APPEND_TIME, Record, TopicPartition
from kafkamq.transport.transactions import TransactionalProducer
from kafkamq.types import MessageId

# Of payloads in one transaction, as for trackers (R16).
MAX_TRANSACTION_BYTES = 16 * 1024 * 1024
# A look-up per message costs 0.4 us.
_STARTED, _HELD = LeaseState.STARTED, LeaseState.HELD
# Messages that are STARTed one by one before the brokers' time is known (R28).
FIRST_COUNT = 100
_MISSING = object()
_log = logging.getLogger(__name__)
# The broker aborts a transaction whose step takes longer.
_STEP_TIMEOUT_S = 10.0


def _is_since(record: Record, oldest_ms: int) -> bool:
    kind, time_ms = record.timestamp()
    return kind == LOG_APPEND_TIME and time_ms >= oldest_ms


Piece: TypeAlias = "tuple[Lease, Sequence[MarkersMessage]]"
MessageRun: TypeAlias = "Run[MarkersMessage]"


@dataclass(slots=True, eq=False)
class Start:
    """A START on its way into the log: what its delivery report finds, however late it comes.

    It must not lead back to its step: the messages of both would wait for the garbage collector.
    """

    reports: deque[Start]
    number: int
    value: bytes
    leases: Sequence[Lease]
    runs: Collection[MessageRun]
    written_ms: int = 0
    record: Record | None = None
    error: KafkaError | None = None

    def reported(self, error: KafkaError | None, record: Record | None) -> None:
        """Kafka's delivery report; what it says is read by the intake, not in the call-back."""
        self.error, self.record = error, record
        self.reports.append(self)


@dataclass(eq=False)
class Step:
    """What is STARTed at once: some runs, in few records of each marker partition."""

    runs: Sequence[MessageRun]
    reports: deque[Start]
    starts: dict[int, list[Start]] = field(default_factory=dict)

    def add(
        self, number: int, value: bytes, leases: Sequence[Lease], runs: Collection[MessageRun]
    ) -> None:
        self.starts.setdefault(number, []).append(Start(self.reports, number, value, leases, runs))
        for run in runs:
            run.unreported += 1

    def records(self) -> dict[int, list[dict[str, Any]]]:
        """Return them by marker partition, for produce_batch at once: leases begin now."""
        now_ms = monotonic_ms()
        for run in self.runs:
            run.sent_ms = now_ms
        for start in chain.from_iterable(self.starts.values()):
            start.written_ms = now_ms
        return {
            number: [
                {
                    "value": start.value,
                    "key": marker_key(start.leases[0].partition, start.leases[0].offsets[0]),
                    "callback": start.reported,
                }
                for start in starts
            ]
            for number, starts in self.starts.items()
        }


class Starter:
    """Plans the STARTs of one consumer and follows them; the intake's thread calls it."""

    def __init__(
        self, state: ConsumerState, pipeline: Pipeline[MarkersMessage], ack_writer: AckWriter
    ) -> None:
        self._state = state
        self._pipeline = pipeline
        self._ack_writer = ack_writer
        self._max_deliveries = state.queue.max_deliveries
        self._is_at_most_once = state.queue.is_at_most_once
        self._max_inline_bytes = state.queue.max_inline_payload_bytes
        # More takes longer than a transaction may, and would be begun again forever.
        self._max_bytes = MAX_TRANSACTION_BYTES if state.queue.exactly_once else 0
        self._queue_key = state.queue.queue_id.encode()
        self._reports: deque[Start] = deque()
        self._unreported: dict[Start, None] = {}
        self._late_count = 0

    def plan(self, wanted: int) -> Step | None:
        """Take up to ``wanted`` messages and encode their STARTs; None: R6 lets none start now."""
        state, leases = self._state, self._state.leases
        head = next(iter(self._pipeline.upcoming()), None)
        if head is None:
            return None
        is_last = self._is_last(head.messages[0])
        now_ms = monotonic_ms()
        with process_gate.rule() as rule:
            enter = rule.enter_last if is_last else rule.enter
            if not enter(leases, now_ms):
                return None
        # A transaction's reports count when it is committed, or not at all.
        reports = deque[Start]() if state.queue.exactly_once else self._reports
        step = Step((), reports)
        try:
            with state.lock:
                state.renew_id()
                step.runs = self._pipeline.take_many(self._count(wanted, is_last))
                self._fill(step, now_ms)
        finally:
            pieces = step.runs[0].pieces if is_last and step.runs else ()
            with process_gate.rule() as rule:
                rule.entered(leases, pieces[0][0] if pieces else None)
        return step

    def _is_last(self, message: MarkersMessage) -> bool:
        count = message._count
        if count == 1 or self._is_at_most_once:
            # No delivery follows any more.
            return False
        return is_last_delivery(count, self._max_deliveries)

    def _count(self, wanted: int, is_last: bool) -> int:
        """Say how many of the next messages make a batch: a last delivery is one by itself (R6)."""
        if is_last:
            return 1
        if self._is_at_most_once:
            return wanted
        if self._state.queue.batch_markers and self._state.broker_ms() is None:
            wanted = min(wanted, FIRST_COUNT)
        if not self._max_bytes and all(run.is_plain for run in self._pipeline.upcoming()):
            return wanted
        count = size = 0
        oldest_ms = self._oldest_by_reference_ms()
        for run in self._pipeline.upcoming():
            ends = run.messages[0]._record, run.messages[-1]._record
            carries = self._max_bytes and not self._outlives(*ends, oldest_ms)
            for message in run.messages:
                if count == wanted or (message._count > 1 and self._is_last(message)):
                    return count
                # The rest waits until these are settled.
                if carries:
                    size += min(len(message._record), self._max_inline_bytes)
                    if size > self._max_bytes and count:
                        return count
                count += 1
        return count

    def _outlives(self, first: Record, last: Record, oldest_ms: int | None) -> bool:
        """Return whether STARTs may refer to these messages and those between them (R28)."""
        if oldest_ms is None or not self._state.facts.message_topic_id:
            return False
        # R13: without topic id and epoch nothing tells a message from another in its place.
        return all(
            record.leader_epoch() is not None and _is_since(record, oldest_ms)
            for record in (first, last)
        )

    def _fill(self, step: Step, now_ms: int) -> None:
        """Give the messages leases, and the step its STARTs."""
        oldest_ms = self._oldest_by_reference_ms()
        named: dict[int, list[tuple[Lease, MessageRun]]] = {}
        for run in step.runs:
            self._start(step, run, run, named, oldest_ms, now_ms)
        for number, leases in named.items():
            for batches, members in join((each[0].batch(), each) for each in leases):
                value = encode_batch_start(self._state.encoder, batches, self._queue_key)
                runs = dict.fromkeys(run for _, run in members)
                step.add(number, value, [lease for lease, _ in members], runs)

    def _start(
        self,
        step: Step,
        of: MessageRun,
        run: MessageRun,
        named: dict[int, list[tuple[Lease, MessageRun]]],
        oldest_ms: int | None,
        now_ms: int,
    ) -> None:
        """START messages of ``of``, or a part of them; epochs ascend with offsets, as do times."""
        facts, leases = self._state.facts, self._state.leases
        first, last = run.messages[0]._record, run.messages[-1]._record
        epoch = first.leader_epoch()
        if last.leader_epoch() != epoch:
            middle = len(run.offsets) // 2
            for part in (run.cut(0, middle), run.cut(middle, len(run.offsets))):
                self._start(step, of, part, named, oldest_ms, now_ms)
            return
        log = facts.message_topic_id, 0 if epoch is None else epoch + 1
        number = marker_partition(run.partition, run.offsets[0], facts.marker_partitions)
        if leases.may_be_lapsed:
            ids = [MessageId(run.partition, offset, *log) for offset in run.offsets]
            # Marker partitions may have been added since (R26): a second START and the END go where
            # the first START is, or nobody would end that one.
            routes = list(map(leases.first_route, ids))
            if len(set(routes)) > 1:
                begin = 0
                for _, group in groupby(routes):
                    end = begin + len(list(group))
                    self._start(step, of, run.cut(begin, end), named, oldest_ms, now_ms)
                    begin = end
                return
            # R5: a START is in the log, its lease over: a tracker answers.
            rest = [at for at, one in enumerate(ids) if not leases.is_lapsed(one, now_ms)]
            if not rest:
                return
            offsets = [run.offsets[at] for at in rest]
            run = replace(run, offsets=offsets, messages=[run.messages[at] for at in rest])
            first_route = leases.first_route(ids[rest[0]])
            number = number if first_route is None else first_route
        if self._is_at_most_once:
            lease = Lease.unwatched(run.partition, run.offsets, log, self._state.now_ms())
            _give(of, lease, run.messages)
            return
        is_last = not run.is_plain and self._is_last(run.messages[0])  # R6
        if self._outlives(first, last, oldest_ms) and not is_last:
            lease = leases.start(run.partition, run.offsets, log, number)
            lease.oldest_ms = min(first.timestamp()[1], last.timestamp()[1])
            _give(of, lease, run.messages)
            named.setdefault(number, []).append((lease, of))
            return
        identify = identity_encoder(run.partition, *log)
        for message, offset in zip(run.messages, run.offsets, strict=True):
            lease = leases.start(run.partition, [offset], log, number)
            _give(of, lease, [message])
            value = self._encoded(message, identify(offset))
            step.add(number, value, (lease,), (of,))

    def _oldest_by_reference_ms(self) -> int | None:
        """Broker time since which messages may be STARTed by reference (R28); None: none may be."""
        queue = self._state.queue
        now_ms = self._state.broker_ms() if queue.batch_markers else None
        if now_ms is None:
            return None
        return oldest_by_reference_ms(
            now_ms,
            max_lease_ms=queue.max_lease_ms,
            retention_ms=self._state.facts.message_retention_ms,
        )

    def _encoded(self, message: MarkersMessage, identity: bytes) -> bytes:
        """Return a START of one message, with its payload unless that is too large (R11)."""
        encoder, record = self._state.encoder, message._record
        max_bytes = min(self._state.facts.max_marker_bytes, MAX_MARKER_BYTES)
        key, value = record.key(), record.value()
        # As markers have it: the queue's id is in front.
        key = join_key(self._queue_key, key) if self._state.queue.topic else key or b""
        known = message._count, message.raw_headers, message._expiry_ms, message.timestamp_ms
        if value is None or len(value) <= self._max_inline_bytes:
            start = encoder.encode_known(identity, key, value, *known, False)
            if len(start) <= max_bytes:
                return start
        return encode_reference(encoder, identity, key, *known, max_bytes)

    def write(self, step: Step) -> None:
        """Queue the STARTs outside of a transaction; what is refused is reported as failed."""
        all_records = step.records()
        self.sent(step)
        for number, records in all_records.items():
            starts = step.starts[number]
            try:
                self._state.writer.write_many(number, records)
            except BrokerError as error:
                _log.info("STARTs were not queued", extra={"error": str(error)})
                for start, record in zip(starts, records, strict=True):
                    if "_error" in record:
                        start.reported(NEVER_REPORTED, None)

    def sent(self, step: Step) -> None:
        """Its STARTs are on their way: each is reported some time."""
        for starts in step.starts.values():
            self._unreported.update(dict.fromkeys(starts))

    @property
    def is_waiting(self) -> bool:
        return len(self._unreported) > self._late_count

    @property
    def oldest_ms(self) -> int:
        return next(iter(self._unreported)).written_ms

    def late_partitions(self, patience_ms: int) -> set[int]:
        """Return partitions of the messages with STARTs to marker partitions that do not answer."""
        until_ms = monotonic_ms() - patience_ms
        self._late_count = 0
        if not self._unreported or next(iter(self._unreported)).written_ms > until_ms:
            return set()
        numbers = {each.number for each in self._unreported if each.written_ms <= until_ms}
        late = [each for each in self._unreported if each.number in numbers]
        self._late_count = len(late)
        runs = (run for start in late for run in start.runs)
        return {run.partition for run in runs if run.state is RunState.SENT}

    def wait(self, timeout_s: float) -> None:
        """Serve reports until all STARTs but the late ones are reported, or the time is over."""
        writer, reports = self._state.writer, self._reports
        count = len(self._unreported) - self._late_count
        writer.wait_for(lambda: len(reports) >= count, timeout_s)
        if len(reports) < len(self._unreported) and writer.is_idle:
            for start in self._unreported.keys() - set(reports):
                start.reported(NEVER_REPORTED, None)

    def see_reports(self) -> list[Start]:
        """Note which STARTs are in the log; returns those that failed."""
        failed: list[Start] = []
        reports = self._reports
        with self._state.lock:
            while reports:
                start = reports.popleft()
                if self._unreported.pop(start, _MISSING) is _MISSING:
                    continue
                if start.error is not None:
                    failed.append(start)
                else:
                    self._delivered(start)
        return failed

    def transacted(self, step: Step) -> None:
        """Its transaction is committed: all its STARTs are in the log."""
        with self._state.lock:
            while step.reports:
                start = step.reports.popleft()
                if start.error is None:
                    self._delivered(start)

    def _delivered(self, start: Start) -> None:
        """Whatever became of its runs meanwhile; with the lock held."""
        state, record, written_ms = self._state, start.record, start.written_ms
        assert record is not None, "it is reported"
        log_ms, offset = record.timestamp()[1], record.offset()
        state.namespace.broker_clock.reported(log_ms, written_ms)
        for lease in start.leases:
            state.leases.started(lease, written_ms, log_ms, -1 if offset is None else offset)
        for run in start.runs:
            run.unreported -= 1

    def finish(self, runs: Sequence[MessageRun]) -> list[Piece]:
        """The offsets are committed: what may be handed out, unless its lease has ended (R5)."""
        state = self._state
        with state.lock:
            leases = [lease for run in runs for lease, _ in run.pieces]
            started = [each for each in leases if each.state is _STARTED]
            state.leases.committed(started, monotonic_ms())
            state.renew_id()
        expired = [
            message
            for run in runs
            if not run.is_plain
            for lease, messages in run.pieces
            for message in messages
            if message._expiry_ms and has_expired(message._expiry_ms, lease.log_begin_ms)
        ]
        if expired:
            self._ack_writer.reject_expired(expired)
        return [
            (lease, messages)
            if len(lease.held) == len(messages)
            else (lease, [each for each in messages if each.offset in lease.held])
            for run in runs
            for lease, messages in run.pieces
            if lease.state is _HELD
        ]

    def give_up(self, runs: Iterable[MessageRun], *, is_undone: bool = False) -> None:
        """Forget these runs, under a new consumer_id (R5, R7).

        ``is_undone``: nothing of them is in the log, as their transaction did not happen.
        """
        lost, leases = LeaseState.LOST, self._state.leases
        gone = [lease for run in runs for lease in run.leases() if lease.state is not lost]
        with self._state.lock:
            if is_undone:
                leases.aborted(gone)
            else:
                leases.failed(gone)
            self._state.renew_id()


def _give(run: MessageRun, lease: Lease, messages: Sequence[MarkersMessage]) -> None:
    """These messages of the run have this lease."""
    run.pieces.append((lease, messages))
    for message in messages:
        message._lease = lease


class ProcessGate:
    """It keeps R6 across all consumers of this process; a fork gets a new one."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._rule = LastDeliveries()

    @contextmanager
    def rule(self) -> Iterator[LastDeliveries]:
        """The rule, which is the caller's inside of the block."""
        with self._lock:
            yield self._rule


process_gate = ProcessGate()


class Transaction:
    """One on its way.

    Attributes:
        is_over: Whether its outcome is known; set last.
        is_done: Whether it is committed. Else only the group knows what is: ask it.
        error: Why it would fail again, if it would.
    """

    def __init__(self) -> None:
        self.is_over = self.is_done = False
        self.error: KafkaMQError | None = None


class Transactor:
    """One consumer's transactions (``exactly_once``), one at a time, in a thread of its own.

    The offsets carry the consumer's membership as it was when the messages were polled, so a worker
    whose partitions went to others in the meantime cannot commit: the broker refuses its
    generation, and the whole transaction with the STARTs is as if it had never been. That fences a
    zombie whatever its transactional id is, so every consumer has a random one.

    The next transaction begins by settling one that failed.
    """

    def __init__(
        self, config: ServiceConfig, transactional_id: str, wake: Callable[[], None]
    ) -> None:
        """``wake`` is called when a transaction is over."""
        self._marker_topic = config.marker_topic
        self._message_topic = config.message_topic
        self._producer = TransactionalProducer(config, transactional_id)
        self._wake = wake
        self._thread = JobThread("kafkamq-exactly-once")

    def begin(
        self,
        starts: Callable[[], Mapping[int, list[dict[str, Any]]]],
        offsets: Mapping[int, int],
        membership: bytes,
    ) -> Transaction:
        """Write STARTs and commit offsets, all or nothing.

        Args:
            starts: Gives, when they are written, by marker partition: value, key and callback of
                each. Called in the transactor's thread.
            membership: The consumer's group metadata when it polled the messages.
        """
        positions = [TopicPartition(self._message_topic, each, at) for each, at in offsets.items()]
        transaction = Transaction()

        def job() -> None:
            try:
                self._transact(starts, positions, membership)
                transaction.is_done = True
            except (BrokerError, DeadlineExceededError) as error:
                if isinstance(error, BrokerError) and meaning(error) is Meaning.FORBIDDEN:
                    transaction.error = BrokerError(str(error), code=error.code)
                else:
                    _log.info("a transaction of STARTs is made again", extra={"error": str(error)})
            except KafkaMQError as error:
                transaction.error = error
            except Exception as error:  # noqa: BLE001 - the intake waits for an outcome
                _log.exception("a transaction of STARTs failed")
                transaction.error = KafkaMQError(f"a transaction failed: {error!r}")
            transaction.is_over = True
            self._wake()

        self._thread.add(job)
        return transaction

    def _transact(
        self,
        starts: Callable[[], Mapping[int, list[dict[str, Any]]]],
        positions: Sequence[TopicPartition],
        membership: bytes,
    ) -> None:
        producer = self._producer
        if not producer.is_ready:
            producer.init(timeout_s=_STEP_TIMEOUT_S)
        producer.begin()
        try:
            for partition, each in starts().items():
                producer.produce_many(
                    self._marker_topic, partition, each, timeout_s=_STEP_TIMEOUT_S
                )
            producer.send_offsets(positions, membership, timeout_s=_STEP_TIMEOUT_S)
            producer.commit(timeout_s=_STEP_TIMEOUT_S)
        except BaseException:
            producer.abort(timeout_s=_STEP_TIMEOUT_S)
            if not producer.is_ready:
                # What is open now must not hold readers back.
                try:
                    producer.init(timeout_s=_STEP_TIMEOUT_S)
                except KafkaMQError as error:
                    _log.info("a transaction is not settled yet", extra={"error": str(error)})
            raise

    def close(self, timeout_s: float) -> None:
        """Abort what is open and end the client; bounded, what takes longer goes on behind us."""
        if not self._thread.end(self._producer.close, timeout_s=timeout_s):
            _log.warning("ending a transaction takes long and goes on")
