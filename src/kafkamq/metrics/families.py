"""What is counted and how: counters, gauges and histograms that cost a dictionary entry.

Standard library only: counting works without prometheus-client, which ``exposition.py`` needs to
show what was counted. Hot paths add once per batch, never once per message.
"""

from __future__ import annotations

import operator
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

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
        asked = [source() for source in sources]  # first: one may add what it has noted so far
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
    """A value that may grow and shrink."""

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
    """Seconds, in buckets."""

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
        """As ``observe_all``, of many that count once, a bucket at a time."""
        ordered = sorted(seconds)
        ends = [0, *(bisect_right(ordered, edge) for edge in self.buckets), len(ordered)]
        groups = [ordered[start:end] for start, end in pairwise(ends) if start < end]
        means = [(min(sum(group) / len(group), group[-1]), len(group)) for group in groups]
        self.observe_all(means, *labels)

    def distributions(self) -> dict[Labels, Distribution]:
        self.values()  # what is watched observes what it has noted so far
        with self._lock:
            return {
                key: Distribution(list(found.counts), found.total)
                for key, found in self._distributions.items()
            }
