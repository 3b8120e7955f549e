"""The parallel consumer handles many records of a partition at once, each key in its order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkamq.lazy import loader

if TYPE_CHECKING:
    from kafkamq.parallel.consumer import ParallelBase, ParallelConsumer
    from kafkamq.parallel.health import Health
    from kafkamq.parallel.record import ParallelRecord
    from kafkamq.parallel.results import OutgoingRecord, Produced

__all__ = [
    "Health",
    "OutgoingRecord",
    "ParallelBase",
    "ParallelConsumer",
    "ParallelRecord",
    "Produced",
]

_HOMES = {
    "kafkamq.parallel.health": ("Health",),
    "kafkamq.parallel.results": ("OutgoingRecord", "Produced"),
    "kafkamq.parallel.consumer": ("ParallelBase", "ParallelConsumer"),
    "kafkamq.parallel.record": ("ParallelRecord",),
}

__getattr__ = loader(__name__, _HOMES)
