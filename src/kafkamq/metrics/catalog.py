"""Every metric of kafkamq is here by name: a contract, pinned by a test and used by the
dashboard.

Labels are ``queue``, ``partition`` and, of Spark, ``query`` only. A worker's ``partition`` is one
of the messages topic, a tracker's one of the markers topic. One process serves one namespace: the
scrape job tells them apart. All times are seconds.

Counters, gauges and histograms cost a dictionary entry, and use the standard library only: what is
counted is shown by ``exposition.py`` and ``server.py``, which need prometheus-client. Hot paths add
once per batch, never once per message.
"""

from __future__ import annotations

import operator
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric

Labels = tuple[str, ...]
"""Values of a family's labels, in their order."""

Source = Callable[[], Mapping[Labels, float]]
"""Asked when somebody looks; must not wait for anything."""


class Family:
    """A named metric with a fixed set of labels; thread-safe.

    What several sources and ``add`` say of the same labels is summed, or what ``combine`` makes of
    two values.
    """

    kind = ""

    def __init__(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...] = (),
        *,
        combine: Callable[[float, float], float] = operator.add,
    ) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self._combine = combine
        self._lock = threading.Lock()
        self._values: dict[Labels, float] = {}
        self._sources: list[Source] = []

    def watch(self, source: Source) -> Callable[[], None]:
        """Ask ``source`` from now on when somebody looks; the result ends that."""
        with self._lock:
            self._sources.append(source)

        def forget() -> None:
            with self._lock:
                self._sources = [other for other in self._sources if other is not source]

        return forget

    def values(self) -> dict[Labels, float]:
        with self._lock:
            sources = list(self._sources)
        # This comes first: a source may add what it has noted so far.
        asked = [source() for source in sources]
        with self._lock:
            result = dict(self._values)
        for found in asked:
            for labels, value in found.items():
                result[labels] = self._combine(result[labels], value) if labels in result else value
        return result

    def _labels(self, labels: Iterable[object]) -> Labels:
        found = tuple(str(label) for label in labels)
        assert len(found) == len(self.labels), f"{self.name} has the labels {self.labels}"
        return found


class Counter(Family):
    """Only grows; ``_total`` is added to its name where it is shown."""

    kind = "counter"

    def add(self, amount: float, *labels: object) -> None:
        key = self._labels(labels)
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + amount


class Gauge(Family):
    kind = "gauge"

    def set(self, value: float, *labels: object) -> None:
        key = self._labels(labels)
        with self._lock:
            self._values[key] = value


@dataclass(slots=True)
class Distribution:
    """One histogram: observations per bucket (not cumulated), the last one for all above."""

    counts: list[int]
    total: float = field(default=0.0)


class Histogram(Family):
    kind = "histogram"

    def __init__(
        self, name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]
    ) -> None:
        super().__init__(name, text, labels)
        self.buckets = buckets
        self._distributions: dict[Labels, Distribution] = {}

    def observe(self, seconds: float, *labels: object, count: int = 1) -> None:
        self.observe_all(((seconds, count),), *labels)

    def observe_all(self, observed: Iterable[tuple[float, int]], *labels: object) -> None:
        key = self._labels(labels)
        with self._lock:
            found = self._distributions.get(key)
            if found is None:
                found = Distribution([0] * (len(self.buckets) + 1))
                self._distributions[key] = found
            for seconds, count in observed:
                found.counts[bisect_left(self.buckets, seconds)] += count
                found.total += seconds * count

    def observe_each(self, seconds: Sequence[float], *labels: object) -> None:
        """Observe many values that count once each, a bucket at a time."""
        ordered = sorted(seconds)
        ends = [0, *(bisect_right(ordered, edge) for edge in self.buckets), len(ordered)]
        groups = [ordered[start:end] for start, end in pairwise(ends) if start < end]
        means = [(min(sum(group) / len(group), group[-1]), len(group)) for group in groups]
        self.observe_all(means, *labels)

    def distributions(self) -> dict[Labels, Distribution]:
        # What is watched observes what it has noted so far.
        self.values()
        with self._lock:
            return {
                key: Distribution(list(found.counts), found.total)
                for key, found in self._distributions.items()
            }


_QUEUE = ("queue",)
_PARTITION = ("partition",)
_BOTH = ("queue", "partition")
_QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_HANDLING = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0, 7200.0, 43_200.0)
_AGES = (*_QUICK[2:], 60.0, 300.0, 1800.0, 7200.0, 43_200.0)
_LATENESS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)

_all: dict[str, Family] = {}


def register(named: Mapping[str, object]) -> None:
    """Add the families among a module's globals; their names begin with ``kafkamq_``."""
    for family in [each for each in named.values() if isinstance(each, Family)]:
        assert family.name.startswith("kafkamq_"), family.name
        assert family.name not in _all, family.name
        _all[family.name] = family


def families() -> tuple[Family, ...]:
    return tuple(_all.values())


class Collector:
    """Gives all of kafkamq's metrics to a registry of prometheus-client, which it imports then."""

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        for family in families():
            if isinstance(family, Histogram):
                shown = HistogramMetricFamily(family.name, family.text, labels=family.labels)
                for labels, found in family.distributions().items():
                    bounds = (*map(str, family.buckets), "+Inf")
                    sums = map(float, accumulate(found.counts))
                    shown.add_metric(labels, list(zip(bounds, sums, strict=True)), found.total)
                yield shown
                continue
            make = CounterMetricFamily if isinstance(family, Counter) else GaugeMetricFamily
            simple = make(family.name, family.text, labels=family.labels)
            for labels, value in family.values().items():
                simple.add_metric(labels, value)
            yield simple


# Producers.
SENT = Counter("kafkamq_messages_sent", "Messages that Kafka has confirmed.", _BOTH)
SEND_FAILED = Counter("kafkamq_sends_failed", "Sends that Kafka refused or timed out.", _QUEUE)
SEND_SECONDS = Histogram(
    "kafkamq_send_seconds", "From send to Kafka's confirmation.", _QUEUE, _QUICK
)

# Workers.
RECEIVED = Counter(
    "kafkamq_messages_received", "Deliveries: STARTed and committed, to be handed out.", _BOTH
)
RECEIVED_AGAIN = Counter(
    "kafkamq_messages_received_again", "Deliveries with a delivery_count above 1.", _BOTH
)
ACKED = Counter("kafkamq_messages_acked", "Verdicts: done.", _BOTH)
NACKED = Counter("kafkamq_messages_nacked", "Verdicts: given back, counted.", _BOTH)
REJECTED = Counter("kafkamq_messages_rejected", "Verdicts: to the dead letters.", _BOTH)
RELEASED = Counter("kafkamq_messages_released", "Given back by close, never handed out.", _BOTH)
LEASES_LOST = Counter(
    "kafkamq_leases_lost", "Leases that ended while this worker held the message.", _BOTH
)
LATE_VERDICTS = Counter(
    "kafkamq_late_verdicts", "Verdicts that reached the log after their lease, or never.", _BOTH
)
NAMES_OF_OURS = Counter(
    "kafkamq_names_of_ours",
    "Messages of a topic that anybody writes to with headers of the sender's called as ours are.",
    _QUEUE,
)
IN_FLIGHT = Gauge("kafkamq_in_flight", "Messages held by this process's workers.", _QUEUE)
READY = Gauge("kafkamq_ready", "Of these, what no receive has taken yet.", _QUEUE)
UNDER_WAY = Gauge("kafkamq_under_way", "Messages STARTed and not committed.", _QUEUE)
POLL_AGE = Gauge(
    "kafkamq_poll_age_seconds",
    "Since the last poll of a queue's topic, of the consumer that polled the longest ago.",
    _QUEUE,
    combine=max,
)
SEND_TO_RECEIVE_SECONDS = Histogram(
    "kafkamq_send_to_receive_seconds",
    "From the time of a record in its topic to its hand-out.",
    _QUEUE,
    _AGES,
)
HANDLING_SECONDS = Histogram(
    "kafkamq_receive_to_verdict_seconds",
    "From STARTed and committed to the verdict.",
    _QUEUE,
    _HANDLING,
)

# Trackers.
REDELIVERED = Counter("kafkamq_tracker_redelivered", "Copies written.", _PARTITION)
DEAD_LETTERED = Counter("kafkamq_tracker_dead_lettered", "Dead letters written.", _PARTITION)
TRACKER_LATE = Counter(
    "kafkamq_tracker_late_verdicts", "ENDs that found their message due (R9).", _PARTITION
)
MALFORMED = Counter(
    "kafkamq_tracker_malformed_markers", "Records set aside in the quarantine (R21).", _PARTITION
)
IN_PROGRESS = Gauge(
    "kafkamq_tracker_in_progress", "Entries: held, waiting, due or delayed.", _PARTITION
)
DUE = Gauge("kafkamq_tracker_due", "Entries that are due and not settled.", _PARTITION)
AWAITED = Gauge(
    "kafkamq_tracker_awaited",
    "Of what is due: what waits for logs that do not answer, or are not known (R18).",
    _PARTITION,
)
OLDEST_DEADLINE = Gauge(
    "kafkamq_tracker_oldest_deadline_seconds",
    "Log time until the earliest deadline, or until what ended beside it is forgotten (R12, 60 s)"
    " if that is sooner; negative: so long past. Absent: nothing is open.",
    _PARTITION,
)
POSITION = Gauge("kafkamq_tracker_position", "Next offset that the tracker folds.", _PARTITION)
LAG = Gauge("kafkamq_tracker_lag", "Readable records of the markers not folded yet.", _PARTITION)
LIVE = Gauge(
    "kafkamq_tracker_live", "1: has read its own TICK and redelivers (R17); else 0.", _PARTITION
)
LSO_STALLED = Gauge(
    "kafkamq_lso_stalled_seconds",
    "How long an open transaction has held readers of the markers back.",
    _PARTITION,
)
MESSAGES_LSO_STALLED = Gauge(
    "kafkamq_messages_lso_stalled_seconds",
    "How long an open transaction has held readers of the messages back.",
    _PARTITION,
)
LATENESS = Histogram(
    "kafkamq_tracker_lateness_seconds",
    "From the deadline to the copy or dead letter.",
    _PARTITION,
    _LATENESS,
)

# Streaming queries of Spark, the tracker's among them.
_QUERY = ("query",)
STANDBY = Gauge("kafkamq_spark_standby", "1: it stands by (R36); 0: it is active.", _QUERY)
SPARK_RUNNING = Gauge("kafkamq_spark_running", "1: the query runs; 0: it has ended.", _QUERY)
SPARK_FAILURES = Counter("kafkamq_spark_failures", "Runs of the query that failed.", _QUERY)
SPARK_ROWS = Counter("kafkamq_spark_rows", "Rows that batches have read.", _QUERY)
SPARK_ROWS_PER_SECOND = Gauge(
    "kafkamq_spark_rows_per_second", "Rows of the last batch by its time.", _QUERY
)
SPARK_BATCH_SECONDS = Histogram(
    "kafkamq_spark_batch_seconds", "Time of a batch, planning and commit included.", _QUERY,
    _LATENESS,
)  # fmt: skip
SPARK_STATE_BYTES = Gauge(
    "kafkamq_spark_state_bytes", "State of the query in memory and in RocksDB's files.", _QUERY
)
SPARK_STATE_ROWS = Gauge("kafkamq_spark_state_rows", "Rows in the state.", _QUERY)
SPARK_BACKLOG = Gauge(
    "kafkamq_spark_backlog", "Records of the source behind the last batch.", _QUERY
)

register(globals())
