"""The parallel consumer: many records of a partition at once, each key in its order."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kafkamq.parallel.consumer import ParallelBase, ParallelConsumer
    from kafkamq.parallel.health import Health
    from kafkamq.parallel.record import ParallelRecord
    from kafkamq.parallel.results import OutgoingRecord

__all__ = ["Health", "OutgoingRecord", "ParallelBase", "ParallelConsumer", "ParallelRecord"]

_HOMES = {
    "kafkamq.parallel.health": ("Health",),
    "kafkamq.parallel.results": ("OutgoingRecord",),
    "kafkamq.parallel.consumer": ("ParallelBase", "ParallelConsumer"),
    "kafkamq.parallel.record": ("ParallelRecord",),
}

_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value
