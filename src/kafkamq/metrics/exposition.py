"""Shows what was counted to prometheus-client, which is imported when somebody looks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kafkamq.errors import ConfigError
from kafkamq.metrics.catalog import families
from kafkamq.metrics.families import Counter, Histogram

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from kafkamq.metrics.server import MetricsServer

__all__ = ["MISSING", "Collector", "register_metrics", "serve_metrics"]

MISSING = "prometheus-client is not installed: pip install 'kafkamq[metrics]'"


class Collector:
    """Gives all of kafkamq's metrics to a registry of prometheus-client."""

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
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


def register_metrics(registry: CollectorRegistry | None = None) -> None:
    """Add kafkamq's metrics to a registry, by default prometheus-client's own; once.

    Raises:
        ConfigError: prometheus-client is not installed.
    """
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        raise ConfigError(MISSING) from None
    (REGISTRY if registry is None else registry).register(Collector())


def serve_metrics(port: int, *, host: str = "0.0.0.0") -> MetricsServer:
    """Serve this process's metrics and health.

    Args:
        port: 0: a free one, see ``port`` of the result.
        host: Address to listen on; all by default, as scrapers are elsewhere.

    Raises:
        ConfigError: prometheus-client is not installed, or the port is taken.
    """
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise ConfigError(MISSING) from None
    from kafkamq.metrics.server import MetricsServer

    return MetricsServer(port, host)
