"""Testing without a cluster: queues and Kafka in memory, a simulator, and the checker.

`MemoryService` is a `Service` without Kafka, on a `Clock` that a test moves, for tests of handlers.
`Service("memory://NAME")` runs the clients that ship on a `MemoryKafka`, which `cluster_of` finds
and `forget_cluster` empties. `simulate` runs senders, workers and trackers under faults that a seed
draws, on greenlet. `check_logs` judges any namespace from its topics, also
of a real Kafka (`record_of` takes what confluent-kafka consumed). `random_markers`,
`NaiveTracker` and `check_agreement` are for tests of trackers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkamq.lazy import loader
from kafkamq.testing.agreement import StateStore, check_agreement, cut_batches, plan_of_batches
from kafkamq.testing.checker import CheckFailedError, Problem, Verdict, check_logs
from kafkamq.testing.history import LogRecord, record_of
from kafkamq.testing.naive import NaiveTracker
from kafkamq.testing.random_markers import MarkerRecord, random_markers
from kafkamq.testing.service import Clock, MemoryDeadLetter, MemoryService

if TYPE_CHECKING:
    from kafkamq.testing.simulation.limits import (
        Behaviour,
        Faults,
        Limits,
        TrackerSettings,
        WorkerSettings,
        draw_limits,
    )
    from kafkamq.testing.simulation.simulator import Simulation, simulate
    from kafkamq.transport.memory.cluster import MemoryKafka, cluster_of, forget_cluster

__all__ = [
    "Behaviour",
    "CheckFailedError",
    "Clock",
    "Faults",
    "Limits",
    "LogRecord",
    "MarkerRecord",
    "MemoryDeadLetter",
    "MemoryKafka",
    "MemoryService",
    "NaiveTracker",
    "Problem",
    "Simulation",
    "StateStore",
    "TrackerSettings",
    "Verdict",
    "WorkerSettings",
    "check_agreement",
    "check_logs",
    "cluster_of",
    "cut_batches",
    "draw_limits",
    "forget_cluster",
    "plan_of_batches",
    "random_markers",
    "record_of",
    "simulate",
]

_LIMITS = ("Behaviour", "Faults", "Limits", "TrackerSettings", "WorkerSettings", "draw_limits")
_HOMES = {
    "kafkamq.testing.simulation.limits": _LIMITS,
    "kafkamq.testing.simulation.simulator": ("Simulation", "simulate"),
    "kafkamq.transport.memory.cluster": ("MemoryKafka", "cluster_of", "forget_cluster"),
}

__getattr__ = loader(__name__, _HOMES)
