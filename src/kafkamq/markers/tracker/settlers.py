"""What the worker threads of a local tracker settle with: readers, and producers of ledgers."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.markers.rules.delivery import Carry, Settle
from kafkamq.markers.tracker.ledger import Ledger
from kafkamq.markers.tracker.open_ledgers import OpenLedgers
from kafkamq.markers.tracker.settlement import Settler, SettleReport, TransactionSize
from kafkamq.transport.patience import Patience

SETTLE_S = 20.0


class Settlers:
    """One settler for each worker thread; thread-safe."""

    def __init__(self, config: ServiceConfig, tracker: TrackerConfig) -> None:
        self.ledgers = OpenLedgers()
        self._config = config
        self._tracker = tracker
        self._patience = Patience()
        self._size = TransactionSize(tracker.max_transaction_bytes)
        self._idle: SimpleQueue[Settler] = SimpleQueue()

    def add(self) -> None:
        """Connect one more."""
        settler = Settler(self._config, self._tracker, self._patience, self._size)
        settler.prepare()
        self._idle.put(settler)

    def settle(
        self,
        ledger: Ledger,
        actions: Sequence[Settle | Carry],
        *,
        position: int,
        batch: int,
        members: Sequence[bytes],
    ) -> SettleReport:
        """``Settler.settle`` of an owner that starts again when it was fenced."""
        settler = self._idle.get()
        try:
            with self.ledgers.using(ledger):
                return settler.settle(
                    ledger,
                    actions,
                    position=position,
                    batch=batch,
                    members=members,
                    reopen=False,
                    timeout_s=SETTLE_S,
                )
        finally:
            self._idle.put(settler)

    def close(self) -> None:
        """End the settlers that are idle; idempotent."""
        while not self._idle.empty():
            self._idle.get().close()
