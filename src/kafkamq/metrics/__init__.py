"""Metrics and health of a process; counting needs no package, showing needs prometheus-client."""

from kafkamq.metrics.catalog import Collector, Counter, Gauge, Histogram, families, register
from kafkamq.metrics.exposition import register_metrics, serve_metrics
from kafkamq.metrics.health import health

__all__ = [
    "serve_metrics", "register_metrics", "Collector", "Counter", "Gauge", "Histogram", "families",
    "register", "health",
]  # fmt: skip
