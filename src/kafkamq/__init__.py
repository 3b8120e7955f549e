"""kafkamq: message queues on the Kafka a team already runs, with the pipeline behind them on Spark.

The names below load when they are first used, so that ``import kafkamq`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkamq.lazy import loader

if TYPE_CHECKING:
    from kafkamq.config import Backoff, DeadLetterWriter
    from kafkamq.errors import (
        BrokerError,
        ConfigError,
        DataLossError,
        DeadlineExceededError,
        FencedError,
        KafkaMQError,
        LeaseLostError,
        SchemaRegistryError,
        StateError,
        WireError,
    )
    from kafkamq.parallel.consumer import ParallelConsumer
    from kafkamq.parallel.record import ParallelRecord
    from kafkamq.parallel.results import OutgoingRecord, Produced
    from kafkamq.queue.consumer import Consumer
    from kafkamq.queue.dead_letter_writer import OutgoingDeadLetter
    from kafkamq.queue.message import Message
    from kafkamq.queue.producer import Delivery, Producer
    from kafkamq.queue.schemas.registry import SchemaRegistry
    from kafkamq.queue.service import Queue, Service
    from kafkamq.runtime.telemetry import trace_headers
    from kafkamq.runtime.worker import Worker
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
    "Service", "Queue", "Producer", "Consumer", "Message", "Delivery", "Worker",
    "ParallelConsumer", "ParallelRecord", "OutgoingRecord", "Produced", "SchemaRegistry",
    "trace_headers", "Ack", "Nack", "Reject", "Backoff", "OutgoingMessage", "OutgoingDeadLetter",
    "DeadLetterWriter", "SentMessage", "ScheduleToken", "MessageId", "KafkaMQError", "ConfigError",
    "StateError", "WireError", "LeaseLostError", "SchemaRegistryError", "DeadlineExceededError",
    "BrokerError", "FencedError", "DataLossError", "__version__",
]  # fmt: skip

__version__ = "0.2.0"

_HOMES = {
    "kafkamq.config": ("Backoff", "DeadLetterWriter"),
    "kafkamq.errors": (
        "BrokerError", "ConfigError", "DataLossError", "DeadlineExceededError", "FencedError",
        "KafkaMQError", "LeaseLostError", "SchemaRegistryError", "StateError", "WireError",
    ),
    "kafkamq.queue.consumer": ("Consumer",),
    "kafkamq.queue.dead_letter_writer": ("OutgoingDeadLetter",),
    "kafkamq.queue.message": ("Message",),
    "kafkamq.queue.producer": ("Delivery", "Producer"),
    "kafkamq.queue.schemas.registry": ("SchemaRegistry",),
    "kafkamq.queue.service": ("Queue", "Service"),
    "kafkamq.runtime.worker": ("Worker",),
    "kafkamq.runtime.telemetry": ("trace_headers",),
    "kafkamq.parallel.results": ("OutgoingRecord", "Produced"),
    "kafkamq.parallel.consumer": ("ParallelConsumer",),
    "kafkamq.parallel.record": ("ParallelRecord",),
    "kafkamq.types": (
        "Ack", "MessageId", "Nack", "OutgoingMessage", "Reject", "ScheduleToken", "SentMessage",
    ),
}  # fmt: skip
__getattr__ = loader(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
