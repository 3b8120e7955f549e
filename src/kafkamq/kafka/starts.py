"""From polled messages to held ones: STARTs for a batch, their reports, and who may be handed out.

R5 in the order of the calls: ``begin`` writes the STARTs, ``wait`` sees them in the log, the
caller commits the offsets, ``finish`` says what may be handed out. Whatever fails in between,
``Consumer`` seeks back and ``abandon`` forgets the batch under a new consumer_id.
"""

from __future__ import annotations

from collections.abc import Iterable

from confluent_kafka import KafkaError

from kafkamq.clients.errors import broker_error
from kafkamq.core.handout import has_expired, is_last_delivery
from kafkamq.core.intake import Intake, Polled
from kafkamq.core.leases import Lease, LeaseState
from kafkamq.kafka.clock import monotonic_ms
from kafkamq.kafka.gate import process_gate
from kafkamq.kafka.message import Message
from kafkamq.kafka.namespace import NamespaceFacts
from kafkamq.kafka.verdicts import Verdicts
from kafkamq.kafka.worker import Worker
from kafkamq.types import MessageId
from kafkamq.wire.partitions import marker_key, marker_partition

__all__ = ["Batch", "Starter"]


class Batch:
    """Messages whose STARTs are under way."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.starts: list[bytes] = []  # beside them; emptied when they are written
        self.is_started = False  # every START is in the log

    def partitions(self) -> set[int]:
        """Of the messages topic."""
        return {message.message_id.partition for message in self.messages}

    def leases(self) -> list[Lease]:
        """One per message."""
        return [message._lease for message in self.messages]

    def error(self) -> KafkaError | None:
        """The first failed START, if any."""
        for message in self.messages:
            if message._start_error is not None:
                return message._start_error
        return None

    @property
    def is_reported(self) -> bool:
        """Whether every START is known to be in the log or failed."""
        return all(
            message._lease.state is not LeaseState.STARTING or message._start_error is not None
            for message in self.messages
        )


class Starter:
    """Plans and writes the STARTs of one consumer; its owner thread calls it."""

    def __init__(self, worker: Worker, intake: Intake[Message], verdicts: Verdicts) -> None:
        self._worker = worker
        self._intake = intake
        self._verdicts = verdicts
        self._max_deliveries = worker.queue.max_deliveries
        self._max_inline_bytes = worker.queue.max_inline_payload_bytes

    def begin(self, wanted: int) -> Batch | None:
        """Write STARTs for up to ``wanted`` polled messages; None: R6 lets none start now.

        Raises:
            BrokerError: They could not be queued; ``abandon`` the batch of the error.
        """
        batch = self._plan(wanted)
        if batch is None:
            return None
        write = self._worker.writer.write
        try:
            for message, start in zip(batch.messages, batch.starts, strict=True):
                write(
                    start,
                    message._marker_key,
                    message._lease.marker_partition,
                    message._start_reported,
                )
        except BaseException:
            self.abandon(batch)
            raise
        finally:
            batch.starts.clear()
        return batch

    def _plan(self, wanted: int) -> Batch | None:
        """R5, R6: take from the intake, and encode."""
        worker, intake = self._worker, self._intake
        leases = worker.leases
        now_ms = monotonic_ms()
        head = intake.head()
        if head is None:
            return None
        is_last = self._is_last(head)
        if not process_gate.enter(leases, now_ms, last=is_last):
            return None
        batch = Batch()
        try:
            facts = worker.namespace.facts()
            with worker.lock:
                worker.renew_id()
                while head is not None and len(batch.messages) < wanted:
                    if batch.messages and self._is_last(head):
                        break  # R6: alone, when these are settled
                    intake.take()
                    self._add(batch, head, facts, now_ms)
                    if is_last:
                        break
                    head = intake.head()
        except BaseException:
            self.abandon(batch)
            raise
        finally:
            alone = batch.messages[0]._lease if is_last and batch.messages else None
            process_gate.entered(leases, alone)
        return batch

    def _is_last(self, polled: Polled[Message]) -> bool:
        count = polled.record._count
        return count > 1 and is_last_delivery(count, self._max_deliveries)

    def _add(
        self, batch: Batch, polled: Polled[Message], facts: NamespaceFacts, now_ms: int
    ) -> None:
        message, partition, offset = polled.record, polled.partition, polled.offset
        epoch = message._record.leader_epoch()
        message_id = MessageId(
            partition, offset, facts.message_topic_id, 0 if epoch is None else epoch + 1
        )
        leases = self._worker.leases
        if leases.is_lapsed(message_id, now_ms):
            return  # R5: its START is in the log and its lease over; a tracker answers for it
        route = marker_partition(partition, offset, facts.marker_partitions)
        message._hold(leases.start(message_id, route), marker_key(partition, offset))
        batch.messages.append(message)
        batch.starts.append(self._encode(message, facts))

    def _encode(self, message: Message, facts: NamespaceFacts) -> bytes:
        """The START; by reference where the payload is too large for a marker (R11)."""
        record = message._record
        payload = record.value()
        by_reference = payload is not None and len(payload) > self._max_inline_bytes
        while True:
            start = self._worker.encoder.encode(
                message._lease.message_id,
                record.key() or b"",
                None if by_reference else payload,
                delivery_count=message._count,
                headers=message._headers,
                expires_at_ms=message._expiry_ms,
                message_timestamp_ms=record.timestamp()[1],
                by_reference=by_reference,
            )
            if len(start) <= facts.max_marker_bytes or by_reference:
                return start
            by_reference = True

    def wait(self, batch: Batch, timeout_s: float) -> bool:
        """Whether all STARTs are in the log; waits for it.

        Raises:
            BrokerError: One of them failed; ``abandon`` the batch.
        """
        writer = self._worker.writer
        if not writer.flush(timeout_s) and not batch.is_reported:
            writer.watch.check(f"writing STARTs to {writer.topic}")
            return False
        error = batch.error()
        if error is not None:
            if error.fatal():
                writer.renew()
            raise broker_error(error, f"writing STARTs to {writer.topic}")
        self._intake.started()
        batch.is_started = True
        return True

    def finish(self, batch: Batch) -> list[Message]:
        """The offsets are committed: what may be handed out, unless its lease has ended (R5)."""
        worker = self._worker
        with worker.lock:
            worker.leases.committed(batch.leases(), monotonic_ms())
            worker.renew_id()
        held = [m for m in batch.messages if m._lease.state is LeaseState.HELD]
        expired = [m for m in held if has_expired(m._expiry_ms, m._lease.log_begin_ms)]
        if not expired:
            return held
        self._verdicts.reject_expired(expired)
        return [m for m in held if m._lease.state is LeaseState.HELD]

    def abandon(self, batch: Batch) -> None:
        """Forget the batch, under a new consumer_id (R5, R7)."""
        with self._worker.lock:
            self._worker.leases.failed(
                lease for lease in batch.leases() if lease.state is not LeaseState.LOST
            )
            self._worker.renew_id()

    def drop(self, batch: Batch, partitions: Iterable[int]) -> None:
        """Forget those of the batch whose partitions went to another member."""
        gone = set(partitions)
        lost = [m for m in batch.messages if m.message_id.partition in gone]
        if lost:
            kept = [m for m in batch.messages if m.message_id.partition not in gone]
            batch.messages[:] = lost
            self.abandon(batch)
            batch.messages[:] = kept
