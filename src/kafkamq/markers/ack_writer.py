"""Writes acknowledgements: each verdict as an END (R8), and learns which came late (R9)."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kafkamq.errors import BrokerError, ConfigError, KafkaMQError, LeaseLostError, StateError
from kafkamq.markers.ends import Ends
from kafkamq.markers.message import UNREPORTED, EndRecord, MarkersMessage, Verdict
from kafkamq.markers.recorder import ConsumerRecorder
from kafkamq.markers.rules.leases import Acknowledgement, Lease, LeaseState, Renewal
from kafkamq.markers.state import ConsumerState
from kafkamq.markers.wire.markers import encode_batches, encode_keepalive, encode_known_keepalive
from kafkamq.queue.lost_leases import LostLeases, too_late
from kafkamq.queue.message import Message
from kafkamq.queue.wire.headers import cut_text
from kafkamq.queue.wire.partitions import marker_key
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.errors import broker_error, is_retriable
from kafkamq.types import DeadLetterReason, Outcome

WAIT_TIMEOUT_S = 60.0  # of wait=True: every END is confirmed or failed after 30 s
LINGER_MS = 5  # R30: verdicts that follow each other more closely are written together
MAX_QUEUED = 1000
_SLICE_S = 0.25
_ACK = Outcome.ACK
_ACKED = Verdict(_ACK)
_WRITE = Acknowledgement.WRITE
_HELD = LeaseState.HELD  # a look-up per message costs 0.4 us
_ACKNOWLEDGED = LeaseState.ACKNOWLEDGED
_log = logging.getLogger(__name__)


class AckWriter:
    """Writes the ENDs of one worker and learns what became of them; thread-safe."""

    def __init__(
        self, state: ConsumerState, on_lease_lost: Callable[[Message], None] | None
    ) -> None:
        self._state = state
        self._on_lease_lost = on_lease_lost
        self.queue_id = state.queue.queue_id
        self._recorder = ConsumerRecorder(self.queue_id)
        self.has_news = threading.Event()  # something to tell, or to write again
        self._handed_out: dict[Lease, MarkersMessage] = {}  # filled if somebody wants to be told
        self.lost_leases = LostLeases(self.queue_id, on_lease_lost, state.queue.max_in_flight)
        self._writing = threading.Lock()  # whoever takes ENDs out of these two; held until written
        self._queued: deque[MarkersMessage] = deque()  # whose ENDs are to be written
        self._written_ms = 0
        self._failed: deque[EndRecord] = deque()  # to write again
        self._unseen: dict[EndRecord, None] = {}  # of what nobody saw, and under way
        self._running_out: deque[EndRecord] = deque()  # of what nobody saw, and not in the log
        self._under_way: dict[EndRecord, None] = {}  # not delivered yet, the failed too
        self._ends = Ends(state, self)

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
        """Queue the END of a verdict; see ``Message.ack`` for the errors."""
        state = self._state
        state.check()
        lease = message._lease
        verdict = _ACKED
        if outcome is not _ACK:
            _check_reason(reason, is_needed=outcome is Outcome.REJECT)
            count = message.delivery_count if outcome is Outcome.NACK else 0
            verdict = Verdict(outcome, cut_text(reason) if reason else "", delay_ms, count)
        now_ms = monotonic_ms()
        with state.lock:
            if lease.state is _HELD:
                message._verdict = verdict
                message._end = None
                self._queued.append(message)
            # Last: a verdict that is broken off before is none, and the writer passes it over; one
            # that is broken off behind is written.
            acknowledgement = state.leases.acknowledge(lease, now_ms)
        if acknowledgement is not _WRITE:
            self._refuse(message, acknowledgement)
        if self._on_lease_lost is not None:
            self._handed_out.pop(lease, None)
        if now_ms - self._written_ms >= LINGER_MS or len(self._queued) >= MAX_QUEUED:
            self.write_queued()
        elif not self.has_news.is_set():
            self.has_news.set()  # the lease renewer writes it, if nobody does so before
        if wait:
            self._await(message)

    def gathering_s(self) -> float:
        """So long the verdicts that were given wait for more (R30)."""
        left_ms = LINGER_MS - (monotonic_ms() - self._written_ms)
        return max(0, left_ms) / 1000 if self._queued else 0.0

    def write_queued(self) -> None:
        """Write the ENDs that were given since, in few records."""
        with self._writing:
            self._write_queued()

    def _write_queued(self) -> None:
        self._written_ms = monotonic_ms()
        taken: list[MarkersMessage] = []
        queued = self._queued
        try:
            with self._state.lock:  # whoever adds settles before it is given back
                taken = [message for message in queued if message._lease.state is _ACKNOWLEDGED]
                queued.clear()  # last: after an interrupt it is written twice, not never
            ends = self._ends.of(taken)
            self._recorder.settled(taken, self._written_ms)
            self._under_way.update(dict.fromkeys(ends))
            by_route: dict[int, list[EndRecord]] = {}
            for end in ends:
                by_route.setdefault(end.messages[0]._lease.marker_partition, []).append(end)
            for route, each in by_route.items():
                self._write_many(route, each)
        except BaseException:  # an interrupt: twice is harmless, never is not
            self._failed.append(EndRecord(self, taken))
            self.has_news.set()
            raise

    def _write_many(self, route: int, ends: Sequence[EndRecord]) -> None:
        records: list[dict[str, Any]] = [
            {"value": end.value, "key": end.messages[0]._marker_key, "callback": end.reported}
            for end in ends
        ]
        try:
            self._state.writer.write_many(route, records)
        except BrokerError as error:
            _log.warning("verdicts are written again", extra={"error": str(error)})
            refused = zip(ends, records, strict=True)
            self._failed.extend(end for end, record in refused if "_error" in record)
            self.has_news.set()

    def _refuse(self, message: MarkersMessage, acknowledgement: Acknowledgement) -> None:
        if acknowledgement is Acknowledgement.ACKNOWLEDGED_BEFORE:
            raise StateError(f"{message!r} has a verdict already: one in all")
        if self._on_lease_lost is not None:
            self._handed_out.pop(message._lease, None)
        raise LeaseLostError(
            f"the lease of {message!r} ended before the verdict: nothing was written, it may be "
            "with another worker (a longer redelivery_timeout or max_lease, or extend())",
            (message.message_id,),
        )

    def _write(self, end: EndRecord) -> None:
        first = end.messages[0]
        self._under_way[end] = None
        try:
            route = first._lease.marker_partition
            self._state.writer.write(end.value, first._marker_key, route, end.reported)
        except BrokerError:
            self._under_way.pop(end, None)
            raise

    def has_verdict(self, message: MarkersMessage) -> bool:
        """Whether a verdict was given already."""
        return message._lease.state is _ACKNOWLEDGED

    def extend(self, message: MarkersMessage, extension_ms: int) -> None:
        """A KEEPALIVE of one message (R7)."""
        state = self._state
        state.check()
        with state.lock:
            if message._lease.state is LeaseState.ACKNOWLEDGED:
                renewal = None
                acknowledgement = Acknowledgement.ACKNOWLEDGED_BEFORE
            else:
                renewal = state.leases.extend(message._lease, extension_ms, monotonic_ms())
                acknowledgement = Acknowledgement.LOST
        if renewal is None:
            self._refuse(message, acknowledgement)
        else:
            self.renew(renewal)

    def renew(self, renewal: Renewal) -> None:
        """Queue a KEEPALIVE."""
        state = self._state

        def reported(error: object, record: object) -> None:
            if error is None:
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
        named = renewal.leases[0]
        state.writer.write(
            value, marker_key(named.partition, named.offset), renewal.marker_partition, reported
        )

    def release(self, messages: Sequence[MarkersMessage]) -> None:
        """Give back what was never handed out, without counting a delivery (R8)."""
        with self._state.lock:
            now_ms = monotonic_ms()
            leases = self._state.leases
            released = [
                m for m in messages if leases.acknowledge(m._lease, now_ms) is Acknowledgement.WRITE
            ]
        self._end_unseen(released, Verdict(Outcome.RELEASE))
        self._recorder.released(released)

    def reject_expired(self, messages: Sequence[MarkersMessage]) -> None:
        """R10: too old when they were STARTed, not handed out."""
        with self._state.lock:
            now_ms = monotonic_ms()
            leases = self._state.leases
            rejected = [
                m for m in messages if leases.acknowledge(m._lease, now_ms) is Acknowledgement.WRITE
            ]
        self._end_unseen(rejected, Verdict(Outcome.REJECT, DeadLetterReason.EXPIRED.value))

    def _end_unseen(self, messages: Sequence[MarkersMessage], verdict: Verdict) -> None:
        for message in messages:
            message._verdict = verdict
            message._lease.is_end_known = True  # without it the lease just runs out
        for end in self._ends.of(messages):
            first = end.messages[0]
            report = partial(self._unseen_reported, end)
            self._unseen[end] = None
            try:
                route = first._lease.marker_partition
                self._state.writer.write(end.value, first._marker_key, route, report)
            except BrokerError as error:
                _log.warning("an END could not be queued", extra={"error": str(error)})
                report(error, None)

    def _unseen_reported(self, end: EndRecord, error: object, _: object) -> None:
        if error is not None:  # without a lock, as in ``end_failed``
            self._running_out.append(end)
        self._unseen.pop(end, None)

    def _let_run_out(self) -> None:
        """Their ENDs are not in the log: no KEEPALIVE may name their consumer any more (R7)."""
        count = 0
        with self._state.lock:
            while self._running_out:
                for message in self._running_out[0].messages:
                    self._state.leases.end_failed(message._lease, monotonic_ms())
                    count += 1
                self._running_out.popleft()
            self._state.renew_id()
        self._warn_unreleased(count, "their ENDs are not in the log")

    def _warn_unreleased(self, count: int, error_text: str) -> None:
        if count:
            _log.warning(
                "messages could not be released; they come back when their leases end",
                extra={"queue": self.queue_id, "messages": count, "error": error_text},
            )

    # What is known of leases.

    def handed_out(self, messages: Sequence[MarkersMessage]) -> None:
        """The application has them now."""
        if self._on_lease_lost is not None:
            for message in messages:
                self._handed_out[message._lease] = message

    def taken_back(self, messages: Sequence[MarkersMessage]) -> None:
        """The application never saw them after all."""
        for message in messages:
            self._handed_out.pop(message._lease, None)

    def lost(self, leases: Sequence[Lease]) -> None:
        """Leases that ended by the worker's own clock; the application is told of its own."""
        self._recorder.lost(leases)
        for lease in leases:
            message = self._handed_out.pop(lease, None)
            if message is not None:
                self.lost_leases.lost(message)

    # Delivery reports; called while reports are served, with no lock held.

    def end_delivered(self, end: EndRecord) -> None:
        """An END is in the log."""
        self._under_way.pop(end, None)

    def check_late(self, messages: Sequence[MarkersMessage], log_ms: int) -> None:
        """Their END is in the log, after their leases' ends as far as these were known (R9)."""
        with self._state.lock:
            ended = self._state.leases.ended
            late = [each for each in messages if not ended(each._lease, log_ms)]
        for message in late:
            self._is_late(message)

    def end_failed(self, end: EndRecord) -> None:
        """An END was not delivered: ``serve`` writes it again while the lease stands.

        No lock is taken here: after a fatal error librdkafka serves reports while that error is
        raised already, so the lock's next line would fail and the lock stay taken forever.
        """
        if self._state.is_closed:
            for message in end.messages:
                self._is_late(message)
            self._under_way.pop(end, None)
        else:
            self._failed.append(end)

    def _is_late(self, message: MarkersMessage) -> None:
        self._recorder.late(message)
        self.lost_leases.late(message)
        self.has_news.set()

    # Served by the lease renewer and by whoever waits.

    def serve(self) -> None:
        """Write what was given, and what failed."""
        if self._running_out:
            self._let_run_out()
        if self._queued or self._failed or self._under_way:
            with self._writing:
                self._write_queued()
                self._find_unreported()
                self._write_again()

    def _find_unreported(self) -> None:
        """ENDs that will never be reported are written again; with ``_writing`` held.

        Their client is gone, or an interrupt took the report. No answer is no confirmation.
        """
        if self._under_way and not len(self._state.writer) and self._state.writer.is_idle:
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
            failed = self._failed[0]  # stays there until it is written: flush looks
            now_ms = monotonic_ms()
            with self._state.lock:
                end_failed = self._state.leases.end_failed
                again = [each for each in failed.messages if end_failed(each._lease, now_ms)]
            if len(again) < len(failed.messages):
                known = set(map(id, again))
                for message in failed.messages:
                    if id(message) not in known:
                        self._is_late(message)
                failed.messages = again
            for end in self._ends.of(again):
                end.error = failed.error
                try:
                    self._write(end)
                except BrokerError:
                    return
            self._under_way.pop(failed, None)  # behind these: a flush that finds none returns
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
        writer = self._state.writer
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            self.serve()
            writer.wait_for(self._is_all_reported, max(0.0, min(left_s, _SLICE_S)))
            with self._writing:  # or an END might be in another thread's hands
                if not self._queued and self._is_all_reported():
                    return
            writer.watch.check("writing verdicts")
            if left_s <= 0:
                ends = {*self._failed, *self._under_way}
                count = len(self._queued) + sum(len(end.messages) for end in ends)
                raise writer.watch.deadline(f"confirming {count} verdicts", timeout_s)

    def _is_all_reported(self) -> bool:
        """Whether each END that was written is in the log, by its own report, or given up."""
        return not self._under_way and not self._failed

    def _await(self, message: MarkersMessage) -> None:
        writer = self._state.writer
        deadline_s = time.monotonic() + WAIT_TIMEOUT_S
        self.serve()

        def is_known() -> bool:
            end = message._end
            is_reported = end is not None and end.log_ms != UNREPORTED
            return is_reported or message._lease.state is not LeaseState.ACKNOWLEDGED

        while not is_known():
            writer.wait_for(is_known, _SLICE_S)
            writer.watch.check("writing a verdict")
            failed = None if message._end is None else message._end.error
            if failed is not None:
                error = broker_error(failed, f"writing the verdict on {message!r}")
                if not is_retriable(error):
                    raise error
            self.serve()
            if time.monotonic() > deadline_s:
                raise writer.watch.deadline("confirming a verdict", WAIT_TIMEOUT_S)
        if message._lease.state is LeaseState.LOST:
            self.lost_leases.told_otherwise(message)
            raise too_late([message.message_id])

    def close(self, timeout_s: float) -> KafkaMQError | None:
        """Wait once more; what is not confirmed then is given up."""
        deadline_s = time.monotonic() + timeout_s
        failure: KafkaMQError | None = None
        try:
            self._drain(timeout_s)
        except KafkaMQError as error:
            failure = error
        self._confirm_unseen(deadline_s - time.monotonic())
        return failure

    def _confirm_unseen(self, timeout_s: float) -> None:
        """Wait for the ENDs of what nobody saw: the client's end drops what is still queued."""
        try:
            self._state.writer.confirm(lambda: not self._unseen, "releasing messages", timeout_s)
        except KafkaMQError as error:
            self._warn_unreleased(len(self._unseen), str(error))
        self._let_run_out()


def _check_reason(reason: str, *, is_needed: bool) -> None:
    if not isinstance(reason, str):
        raise ConfigError(f"reason is a {type(reason).__name__}: it must be a text")
    if is_needed and not reason:
        raise ConfigError("reason is empty: it must say why, for it stands in the dead letter")
