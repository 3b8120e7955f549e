"""Receives a queue's messages: what the consumers of all backends have."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from datetime import timedelta

from kafkamq.config import QueueConfig
from kafkamq.errors import BrokerError, ConfigError, DeadlineExceededError, StateError
from kafkamq.queue.message import Message
from kafkamq.transport.errors import is_retriable

_PAUSE_S = 0.25
_log = logging.getLogger(__name__)


class Consumer(ABC):
    """Receives the messages of one queue; iterable; a context manager.

    One thread owns it and receives; verdicts may come from any thread. Made before a fork it
    refuses to work in the child (StateError): the child makes a Service of its own. Each backend
    has a subclass, which ``Queue.consumer`` makes.
    """

    def __init__(self, queue: QueueConfig) -> None:
        self._queue = queue
        self._closing = threading.Event()
        self._hurry = threading.Event()  # the present receive has nobody to return to

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Consumer of {self._queue.queue_id!r}>"

    @property
    def queue_id(self) -> str:
        """The queue that it receives from."""
        return self._queue.queue_id

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Messages held: fetched ahead, or handed out and without verdict."""

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether ``close`` has run."""

    @property
    def has_failed(self) -> bool:
        """Whether it has ended by a failure, so that no receive can succeed any more."""
        return False

    # Receiving.

    def receive(self, timeout: float | timedelta = 1.0) -> Message | None:
        """The next message, or None when none came in time.

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
        """Messages until the consumer is closed; retriable errors are retried."""
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
            except BaseException as error:  # between the lines above, too
                if message is not None:
                    self._broken_off(error, [message])
                if not isinstance(error, StateError) or not self._closing.is_set():
                    raise  # else closed by another thread meanwhile
        return None

    def _broken_off(self, error: BaseException, messages: list[Message]) -> None:
        """A call ends by ``error`` and has received these, which its caller has not seen."""
        del error
        self.put_back(messages)

    def cancel_receive(self) -> None:
        """Whoever waits for the present ``receive`` has gone: it ends soon. From any thread."""
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
