"""What was counted, as prometheus-client has it, which is imported when somebody looks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kafkamq.metrics.catalog import families
from kafkamq.metrics.families import Counter, Histogram

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class Collector:
    """Gives all of kafkamq's metrics to a registry of prometheus-client."""

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
                    buckets = _cumulated(family.buckets, found.counts)
                    shown.add_metric(labels, buckets, found.total)
                yield shown
                continue
            make = CounterMetricFamily if isinstance(family, Counter) else GaugeMetricFamily
            simple = make(family.name, family.text, labels=family.labels)
            for labels, value in family.values().items():
                simple.add_metric(labels, value)
            yield simple


def _cumulated(bounds: tuple[float, ...], counts: list[int]) -> list[tuple[str, float]]:
    buckets = []
    sum_ = 0
    for bound, count in zip((*(str(bound) for bound in bounds), "+Inf"), counts, strict=True):
        sum_ += count
        buckets.append((bound, float(sum_)))
    return buckets
