"""Here the life of a queue is tables for Spark SQL.

    register_views(spark, config)
    spark.sql("SELECT queue_id, outcome, count(*) FROM deliveries GROUP BY ALL").show()

Every view reads what is committed in the topics when the query runs; nothing is kept. They are the
views of ``format("kafkamq")``, whose columns ``spark/source/columns.py`` lists. Times are the
brokers'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.spark.formats import register_source
from kafkamq.spark.options import VIEWS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["VIEWS", "Views", "register_views"]


class Views:
    def __init__(self, spark: SparkSession, config: ServiceConfig) -> None:
        self._spark = spark
        self._format = register_source(spark, config)

    def messages(self) -> DataFrame:
        """Every copy of every message in the queue topic.

        ``origin_*`` is the place of the first copy, its own for the first; ``headers`` are the
        sender's; ``delivery_count`` is what the copy's delivery is.
        """
        return self.view("messages")

    def markers(self) -> DataFrame:
        """Every record of the markers topic; ``type`` is null where it is no marker."""
        return self.view("markers")

    def dead_letters(self) -> DataFrame:
        """Every dead letter, with its reason and the error's text."""
        return self.view("dead_letters")

    def deliveries(self) -> DataFrame:
        """Return one row per attempt: a copy of a message that a worker STARTed.

        It ends with the first END that names it: a worker's verdict (ACK, NACK, REJECT, RELEASE),
        or a tracker's (REDELIVERED, DEAD_LETTERED) when none came. What has not ended has null
        there. ``is_late``: the verdict came after the lease's end, and the message went on.
        """
        return self.view("deliveries")

    def in_flight(self) -> DataFrame:
        """Return what a tracker still has to do with: held, waiting, scheduled or due, by log time.

        Computed by the tracker's own rules from the position that a tracker has committed.
        """
        return self.view("in_flight")

    def view(self, name: str) -> DataFrame:
        return self._spark.read.format(self._format).option("view", name).load()


def register_views(
    spark: SparkSession, config: ServiceConfig, *, prefix: str = ""
) -> tuple[str, ...]:
    """Make the views known to a session as temporary views; returns their names.

    Args:
        spark: The session.
        config: The namespace.
        prefix: Goes before each name, for several namespaces in one session.

    Raises:
        ConfigError: The prefix cannot begin a view's name.
    """
    if prefix and not prefix.isidentifier():
        raise ConfigError(
            f"prefix is {prefix!r}: it must begin with a letter or '_' and go on "
            "with letters, digits and '_'"
        )
    views = Views(spark, config)
    names = []
    for name in VIEWS:
        views.view(name).createOrReplaceTempView(f"{prefix}{name}")
        names.append(f"{prefix}{name}")
    return tuple(names)
