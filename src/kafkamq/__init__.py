"""kafkamq: message queues on the Kafka a team already runs, with the pipeline behind them on Spark.

The names below load when they are first used, so that ``import kafkamq`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kafkamq.config import Backoff
    from kafkamq.errors import (
        BrokerError,
        ConfigError,
        DataLossError,
        DeadlineExceededError,
        FencedError,
        KafkaMQError,
        LeaseLostError,
        StateError,
        WireError,
    )
    from kafkamq.kafka import Consumer, Delivery, Message, Producer, Queue, Service
    from kafkamq.kafka.handlers import Worker, trace_headers
    from kafkamq.kafka.parallel import OutgoingRecord, ParallelConsumer, ParallelRecord
    from kafkamq.types import (
        Ack,
        MessageId,
        Nack,
        OutgoingMessage,
        Reject,
        ScheduleToken,
        SentMessage,
    )

__all__ = [
    "Service",
    "Queue",
    "Producer",
    "Consumer",
    "Message",
    "Delivery",
    "Worker",
    "ParallelConsumer",
    "ParallelRecord",
    "OutgoingRecord",
    "trace_headers",
    "Ack",
    "Nack",
    "Reject",
    "Backoff",
    "OutgoingMessage",
    "SentMessage",
    "ScheduleToken",
    "MessageId",
    "KafkaMQError",
    "ConfigError",
    "StateError",
    "WireError",
    "LeaseLostError",
    "DeadlineExceededError",
    "BrokerError",
    "FencedError",
    "DataLossError",
    "__version__",
]

__version__ = "0.1.0"

_HOMES = {
    "kafkamq.config": ("Backoff",),
    "kafkamq.errors": (
        "BrokerError",
        "ConfigError",
        "DataLossError",
        "DeadlineExceededError",
        "FencedError",
        "KafkaMQError",
        "LeaseLostError",
        "StateError",
        "WireError",
    ),
    "kafkamq.kafka": ("Consumer", "Delivery", "Message", "Producer", "Queue", "Service"),
    "kafkamq.kafka.handlers": ("Worker", "trace_headers"),
    "kafkamq.kafka.parallel": ("OutgoingRecord", "ParallelConsumer", "ParallelRecord"),
    "kafkamq.types": (
        "Ack",
        "MessageId",
        "Nack",
        "OutgoingMessage",
        "Reject",
        "ScheduleToken",
        "SentMessage",
    ),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'kafkamq' has no attribute {name!r}")
    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
