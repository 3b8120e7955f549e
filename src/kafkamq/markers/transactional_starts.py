"""STARTs and offsets of a batch in one transaction (``exactly_once=True``).

The offsets carry the consumer's membership as it was when the batch was polled, so a worker whose
partitions went to others in the meantime cannot commit: the broker refuses its generation, and the
whole transaction with the STARTs is as if it had never been. That fences a zombie whatever its
transactional id is, so every consumer has a random one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DeadlineExceededError, KafkaMQError
from kafkamq.transport.errors import Meaning, meaning
from kafkamq.transport.offset_commits import Commit
from kafkamq.transport.record import TopicPartition
from kafkamq.transport.transactions import TransactionalProducer

_STEP_TIMEOUT_S = 10.0  # of each step of a transaction; longer ones are aborted by the broker
_CLOSE_TIMEOUT_S = 10.0
_log = logging.getLogger(__name__)


class ExactCommitter:
    """One consumer's transactions, one at a time, in a thread of its own; one owner thread.

    After anything but ``Commit.DONE`` only the group knows what is committed: read again from
    there. The next transaction begins by settling the one that failed.
    """

    def __init__(self, config: ServiceConfig, transactional_id: str) -> None:
        self._marker_topic = config.marker_topic
        self._message_topic = config.message_topic
        self._producer = TransactionalProducer(config, transactional_id)
        self._thread = ThreadPoolExecutor(1, "kafkamq-exactly-once")
        self._pending: Future[None] | None = None
        self._given_up: Future[None] | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a transaction is, also one that was given up: its offsets may come yet."""
        return self._pending is not None or not (self._given_up is None or self._given_up.done())

    def begin(
        self,
        starts: Callable[[], Mapping[int, list[dict[str, Any]]]],
        offsets: Mapping[int, int],
        membership: bytes,
    ) -> None:
        """Write STARTs and commit offsets, all or nothing.

        Args:
            starts: Gives, when they are written, by marker partition: value, key and callback of
                each. Called in another thread.
            offsets: Of the messages topic, by partition.
            membership: The consumer's group metadata when it polled the messages.
        """
        positions = [TopicPartition(self._message_topic, each, at) for each, at in offsets.items()]
        self._pending = self._thread.submit(self._run, starts, positions, membership)

    def wait(self, timeout_s: float) -> Commit:
        """What became of it, after waiting.

        Raises:
            BrokerError: It failed, and would fail again.
        """
        pending = self._pending
        assert pending is not None, "a transaction was begun"
        wait([pending], timeout_s)
        if not pending.done():  # not by result(): its own failure may be a TimeoutError, too
            return Commit.PENDING
        try:
            pending.result()
        except (BrokerError, DeadlineExceededError) as error:
            self._pending = None
            if isinstance(error, BrokerError) and meaning(error) is Meaning.FORBIDDEN:
                raise BrokerError(str(error), code=error.code) from error
            _log.info("a transaction of STARTs is made again", extra={"error": str(error)})
            return Commit.FAILED
        except KafkaMQError:
            self._pending = None
            raise
        self._pending = None
        return Commit.DONE

    def give_up(self) -> None:
        """Wait for the end of a transaction under way, so that the group knows what became of it.

        After the bound it goes on behind us (``is_under_way``), and the next one waits for it.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._given_up = pending
            wait([pending], _CLOSE_TIMEOUT_S)

    def _run(
        self,
        starts: Callable[[], Mapping[int, list[dict[str, Any]]]],
        positions: Sequence[TopicPartition],
        membership: bytes,
    ) -> None:
        producer = self._producer
        if not producer.is_ready:
            producer.init(timeout_s=_STEP_TIMEOUT_S)
        producer.begin()
        try:
            for partition, each in starts().items():
                producer.produce_many(
                    self._marker_topic, partition, each, timeout_s=_STEP_TIMEOUT_S
                )
            producer.send_offsets(positions, membership, timeout_s=_STEP_TIMEOUT_S)
            producer.commit(timeout_s=_STEP_TIMEOUT_S)
        except KafkaMQError:
            producer.abort(timeout_s=_STEP_TIMEOUT_S)
            if not producer.is_ready:  # what is open now must not hold readers back
                self._acknowledge()
            raise

    def _acknowledge(self) -> None:
        """End a transaction of unknown outcome; the next one tries again if this fails."""
        try:
            self._producer.init(timeout_s=_STEP_TIMEOUT_S)
        except KafkaMQError as error:
            _log.info("a transaction is not settled yet", extra={"error": str(error)})

    def close(self) -> None:
        """Abort what is open and end the client; bounded, what takes longer goes on behind us."""
        closing = self._thread.submit(self._producer.close)
        self._thread.shutdown(wait=False)
        try:
            closing.result(_CLOSE_TIMEOUT_S)
        except FutureTimeoutError:
            _log.warning("ending a transaction takes long and goes on")
