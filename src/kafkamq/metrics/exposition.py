"""Shows what was counted to prometheus-client, which is imported when somebody looks."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

from kafkamq.errors import ConfigError
from kafkamq.metrics.catalog import Collector

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from kafkamq.metrics.server import MetricsServer

MISSING = "prometheus-client is not installed: pip install 'kafkamq[metrics]'"
# Those that have the metrics: a second time is an error.
_registries: WeakSet[CollectorRegistry] = WeakSet()


def register_metrics(registry: CollectorRegistry | None = None) -> None:
    """Add kafkamq's metrics to a registry, by default prometheus-client's own; once to each."""
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        raise ConfigError(MISSING) from None
    registry = REGISTRY if registry is None else registry
    if registry not in _registries:
        registry.register(Collector())
        _registries.add(registry)


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
