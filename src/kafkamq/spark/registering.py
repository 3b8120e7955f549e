"""Makes kafkamq's formats known to a Spark session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkamq.config import ServiceConfig
from kafkamq.spark.formats import FORMAT, register_source
from kafkamq.spark.session import check_packages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(
    spark: SparkSession, config: ServiceConfig | None = None, *, name: str = FORMAT
) -> SparkSession:
    """Make ``format("kafkamq")`` known; returns the session.

    Args:
        spark: The session, of ``build_session`` or any other.
        config: Cluster, namespace and Kafka's properties for all queries. None: each query names
            them as options (``kafka.bootstrap.servers``, ``namespace``, ``kafka.NAME``), where
            secrets can be seen in plans.
        name: What ``format`` is given; another one for a second cluster or namespace. With
            ``-sink`` behind it it is the same.

    Raises:
        ConfigError: A Python package is missing or has an unsupported version.
    """
    check_packages()
    register_source(spark, config, name=name)
    register_source(spark, config, name=f"{name}-sink")
    return spark
