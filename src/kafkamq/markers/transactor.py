"""STARTs and offsets of a step in one transaction (``exactly_once=True``).

The offsets carry the consumer's membership as it was when the messages were polled, so a worker
whose partitions went to others in the meantime cannot commit: the broker refuses its generation,
and the whole transaction with the STARTs is as if it had never been. That fences a zombie whatever
its transactional id is, so every consumer has a random one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DeadlineExceededError, KafkaMQError
from kafkamq.transport.errors import Meaning, meaning
from kafkamq.transport.job_thread import JobThread
from kafkamq.transport.record import TopicPartition
from kafkamq.transport.transactions import TransactionalProducer

_STEP_TIMEOUT_S = 10.0  # of each step of a transaction; longer ones are aborted by the broker
_log = logging.getLogger(__name__)


class Transaction:
    """One on its way.

    Attributes:
        is_over: Whether its outcome is known; set last.
        is_done: Whether it is committed. Else only the group knows what is: ask it.
        error: Why it would fail again, if it would.
    """

    def __init__(self) -> None:
        self.is_over = self.is_done = False
        self.error: KafkaMQError | None = None


class Transactor:
    """One consumer's transactions, one at a time, in a thread of its own; one owner thread.

    The next transaction begins by settling one that failed.
    """

    def __init__(
        self, config: ServiceConfig, transactional_id: str, wake: Callable[[], None]
    ) -> None:
        """``wake`` is called when a transaction is over."""
        self._marker_topic = config.marker_topic
        self._message_topic = config.message_topic
        self._producer = TransactionalProducer(config, transactional_id)
        self._wake = wake
        self._thread = JobThread("kafkamq-exactly-once")

    def begin(
        self,
        starts: Callable[[], Mapping[int, list[dict[str, Any]]]],
        offsets: Mapping[int, int],
        membership: bytes,
    ) -> Transaction:
        """Write STARTs and commit offsets, all or nothing.

        Args:
            starts: Gives, when they are written, by marker partition: value, key and callback of
                each. Called in the transactor's thread.
            offsets: Of the messages topic, by partition.
            membership: The consumer's group metadata when it polled the messages.
        """
        positions = [TopicPartition(self._message_topic, each, at) for each, at in offsets.items()]
        transaction = Transaction()

        def job() -> None:
            try:
                self._transact(starts, positions, membership)
                transaction.is_done = True
            except (BrokerError, DeadlineExceededError) as error:
                if isinstance(error, BrokerError) and meaning(error) is Meaning.FORBIDDEN:
                    transaction.error = BrokerError(str(error), code=error.code)
                else:
                    _log.info("a transaction of STARTs is made again", extra={"error": str(error)})
            except KafkaMQError as error:
                transaction.error = error
            except Exception as error:  # noqa: BLE001 - the intake waits for an outcome
                _log.exception("a transaction of STARTs failed")
                transaction.error = KafkaMQError(f"a transaction failed: {error!r}")
            transaction.is_over = True
            self._wake()

        self._thread.add(job)
        return transaction

    def _transact(
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
        except BaseException:
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

    def close(self, timeout_s: float) -> None:
        """Abort what is open and end the client; bounded, what takes longer goes on behind us."""
        if not self._thread.end(self._producer.close, timeout_s=timeout_s):
            _log.warning("ending a transaction takes long and goes on")
