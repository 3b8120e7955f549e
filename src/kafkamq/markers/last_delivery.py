"""R6 across all consumers of this process: a last allowed delivery is held alone."""

from __future__ import annotations

import os
import threading

from kafkamq.markers.rules.handout import Holder, LastDeliveries
from kafkamq.markers.rules.leases import Lease


class ProcessGate:
    """``LastDeliveries`` with a lock; a forked child begins with an empty one."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._rule = LastDeliveries()

    def join(self, holder: Holder) -> None:
        """A consumer starts."""
        with self._lock:
            self._rule.join(holder)

    def leave(self, holder: Holder) -> None:
        """A consumer ends."""
        with self._lock:
            self._rule.leave(holder)

    def enter(self, holder: Holder, monotonic_ms: int, *, last: bool) -> bool:
        """Whether STARTs may be planned now, of a last delivery or of others."""
        with self._lock:
            if last:
                return self._rule.enter_last(holder, monotonic_ms)
            return self._rule.enter(holder, monotonic_ms)

    def entered(self, holder: Holder, alone: Lease | None = None) -> None:
        """The STARTs are planned."""
        with self._lock:
            self._rule.entered(holder, alone)


process_gate = ProcessGate()
