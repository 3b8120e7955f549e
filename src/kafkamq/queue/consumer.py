"""Receives a queue's messages: what the consumers of all backends have, and lost leases."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta

from kafkamq.config import QueueConfig
from kafkamq.errors import (
    BrokerError,
    ConfigError,
    DeadlineExceededError,
    LeaseLostError,
    StateError,
)
from kafkamq.metrics.catalog import SEND_TO_RECEIVE_SECONDS, Labels
from kafkamq.queue.message import Message
from kafkamq.transport.errors import is_retriable
from kafkamq.types import MessageId

_PAUSE_S = 0.25
_log = logging.getLogger(__name__)


class HandOutAges:
    """Observes how old the records of one consumer are when they are handed out.

    A record costs a microsecond to hand out, and may not cost another tenth of it here. So at most
    16 messages of a batch, evenly spaced, are looked at, and each counts for those up to the next.
    Messages that are received one by one are noted, and counted with the rest of their
    millisecond, or when somebody looks. A note is the record's time (ms): it keeps no payload.
    """

    def __init__(self, queue_id: str) -> None:
        self.wall_ms: Callable[[], int] = _wall_ms
        self._queue_id = queue_id
        self._lock = threading.Lock()
        self._noted: deque[int] = deque()
        self._noted_ms = -1
        self._noted_wall_ms = 0
        # Each batch is looked at from another message on, so that none is always passed over.
        self._turn = 0

    def watch(self) -> Callable[[], None]:
        """Count what is noted whenever somebody looks; what it returns does so a last time."""
        forget = SEND_TO_RECEIVE_SECONDS.watch(self._fold)

        def close() -> None:
            forget()
            self._fold()

        return close

    def note(self, messages: Sequence[Message], now_ms: int) -> None:
        """Note what is handed out at a monotonic time; the consumer's one thread calls it."""
        if len(messages) > 1:
            step = -(-len(messages) // 16)
            self._turn += 1
            written = [each._record.timestamp()[1] for each in messages[self._turn % step :: step]]
            weights = [step] * len(written)
            weights[-1] += len(messages) - step * len(written)
            self._count(zip(written, weights, strict=True), self.wall_ms())
        elif messages:
            if now_ms != self._noted_ms:
                self._fold()
                self._noted_ms, self._noted_wall_ms = now_ms, self.wall_ms()
            self._noted.append(messages[0]._record.timestamp()[1])

    def _count(self, written: Iterable[tuple[int, int]], wall_ms: int) -> None:
        """Count pairs of a record's time (ms; -1: it has none) and a number of messages."""
        observed = [(max(0, wall_ms - ms) / 1000, count) for ms, count in written if ms > 0]
        SEND_TO_RECEIVE_SECONDS.observe_all(observed, self._queue_id)

    def _fold(self) -> Mapping[Labels, float]:
        with self._lock:
            # Of two threads the one that has taken the notes counts them.
            noted = [self._noted.popleft() for _ in range(len(self._noted))]
            if noted:
                self._count(Counter(noted).items(), self._noted_wall_ms)
        return {}


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class Consumer(ABC):
    """Receives the messages of one queue; iterable; a context manager.

    One thread owns it and receives; verdicts may come from any thread. Made before a fork it
    refuses to work in the child (StateError): the child makes a Service of its own. Each backend
    has a subclass, which ``Queue.consumer`` makes.
    """

    def __init__(self, queue: QueueConfig) -> None:
        self._queue = queue
        self._closing = threading.Event()
        # The present receive has nobody to return to.
        self._hurry = threading.Event()
        self._ages = HandOutAges(queue.queue_id)

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Consumer of {self._queue.queue_id!r}>"

    @property
    def queue_id(self) -> str:
        return self._queue.queue_id

    @property
    def consumer_id(self) -> str:
        """Return what markers call it now; empty where its backend has no such id."""
        return ""

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Return messages held: fetched ahead, or handed out and without verdict."""

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Return whether ``close`` has run."""

    @property
    def has_failed(self) -> bool:
        """Return whether it has ended by a failure, so that no receive can succeed any more."""
        return False

    # Receiving.

    def receive(self, timeout: float | timedelta = 1.0) -> Message | None:
        """Return the next message, or None when none came in time.

        Some may be fetched ahead; ``close`` gives those back.

        Args:
            timeout: Seconds to wait.

        Raises:
            ConfigError: ``timeout`` is no time.
            StateError: Closed, or in a forked child.
            BrokerError: Kafka refused or failed; nothing is lost, receive again if it says
                ``is_retriable``.
            DataLossError: Messages were deleted before they were read.
        """
        messages = self.receive_many(1, timeout)
        return messages[0] if messages else None

    @abstractmethod
    def receive_many(self, n: int, timeout: float | timedelta = 1.0) -> list[Message]:
        """Up to ``n`` messages as soon as there are any; none when none came in time.

        The errors are those of ``receive``.
        """

    def __iter__(self) -> Iterator[Message]:
        """Return messages until the consumer is closed; retriable errors are retried."""
        # No generator: an interrupt as it goes on would come after its message was given away.
        return iter(self._next, None)

    def _next(self) -> Message | None:
        while not self._closing.is_set():
            message = None
            try:
                message = self.receive(self._queue.next_message_timeout_ms / 1000)
                if message is not None:
                    return message
            except (BrokerError, DeadlineExceededError) as error:
                if not is_retriable(error) or self.has_failed:
                    raise
                _log.warning("receiving failed and goes on", extra={"error": str(error)})
                self._closing.wait(_PAUSE_S)
            except BaseException as error:
                # An interrupt may come between the lines above, too.
                if message is not None:
                    self._broken_off(error, [message])
                if not isinstance(error, StateError) or not self._closing.is_set():
                    raise
        return None

    def _broken_off(self, error: BaseException, messages: list[Message]) -> None:
        """A call ends by ``error`` and has received these, which its caller has not seen."""
        del error
        self.put_back(messages)

    def cancel_receive(self) -> None:
        """End the present ``receive`` soon, as nobody waits for it any more. From any thread."""
        self._hurry.set()

    @abstractmethod
    def put_back(self, messages: Sequence[Message]) -> None:
        """These were received and nobody saw them: the next call gets them. From any thread."""

    def _check_count(self, n: int) -> None:
        if n < 1:
            raise ConfigError(f"n is {n}: it must be >= 1")

    # Ending.

    @abstractmethod
    def flush(self, timeout: float | timedelta = 30.0) -> None:
        """Wait until all verdicts are in Kafka.

        Raises:
            DeadlineExceededError: Not in time; nothing was dropped, flush again.
            LeaseLostError: Some came after the end of their leases; it names them, each once (the
                first 10,000 since the last flush).
            StateError: Closed, or in a forked child.
        """

    @abstractmethod
    def close(self, timeout: float | timedelta = 30.0) -> None:
        """Release what was never handed out, confirm the verdicts, leave the group.

        What was handed out and has no verdict comes back when its lease ends. Closing twice is
        fine; so is closing from another thread, which ends an iteration, and from inside of
        ``on_lease_lost``; otherwise it waits for that, no longer than the timeout.

        Raises:
            DeadlineExceededError, BrokerError: Verdicts could not be confirmed in time; they may
                be lost, and their messages come back.
        """


MAX_LATE = 10_000
MAX_NAMED = 10


class LostLeases:
    """What one consumer has to tell; thread-safe.

    ``on_lease_lost`` runs in one thread, begun when there is something to tell and ended when all
    is told: whatever the application does there holds up no renewal and no verdict, and may close
    the consumer. While it does not return, up to ``max_untold`` messages wait; losses beyond that
    are counted and logged, and not told.
    """

    def __init__(
        self, queue_id: str, on_lease_lost: Callable[[Message], None] | None, max_untold: int
    ) -> None:
        self._queue_id = queue_id
        self._on_lease_lost = on_lease_lost
        self._max_untold = max_untold
        self._changed = threading.Condition()
        self._untold: deque[Message | MessageId] = deque()
        self._dropped = 0
        self._teller: threading.Thread | None = None
        self._late: list[MessageId] = []
        self._more_late = 0

    # What happened.

    def lost(self, message: Message | MessageId) -> None:
        """Its lease has ended; ``tell_soon`` tells of it."""
        # Without a call-back only a line of log is due: it needs no payload.
        each = _id_of(message) if self._on_lease_lost is None else message
        with self._changed:
            is_full = len(self._untold) >= self._max_untold
            if is_full:
                self._dropped += 1
                is_first = self._dropped == 1
            else:
                self._untold.append(each)
        if is_full and is_first:
            _log.warning(
                "on_lease_lost is behind: more lost leases are not told",
                extra={"queue": self._queue_id, "waiting": self._max_untold},
            )

    def late(self, message: Message | MessageId) -> None:
        """Its verdict came too late, or never; ``flush`` names it, too.

        By its id: the application is not told, as it never had it.
        """
        with self._changed:
            if len(self._late) < MAX_LATE:
                self._late.append(_id_of(message))
            else:
                self._more_late += 1
        self.lost(message)

    def told_otherwise(self, message: Message) -> None:
        """Who gave the verdict waits for it and is told at once: ``flush`` does not name it."""
        with self._changed:
            try:
                self._late.remove(message.message_id)
            except ValueError:
                # Another thread's flush has named it, or it was only counted.
                self._more_late = max(0, self._more_late - 1)

    def take_late(self) -> LeaseLostError | None:
        """Return the verdicts that came late since, each named once."""
        with self._changed:
            late, self._late = self._late, []
            more, self._more_late = self._more_late, 0
        return too_late(late, more) if late else None

    # Telling.

    def tell_soon(self) -> None:
        """Begin to tell what there is, unless that is going on; returns at once."""
        with self._changed:
            if not self._untold or self._teller is not None:
                return
            self._teller = threading.Thread(
                target=self._tell_all, name="kafkamq-lease-lost", daemon=True
            )
            try:
                self._teller.start()
            except RuntimeError as error:
                # There are no more threads, or the interpreter ends.
                self._teller = None
                _log.warning("lost leases are not told yet", extra={"error": str(error)})

    def finish(self, timeout_s: float) -> None:
        """Wait until all is told; not from inside of ``on_lease_lost``. Hold no lock."""
        self.tell_soon()
        with self._changed:
            if self._teller is threading.current_thread():
                return
            if not self._changed.wait_for(lambda: self._teller is None, max(0.0, timeout_s)):
                _log.warning(
                    "on_lease_lost has not returned in time",
                    extra={"queue": self._queue_id, "not_told": len(self._untold)},
                )

    def _tell_all(self) -> None:
        while True:
            with self._changed:
                each = self._untold.popleft() if self._untold else None
                if each is None:
                    dropped, self._dropped = self._dropped, 0
                    if not dropped:
                        # What waits in ``finish`` knows then that all is told.
                        self._teller = None
                        self._changed.notify_all()
                        return
            if each is not None:
                self._tell(each)
                continue
            _log.warning(
                "lost leases were not told: on_lease_lost was behind",
                extra={"queue": self._queue_id, "count": dropped},
            )

    def _tell(self, each: Message | MessageId) -> None:
        place = _id_of(each)
        _log.info(
            "a lease was lost",
            extra={"queue": self._queue_id, "partition": place.partition, "offset": place.offset},
        )
        if self._on_lease_lost is None or isinstance(each, MessageId):
            return
        try:
            self._on_lease_lost(each)
        except BaseException:  # noqa: BLE001 - sys.exit() included: the others are told as well
            _log.exception("on_lease_lost failed", extra={"queue": self._queue_id})


def _id_of(message: Message | MessageId) -> MessageId:
    return message if isinstance(message, MessageId) else message.message_id


def too_late(ids: Sequence[MessageId], more: int = 0) -> LeaseLostError:
    """``more``: of which only the number is known."""
    count = len(ids) + more
    named = ", ".join(f"{each.partition}/{each.offset}" for each in ids[:MAX_NAMED])
    others = f" and {count - MAX_NAMED} more" if count > MAX_NAMED else ""
    return LeaseLostError(
        f"{count} verdicts came after the end of their leases: {named}{others} "
        "(partition/offset); these messages may be delivered again",
        tuple(ids),
    )
