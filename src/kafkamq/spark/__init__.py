"""The pipeline on Spark: source, exactly-once sink, redelivery tracker and SQL views.

    import kafkamq.spark
    kafkamq.spark.register(spark, config)
    spark.read.format("kafkamq").option("view", "deliveries").load()

The names below load when they are first used, so that importing this costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kafkamq.spark.registering import register
    from kafkamq.spark.views import Views, register_views

__all__ = [
    "register",
    "register_views",
    "Views",
]

_HOMES = {
    "kafkamq.spark.registering": ("register",),
    "kafkamq.spark.views": ("Views", "register_views"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'kafkamq.spark' has no attribute {name!r}")
    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
