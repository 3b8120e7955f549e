"""Which query hands out a queue, the one that started last (R22), and how far the queue is done.

Each start of a query writes its epoch, one more than that of any start before it, into a ledger of
the queue's, in a transaction that fences any other query about to do so. Before every batch the
query looks whether it still is the latest. So two queries on one queue, with whatever checkpoints,
do not go on side by side: the earlier ends before its next batch. The position of the queue's group
is committed in transactions of the same id: a query that was paused behind its look, and goes on
beside its successor, cannot set it back. Ordinary workers go on where Spark stopped, and the other
way round; Kafka drops what was committed long ago, so the ledger has a copy of the position.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import time
from collections.abc import Collection, Iterable, Mapping

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DeadlineExceededError, FencedError, StateError
from kafkamq.markers.positions import Positions
from kafkamq.markers.rules.batching import MessageSet
from kafkamq.markers.tracker.ledger import Ledger, LedgerKey, read_ledgers
from kafkamq.queue.wire.keys import join_key
from kafkamq.spark.queues.starting import identity_of
from kafkamq.transport.admin import Admin
from kafkamq.transport.commits import metadata_of
from kafkamq.transport.errors import TransactionAbortedError
from kafkamq.transport.log_reader import LogRange, Record, log_reader
from kafkamq.transport.record import TopicPartition

_TAKING_S = 60.0
_COMMIT_S = 30.0
_TRIES = 5


class QueueOwner:
    """One start of a query on a queue, and the queue's position; one owner thread."""

    def __init__(self, config: ServiceConfig, queue_id: str, group: str) -> None:
        topic = config.ledger_topic
        self._config = config
        self._queue_id = queue_id
        self._group = group
        self._membership = b""
        self._own = join_key(queue_id)
        self._prefix = self._own + b"\0"
        self._name = f"{socket.gethostname()}, process {os.getpid()}, {secrets.token_hex(4)}"
        self._epoch = 0
        self._admin = Admin(config)
        self._key = LedgerKey(f"kafkamq.{topic}.queue.{queue_id}", topic, 0)
        self._ledger = Ledger(config, self._key, engine=self._name, epoch=0, admin=self._admin)
        self._kept = Positions(config, group, queue_id)
        self._committed: dict[int, int] = {}

    def take(self) -> None:
        deadline_s = time.monotonic() + _TAKING_S
        while True:
            one = self._ledger
            try:
                one.fence()
                newest = 0 if one.last is None else one.last.epoch
                self._epoch = one.adopt(max(newest, self._epoch) + 1, 0).epoch
                return
            except (FencedError, TransactionAbortedError) as error:
                # Somebody starts at this moment, too; both would fence each other forever.
                if time.monotonic() > deadline_s:
                    raise DeadlineExceededError(
                        f"becoming the only query on queue {self._queue_id!r} did not succeed in "
                        f"{_TAKING_S:g} s: {error}"
                    ) from error
                time.sleep(random.uniform(0.02, 0.3))

    def check(self) -> None:
        """Raise FencedError if another query on the queue was started later."""
        last = read_ledgers(self._admin, [self._key]).get(self._key)
        if last is None:
            # Kafka forgets what was committed once and never again.
            self.take()
        elif (last.epoch, last.engine) != (self._epoch, self._name):
            raise FencedError(
                f"queue {self._queue_id!r}: another query started on it later (epoch {last.epoch}, "
                f"{last.engine}; ours is {self._epoch}), and this one ends: both would hand out "
                "the same messages",
                code="LATER_START",
                is_fatal=True,
            )

    def is_own(self, record: Record) -> bool:
        key = record.key()
        return key == self._own or (key or b"").startswith(self._prefix)

    def require_alone(self) -> None:
        """Raise StateError if workers are there, or came, moved the position on, and went."""
        if self._admin.group_assignments(self._group):
            raise StateError(
                f"workers joined queue {self._queue_id!r} (group {self._group}) while Spark "
                "reads it, and hand out the same messages; stop one of them"
            )
        topic = self._config.message_topic
        known = [(self._group, (topic, number)) for number in self._committed]
        for each in self._admin.committed(known):
            ours = self._committed[each.partition]
            if each.offset > ours:
                self.check()
                raise StateError(
                    f"workers went on with queue {self._queue_id!r} (group {self._group}) while "
                    f"Spark read it: {topic}[{each.partition}] stands at {each.offset}, Spark left "
                    f"it at {ours}; start the query again, and it goes on behind them"
                )

    def find(self, numbers: Iterable[int], topic_id: bytes) -> dict[int, int]:
        """Find the positions of these partitions; absent: the queue is new there."""
        wanted = list(numbers)
        topic = self._config.message_topic
        committed = self._admin.committed([(self._group, (topic, number)) for number in wanted])
        found = {each.partition: each.offset for each in committed if each.offset >= 0}
        missing = [number for number in wanted if number not in found]
        return found | (self._find_kept(missing, topic_id) if missing else {})

    def _find_kept(self, numbers: Collection[int], topic_id: bytes) -> dict[int, int]:
        """Return what the ledger has of partitions for which Kafka has nothing."""
        found = self._kept.find(numbers, topic_id)
        if not found:
            return {}
        started = self._kept.started_since(found)
        return {
            number: self._behind(started, number, position.offset, topic_id)
            for number, position in found.items()
        }

    def _behind(self, started: MessageSet, number: int, offset: int, topic_id: bytes) -> int:
        """Return a place behind what a killed worker had begun: it is the tracker's."""
        last = started.end(number)
        if not last:
            return offset
        topic, reader = self._config.message_topic, log_reader(self._config)
        end = min(last, reader.log_ends(topic, [number])[number])
        for records in reader.read(LogRange(topic, number, offset, end), skips_lost=True):
            for record in records:
                if self.is_own(record) and identity_of(record, topic_id) not in started:
                    return record.offset()
        return max(offset, end)

    def commit(self, offsets: Mapping[int, int], topic_id: bytes) -> None:
        """Set the position of the queue's group, unless another query has started later.

        Raises:
            FencedError: One has.
            StateError: The group has members, or had: a transaction commits for it whatever members
                it has, and what a worker has committed since it joined would be set back.
            BrokerError, DeadlineExceededError: Kafka did not take it, several times.
        """
        news = {number: at for number, at in offsets.items() if self._committed.get(number) != at}
        if news:
            self.require_alone()
            self._transact(news)
            self._committed.update(news)
            self._kept.note(news, topic_id)
        self._kept.write()

    def _transact(self, offsets: Mapping[int, int]) -> None:
        ledger, topic = self._ledger, self._config.message_topic
        # Nobody's membership: while Spark reads the queue, its group has no members.
        self._membership = self._membership or metadata_of(self._config, self._group)
        targets = [TopicPartition(topic, number, offset) for number, offset in offsets.items()]
        tried = 0
        while True:
            tried += 1
            try:
                if not ledger.is_open:
                    ledger.open()
                with ledger.producer.transaction():
                    ledger.producer.send_offsets(targets, self._membership, timeout_s=_COMMIT_S)
                return
            except (BrokerError, DeadlineExceededError):
                # Who fenced this producer without starting later was about to, and tries again.
                self.check()
                if tried == _TRIES:
                    raise

    def close(self) -> None:
        """Write what the ledger lacks, bounded, and end the clients; idempotent."""
        self._kept.close()
        self._ledger.close()
        self._admin.close()
