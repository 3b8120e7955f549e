"""A consumer of the ``markers`` backend hands out a queue's messages, one worker of any number.

Four threads share the work. The intake (``intake.py``) owns the Kafka consumer and brings messages
up to ``ready``; the keeper (``ack_writer.py``) writes what becomes of leases; a helper asks brokers
and a transactor runs transactions for the intake. The application's threads own nothing: they say
what they want, and take what is ready.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import islice
from operator import attrgetter
from typing import cast

from kafkamq.config import QueueConfig, wait_seconds
from kafkamq.errors import KafkaMQError, StateError
from kafkamq.markers.ack_writer import AckWriter, Keeper
from kafkamq.markers.intake import AHEAD_COUNT, AHEAD_MS, LINGER_S, MIN_TIMEOUT_MS, Demand, Intake
from kafkamq.markers.message import MarkersMessage
from kafkamq.markers.rules.handout import ReceiveAhead
from kafkamq.markers.starts import Transactor, process_gate
from kafkamq.markers.state import ConsumerState
from kafkamq.markers.tokens import HandOver
from kafkamq.metrics.catalog import IN_FLIGHT, POLL_AGE, READY, UNDER_WAY
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.message import Message, only_ack
from kafkamq.queue.names import group_of, new_consumer_id
from kafkamq.queue.namespace import Namespace
from kafkamq.transport.clock import monotonic_ms
from kafkamq.types import Outcome

MAX_EXIT_S = 5.0
_LEAVE_S = 10.0
_LEAST_S = 0.5
_SLICE_S = 0.25
_YIELD_S = 1e-6
_LEASE = attrgetter("_lease")
_log = logging.getLogger(__name__)


class _AtMostOnce(AckWriter):
    """The verdicts of ``delivery="at-most-once"``: ACKs, which say nothing new.

    No tracker answers for a message once it is committed: there is no START, no lease and no END.
    """

    def acknowledge(
        self, message: MarkersMessage, outcome: Outcome, *, wait: bool = False, **facts: object
    ) -> None:
        del wait, facts
        self.state.check()
        only_ack(message, outcome.name.lower())
        try:
            message._lease.held.remove(message.offset)
        except KeyError:
            raise StateError(f"{message!r} has a verdict already: one in all") from None

    def extend(self, message: MarkersMessage, extension_ms: int) -> None:
        del extension_ms
        only_ack(message, "extend")

    def handed_out(self, messages: Sequence[MarkersMessage]) -> None:
        """Nothing will be told of them."""

    def release(self, messages: Sequence[MarkersMessage]) -> None:
        self._pass_over(messages, "committed and not handed out")

    def reject_expired(self, messages: Sequence[MarkersMessage]) -> None:
        self._pass_over(messages, "expired")

    def _pass_over(self, messages: Sequence[MarkersMessage], why: str) -> None:
        for message in messages:
            message._lease.held.discard(message.offset)
        if messages:
            _log.warning(
                "messages are lost, as at-most-once allows",
                extra={"queue": self.queue_id, "messages": len(messages), "reason": why},
            )


class MarkersConsumer(Consumer):
    def __init__(
        self,
        namespace: Namespace,
        queue: QueueConfig,
        on_lease_lost: Callable[[Message], None] | None = None,
    ) -> None:
        super().__init__(queue)
        self._state = ConsumerState(namespace, queue)
        writer = _AtMostOnce if queue.is_at_most_once else AckWriter
        self._ack_writer = writer(self._state, on_lease_lost)
        self._ack_writer.hand_over = self._hand_over = HandOver(self._ack_writer)
        self._ahead = ReceiveAhead(first=queue.receive_buffer, maximum=queue.max_in_flight)
        self._may_run_ahead = (
            queue.redelivery_timeout_ms >= MIN_TIMEOUT_MS and not queue.is_at_most_once
        )
        self._transactor: Transactor | None = None
        if queue.exactly_once:
            transactional_id = f"{group_of(namespace.config, queue.queue_id)}/{new_consumer_id()}"
            self._transactor = Transactor(
                namespace.config, transactional_id, self._state.intake.ring
            )
        self.intake = Intake(self._state, self._ack_writer, self._transactor)
        self.keeper = Keeper(self._state, self._ack_writer, self.intake.reader.positions.write)
        self._ending = threading.Lock()
        with process_gate.rule() as rule:
            rule.join(self._state.leases)
        atexit.register(self._close_at_exit)
        key, intake = (queue.queue_id,), self.intake
        self._forget_gauges = (
            IN_FLIGHT.watch(lambda: {key: self.in_flight}),
            READY.watch(lambda: {key: len(intake.ready)}),
            UNDER_WAY.watch(lambda: {key: intake.under_way_count}),
            POLL_AGE.watch(lambda: {key: intake.poll_age_s}),
            self._ages.watch(),
        )
        self.keeper.start()
        self.intake.start()

    @property
    def consumer_id(self) -> str:
        return self._state.leases.consumer_id

    @property
    def in_flight(self) -> int:
        return self._state.leases.open_count

    @property
    def is_closed(self) -> bool:
        return self._state.is_closed

    # Receiving.

    def receive(self, timeout: float | timedelta = 1.0) -> Message | None:
        """Some are STARTed ahead (``receive_buffer`` of them, more when they are used up fast)."""
        taken: list[Message] = []
        try:
            if not self._take(taken, 1):
                ahead = 1 if self._queue.is_at_most_once else self._ahead.size
                self._wait_for(taken, 1, ahead, timeout)
            return taken[0] if taken else None
        except BaseException:
            self.put_back(taken)
            raise

    def receive_many(self, n: int, timeout: float | timedelta = 1.0) -> list[Message]:
        """Take what ``Consumer.receive_many`` promises.

        Some are STARTed ahead where the worker uses them up fast, for a quarter of a second at most
        and half of the queue's ``max_in_flight``; and on an ``exactly_once`` queue, where a
        transaction is worth more messages than a few.
        """
        self._check_count(n)
        taken: list[Message] = []
        try:
            if not self._take(taken, n):
                queue = self._queue
                ahead = n if queue.is_at_most_once else self._ahead.size_for(n)
                if queue.exactly_once:
                    ahead = max(ahead, self._ahead.size)
                self._wait_for(taken, n, ahead, timeout)
            return taken
        except BaseException:
            self.put_back(taken)
            raise

    def _wait_for(
        self, taken: list[Message], n: int, start: int, timeout: float | timedelta
    ) -> None:
        state, intake = self._state, self.intake
        deadline_s = time.monotonic() + wait_seconds(timeout, may_be_endless=True)
        self._ack_writer.hurry()
        intake.demand = Demand(n, start, deadline_s + LINGER_S)
        state.intake.ring()
        try:
            while True:
                left_s = deadline_s - time.monotonic()
                state.application.wait(min(left_s, _SLICE_S))
                if self._take(taken, n):
                    intake.demand = None
                    return
                if intake.failures:
                    intake.demand = None
                    raise intake.failures.popleft()
                # Also where it was broken off: what has been STARTed by now is the next one's.
                if left_s <= 0 or self._closing.is_set() or self._hurry.is_set():
                    return
        finally:
            # It comes last: one that came before this call was meant for it.
            self._hurry.clear()

    def _take(self, taken: list[Message], n: int) -> bool:
        """Take up to ``n`` of what is ready; whether there was any. R5: not what has ended."""
        state, intake = self._state, self.intake
        state.check()
        ready, now_ms = intake.ready, monotonic_ms()
        is_later, intake.asked_ms = now_ms > intake.asked_ms, now_ms
        if not ready:
            return False
        with state.lock:
            may_hand_out = state.leases.may_hand_out
            while ready and len(taken) < n:
                if n == 1:
                    message = ready[0]
                    lease = message._lease
                    if message.offset in lease.held and may_hand_out(lease, now_ms):
                        taken.append(message)
                    ready.popleft()
                    continue
                some = list(islice(ready, n - len(taken)))
                are_whole = True
                for lease in set(map(_LEASE, some)):
                    # A lease that it ends holds nothing any more.
                    may_hand_out(lease, now_ms)
                    are_whole = are_whole and len(lease.held) == len(lease.offsets)
                if are_whole:
                    taken += some
                else:
                    taken += [each for each in some if each.offset in each._lease.held]
                # It comes last: an interrupt in between leaves some in both, none in none.
                if len(some) == len(ready):
                    ready.clear()
                    break
                # In C, as there are many.
                deque(islice(iter(ready.popleft, None), len(some)), maxlen=0)
            state.renew_id()
            if not ready:
                # How fast it was used up decides how much is STARTed ahead.
                count, elapsed_ms = intake.ready_count, now_ms - intake.ready_ms
                self._ahead.drained(count, elapsed_ms)
                is_used_at_once = count >= AHEAD_COUNT and elapsed_ms <= AHEAD_MS
                intake.is_fast = is_used_at_once and self._may_run_ahead
        if is_later and intake.is_fast:
            # There is room for more ahead. Where few are taken at once the intake gets a turn each
            # millisecond: a thread that never waits would keep the interpreter's lock from it for
            # five. Who takes many waits soon.
            state.intake.ring()
            if n < AHEAD_COUNT:
                time.sleep(_YIELD_S)
        self._ack_writer.handed_out(cast("list[MarkersMessage]", taken))
        self._ages.note(taken, now_ms)
        return bool(taken)

    def cancel_receive(self) -> None:
        super().cancel_receive()
        self._state.application.ring()

    def put_back(self, messages: Sequence[Message]) -> None:
        """What was taken and is still among the ready ones stays where it is."""
        if not messages:
            return
        own = cast("Sequence[MarkersMessage]", messages)
        for message in own:
            self._ack_writer.forget([message._lease], [message.offset])
        ready = self.intake.ready
        with self._state.lock:
            there = set(map(id, islice(ready, len(own))))
            ready.extendleft(each for each in reversed(own) if id(each) not in there)

    # Ending.

    def flush(self, timeout: float | timedelta = 30.0) -> None:
        self._state.check()
        self._ack_writer.flush(wait_seconds(timeout, may_be_endless=True))

    def close(self, timeout: float | timedelta = 30.0) -> None:
        state, writer = self._state, self._ack_writer
        if state.fork_check.is_forked:
            return
        timeout_s = wait_seconds(timeout, may_be_endless=True)
        self._closing.set()
        state.application.ring()
        deadline_s = time.monotonic() + timeout_s
        with self._ending:
            if state.is_closed:
                return
            try:
                self.intake.drain(timeout_s / 2)
                self.intake.release_ready()
                self._hand_over.close()
                failure = writer.close(max(0.0, deadline_s - time.monotonic()))
            finally:
                self.keeper.stop(_left(deadline_s))
                atexit.unregister(self._close_at_exit)
                state.is_closed = True
                for forget in self._forget_gauges:
                    forget()
                with process_gate.rule() as rule:
                    rule.leave(state.leases)
                state.writer.close()
                if self._transactor is not None:
                    self._transactor.close(_left(deadline_s))
                # Before another member goes on from them.
                self.intake.reader.positions.close(_left(deadline_s))
                self.intake.end(min(_LEAVE_S, _left(deadline_s)))
        # Without the lock: on_lease_lost may be waiting for it, to close this consumer.
        writer.lost_leases.finish(deadline_s - time.monotonic())
        if failure is not None:
            raise failure

    def _close_at_exit(self) -> None:
        try:
            self.close(MAX_EXIT_S)
        except KafkaMQError as error:
            _log.warning("verdicts are not confirmed at the end", extra={"error": str(error)})


def _left(deadline_s: float) -> float:
    return max(_LEAST_S, deadline_s - time.monotonic())
