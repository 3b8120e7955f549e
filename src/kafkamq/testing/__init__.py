"""Testing without a cluster: queues and Kafka in memory, a simulator, and the checker.

`MemoryService` is a `Service` without Kafka, on a `Clock` that a test moves, for tests of handlers.
`MemoryKafka` is a log for tests of your own. `simulate` runs senders, workers and trackers under
faults that a seed draws. `check_logs` judges any namespace from its topics, also those of a real
Kafka (`record_of` takes what confluent-kafka consumed). `random_markers`, `NaiveTracker` and
`check_agreement` are for tests of trackers.
"""

from kafkamq.testing.agreement import (
    StateStore,
    check_agreement,
    cut_batches,
    plan_of_batches,
)
from kafkamq.testing.checker import CheckFailedError, Problem, Verdict, check_logs, record_of
from kafkamq.testing.engines import EngineSettings
from kafkamq.testing.naive import NaiveTracker
from kafkamq.testing.random_markers import MarkerRecord, random_markers
from kafkamq.testing.service import Clock, MemoryDeadLetter, MemoryService
from kafkamq.testing.simulator import Limits, Simulation, draw_limits, simulate
from kafkamq.testing.workers import Behaviour, WorkerSettings
from kafkamq.testing.world import Faults
from kafkamq.transport.memory import Committed, LogRecord, MemoryKafka, TransactionalProducer

__all__ = [
    "Behaviour",
    "CheckFailedError",
    "Clock",
    "Committed",
    "EngineSettings",
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
    "TransactionalProducer",
    "Verdict",
    "WorkerSettings",
    "check_agreement",
    "check_logs",
    "cut_batches",
    "draw_limits",
    "plan_of_batches",
    "random_markers",
    "record_of",
    "simulate",
]
