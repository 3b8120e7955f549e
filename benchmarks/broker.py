"""The broker that benchmarks measure on: one of their own, or one that is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kafkamq.dev import LocalKafka

__all__ = ["broker_at"]


@contextmanager
def broker_at(servers: str) -> Iterator[str]:
    """Its ``bootstrap.servers``; empty ``servers``: a broker that is there for the block."""
    if servers:
        yield servers
        return
    # No quick-start options: this broker is here to be fast, not to be up soon.
    with LocalKafka(heap="1g", jvm_options=()) as kafka:
        yield kafka.bootstrap_servers
