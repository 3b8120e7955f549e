"""How a demo runs; the times are short, so that it ends within a minute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Everything but the messages."""

    engine: str = "spark"  # or "local"
    keep: bool = False  # keep the folder with topics, logs and histories
    cache_dir: Path | None = None
    java: str = "java"
    namespace: str = "demo"
    workers: int = 3
    partitions: int = 4
    marker_partitions: int = 2
    redelivery_timeout: float = 2.5  # s
    slow_s: float = 3.5  # how long a slow message is handled: more than the redelivery timeout
    max_deliveries: int = 3
    backoff: Mapping[str, float] = field(
        default_factory=lambda: {"first": 0.5, "max": 1.0, "jitter": 0.2}
    )
    send_per_s: int = 4000
    kill_at: float = 0.5  # share of the messages that is settled when a worker is killed
    drain_timeout: float = 300.0  # s
    kafka: Mapping[str, str] = field(
        # A killed worker's partitions go to the others after this; Kafka's default is 45 s.
        default_factory=lambda: {"session.timeout.ms": "6000", "heartbeat.interval.ms": "1000"}
    )
