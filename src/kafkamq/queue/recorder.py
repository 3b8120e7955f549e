"""What a worker and a producer count, once per batch (the names are in ``metrics/catalog.py``)."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from operator import attrgetter

from confluent_kafka import Message as Record

from kafkamq.markers.message import Message
from kafkamq.markers.rules.leases import Lease
from kafkamq.metrics import catalog
from kafkamq.metrics.families import Counter as Counted
from kafkamq.types import Outcome

__all__ = ["SendTally", "WorkerTally"]

_FOLD = 1000  # sends after which what was noted is counted

_PARTITION = attrgetter("partition")

_OF_OUTCOME = {
    Outcome.ACK: catalog.ACKED,
    Outcome.NACK: catalog.NACKED,
    Outcome.REJECT: catalog.REJECTED,
}


class WorkerTally:
    """Counts for one consumer; thread-safe."""

    def __init__(self, queue_id: str) -> None:
        self._queue_id = queue_id

    def received(self, messages: Sequence[Message]) -> None:
        """A batch is ready to be handed out."""
        self._add(catalog.RECEIVED, messages)
        again = [message for message in messages if message._count > 1]
        if again:
            self._add(catalog.RECEIVED_AGAIN, again)

    def settled(self, messages: Iterable[Message], now_ms: int) -> None:
        """Verdicts of the application."""
        counts: Counter[tuple[Outcome, int, int]] = Counter()
        last: tuple[Outcome, int, int] | None = None
        run = 0
        for message in messages:  # neighbours have the same, as a rule: one look-up for a run
            lease = message._lease
            outcome, partition = message._outcome, lease.partition
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

    def released(self, messages: Iterable[Message]) -> None:
        """Given back unseen."""
        self._add(catalog.RELEASED, messages)

    def lost(self, leases: Iterable[Lease]) -> None:
        """Leases that ended while they were held."""
        self._add(catalog.LEASES_LOST, leases)

    def late(self, message: Message) -> None:
        """A verdict that came too late, or never."""
        self._add(catalog.LATE_VERDICTS, (message,))

    def _add(self, counter: Counted, counted: Iterable[Message | Lease]) -> None:
        counts = Counter(map(_PARTITION, counted))
        for partition, count in counts.items():
            counter.add(count, self._queue_id, partition)


class SendTally:
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
        """A delivery that failed."""
        catalog.SEND_FAILED.add(1, queue_id)

    def close(self) -> None:
        """Count the rest; idempotent."""
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
