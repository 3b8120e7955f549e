"""A Spark session for a minute's work; what it writes goes with the demo's folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kafkamq.spark.session import build_session, session_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER = "local[2]"
DRIVER_MEMORY = "1g"
QUICK_JVM = "-XX:TieredStopAtLevel=1"  # the better code would come too late
MESSAGES_PER_TASK = 50_000


def demo_session(name: str, folder: Path, *, messages: int) -> SparkSession:
    """The session of the process ``name``, sized for so many messages in all."""
    files = folder / f"spark-{name}"  # Spark leaves files behind when it ends with us
    files.mkdir()
    usual = session_settings(master=MASTER, driver_memory=DRIVER_MEMORY)
    options = "spark.driver.extraJavaOptions"
    return build_session(
        app_name=f"kafkamq demo: {name}",
        master=MASTER,
        driver_memory=DRIVER_MEMORY,
        settings={
            options: f"{usual[options]} {QUICK_JVM} -Djava.io.tmpdir={files}",
            "spark.local.dir": str(files),
            "spark.sql.warehouse.dir": str(files / "warehouse"),
            "spark.sql.shuffle.partitions": str(1 + min(3, messages // MESSAGES_PER_TASK)),
            "spark.sql.debug.maxToStringFields": "200",
        },
    )
