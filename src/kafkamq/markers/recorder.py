"""What a consumer counts, once per batch (the names are in ``metrics/catalog.py``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kafkamq.markers.message import MarkersMessage
from kafkamq.markers.rules.leases import Lease
from kafkamq.metrics import catalog
from kafkamq.types import Outcome

_OF_OUTCOME = {
    Outcome.ACK: catalog.ACKED,
    Outcome.NACK: catalog.NACKED,
    Outcome.REJECT: catalog.REJECTED,
}


class ConsumerRecorder:
    """Counts for one consumer; thread-safe."""

    def __init__(self, queue_id: str) -> None:
        self._queue_id = queue_id

    def received(
        self, held: Iterable[tuple[Lease, Sequence[MarkersMessage]]], *, are_first: bool
    ) -> None:
        """A batch is ready to be handed out: its messages by lease.

        ``are_first``: all of them are first deliveries.
        """
        for lease, messages in held:
            catalog.RECEIVED.add(len(messages), self._queue_id, lease.partition)
            again = 0 if are_first else sum(message._count > 1 for message in messages)
            if again:
                catalog.RECEIVED_AGAIN.add(again, self._queue_id, lease.partition)

    def settled(self, parts: Iterable[Lease], now_ms: int) -> None:
        """Verdicts of the application."""
        counts: Counter[tuple[Outcome, int]] = Counter()
        took: Counter[int] = Counter()
        for part in parts:
            count = len(part.offsets)
            counts[part.verdict.outcome, part.partition] += count
            took[part.begin_ms] += count
        for (outcome, partition), count in counts.items():
            _OF_OUTCOME[outcome].add(count, self._queue_id, partition)
        seconds = [((now_ms - began_ms) / 1000, count) for began_ms, count in took.items()]
        catalog.HANDLING_SECONDS.observe_all(seconds, self._queue_id)

    def released(self, parts: Iterable[Lease]) -> None:
        """Given back unseen."""
        for part in parts:
            catalog.RELEASED.add(len(part.offsets), self._queue_id, part.partition)

    def lost(self, lease: Lease) -> None:
        """It ended while it was held."""
        catalog.LEASES_LOST.add(len(lease.lost), self._queue_id, lease.partition)

    def late(self, part: Lease) -> None:
        """A verdict that came too late, or never."""
        catalog.LATE_VERDICTS.add(len(part.offsets), self._queue_id, part.partition)
