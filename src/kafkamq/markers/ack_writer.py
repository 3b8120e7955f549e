"""Writes what becomes of leases: a verdict as an END (R8), KEEPALIVEs (R7), RELEASEs; R9, R30.

Most ACKs call nothing here: taking the message's offset out of ``lease.held`` (``Message.ack``) is
the verdict, and the keeper collects the offsets that are missing there. All other verdicts, and
ACKs that wait, go through ``AckWriter.acknowledge``. The keeper, one thread of a consumer, writes
them as ENDs, renews leases, and serves the reports, which say what came late.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NoReturn

from kafkamq.errors import BrokerError, ConfigError, KafkaMQError, LeaseLostError, StateError
from kafkamq.markers.message import MarkersMessage
from kafkamq.markers.rules.batching import join
from kafkamq.markers.rules.leases import ACKED, Lease, LeaseState, Refusal, Renewal, Verdict
from kafkamq.markers.state import REPORTS_MS, Bell, ConsumerState, nack_ms
from kafkamq.markers.wire.marker_writer import (
    encode_batches,
    encode_identity,
    encode_keepalive,
    encode_known_end,
    encode_known_keepalive,
)
from kafkamq.metrics import catalog
from kafkamq.metrics.health import health
from kafkamq.queue.consumer import LostLeases, too_late
from kafkamq.queue.message import Acknowledger, Message
from kafkamq.queue.namespace import IDENTITY_AGE_S
from kafkamq.queue.wire.headers import cut_text
from kafkamq.queue.wire.keys import marker_key
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.errors import KafkaError, broker_error, is_retriable
from kafkamq.transport.record import Record
from kafkamq.types import DeadLetterReason, MessageBatch, Outcome

# The longest wait of ``wait=True``: every END is confirmed or failed after 30 s.
WAIT_TIMEOUT_S = 60.0
# Verdicts that follow each other more closely are written together (R30).
LINGER_MS = 5
RENEWALS_PER_TIMEOUT = 3
MAX_SLEEP_MS = 1000
MAX_BEAT_S = 15.0
# The log time of an END without a delivery report; in a report -1 says that Kafka gave none.
UNREPORTED = -2
_SLICE_S = 0.25
_REPORTS_S = 0.05
_TURN_MS = 5
_ACK = Outcome.ACK
_LEASE = attrgetter("_lease")
_MessageKey = tuple[int, int, tuple[bytes, int]]
OF_OUTCOME = {
    Outcome.ACK: catalog.ACKED,
    Outcome.NACK: catalog.NACKED,
    Outcome.REJECT: catalog.REJECTED,
}
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class EndRecord:
    """The END of one message, or of several (R30), on its way into the log.

    With a ``value``, the parts have one verdict, holder and marker partition.
    """

    writer: AckWriter
    parts: list[Lease]
    value: bytes = b""
    log_ms: int = UNREPORTED
    error: KafkaError | None = None

    def reported(self, error: KafkaError | None, record: Record) -> None:
        # It may run with librdkafka's fatal error raised: Python then finds no base class's names.
        if error is not None:
            self.error = error
            self.writer.end_failed(self)
            return
        log_ms = record.timestamp()[1]
        # R9: late perhaps; asked with all facts.
        late = [part for part in self.parts if log_ms > part.log_deadline_ms]
        if late:
            self.writer.check_late(late, log_ms)
        self.log_ms = log_ms
        for part in self.parts:
            part.is_end_known = True
        # It comes last: what an interrupt breaks off is found by it.
        self.writer.end_delivered(self)


class AckWriter:
    """Writes the ENDs of one worker and learns what became of them; thread-safe."""

    # Of messages whose tokens are asked for, which needs this one.
    hand_over: Acknowledger

    def __init__(
        self, state: ConsumerState, on_lease_lost: Callable[[Message], None] | None
    ) -> None:
        self.state = state
        self._on_lease_lost = on_lease_lost
        self.queue_id = state.queue.queue_id
        self._handed_out: dict[_MessageKey, MarkersMessage] = {}
        self.is_kept = False
        self._waiting: dict[Bell, None] = {}
        self.lost_leases = LostLeases(self.queue_id, on_lease_lost, state.queue.max_in_flight)
        self._writing = threading.Lock()
        self._noted_ms = 0
        self._failed: deque[EndRecord] = deque()
        self._unseen: dict[EndRecord, None] = {}
        self._running_out: deque[EndRecord] = deque()
        # ENDs that are not delivered, also those that have failed.
        self._under_way: dict[EndRecord, None] = {}
        self._extensions: deque[Renewal] = deque()

    # Verdicts.

    def acknowledge(
        self,
        message: MarkersMessage,
        outcome: Outcome,
        *,
        wait: bool = False,
        reason: str = "",
        delay_ms: int | None = None,
    ) -> None:
        """Note a verdict; see ``Message.ack`` for the errors, and for what most ACKs do instead."""
        state = self.state
        state.check()
        verdict = ACKED
        if outcome is not _ACK:
            self.check_reason(reason, outcome)
            count = message.delivery_count if outcome is Outcome.NACK else 0
            verdict = Verdict(outcome, cut_text(reason) if reason else "", delay_ms, count)
        with state.lock:
            lease, now_ms = message._lease, monotonic_ms()
            part = state.leases.acknowledge(lease, message.offset, now_ms, verdict)
        if isinstance(part, Refusal):
            self.refuse(message, part)
        self._has_verdict()
        if wait:
            self._await(message, part)

    def note(self, lease: Lease) -> None:
        """One of its messages was acked; from any thread, without a lock."""
        self.state.leases.note(lease)
        self._has_verdict()

    def _has_verdict(self) -> None:
        if not self._noted_ms:
            # Else the keeper is awake, and looks when it has gathered enough.
            self._noted_ms = monotonic_ms()
            self.state.keeper.ring()

    def gathering_s(self) -> float:
        """Return how long the verdicts that were given still wait for more (R30)."""
        noted_ms = self._noted_ms
        return max(0, noted_ms + LINGER_MS - monotonic_ms()) / 1000 if noted_ms else 0.0

    def hurry(self) -> None:
        """The verdicts that were given wait for no more: their application has nothing to do."""
        self._noted_ms = 1
        self.state.keeper.ring()

    def _write_queued(self) -> None:
        """Write the ENDs of the verdicts that were given since, in few records."""
        leases, taken = self.state.leases, list[Lease]()
        try:
            with self.state.lock:
                taken = leases.collect()
                # It comes last: after an interrupt ENDs are written twice, not never.
                leases.collected()
            ends = self._ends_of(taken)
            self._count_settled(taken, monotonic_ms())
            self._under_way.update(dict.fromkeys(ends))
            by_route: dict[int, list[EndRecord]] = {}
            for end in ends:
                by_route.setdefault(end.parts[0].marker_partition, []).append(end)
            for route, each in by_route.items():
                self._write_many(route, each)
        except BaseException:
            # It is an interrupt: twice is harmless, never is not.
            self._failed.append(EndRecord(self, taken))
            self.state.keeper.ring()
            raise

    def _ends_of(self, parts: Iterable[Lease]) -> list[EndRecord]:
        """Return the ENDs of these, one for all that it can name (R30)."""
        groups: dict[tuple[int, str, Verdict], list[Lease]] = {}
        for part in parts:
            same = part.marker_partition, part.holder_id, part.verdict
            groups.setdefault(same, []).append(part)
        ends: list[EndRecord] = []
        for members in groups.values():
            if self.state.queue.batch_markers:
                ends += [
                    self._end_of(*each) for each in join((one.batch(), one) for one in members)
                ]
            else:
                ends += [self._end_of((), [part]) for part in members]
        return ends

    def _end_of(self, batches: Sequence[MessageBatch], parts: list[Lease]) -> EndRecord:
        first = parts[0]
        if len(parts) > 1 or len(first.offsets) > 1:
            identity = encode_batches(batches)
        else:
            identity = encode_identity(first.partition, first.offsets[0], *first.log)
        verdict, delay_ms = first.verdict, 0
        if verdict.outcome is Outcome.NACK:
            # Its jitter is drawn once for the record, or it would be split.
            delay_ms = nack_ms(
                self.state.namespace,
                self.state.queue.backoff,
                verdict.delay_ms,
                delivery_count=verdict.delivery_count,
                message_ms=min(
                    (each.oldest_ms for each in parts if each.oldest_ms >= 0), default=-1
                ),
            )
        known = first.holder_id, delay_ms, verdict.reason
        end = EndRecord(self, parts, encode_known_end(identity, verdict.outcome, *known))
        for part in parts:
            part.end = end
        return end

    def _count_settled(self, parts: Iterable[Lease], now_ms: int) -> None:
        counts: Counter[tuple[Outcome, int]] = Counter()
        took: Counter[int] = Counter()
        for part in parts:
            count = len(part.offsets)
            counts[part.verdict.outcome, part.partition] += count
            took[part.begin_ms] += count
        for (outcome, partition), count in counts.items():
            OF_OUTCOME[outcome].add(count, self.queue_id, partition)
        seconds = [((now_ms - began_ms) / 1000, count) for began_ms, count in took.items()]
        catalog.HANDLING_SECONDS.observe_all(seconds, self.queue_id)

    def _write_many(self, route: int, ends: Sequence[EndRecord]) -> None:
        records: list[dict[str, Any]] = [
            {"value": end.value, "key": _key_of(end.parts[0]), "callback": end.reported}
            for end in ends
        ]
        try:
            self.state.writer.write_many(route, records)
        except BrokerError as error:
            _log.warning("verdicts are written again", extra={"error": str(error)})
            refused = zip(ends, records, strict=True)
            self._failed.extend(end for end, record in refused if "_error" in record)
            self.state.keeper.ring()

    @staticmethod
    def check_reason(reason: str, outcome: Outcome) -> None:
        """Refuse a reason that cannot be written, and a rejection without one."""
        if not isinstance(reason, str):
            raise ConfigError(f"reason is a {type(reason).__name__}: it must be a text")
        if outcome is Outcome.REJECT and not reason:
            raise ConfigError("reason is empty: it must say why, for it stands in the dead letter")

    def refuse(self, message: MarkersMessage, refusal: Refusal) -> NoReturn:
        if refusal is Refusal.ACKNOWLEDGED_BEFORE:
            raise StateError(f"{message!r} has a verdict already: one in all")
        self.forget([message._lease], [message.offset])
        raise LeaseLostError(
            f"the lease of {message!r} ended before the verdict: nothing was written, it may be "
            "with another worker (a longer redelivery_timeout or max_lease, or extend())",
            (message.message_id,),
        )

    def has_verdict(self, message: MarkersMessage) -> bool:
        lease, offset = message._lease, message.offset
        return offset not in lease.held and offset not in lease.lost

    def extend(self, message: MarkersMessage, extension_ms: int) -> None:
        """A KEEPALIVE of one message (R7), which has a lease of its own from then on."""
        state, now_ms = self.state, monotonic_ms()
        state.check()
        with state.lock:
            if self.has_verdict(message):
                refusal, renewal = Refusal.ACKNOWLEDGED_BEFORE, None
            else:
                if state.leases.may_hand_out(message._lease, now_ms):
                    self.own_lease(message)
                refusal = Refusal.LOST
                renewal = state.leases.extend(message._lease, extension_ms, now_ms)
        if renewal is None:
            self.refuse(message, refusal)
        else:
            self._extensions.append(renewal)
            if self.is_kept:
                self.state.keeper.ring()
            else:
                self._write_extensions()

    def _write_extensions(self) -> None:
        """KEEPALIVEs that were asked for; one that cannot be queued now is written later."""
        while self._extensions:
            self.renew(self._extensions[0])
            self._extensions.popleft()

    def own_lease(self, message: MarkersMessage) -> Lease:
        """Return a lease of this message alone, which is held; with the lock held."""
        leases, lease, offset = self.state.leases, message._lease, message.offset
        if len(lease.offsets) > 1:
            own = leases.apart(lease, [offset])
            try:
                # It comes first: what only ``held`` lacks is acked.
                lease.uncollected.discard(offset)
                lease.held.remove(offset)
                message._lease = own
                leases.keep(own)
            except KeyError:
                lease.uncollected.add(offset)
                self.refuse(message, Refusal.ACKNOWLEDGED_BEFORE)
            except BaseException:
                if message._lease is own:
                    leases.keep(own)
                else:
                    lease.held.add(offset)
                    lease.uncollected.add(offset)
                raise
        return message._lease

    def token(self, message: MarkersMessage) -> str:
        return self.hand_over.token(message)

    def hold(self, message: MarkersMessage, hold_ms: int) -> None:
        self.hand_over.hold(message, hold_ms)

    def renew(self, renewal: Renewal) -> None:
        state = self.state

        def reported(error: object, record: object) -> None:
            if error is not None:
                # No lock is taken, as in ``end_failed``: each is one step.
                state.leases.renewal_failed(renewal)
                return
            log_ms: int = record.timestamp()[1]  # type: ignore[attr-defined]  # a Message
            with state.lock:
                state.leases.renewed(renewal, monotonic_ms(), log_ms)

        if renewal.batches:
            value = encode_known_keepalive(
                encode_batches(renewal.batches), renewal.consumer_id, renewal.redeliver_after_ms
            )
        else:
            value = encode_keepalive(
                renewal.message_id,
                consumer_id=renewal.consumer_id,
                redeliver_after_ms=renewal.redeliver_after_ms,
            )
        key = _key_of(renewal.leases[0])
        state.writer.write(value, key, renewal.marker_partition, reported)

    def release(self, messages: Sequence[MarkersMessage]) -> None:
        """Give back what was never handed out, without counting a delivery (R8)."""
        for part in self._end_unseen(messages, Verdict(Outcome.RELEASE)):
            catalog.RELEASED.add(len(part.offsets), self.queue_id, part.partition)

    def reject_expired(self, messages: Sequence[MarkersMessage]) -> None:
        """Reject messages that were too old when they were STARTed (R10)."""
        self._end_unseen(messages, Verdict(Outcome.REJECT, DeadLetterReason.EXPIRED.value))

    def _end_unseen(self, messages: Sequence[MarkersMessage], verdict: Verdict) -> list[Lease]:
        parts: list[Lease] = []
        with self.state.lock:
            now_ms, take_back = monotonic_ms(), self.state.leases.take_back
            for lease, group in groupby(messages, _LEASE):
                part = take_back(lease, [each.offset for each in group], now_ms, verdict)
                if part is not None:
                    parts.append(part)
        for part in parts:
            # Without it the lease just runs out.
            part.is_end_known = True
        for end in self._ends_of(parts):
            first = end.parts[0]
            report = partial(self._unseen_reported, end)
            self._unseen[end] = None
            try:
                route = first.marker_partition
                self.state.writer.write(end.value, _key_of(first), route, report)
            except BrokerError as error:
                _log.warning("an END could not be queued", extra={"error": str(error)})
                report(error, None)
        return parts

    def _unseen_reported(self, end: EndRecord, error: object, _: object) -> None:
        if error is not None:
            self._running_out.append(end)
        self._unseen.pop(end, None)

    def _let_run_out(self) -> None:
        """Their ENDs are not in the log: no KEEPALIVE may name their consumer any more (R7)."""
        count = 0
        with self.state.lock:
            while self._running_out:
                for part in self._running_out[0].parts:
                    self.state.leases.end_failed(part, monotonic_ms())
                    count += len(part.offsets)
                self._running_out.popleft()
            self.state.renew_id()
        self._warn_unreleased(count, "their ENDs are not in the log")

    def _warn_unreleased(self, count: int, error_text: str) -> None:
        if count:
            _log.warning(
                "messages could not be released; they come back when their leases end",
                extra={"queue": self.queue_id, "messages": count, "error": error_text},
            )

    # What is known of leases.

    def handed_out(self, messages: Sequence[MarkersMessage]) -> None:
        if self._on_lease_lost is not None:
            for message in messages:
                lease = message._lease
                self._handed_out[lease.partition, message.offset, lease.log] = message

    def forget(self, parts: Iterable[Lease], offsets: Sequence[int] = ()) -> None:
        """Nothing will be told of these; by default of all messages of the parts."""
        if self._on_lease_lost is not None:
            for part in parts:
                for offset in offsets or part.offsets:
                    self._handed_out.pop((part.partition, offset, part.log), None)

    def _known(self, lease: Lease, offset: int) -> MarkersMessage | None:
        return self._handed_out.pop((lease.partition, offset, lease.log), None)

    def lost(self, leases: Sequence[Lease]) -> None:
        """Leases that ended by the worker's own clock; the application is told of its own."""
        for lease in leases:
            catalog.LEASES_LOST.add(len(lease.lost), self.queue_id, lease.partition)
            for offset in lease.lost:
                message = self._known(lease, offset)
                if message is not None:
                    self.lost_leases.lost(message)

    # Delivery reports; called while reports are served, with no lock held.

    def end_delivered(self, end: EndRecord) -> None:
        self.forget(end.parts)
        self._under_way.pop(end, None)

    def check_late(self, parts: Sequence[Lease], log_ms: int) -> None:
        """Their END is in the log, after their leases' ends as far as these were known (R9)."""
        with self.state.lock:
            late = [part for part in parts if not self.state.leases.ended(part, log_ms)]
        for part in late:
            self._is_late(part)

    def end_failed(self, end: EndRecord) -> None:
        """An END was not delivered: ``serve`` writes it again while the lease stands.

        No lock is taken here: after a fatal error librdkafka serves reports while that error is
        raised already, so the lock's next line would fail and the lock stay taken forever.
        """
        if self.state.is_closed:
            for part in end.parts:
                self._is_late(part)
            self._under_way.pop(end, None)
        else:
            self._failed.append(end)

    def _is_late(self, part: Lease) -> None:
        catalog.LATE_VERDICTS.add(len(part.offsets), self.queue_id, part.partition)
        for message_id in part.message_ids():
            self.lost_leases.late(self._known(part, message_id.offset) or message_id)
        self.state.keeper.ring()

    # Served by the keeper, and by every thread that waits for a report.

    def serve(self) -> None:
        # It comes first: the verdict that comes next rings.
        self._noted_ms = 0
        if self._running_out:
            self._let_run_out()
        self._write_extensions()
        if self.state.leases.has_verdicts or self._failed or self._under_way:
            with self._writing:
                self._write_queued()
                self._find_unreported()
                self._write_again()

    def _find_unreported(self) -> None:
        """ENDs that will never be reported are written again; with ``_writing`` held.

        Their client is gone, or an interrupt took the report. No answer is no confirmation.
        """
        if self._under_way and not len(self.state.writer) and self.state.writer.is_idle:
            failed = set(self._failed)
            for end in [each for each in list(self._under_way) if each not in failed]:
                if end.log_ms == UNREPORTED:
                    self._failed.append(end)
                else:
                    self._under_way.pop(end, None)

    def _write_again(self) -> None:
        """ENDs whose delivery failed, under a fresh consumer_id (R7); with ``_writing`` held.

        Without those whose leases have ended (R30).
        """
        for _ in range(len(self._failed)):
            # It stays there until it is written: flush looks.
            failed = self._failed[0]
            now_ms = monotonic_ms()
            with self.state.lock:
                end_failed = self.state.leases.end_failed
                again = [part for part in failed.parts if end_failed(part, now_ms)]
            if len(again) < len(failed.parts):
                for part in failed.parts:
                    if part not in again:
                        self._is_late(part)
                failed.parts = again
            for end in self._ends_of(again):
                end.error, first = failed.error, end.parts[0]
                to = _key_of(first), first.marker_partition, end.reported
                self._under_way[end] = None
                try:
                    self.state.writer.write(end.value, *to)
                except BrokerError:
                    self._under_way.pop(end, None)
                    return
            # It goes behind these: a flush that finds none returns.
            self._under_way.pop(failed, None)
            self._failed.popleft()

    # Waiting.

    def flush(self, timeout_s: float) -> None:
        """Wait until all ENDs are in the log.

        Raises:
            DeadlineExceededError: Not in time; nothing was dropped.
            LeaseLostError: Some came late, or never; each is named once.
        """
        self._drain(timeout_s)
        late = self.lost_leases.take_late()
        if late is not None:
            raise late

    def _drain(self, timeout_s: float) -> None:
        writer = self.state.writer
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            with self.state.lock:
                self.state.leases.look_again()
            self._wait_for(self._is_all_reported, max(0.0, min(left_s, _SLICE_S)))
            # Otherwise an END might be in another thread's hands.
            with self._writing:
                if not self.state.leases.has_verdicts and self._is_all_reported():
                    return
            writer.watch.check("writing verdicts")
            if left_s <= 0:
                ends = {*self._failed, *self._under_way}
                count = sum(len(part.offsets) for end in ends for part in end.parts)
                raise writer.watch.deadline(f"confirming {count} verdicts", timeout_s)

    def _is_all_reported(self) -> bool:
        """Say whether each END that was written is in the log, by its own report, or given up."""
        return not (self.state.leases.has_verdicts or self._under_way or self._failed)

    def _await(self, message: MarkersMessage, part: Lease) -> None:
        writer = self.state.writer
        deadline_s = time.monotonic() + WAIT_TIMEOUT_S

        def is_known() -> bool:
            return part.is_end_known or part.state is LeaseState.LOST

        while not is_known():
            self._wait_for(is_known, _SLICE_S)
            writer.watch.check("writing a verdict")
            failed = part.end.error if isinstance(part.end, EndRecord) else None
            if failed is not None:
                error = broker_error(failed, f"writing the verdict on {message!r}")
                if not is_retriable(error):
                    raise error
            if time.monotonic() > deadline_s:
                raise writer.watch.deadline("confirming a verdict", WAIT_TIMEOUT_S)
        if part.state is LeaseState.LOST:
            self.lost_leases.told_otherwise(message)
            raise too_late([message.message_id])

    def _wait_for(self, is_known: Callable[[], bool], timeout_s: float) -> None:
        """Have what was given written, and wait until ``is_known()``, or the time is over."""
        if not self.is_kept:
            self.serve()
            self.state.writer.wait_for(is_known, timeout_s)
            return
        bell, deadline_s = Bell(), time.monotonic() + timeout_s
        self._waiting[bell] = None
        try:
            while not is_known():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return
                self.hurry()
                bell.wait(left_s)
        finally:
            self._waiting.pop(bell, None)

    @property
    def is_waited_for(self) -> bool:
        return bool(self._waiting)

    def serve_waiting(self) -> None:
        """Serve reports for those who wait; they look themselves whether it was theirs."""
        self.state.writer.wait_for(self._is_all_reported, _REPORTS_S)
        for bell in list(self._waiting):
            bell.ring()

    def close(self, timeout_s: float) -> KafkaMQError | None:
        """Wait once more; what is not confirmed then is given up."""
        deadline_s = time.monotonic() + timeout_s
        failure: KafkaMQError | None = None
        try:
            self._drain(timeout_s)
        except KafkaMQError as error:
            failure = error
        # The ENDs of what nobody saw, too: the client's end drops what is still queued.
        left_s = deadline_s - time.monotonic()
        try:
            self.state.writer.confirm(lambda: not self._unseen, "releasing messages", left_s)
        except KafkaMQError as error:
            self._warn_unreleased(len(self._unseen), str(error))
        self._let_run_out()
        return failure


def _key_of(lease: Lease) -> bytes:
    return marker_key(lease.partition, lease.offsets[0])


class Keeper:
    """Runs until ``stop``; nothing that goes wrong in one beat ends it."""

    def __init__(
        self, state: ConsumerState, ack_writer: AckWriter, each_second: Callable[[], None]
    ) -> None:
        """``each_second`` is what else is to be written now and then."""
        self._state = state
        self._ack_writer = ack_writer
        self.each_second = each_second
        self._period_ms = max(1, state.queue.redelivery_timeout_ms // RENEWALS_PER_TIMEOUT)
        self._renew_ms = monotonic_ms() + self._period_ms
        self._second_ms = 0
        self._stopped = False
        self.loop = health.add(f"worker of {state.queue.queue_id}", max_age_s=MAX_BEAT_S)
        self._thread = threading.Thread(
            target=self._run, name=f"kafkamq-keeper-{state.queue.queue_id}", daemon=True
        )

    def start(self) -> None:
        self._ack_writer.is_kept = True
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread; waits for a beat that is under way."""
        self._stopped = True
        health.remove(self.loop)
        self._state.keeper.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        self._ack_writer.is_kept = False

    def _run(self) -> None:
        while not self._stopped:
            self._state.keeper.wait(self.sleep_ms() / 1000)
            self.loop.beat()
            self.beat()

    def beat(self) -> None:
        tell = self._ack_writer.lost_leases.tell_soon
        for step in (self._serve, self._renew, tell, self._each_beat):
            if self._stopped:
                return
            try:
                step()
            except KafkaMQError as error:
                _log.warning(
                    "a heartbeat of a consumer failed",
                    extra={"queue": self._state.queue.queue_id, "error": str(error)},
                )
            except Exception:  # noqa: BLE001 - a dead keeper would lose every lease
                _log.exception("a heartbeat of a consumer failed")

    def sleep_ms(self) -> int:
        sleep_ms = min(self._second_ms, self._renew_ms) - monotonic_ms()
        if self._ack_writer.is_waited_for:
            sleep_ms = min(sleep_ms, _TURN_MS)
        elif len(self._state.writer):
            sleep_ms = min(sleep_ms, REPORTS_MS)
        return max(1, sleep_ms)

    def _serve(self) -> None:
        while gathering_s := self._ack_writer.gathering_s():
            self._state.keeper.wait(gathering_s)
        self._ack_writer.serve()
        if self._ack_writer.is_waited_for:
            self._ack_writer.serve_waiting()
        else:
            self._state.writer.poll()

    def _renew(self) -> None:
        """Tell first what has ended, then write KEEPALIVEs for the rest (R7)."""
        state = self._state
        now_ms = monotonic_ms()
        with state.lock:
            lost = state.leases.expire(now_ms)
            state.renew_id()
            if now_ms >= self._renew_ms:
                self._renew_ms = now_ms + self._period_ms
                # Written with the lock held: a RELEASE names the holder as of what is before it.
                for renewal in state.leases.plan_renewals(now_ms):
                    try:
                        self._ack_writer.renew(renewal)
                    except BrokerError as error:  # noqa: PERF203 - the next one may go through
                        state.leases.renewal_failed(renewal)
                        _log.warning("a KEEPALIVE could not be queued", extra={"error": str(error)})
        if lost:
            self._ack_writer.lost(lost)

    def _each_beat(self) -> None:
        now_ms = monotonic_ms()
        if now_ms < self._second_ms:
            # There may be hundreds of beats a second, for verdicts.
            return
        self._second_ms = now_ms + MAX_SLEEP_MS
        self.each_second()
        self._state.namespace.refresh_if_old(IDENTITY_AGE_S)
