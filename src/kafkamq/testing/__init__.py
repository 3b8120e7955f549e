"""Users test without a cluster by this: queues and Kafka in memory, and the checker.

`MemoryService` is a `Service` without Kafka, on a `Clock` that a test moves, for tests of handlers.
`Service("memory://NAME")` runs the clients that ship on a `MemoryKafka`, which `cluster_of` finds
and `forget_cluster` empties. `check_logs` judges any namespace from its topics, also of a real
Kafka (`record_of` takes what confluent-kafka consumed).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkamq.lazy import loader
from kafkamq.testing.checker import CheckFailedError, Problem, Verdict, check_logs
from kafkamq.testing.history import LogRecord, record_of
from kafkamq.testing.memory_backend import MemoryService
from kafkamq.testing.memory_queue import Clock, MemoryDeadLetter

if TYPE_CHECKING:
    from kafkamq.transport.memory.cluster import MemoryKafka, cluster_of, forget_cluster

__all__ = [
    "CheckFailedError", "Clock", "LogRecord", "MemoryDeadLetter", "MemoryKafka", "MemoryService",
    "Problem", "Verdict", "check_logs", "cluster_of", "forget_cluster", "record_of",
]  # fmt: skip

__getattr__ = loader(
    __name__,
    {"kafkamq.transport.memory.cluster": ("MemoryKafka", "cluster_of", "forget_cluster")},
)
