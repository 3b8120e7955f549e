"""The jars of Spark's own Kafka connector, for the rows that measure it beside ours.

They are fetched once, into the user's cache beside the broker's jars.
"""

from __future__ import annotations

from pathlib import Path

from kafkamq.dev.artifacts import Module, fetch_modules

__all__ = ["connector_jars"]

_MODULES = (  # the token provider is not published in 4.2.0 everywhere, and the older one works
    Module(
        "org.apache.spark",
        "spark-sql-kafka-0-10_2.13",
        "4.2.0",
        "64539c45e5d39f7ddb747312c239f38f5208d08c1a0ddf7d70beb2fbd9373705",
    ),
    Module(
        "org.apache.spark",
        "spark-token-provider-kafka-0-10_2.13",
        "4.0.0",
        "f2be3b76f9e6cbe63379d4e4e0dc14f59dbf056ae2ad16ff15ac108004c86767",
    ),
    Module(
        "org.apache.kafka",
        "kafka-clients",
        "3.9.1",
        "7568b998572d256f0b7bc0afdc1b7a2588b8b08415c62ce314c864a6851ae9d9",
    ),
    Module(
        "org.apache.commons",
        "commons-pool2",
        "2.12.0",
        "6d3bd18df8410f3e31b031aca582cc109342358a62a2759ebd0c4cdf30d06f8b",
    ),
)


def connector_jars() -> list[Path]:
    """Paths of the jars, for Spark's property ``spark.jars``."""
    folder = fetch_modules("spark-connector-4.2.0", _MODULES)
    return [folder / each.file_name for each in _MODULES]
