"""Which query hands out a queue: the one that started last, as with trackers (R22).

Each start of a query writes its epoch, one more than that of any start before it, into a ledger of
the queue's, in a transaction that fences whoever is about to do the same. Before every batch the
query looks whether it still is the latest. So two queries on one queue, with whatever checkpoints,
do not go on side by side: the earlier ends before its next batch. The position of the queue's group
is committed in transactions of the same id: a query that was paused behind its look, and goes on
beside its successor, cannot set it back.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import time
from collections.abc import Mapping

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DeadlineExceededError, FencedError
from kafkamq.markers.tracker.ledger import Ledger, LedgerKey, read_ledgers
from kafkamq.transport.admin import Admin
from kafkamq.transport.commits import metadata_of
from kafkamq.transport.errors import TransactionAbortedError
from kafkamq.transport.record import Place, TopicPartition

_TAKING_S = 60.0
_COMMIT_S = 30.0
_TRIES = 5


class QueueOwner:
    """One start of a query on a queue; one owner thread."""

    def __init__(self, config: ServiceConfig, queue_id: str, group: str) -> None:
        topic = config.ledger_topic
        self._config = config
        self._queue_id = queue_id
        self._group = group
        self._membership = b""
        self._key = LedgerKey(f"kafkamq.{topic}.queue.{queue_id}", topic, 0)
        self._name = f"{socket.gethostname()}, process {os.getpid()}, {secrets.token_hex(4)}"
        self._epoch = 0
        self._admin: Admin | None = None
        self._ledger: Ledger | None = None

    def take(self) -> None:
        """Become the latest start."""
        deadline_s = time.monotonic() + _TAKING_S
        while True:
            one = self._opened_ledger()
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
        """Nobody started later."""
        last = read_ledgers(self._opened(), [self._key]).get(self._key)
        if last is None:
            self.take()  # Kafka forgets what was committed once and never again
        elif (last.epoch, last.engine) != (self._epoch, self._name):
            raise FencedError(
                f"queue {self._queue_id!r}: another query started on it later (epoch {last.epoch}, "
                f"{last.engine}; ours is {self._epoch}), and this one ends: both would hand out "
                "the same messages",
                code="LATER_START",
                is_fatal=True,
            )

    def has_members(self) -> bool:
        """Whether workers have joined the queue's group."""
        return bool(self._opened().group_assignments(self._group))

    def commit(self, offsets: Mapping[Place, int]) -> None:
        """Set the position of the queue's group, unless another query has started later.

        Raises:
            FencedError: One has.
            BrokerError, DeadlineExceededError: Kafka did not take it, several times.
        """
        ledger = self._opened_ledger()
        # Nobody's membership: while Spark reads the queue, its group has no members.
        self._membership = self._membership or metadata_of(self._config, self._group)
        targets = [TopicPartition(*place, offset) for place, offset in offsets.items()]
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

    def _opened_ledger(self) -> Ledger:
        if self._ledger is None:
            self._ledger = Ledger(
                self._config, self._key, engine=self._name, epoch=0, admin=self._opened()
            )
        return self._ledger

    def _opened(self) -> Admin:
        if self._admin is None:
            self._admin = Admin(self._config)
        return self._admin

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None
        if self._admin is not None:
            self._admin.close()
            self._admin = None
