"""What a consumer counts, once per batch (the names are in ``metrics/catalog.py``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter

from kafkamq.markers.message import MarkersMessage
from kafkamq.markers.rules.leases import Lease
from kafkamq.metrics import catalog
from kafkamq.metrics.families import Counter as Counted
from kafkamq.types import Outcome

_PARTITION = attrgetter("partition")

_OF_OUTCOME = {
    Outcome.ACK: catalog.ACKED,
    Outcome.NACK: catalog.NACKED,
    Outcome.REJECT: catalog.REJECTED,
}


class ConsumerRecorder:
    """Counts for one consumer; thread-safe."""

    def __init__(self, queue_id: str) -> None:
        self._queue_id = queue_id

    def received(self, messages: Sequence[MarkersMessage]) -> None:
        """A batch is ready to be handed out."""
        self._add(catalog.RECEIVED, messages)
        again = [message for message in messages if message._count > 1]
        if again:
            self._add(catalog.RECEIVED_AGAIN, again)

    def settled(self, messages: Iterable[MarkersMessage], now_ms: int) -> None:
        """Verdicts of the application."""
        counts: Counter[tuple[Outcome, int, int]] = Counter()
        last: tuple[Outcome, int, int] | None = None
        run = 0
        for message in messages:  # neighbours have the same, as a rule: one look-up for a run
            lease = message._lease
            outcome, partition = message._verdict.outcome, lease.partition
            if last is None or (
                outcome is not last[0] or partition != last[1] or lease.begin_ms != last[2]
            ):
                if last is not None:
                    counts[last] += run
                last, run = (outcome, partition, lease.begin_ms), 0
            run += 1
        if last is not None:
            counts[last] += run
        for (outcome, partition, _), count in counts.items():
            _OF_OUTCOME[outcome].add(count, self._queue_id, partition)
        took = [((now_ms - began_ms) / 1000, count) for (_, _, began_ms), count in counts.items()]
        catalog.HANDLING_SECONDS.observe_all(took, self._queue_id)

    def released(self, messages: Iterable[MarkersMessage]) -> None:
        """Given back unseen."""
        self._add(catalog.RELEASED, messages)

    def lost(self, leases: Iterable[Lease]) -> None:
        """Leases that ended while they were held."""
        self._add(catalog.LEASES_LOST, leases)

    def late(self, message: MarkersMessage) -> None:
        """A verdict that came too late, or never."""
        self._add(catalog.LATE_VERDICTS, (message,))

    def _add(self, counter: Counted, counted: Iterable[MarkersMessage | Lease]) -> None:
        counts = Counter(map(_PARTITION, counted))
        for partition, count in counts.items():
            counter.add(count, self._queue_id, partition)
