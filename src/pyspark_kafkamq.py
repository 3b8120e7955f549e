"""Lets Spark find ``format("kafkamq")`` in a session that it was not registered in.

Spark imports every module of this kind of name when a session first needs a format of Python's, so
it imports nothing of kafkamq before the format is used.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.datasource import DataSource


class DefaultSource(DataSource):
    """Makes ``KafkaSource``, whose options name the cluster."""

    @classmethod
    def name(cls) -> str:
        return "kafkamq"

    def __new__(cls, options: Mapping[str, str]) -> DataSource:  # type: ignore[misc]
        """Return the one that does the work."""
        from kafkamq.spark.formats import KafkaSource

        return KafkaSource(options)  # type: ignore[arg-type]
