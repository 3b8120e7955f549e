"""What producers count, many sends at a time (the names are in ``metrics/catalog.py``)."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

from kafkamq.metrics import catalog
from kafkamq.transport.record import Record

__all__ = ["SendRecorder"]

_FOLD = 1000  # sends after which what was noted is counted


class SendRecorder:
    """Counts for the producers of one service; thread-safe.

    A delivery report only notes three values; they are counted by the thousand, and when asked.
    """

    def __init__(self) -> None:
        self._noted: deque[tuple[str, int | str | None, float]] = deque()
        self._forget = catalog.SENT.watch(self._fold_now)

    def sent(self, queue_id: str, record: Record, *, is_delayed: bool) -> None:
        """A delivery report; a delayed message is in no partition of the queue yet."""
        partition = "" if is_delayed else record.partition()
        self._noted.append((queue_id, partition, record.latency() or 0.0))
        if len(self._noted) >= _FOLD:
            self._fold()

    def failed(self, queue_id: str) -> None:
        catalog.SEND_FAILED.add(1, queue_id)

    def close(self) -> None:
        self._fold()
        self._forget()

    def _fold_now(self) -> dict[tuple[str, ...], float]:
        self._fold()
        return {}

    def _fold(self) -> None:
        counts: Counter[tuple[str, int | str | None]] = Counter()
        seconds: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        try:
            while True:  # other threads may add, and fold
                queue_id, partition, latency_s = self._noted.popleft()
                counts[queue_id, partition] += 1
                seconds[queue_id].append((latency_s, 1))
        except IndexError:
            pass
        for (queue_id, partition), count in counts.items():
            catalog.SENT.add(count, queue_id, partition)
        for queue_id, observed in seconds.items():
            catalog.SEND_SECONDS.observe_all(observed, queue_id)
