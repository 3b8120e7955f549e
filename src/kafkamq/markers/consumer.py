"""The ``markers`` backend: hands out a queue's messages, one worker of any number."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from operator import attrgetter
from typing import cast

from kafkamq.config import QueueConfig, ServiceConfig
from kafkamq.errors import KafkaMQError, StateError
from kafkamq.markers.ack_writer import AckWriter
from kafkamq.markers.batches import Batches
from kafkamq.markers.handover import ExactHandover, Handover, PlainHandover
from kafkamq.markers.last_delivery import process_gate
from kafkamq.markers.lease_renewer import LeaseRenewer
from kafkamq.markers.message import MarkersMessage
from kafkamq.markers.reader import MessageReader, group_of
from kafkamq.markers.rules.fetch_buffer import FetchBuffer
from kafkamq.markers.rules.handout import ReceiveAhead
from kafkamq.markers.rules.lease import Overtaken
from kafkamq.markers.rules.message_set import MessageSet
from kafkamq.markers.starts import Starter
from kafkamq.markers.state import ConsumerState
from kafkamq.markers.transactional_starts import ExactCommitter
from kafkamq.metrics.catalog import IN_FLIGHT
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.ids import new_consumer_id
from kafkamq.queue.message import Message, only_ack
from kafkamq.queue.namespace import Namespace
from kafkamq.transport.clock import monotonic_ms
from kafkamq.types import Outcome

MAX_LEAVE_S = 1.0  # how long renewals wait for a batch, when the owner does not
MAX_EXIT_S = 5.0  # how long the interpreter's end waits for verdicts
_SLICE_S = 0.25
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
    """See ``Consumer``. A thread of its own renews the leases of what it holds."""

    def __init__(
        self,
        namespace: Namespace,
        queue: QueueConfig,
        on_lease_lost: Callable[[Message], None] | None = None,
    ) -> None:
        """Made by ``Queue.consumer``."""
        super().__init__(queue)
        self._state = ConsumerState(namespace, queue)
        self._buffer: FetchBuffer[MarkersMessage] = FetchBuffer()
        writer = _AtMostOnce if queue.is_at_most_once else AckWriter
        self._ack_writer = ack_writer = writer(self._state, on_lease_lost)
        self._starter = Starter(self._state, self._buffer, self._ack_writer)
        self._ahead = ReceiveAhead(first=queue.receive_buffer, maximum=queue.max_in_flight)
        self._owner = threading.RLock()
        self._taken: list[Message] | None = None  # what an interrupted receive had taken
        self._received_ms = monotonic_ms()
        self._reader = MessageReader(namespace.config, queue, self._buffer, self, ack_writer)
        self._handover = self._new_handover(namespace.config)
        self._batches = Batches(
            self._state, self._buffer, self._starter, self._reader, self._handover, self._closing
        )
        process_gate.join(self._state.leases)
        atexit.register(self._flush_at_exit)
        self._forget_gauge = IN_FLIGHT.watch(lambda: {(queue.queue_id,): self.in_flight})
        self._lease_renewer = LeaseRenewer(self._state, self._ack_writer, self._tend)
        self._lease_renewer.start()

    def _new_handover(self, config: ServiceConfig) -> Handover:
        if not self._queue.exactly_once:
            return PlainHandover(self._starter, self._reader)
        group = group_of(config, self.queue_id)
        committer = ExactCommitter(config, f"{group}/{new_consumer_id()}")
        return ExactHandover(self._starter, self._reader, self._buffer, committer)

    @property
    def in_flight(self) -> int:
        """Messages held: STARTed ahead, or handed out and without verdict."""
        return self._state.leases.open_count

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` has run."""
        return self._state.is_closed

    # Receiving.

    def receive(self, timeout: float = 1.0) -> Message | None:
        """See ``Consumer.receive``.

        Some are STARTed ahead (the queue's ``receive_buffer``, more when they are used up fast).
        """
        handing: list[Message] = []
        try:
            ahead = 1 if self._queue.is_at_most_once else self._ahead.size
            self._receive(handing, 1, ahead, timeout)
            return handing[0] if handing else None
        except BaseException as error:
            self._broken_off(error, handing)
            raise

    def receive_many(self, n: int, timeout: float = 1.0) -> list[Message]:
        """See ``Consumer.receive_many``.

        Some are STARTed ahead where the worker uses them up fast, for a quarter of a second at most
        and half of the queue's ``max_in_flight``; and on an ``exactly_once`` queue, where a
        transaction is worth more messages than a few.
        """
        self._check_count(n)
        queue = self._queue
        ahead = n if queue.is_at_most_once else self._ahead.size_for(n)
        if queue.exactly_once:
            ahead = max(ahead, self._ahead.size)
        handing: list[Message] = []
        try:
            self._receive(handing, n, ahead, timeout)
            return handing
        except BaseException as error:
            self._broken_off(error, handing)
            raise

    def _receive(self, handing: list[Message], n: int, start: int, timeout: float) -> None:
        """Fill ``handing``, which its caller has not seen before it has returned."""
        self._state.check()
        with self._owner:
            self._state.check()
            if self._taken is not None:
                self._mend(self._taken)
            try:
                self._wait_for(handing, n, start, timeout)
            except BaseException as error:
                self._broken_off(error, handing)  # at once: the lease renewer may be next
                raise
            finally:
                self._received_ms = monotonic_ms()

    def _broken_off(self, error: BaseException, messages: list[Message]) -> None:
        if not isinstance(error, KafkaMQError):
            noted = set(map(id, messages))  # a call that mends may be broken off, too
            before = self._taken or ()
            self._taken = [*messages, *(each for each in before if id(each) not in noted)]

    def _mend(self, handing: Sequence[Message]) -> None:
        """What a broken-off receive had taken or committed is ready, the rest is read again."""
        own = cast("Sequence[MarkersMessage]", handing)
        self._ack_writer.taken_back(own)
        self._batches.take_back(own)
        self._taken = []
        self._batches.mend()
        self._taken = None

    def _wait_for(self, handing: list[Message], n: int, start: int, timeout: float) -> None:
        self._hand_out(handing, n)
        if handing:
            return
        self._ack_writer.serve()
        deadline_s = time.monotonic() + timeout
        self._hurry.clear()
        while True:
            left_s = deadline_s - time.monotonic()
            self._batches.step(start, max(0.0, left_s))
            if self._reader.is_idle:  # no room, R6, late STARTs: who receives keeps others from it
                self._reader.tend()
            self._hand_out(handing, n)
            if handing or left_s <= 0 or self._closing.is_set() or self._hurry.is_set():
                return  # at most once: what is being committed comes with the next receive

    def _hand_out(self, handing: list[Message], n: int) -> None:
        """R5's last step: not what has ended meanwhile."""
        batches = self._batches
        if not batches.ready:
            return
        state, now_ms = self._state, monotonic_ms()
        with state.lock:
            may_hand_out = state.leases.may_hand_out
            ready = batches.ready
            if n == 1 and not handing:
                self._hand_out_one(handing, ready, now_ms)
            while ready and len(handing) < n:
                taken = list(islice(ready, n - len(handing)))
                are_whole = True  # each lease holds all of its messages
                for lease in set(map(_LEASE, taken)):
                    may_hand_out(lease, now_ms)  # else it holds nothing any more
                    are_whole = are_whole and len(lease.held) == len(lease.offsets)
                if are_whole:
                    handing += taken
                else:
                    handing += [each for each in taken if each.offset in each._lease.held]
                if len(taken) == len(ready):
                    ready.clear()  # last: an interrupt in between leaves some in both, none in none
                    break
                for _ in taken:
                    ready.popleft()
            state.renew_id()
        if not ready:
            self._ahead.drained(batches.ready_count, now_ms - batches.ready_ms)
        self._ack_writer.handed_out(cast("list[MarkersMessage]", handing))

    def _hand_out_one(
        self, handing: list[Message], ready: deque[MarkersMessage], now_ms: int
    ) -> None:
        """The first one, unless it is not to be handed out."""
        message = ready[0]
        lease = message._lease
        if message.offset in lease.held and self._state.leases.may_hand_out(lease, now_ms):
            handing.append(message)
            ready.popleft()

    def put_back(self, messages: Sequence[Message]) -> None:
        """See ``Consumer.put_back``."""
        own = cast("Sequence[MarkersMessage]", messages)
        self._ack_writer.taken_back(own)
        with self._state.lock:
            self._batches.ready.extendleft(reversed(own))

    # Membership, told by the reader.

    def _is_topic_another(self) -> bool:
        """Ask whether the messages' topic was recreated; ``Batches.step`` sees to the rest."""
        return self._state.namespace.ask_again() is not self._starter.facts

    def _answered(self, messages: MessageSet) -> None:
        """STARTs of these are in the log: a tracker answers for them."""
        with self._state.lock:
            self._state.leases.answered(messages)

    def _overtaken(self, found: Overtaken) -> None:
        """A former owner's STARTs are known; the latest markers may be newer than the clock."""
        state = self._state
        now_ms = max(self._starter.now_ms(), found.latest_ms)
        with state.lock:
            state.leases.answered(found.redelivered)
            state.leases.overtaken(found.starts, monotonic_ms(), now_ms)

    def _broker_ms(self) -> int | None:
        return self._state.broker_ms()

    def _topic_id(self) -> bytes:
        return self._starter.facts.message_topic_id

    def _stamp(self) -> bytes:
        return self._starter.facts.stamp

    def _gained(self, partitions: Sequence[int]) -> None:
        """Partitions were assigned (R7's 60 s begin)."""
        now_ms = monotonic_ms()
        # Against an older owner's delayed START, which no transaction of its can hold any more.
        if not self._queue.exactly_once:
            with self._state.lock:
                for partition in partitions:
                    self._state.leases.gained_partition(partition, now_ms)
        _log.info(
            "partitions were assigned",
            extra={"queue": self.queue_id, "partitions": list(partitions)},
        )

    def _lost(self, partitions: Sequence[int]) -> None:
        """Partitions went to others; leases of what is held stay."""
        self._batches.lost(partitions)
        now_ms = monotonic_ms()
        with self._state.lock:
            for partition in partitions:
                self._state.leases.lost_partition(partition, now_ms)
        _log.info(
            "partitions were revoked",
            extra={"queue": self.queue_id, "partitions": list(partitions)},
        )

    def _tend(self) -> None:
        """The lease renewer polls when the owner does not: the group does not wait for it."""
        self._reader.positions.write()
        if not self._reader.is_idle or self._closing.is_set():
            return
        if self._owner.acquire(blocking=False):
            try:
                if self._taken is not None and not self._state.is_closed:
                    self._mend(self._taken)
                if not self._state.is_closed:
                    idle_ms = monotonic_ms() - self._received_ms  # it may have received meanwhile
                    if idle_ms >= self._reader.max_idle_ms and not self._reader.is_away:
                        self._leave(idle_ms)
                    self._batches.tend()
                    self._reader.tend()
            finally:
                self._owner.release()

    def _leave(self, idle_ms: int) -> None:
        """Nobody receives: what is not handed out is for others. What is keeps its leases."""
        _log.warning(
            "nothing was received for max.poll.interval.ms: the consumer leaves its group, and "
            "joins it again with the next receive",
            extra={"queue": self.queue_id, "idle_s": idle_ms // 1000, "held": self.in_flight},
        )
        self._release_all(MAX_LEAVE_S)
        self._reader.leave()

    # Ending.

    def flush(self, timeout: float = 30.0) -> None:
        """See ``Consumer.flush``."""
        self._state.check()
        self._ack_writer.flush(timeout)

    def close(self, timeout: float = 30.0) -> None:
        """See ``Consumer.close``."""
        if self._state.is_forked:
            return
        self._closing.set()
        deadline_s = time.monotonic() + timeout
        with self._owner:
            if self._state.is_closed:
                return
            try:
                self._release_all(timeout / 2)
                self._ack_writer.hand_over.close()
                self._lease_renewer.stop()
                failure = self._ack_writer.close(max(0.0, deadline_s - time.monotonic()))
            finally:
                atexit.unregister(self._flush_at_exit)
                self._state.is_closed = True
                self._forget_gauge()
                process_gate.leave(self._state.leases)
                self._state.writer.close()
                self._handover.close()
                self._reader.positions.close()  # before another member goes on from them
                self._reader.close()
        # Without the lock: on_lease_lost may be waiting for it, to close this consumer.
        self._ack_writer.lost_leases.finish(deadline_s - time.monotonic())
        if failure is not None:
            raise failure

    def _flush_at_exit(self) -> None:
        """The process ends without ``close``: at least the verdicts given reach Kafka."""
        if not self._state.is_forked and not self._state.is_closed:
            self._ack_writer.close(MAX_EXIT_S)
            self._ack_writer.lost_leases.finish(MAX_EXIT_S)

    def _release_all(self, timeout_s: float) -> None:
        """R8: RELEASE of what is STARTed and committed; the rest runs out."""
        deadline_s = time.monotonic() + timeout_s
        try:
            if self._taken is not None:
                self._mend(self._taken)
            self._batches.end(deadline_s)
            self._batches.release(self._ack_writer)
        except KafkaMQError as error:
            _log.warning(
                "messages could not be released; they come back when their leases end",
                extra={"queue": self.queue_id, "error": str(error)},
            )
