"""How many producers a process keeps for its ledgers: a broker pays for every connection.

A marker partition has a transactional id, and so a producer, of its own (R22): a thousand of them
would be two thousand connections and five thousand threads, nearly all of them idle. Those that
were used last stay open; the others rest, and are opened again when something is due there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from kafkamq.markers.tracker.ledger import Ledger

MAX_OPEN = 24  # of a process; a producer has two connections to a broker that coordinates it


class OpenLedgers:
    """Puts ledgers to rest, the least recently used first; thread-safe."""

    def __init__(self, most: int = MAX_OPEN) -> None:
        self._most = most
        self._idle: OrderedDict[Ledger, None] = OrderedDict()
        self._ending: set[Ledger] = set()  # a thread puts them to rest, which takes a while
        self._changed = threading.Condition()

    @contextmanager
    def using(self, ledger: Ledger) -> Iterator[None]:
        """The calling thread owns the ledger inside the block."""
        self._take(ledger)
        try:
            yield
        finally:
            self.keep(ledger)

    def keep(self, ledger: Ledger) -> None:
        """Nobody uses this ledger for now; the one that was not used for longest may rest."""
        if not ledger.is_open:
            return
        with self._changed:
            self._idle[ledger] = None
            if len(self._idle) <= self._most:
                return
            oldest, _ = self._idle.popitem(last=False)
            self._ending.add(oldest)
        try:
            oldest.rest()
        finally:
            with self._changed:
                self._ending.discard(oldest)
                self._changed.notify_all()

    def close(self, ledger: Ledger) -> None:
        """End a ledger that nobody uses; idempotent."""
        self._take(ledger)
        ledger.close()

    def _take(self, ledger: Ledger) -> None:
        """The calling thread owns it from here on: no other one may be putting it to rest."""
        with self._changed:
            self._changed.wait_for(lambda: ledger not in self._ending)
            self._idle.pop(ledger, None)
