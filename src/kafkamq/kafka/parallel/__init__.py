"""The parallel consumer: many records of a partition at once, each key in its order."""

from kafkamq.kafka.parallel.consumer import ParallelBase, ParallelConsumer
from kafkamq.kafka.parallel.health import Health
from kafkamq.kafka.parallel.record import ParallelRecord
from kafkamq.kafka.parallel.results import OutgoingRecord

__all__ = ["Health", "OutgoingRecord", "ParallelBase", "ParallelConsumer", "ParallelRecord"]
