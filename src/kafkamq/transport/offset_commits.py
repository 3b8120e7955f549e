"""Offset commits that wait no longer than they should.

Kafka answers the requests of one connection in their order. While a group rebalances, a commit
stands behind the worker's own request to join, which is answered when the slowest member has come:
librdkafka's synchronous commit then blocks for half a minute, and serves no rebalance meanwhile. So
commits run in a thread of their own, one after the other, and whoever waits goes on polling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from enum import Enum
from typing import TypeVar

from confluent_kafka import KafkaException, TopicPartition

from kafkamq.transport.errors import broker_error, is_retriable
from kafkamq.transport.port import Consumer as KafkaConsumer

__all__ = ["Answer", "Commit", "Committer"]

Answer = TypeVar("Answer")
COMMIT_TIMEOUT_S = 10.0  # then the batch is given up (R5: bounded)


class Commit(Enum):
    """What became of a commit."""

    DONE = 0
    PENDING = 1
    FAILED = 2  # the group has moved on, or Kafka is away: read again from what is committed


class Committer:
    """Commits offsets of one topic, one commit at a time; one owner thread."""

    def __init__(self, topic: str, group: str) -> None:
        self._topic = topic
        self._thread = ThreadPoolExecutor(1, f"kafkamq-commit-{group}")
        self._pending: Future[None] | None = None
        self._began_s = 0.0
        self._is_finished = False

    @property
    def is_pending(self) -> bool:
        """Whether a commit is under way and not given up."""
        return self._pending is not None

    def begin(self, consumer: KafkaConsumer, offsets: Mapping[int, int]) -> None:
        """Commit these offsets (by partition); none may be pending."""
        wanted = [TopicPartition(self._topic, number, at) for number, at in offsets.items()]
        self._began_s = time.monotonic()
        self._pending = self._thread.submit(_commit, consumer, wanted)

    def wait(self, timeout_s: float) -> Commit:
        """What became of the pending commit, after waiting for it.

        Raises:
            BrokerError: It failed, and would fail again.
        """
        pending = self._pending
        assert pending is not None, "a commit was begun"
        try:
            pending.result(timeout_s)
        except FutureTimeoutError:
            if time.monotonic() - self._began_s < COMMIT_TIMEOUT_S:
                return Commit.PENDING
            self.give_up()  # it may succeed later; the next commit waits for its end
            return Commit.FAILED
        except KafkaException as error:
            self._pending = None
            wrapped = broker_error(error, f"committing offsets of {self._topic}")
            if is_retriable(wrapped):
                return Commit.FAILED
            raise wrapped from error
        self._pending = None
        return Commit.DONE

    def ask(self, question: Callable[[], Answer]) -> Future[Answer]:
        """Ask it behind the commits that were begun."""
        return self._thread.submit(question)

    def give_up(self) -> None:
        """Wait no more for the pending commit."""
        if self._pending is not None:
            self._pending.cancel()  # only if it has not begun
            self._pending = None

    def finish(self, close: Callable[[], None], timeout_s: float) -> bool:
        """Close the client when no commit is under way in it; False: that goes on behind us.

        Idempotent; nothing else works afterwards.
        """
        if self._is_finished:
            return True
        self._is_finished = True
        closing = self._thread.submit(close)
        self._thread.shutdown(wait=False)
        try:
            closing.result(timeout_s)
        except FutureTimeoutError:
            return False
        return True


def _commit(consumer: KafkaConsumer, wanted: list[TopicPartition]) -> None:
    for result in consumer.commit(offsets=wanted, asynchronous=False) or ():
        if result.error is not None:
            raise KafkaException(result.error)
