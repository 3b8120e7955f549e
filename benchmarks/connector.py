"""The jars of Spark's own Kafka connector, for the rows that measure it beside ours.

Fetched once, by the Ivy that PySpark bundles, into the user's cache beside the broker's jars.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from kafkamq.dev.ivy import Ivy, fetched, ivy_jar

__all__ = ["connector_jars"]

_MODULES = (  # the token provider is not published in 4.2.0 everywhere, and the older one works
    ("org.apache.spark", "spark-sql-kafka-0-10_2.13", "4.2.0"),
    ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.0.0"),
    ("org.apache.kafka", "kafka-clients", "3.9.1"),
    ("org.apache.commons", "commons-pool2", "2.12.0"),
)


def connector_jars() -> list[Path]:
    """Paths of the jars, for Spark's property ``spark.jars``."""
    folder = Path.home() / ".cache" / "kafkamq" / "spark-connector-4.2.0"
    jars = [folder / f"{name}-{version}.jar" for _, name, version in _MODULES]
    if not all(jar.exists() for jar in jars):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            ivy = Ivy(java="java", jar=ivy_jar(folder, Path(work)))
            ivy.fetch(_MODULES, Path(work), on_fetched=lambda count: None)
            found = dict(fetched(Path(work)))
            for module, jar in zip(_MODULES, jars, strict=True):
                found[module].replace(jar)
    return jars
