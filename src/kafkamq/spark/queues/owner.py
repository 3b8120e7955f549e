"""Which query hands out a queue: the one that started last, as with trackers (R22).

Each start of a query writes its epoch, one more than that of any start before it, into a ledger of
the queue's, in a transaction that fences whoever is about to do the same. Before every batch the
query looks whether it still is the latest. So two queries on one queue, with whatever checkpoints,
do not go on side by side: the earlier ends before its next batch.
"""

from __future__ import annotations

import os
import random
import secrets
import socket
import time

from kafkamq.config import ServiceConfig
from kafkamq.errors import DeadlineExceededError, FencedError
from kafkamq.markers.tracker.ledger import Ledger, LedgerKey, read_ledgers
from kafkamq.transport.admin import Admin
from kafkamq.transport.errors import TransactionAbortedError

_TAKING_S = 60.0


class QueueOwner:
    """One start of a query on a queue; one owner thread."""

    def __init__(self, config: ServiceConfig, queue_id: str) -> None:
        topic = config.ledger_topic
        self._config = config
        self._queue_id = queue_id
        self._key = LedgerKey(f"kafkamq.{topic}.queue.{queue_id}", topic, 0)
        self._name = f"{socket.gethostname()}, process {os.getpid()}, {secrets.token_hex(4)}"
        self._epoch = 0
        self._admin: Admin | None = None

    def take(self) -> None:
        """Become the latest start."""
        admin = self._opened()
        deadline_s = time.monotonic() + _TAKING_S
        while True:
            one = Ledger(self._config, self._key, engine=self._name, epoch=0, admin=admin)
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
            finally:
                one.close()

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

    def _opened(self) -> Admin:
        if self._admin is None:
            self._admin = Admin(self._config)
        return self._admin

    def close(self) -> None:
        if self._admin is not None:
            self._admin.close()
            self._admin = None
