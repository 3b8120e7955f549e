"""The ledgers that a worker process of Spark settles with: one for each marker partition of its.

A producer for each would be two connections and some threads for each partition, and a process may
have hundreds: those that were used last stay open (``OpenLedgers``), and all ask
through one admin client.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kafkamq.config import ServiceConfig
from kafkamq.markers.tracker.ledger import MAX_OPEN, Ledger, LedgerKey, OpenLedgers
from kafkamq.transport.admin import Admin


class PartitionLedgers:
    """The ledgers of one start of the engine in one process; thread-safe."""

    def __init__(self, config: ServiceConfig, *, engine: str, epoch: int) -> None:
        self._config = config
        self._engine = engine
        self._epoch = epoch
        self._admin: Admin | None = None
        self._known: dict[int, Ledger] = {}
        self._open = OpenLedgers()
        self._lock = threading.Lock()

    @contextmanager
    def using(self, partition: int) -> Iterator[Ledger]:
        """The calling thread owns the partition's ledger inside the block; it is open there.

        Another process may have settled since it was open last: it is read again.
        """
        ledger = self._ledger(partition)
        with self._open.using(ledger):
            if not ledger.is_open:
                ledger.open()
            yield ledger

    def _ledger(self, partition: int) -> Ledger:
        with self._lock:
            found = self._known.get(partition)
            if found is None:
                if self._admin is None:
                    self._admin = Admin(self._config, kept_groups=())
                key = LedgerKey.of_markers(self._config, partition)
                found = self._known[partition] = Ledger(
                    self._config, key, engine=self._engine, epoch=self._epoch, admin=self._admin
                )
            return found

    def turns(self) -> int:
        """How many partitions share the place of one open ledger."""
        return max(1, -(-len(self._known) // MAX_OPEN))

    def close(self) -> None:
        """End all clients; idempotent."""
        with self._lock:
            known, self._known = self._known, {}
            admin, self._admin = self._admin, None
        for ledger in known.values():
            self._open.close(ledger)
        if admin is not None:
            admin.close()
