"""Results and offsets in one transaction: whoever reads committed data sees each exactly once.

All workers share one producer. A worker sends the results of what it took, and settles it, inside a
gate; a commit closes the gate, so that a transaction holds results and their offsets or neither.
When a transaction fails, everything since the last one is forgotten and read again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from confluent_kafka import KafkaException

from kafkamq.clients.exact_commits import ExactCommits
from kafkamq.clients.transactions import TransactionalProducer
from kafkamq.errors import (
    BrokerError,
    ConfigError,
    DeadlineExceededError,
    KafkaMQError,
)
from kafkamq.kafka.parallel.commits import Committer, Duty, Plan, plan_commits
from kafkamq.kafka.parallel.config import ParallelConfig
from kafkamq.kafka.parallel.desk import Desk, Worker
from kafkamq.kafka.parallel.results import outgoing
from kafkamq.kafka.parallel.stats import Stats

__all__ = ["TransactionCommitter", "TransactionPublisher"]

_ASYNC_SLICE_S = 0.001
_log = logging.getLogger(__name__)


class _Gate:
    """Workers pass one by one; a commit waits until none is inside, and keeps it closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def passing(self) -> Iterator[None]:
        with self._lock:
            yield

    def try_enter(self) -> bool:
        return self._lock.acquire(blocking=False)

    def leave(self) -> None:
        self._lock.release()


class TransactionCommitter(Committer):
    """Commits transactions instead of offsets alone."""

    def __init__(
        self,
        config: ParallelConfig,
        desk: Desk,
        commits: ExactCommits,
        duties: Callable[[], list[Duty]],
        stats: Stats,
        fail: Callable[[BaseException], None],
        rewind: Callable[[], None],
    ) -> None:
        super().__init__(config, desk, commits, duties, stats, fail)
        self.gate = _Gate()
        self._rewind = rewind
        self._producer = TransactionalProducer(
            config.service,
            f"kafkamq.{config.group_id}.{uuid.uuid4().hex}",
            partitioner="murmur2_random",
        )
        self._has_begun = False
        self._failure: BaseException | None = None  # of a send: the transaction must not commit

    def start(self) -> None:
        """Begin.

        Raises:
            BrokerError, DeadlineExceededError: Transactions cannot be had.
        """
        self._producer.init()
        super().start()

    def send(self, worker: Worker) -> None:
        """Inside the gate: put a worker's results into the transaction and settle what it did."""
        stale = {
            record
            for run in (*worker.finished, *(each.run for each in worker.troubles))
            if run.is_stale
            for record in run.records
        }
        outputs, worker.outputs = worker.outputs, []
        for record, result in outputs:
            if record not in stale:
                self._send_one(result)
        self._desk.settle(worker)
        self._desk.release_all(worker)

    def _send_one(self, result: object) -> None:
        if self._failure is not None:
            return
        try:
            for out in outgoing(result):
                if not self._has_begun:
                    self._producer.begin()
                    self._has_begun = True
                headers = tuple(out.header_list())
                self._producer.produce((out.topic, out.partition, out.key, out.value, headers))
        except ConfigError as error:
            self._failure = error
            self._fail(error)
        except (KafkaMQError, KafkaException) as error:
            self._failure = error

    def forget(self) -> None:
        """Abort what was not committed: partitions went without notice."""
        with self.gate.passing():
            self._abort(None)

    def _commit(self) -> bool:
        with self.gate.passing():
            plan = plan_commits(
                self._duties(),
                self._desk,
                self._stats,
                self._config.limits,
                with_maps=self._with_maps,
            )
            if self._failure is None and not plan.commits and not self._has_begun:
                return False
            try:
                if self._failure is not None:
                    raise self._failure
                if not self._has_begun:
                    self._producer.begin()
                self._has_begun = True
                if plan.commits:
                    self._send_offsets(plan)
                self._producer.commit(timeout_s=self._config.commit_timeout_ms / 1000)
                self._has_begun = False
            except (BrokerError, DeadlineExceededError, KafkaException) as error:
                self._abort(error)
                return True
        if plan.commits:
            self.confirm(plan)
        return any(verdict.ceiling is not None for _, _, verdict in plan.parts)

    def _send_offsets(self, plan: Plan) -> None:
        timeout_s = self._config.commit_timeout_ms / 1000
        self._producer.call(
            lambda producer, client_id: self._commits.send_to_transaction(
                producer, client_id, plan.commits, timeout_s
            )
        )

    def _abort(self, error: BaseException | None) -> None:
        """Inside the gate: nothing since the last commit has happened."""
        self._stats.commit_failures += 1
        self._failure = None
        self._has_begun = False
        _log.warning(
            "a transaction is aborted; what it held is processed again", extra={"said": str(error)}
        )
        for duty in self._duties():  # what is settled from here on belongs to no lane
            with self._desk.lock:
                self._desk.scheduler.close(duty.lane)
        self._producer.abort()
        if not self._producer.is_ready:
            self._producer.init()
        self._rewind()

    def end(self, timeout_s: float) -> bool:
        """As ``Committer.end``; ends the producer."""
        has_ended = super().end(timeout_s)
        if has_ended:
            self._producer.close()
        return has_ended


class TransactionPublisher:
    """Hands results to the transaction."""

    def __init__(self, desk: Desk, committer: TransactionCommitter) -> None:
        self._committer = committer
        desk.is_deferred = True

    def publish(self, worker: Worker) -> None:
        """Wait for the gate, and pass."""
        with self._committer.gate.passing():
            self._committer.send(worker)

    async def publish_async(self, worker: Worker) -> None:
        """As ``publish``."""
        gate = self._committer.gate
        while not gate.try_enter():
            await asyncio.sleep(_ASYNC_SLICE_S)
        try:
            self._committer.send(worker)
        finally:
            gate.leave()
