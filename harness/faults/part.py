"""The settings of the programs in `harness.faults.actors`."""

from __future__ import annotations

from dataclasses import dataclass, field

from kafkamq.config import ServiceConfig

POISON = b"poison"
"""A payload that begins so kills the worker that gets it."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The settings of any role; each reads those that concern it."""

    bootstrap_servers: str
    namespace: str
    folder: str  # of the histories
    name: str
    queue_id: str = "a"
    seed: int = 0
    kafka: dict[str, str] = field(default_factory=dict)
    clock_ahead_s: float = 0.0  # how wrong its Python's wall clock is
    # sender
    count: int = 1000
    rate: float = 500.0  # messages per second
    delayed: float = 0.0  # share of messages with a delay of 1 s
    poison: float = 0.0  # share of messages that kill the process that handles them
    payload_bytes: int = 0  # 0: a small number
    # worker
    redelivery_timeout: float = 3.0
    max_deliveries: int = 5
    exactly_once: bool = False
    nacks: float = 0.02  # shares of first deliveries
    rejects: float = 0.005
    batch: int = 50
    work_s: float = 0.0  # per message
    # tracker
    max_actions: int = 50_000

    @property
    def config(self) -> ServiceConfig:
        """Return where it plays."""
        return ServiceConfig(
            bootstrap_servers=self.bootstrap_servers, namespace=self.namespace, kafka=self.kafka
        )
