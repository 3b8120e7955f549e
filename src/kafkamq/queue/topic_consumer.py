"""What consumers of queues with a topic of their own have in common: the API, and one verdict."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from abc import abstractmethod
from collections import Counter as Count
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

from kafkamq.config import QueueConfig, utf8, wait_seconds
from kafkamq.errors import (
    ConfigError,
    DeadlineExceededError,
    KafkaMQError,
    LeaseLostError,
    StateError,
)
from kafkamq.metrics import catalog
from kafkamq.metrics.catalog import Counter, Labels
from kafkamq.queue.consumer import Consumer, LostLeases
from kafkamq.queue.dead_letter_writer import DeadLetterOutbox
from kafkamq.queue.message import Acknowledger, Message
from kafkamq.queue.rules.capabilities import Feature, require
from kafkamq.queue.rules.retry import GiveUp, backoff_delay_ms, judge
from kafkamq.transport.clients import ForkCheck
from kafkamq.transport.clock import monotonic_ms, public_s
from kafkamq.transport.record import RecordLike, headers_of
from kafkamq.types import DeadLetterReason, Nack, Outcome, Reject

P = TypeVar("P")
# Dead letters under way, with their payloads, at which nothing is handed out.
MAX_UNWRITTEN = 10_000
_SLICE_S = 0.25
_log = logging.getLogger(__name__)

_COUNTERS: dict[object, Counter] = {
    "received": catalog.RECEIVED,
    "again": catalog.RECEIVED_AGAIN,
    Outcome.ACK: catalog.ACKED,
    Outcome.NACK: catalog.NACKED,
    Outcome.REJECT: catalog.REJECTED,
    Outcome.RELEASE: catalog.RELEASED,
    "lost": catalog.LEASES_LOST,
}


class TopicAcknowledger(Acknowledger, Protocol):
    def moment_s(self, clock_ms: float) -> float:
        """Return a moment of its clock in seconds of ``time.monotonic()``."""


class MessageState(Enum):
    HELD = "held"
    ACKNOWLEDGED = "settled"
    LOST = "lost"


class TopicMessage(Message, Generic[P]):
    """One delivery; see ``Message``.

    Attributes:
        state: Guarded by its consumer.
        place: What its backend finds it by.
    """

    __slots__ = ("_deadline_ms", "place", "state")

    _acknowledger: TopicAcknowledger

    def __init__(
        self,
        consumer: TopicAcknowledger,
        record: RecordLike,
        *,
        delivery_count: int = 1,
        deadline_ms: float = math.inf,
        place: P,
    ) -> None:
        """Only its consumer makes it; ``deadline_ms`` is of that one's clock."""
        super().__init__(consumer, record, headers_of(record), delivery_count)
        self._deadline_ms = deadline_ms
        self.place = place
        self.state = MessageState.HELD

    @property
    def deadline(self) -> float:
        return self._acknowledger.moment_s(self._deadline_ms)


M = TypeVar("M", bound=TopicMessage[Any])


class TopicConsumer(Consumer, Generic[M]):
    """A consumer without markers: a backend says how messages come, and what verdicts do."""

    def __init__(
        self,
        queue: QueueConfig,
        dead_letters: DeadLetterOutbox,
        on_lease_lost: Callable[[Message], None] | None = None,
    ) -> None:
        super().__init__(queue)
        self._dead_letters = dead_letters
        self._lost_leases = LostLeases(queue.queue_id, on_lease_lost, queue.max_in_flight)
        self._fork_check = ForkCheck("Consumer")
        self._changed = threading.Condition(threading.RLock())
        self._ready: deque[M] = deque()
        self._held: dict[int, M] = {}
        self._unwritten_count = 0
        self._has_closed = False
        self._failure: BaseException | None = None
        self._counts: Count[tuple[object, int]] = Count()
        self._forget_metrics = [
            catalog.IN_FLIGHT.watch(lambda: {(queue.queue_id,): self.in_flight}),
            *(each.watch(self._counted(what)) for what, each in _COUNTERS.items()),
            self._ages.watch(),
        ]

    # What a backend says.

    def _fill(self, n: int) -> None:
        """Put what is there into ``_ready``, up to ``n``; with ``_changed`` held; never waits."""

    def _may_hand_out(self, message: M) -> bool:
        """Return whether it can still be worked on; if not, the backend gives it back itself."""
        del message
        return True

    @abstractmethod
    def _done(self, message: M) -> None:
        """It needs no more deliveries; may raise LeaseLostError."""

    def _given_up(self, message: M) -> None:
        """Its dead letter is in Kafka; may raise LeaseLostError."""
        self._done(message)

    def _is_ours(self, message: M) -> bool:
        del message
        return True

    def _dropped(self, message: M) -> None:
        """Its dead letter is not written: others decide on it again."""

    @abstractmethod
    def _again(self, message: M, delay_ms: int) -> None:
        """Have the message delivered again; may raise LeaseLostError."""

    @abstractmethod
    def _confirm(self, timeout_s: float) -> None:
        """Waits until all verdicts are in Kafka; raises DeadlineExceededError."""

    @abstractmethod
    def _end(self, timeout_s: float) -> None:
        """Give back ``_ready``, and end; all verdicts are confirmed by then, or given up."""

    def _fail(self, error: BaseException) -> None:
        """No more messages come: the next ``receive`` raises this."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    @property
    def has_failed(self) -> bool:
        try:
            self._check_failure()
        except BaseException:  # noqa: BLE001 - whatever it was
            return True
        return False

    def _extend(self, message: M, extension_ms: int) -> None:
        """Hold it longer; where nothing ends by time there is nothing to do."""

    def _now_ms(self) -> int:
        return monotonic_ms()

    def moment_s(self, clock_ms: float) -> float:
        return public_s(clock_ms)

    # Receiving.

    @property
    def max_deliveries(self) -> int:
        """Return after how many deliveries a message is given up."""
        return self._queue.max_deliveries

    @property
    def in_flight(self) -> int:
        return len(self._held) + len(self._ready)

    @property
    def is_closed(self) -> bool:
        return self._has_closed

    def receive_many(self, n: int, timeout: float | timedelta = 1.0) -> list[Message]:
        self._check_count(n)
        self._check()
        self._hurry.clear()
        deadline_s = time.monotonic() + wait_seconds(timeout, may_be_endless=True)
        with self._changed:
            while True:
                self._check_failure()
                messages = self._take(n)
                left_s = deadline_s - time.monotonic()
                if messages or left_s <= 0 or self._closing.is_set() or self._hurry.is_set():
                    return messages
                self._changed.wait(min(left_s, _SLICE_S))

    def _take(self, n: int) -> list[Message]:
        taken: list[Message] = []
        room = min(n, self._queue.max_in_flight - len(self._held))
        if self._unwritten() >= MAX_UNWRITTEN:
            room = 0
        if len(self._ready) < room:
            self._fill(room)
        ready, counts, again_count = self._ready, self._counts, 0
        while ready and len(taken) < room:
            message = ready.popleft()
            if message.state is MessageState.HELD and self._may_hand_out(message):
                self._held[id(message)] = message
                taken.append(message)
                partition = message._record.partition() or 0
                counts["received", partition] += 1
                if message._count > 1:
                    counts["again", partition] += 1
                    again_count += 1
        first = [each for each in taken if each._count == 1] if again_count else taken
        self._ages.note(first, monotonic_ms())
        return taken

    def cancel_receive(self) -> None:
        super().cancel_receive()
        with self._changed:
            self._changed.notify_all()

    def put_back(self, messages: Sequence[Message]) -> None:
        with self._changed:
            for message in reversed(cast("Sequence[M]", messages)):
                if self._held.pop(id(message), None) is not None:
                    self._ready.appendleft(message)
            self._changed.notify_all()

    # Verdicts: what ``Message`` calls.

    def acknowledge(
        self,
        message: M,
        outcome: Outcome,
        *,
        wait: bool = False,
        reason: str = "",
        delay_ms: int | None = None,
    ) -> None:
        """Apply the one verdict on a message; see ``Message.ack`` for the errors."""
        self._check()
        utf8(reason, name="reason")
        if outcome is Outcome.REJECT and not reason:
            raise ConfigError("reason is '': a rejection needs one")
        if outcome is Outcome.NACK and delay_ms:
            asked = f"queue {self.queue_id!r}: nack(delay={delay_ms / 1000:g})"
            require(self._queue.backend, Feature.RETRY_DELAY, asked)
        self._claim(message, outcome)
        if outcome is Outcome.ACK:
            self._done(message)
        else:
            self._judge(message, outcome, reason, delay_ms)
        if wait:
            self.flush()

    def _claim(self, message: M, outcome: Outcome) -> None:
        """From here on it is settled, whatever becomes of that."""
        with self._changed:
            if message.state is MessageState.ACKNOWLEDGED:
                raise StateError(f"{message!r} has a verdict already: one in all")
            if self._now_ms() > message._deadline_ms:
                self._lose(message)
            if message.state is MessageState.LOST:
                raise LeaseLostError(
                    f"the lease of {message!r} ended before the verdict: it may be with another "
                    "worker",
                    (message.message_id,),
                )
            message.state = MessageState.ACKNOWLEDGED
            self._held.pop(id(message), None)
            self._counts[outcome, message._record.partition() or 0] += 1
            self._changed.notify()

    def _judge(self, message: M, outcome: Outcome, reason: str, delay_ms: int | None) -> None:
        verdict = Reject(reason) if outcome is Outcome.REJECT else Nack(None, reason)
        count = message.delivery_count
        decision = judge(verdict, attempt=count, max_attempts=self.max_deliveries)
        if isinstance(decision, GiveUp):
            self._write_dead_letter(message, decision.reason, reason)
            return
        if delay_ms is None:
            delay_ms = backoff_delay_ms(self._queue.backoff, count, random.random())
        self._again(message, delay_ms)

    def _write_dead_letter(self, message: M, reason: DeadLetterReason, error: str) -> None:
        """A dead letter first, however long that takes; the message is done when Kafka has it.

        What went to another worker meanwhile is not written, and ``flush`` says so.
        """
        with self._changed:
            self._unwritten_count += 1

        def written(outcome: Future[None]) -> None:
            is_dropped = outcome.cancelled()
            failure = None if is_dropped else outcome.exception()
            try:
                if is_dropped:
                    self._lost_late((message,))
                    self._dropped(message)
                elif failure is None:
                    _log.info(
                        "a message is given up; it is a dead letter",
                        extra={"queue": self.queue_id, "reason": reason.value},
                    )
                    self._given_up(message)
                else:
                    # The consumer is closed: nothing says that the message is done.
                    _log.error(
                        "a dead letter could not be written; its message comes again",
                        extra={"queue": self.queue_id, "error": str(failure)},
                    )
            except LeaseLostError:
                # It is written all the same, and perhaps once more by another consumer.
                self._lost_late((message,))
            finally:
                with self._changed:
                    self._unwritten_count -= 1
                    self._changed.notify_all()

        is_ours = partial(self._is_ours, message)
        self._dead_letters.write(message, reason, error, is_ours).add_done_callback(written)

    def _unwritten(self) -> int:
        """Dead letters under way."""
        return self._unwritten_count

    def token(self, message: M) -> str:
        raise self._no_tokens("message.token")

    def hold(self, message: M, hold_ms: int) -> None:
        raise self._no_tokens("hold()")

    def _no_tokens(self, asked: str) -> ConfigError:
        require(self._queue.backend, Feature.TOKENS, f"queue {self.queue_id!r}: {asked}")
        return ConfigError(f"queue {self.queue_id!r}: {asked}: queues in memory have no tokens")

    def has_verdict(self, message: M) -> bool:
        return message.state is MessageState.ACKNOWLEDGED

    def extend(self, message: M, extension_ms: int) -> None:
        """Hold a message longer; see ``Message.extend``."""
        require(self._queue.backend, Feature.EXTEND, f"queue {self.queue_id!r}: extend()")
        self._check()
        with self._changed:
            if message.state is MessageState.ACKNOWLEDGED:
                raise StateError(f"{message!r} has a verdict already")
            if message.state is MessageState.LOST or self._now_ms() > message._deadline_ms:
                raise LeaseLostError(f"the lease of {message!r} has ended", (message.message_id,))
            self._extend(message, extension_ms)

    # Leases that end.

    def _lose(self, message: M) -> None:
        """Its lease has ended while it was held; with ``_changed`` held."""
        if message.state is not MessageState.HELD:
            return
        message.state = MessageState.LOST
        self._counts["lost", message._record.partition() or 0] += 1
        if self._held.pop(id(message), None) is not None:
            self._lost_leases.lost(message)
            self._lost_leases.tell_soon()

    def _lost_late(self, messages: Iterable[M]) -> None:
        """Verdicts on these came too late."""
        for message in messages:
            with self._changed:
                self._counts["lost", message._record.partition() or 0] += 1
            self._lost_leases.late(message)
        self._lost_leases.tell_soon()

    # The end.

    def flush(self, timeout: float | timedelta = 30.0) -> None:
        self._check()
        self._flush(wait_seconds(timeout, may_be_endless=True))
        late = self._lost_leases.take_late()
        if late is not None:
            raise late

    def _flush(self, timeout: float) -> None:
        deadline_s = time.monotonic() + timeout
        with self._changed:
            while self._unwritten():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceededError(
                        f"{self._unwritten()} dead letters of queue {self.queue_id!r} are not"
                        f" confirmed after {timeout:g} s"
                    )
                self._changed.wait(min(left_s, _SLICE_S))
        self._confirm(max(0.0, deadline_s - time.monotonic()))

    def close(self, timeout: float | timedelta = 30.0) -> None:
        if self._fork_check.is_forked:
            return
        timeout_s = wait_seconds(timeout, may_be_endless=True)
        with self._changed:
            if self._closing.is_set():
                return
            self._closing.set()
            self._changed.notify_all()
        deadline_s = time.monotonic() + timeout_s
        failure: KafkaMQError | None = None
        try:
            self._flush(timeout_s / 2)
        except KafkaMQError as error:
            failure = error
        try:
            self._end(max(1.0, deadline_s - time.monotonic()))
        finally:
            self._has_closed = True
            for forget in self._forget_metrics:
                forget()
            # What was counted is kept when nobody watches any more.
            for (what, partition), count in self._counts.items():
                _COUNTERS[what].add(count, self.queue_id, partition)
            self._counts.clear()
            try:
                self._dead_letters.close(max(1.0, deadline_s - time.monotonic()))
            finally:
                self._lost_leases.finish(deadline_s - time.monotonic())
        if failure is not None:
            raise failure

    def _check(self) -> None:
        self._fork_check.check()
        if self._has_closed:
            raise StateError(f"{self!r} is closed")

    # Metrics.

    def _counted(self, what: object) -> Callable[[], Mapping[Labels, float]]:
        def values() -> dict[Labels, float]:
            with self._changed:
                return {
                    (self.queue_id, str(partition)): float(count)
                    for (counted, partition), count in self._counts.items()
                    if counted == what
                }

        return values
