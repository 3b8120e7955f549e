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
from threading import Lock
from typing import TypeVar

from confluent_kafka import KafkaException, TopicPartition

from kafkamq.errors import KafkaMQError
from kafkamq.transport.errors import broker_error, is_retriable
from kafkamq.transport.port import Consumer as KafkaConsumer
from kafkamq.transport.record import Place

Answer = TypeVar("Answer")
_TURN_S = 0.001
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
        self._wanted: dict[Place, int] = {}  # what it is to commit; read when its turn comes
        self._began_s = 0.0
        self._is_finished = False

    @property
    def is_pending(self) -> bool:
        """Whether a commit is under way and not given up."""
        return self._pending is not None

    def begin(self, consumer: KafkaConsumer, offsets: Mapping[int, int]) -> None:
        """Commit these offsets (by partition); none may be pending."""
        self._wanted = {(self._topic, number): at for number, at in offsets.items()}
        self._began_s = time.monotonic()
        doing = f"committing offsets of {self._topic}"
        turn = Lock()
        turn.acquire()
        self._pending = self._thread.submit(_commit_all, turn, consumer, self._wanted, doing)
        # It needs the interpreter to set out, and the application may keep that for milliseconds.
        turn.acquire(timeout=_TURN_S)

    def forget(self, partition: int) -> None:
        """It was revoked: a commit whose turn has not come leaves it out.

        Kafka takes offsets of any partition from a member of the present generation: those of a
        commit that waited for its turn would set the new owner's position back.
        """
        self._wanted.pop((self._topic, partition), None)

    def wait(self, timeout_s: float) -> Commit:
        """What became of the pending commit, after waiting for it."""
        pending = self._pending
        assert pending is not None, "a commit was begun"
        try:
            pending.exception(timeout_s)  # not result(): its own failure may be a TimeoutError, too
        except FutureTimeoutError:
            if time.monotonic() - self._began_s < COMMIT_TIMEOUT_S:
                return Commit.PENDING
            self.give_up()  # it may succeed later; the next commit waits for its end
            return Commit.FAILED
        try:
            pending.result()
        except KafkaMQError as error:
            self._pending = None
            if is_retriable(error):
                return Commit.FAILED
            raise
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


def _commit_all(
    turn: Lock, consumer: KafkaConsumer, offsets: Mapping[Place, int], doing: str
) -> None:
    turn.release()
    wanted = [TopicPartition(*place, offset) for place, offset in list(offsets.items())]
    try:
        answers = wanted and consumer.commit(offsets=wanted, asynchronous=False)
        for answer in answers or ():
            if answer.error is not None:
                raise broker_error(answer.error, doing)
    except KafkaException as error:
        raise broker_error(error, doing) from error
