"""The pipeline on Spark: source, exactly-once sink, redelivery tracker and SQL views.

    import kafkamq.spark
    kafkamq.spark.register(spark, config)
    spark.read.format("kafkamq").option("view", "deliveries").load()

The names below load when they are first used, so that importing this costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkamq.lazy import loader

if TYPE_CHECKING:
    from kafkamq.spark.batches import Batch
    from kafkamq.spark.formats import Views, register, register_views
    from kafkamq.spark.handlers import StreamMessage, map_messages
    from kafkamq.spark.payloads import with_body
    from kafkamq.spark.queue_streams import Acknowledged, AckQuery, ack, read_queue
    from kafkamq.spark.sink.sink import by_slot, clear_sink_ledger, write_stream
    from kafkamq.spark.tables import rows_of, write_once

__all__ = [
    "register",
    "read_queue",
    "with_body",
    "map_messages",
    "ack",
    "write_once",
    "rows_of",
    "Batch",
    "AckQuery",
    "Acknowledged",
    "StreamMessage",
    "register_views",
    "Views",
    "by_slot",
    "clear_sink_ledger",
    "write_stream",
]

_HOMES = {
    "kafkamq.spark.batches": ("Batch",),
    "kafkamq.spark.handlers": ("StreamMessage", "map_messages"),
    "kafkamq.spark.payloads": ("with_body",),
    "kafkamq.spark.queue_streams": ("AckQuery", "Acknowledged", "ack", "read_queue"),
    "kafkamq.spark.formats": ("Views", "register", "register_views"),
    "kafkamq.spark.sink.sink": ("by_slot", "clear_sink_ledger", "write_stream"),
    "kafkamq.spark.tables": ("rows_of", "write_once"),
}

_load = loader(__name__, _HOMES)


def __getattr__(name: str) -> object:
    try:
        return _load(name)
    except ImportError:
        # An older PySpark lacks modules, and names in others.
        from kafkamq.spark.session import check_packages

        check_packages()
        raise


def __dir__() -> list[str]:
    return sorted(__all__)
