"""A Spark tracker as a program, with everything written down that Spark can write down.

Run: python secured_spark.py BOOTSTRAP NAMESPACE FOLDER; Kafka's properties are in the environment
as SECURED_<name>. It ends when a line comes in.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.spark.session import build_session
from kafkamq.spark.tracker.tracker import SparkTracker


def main(bootstrap: str, namespace: str, folder: str) -> None:
    logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.INFO)  # DEBUG: every byte to the JVM, by design
    kafka = {name[8:]: value for name, value in os.environ.items() if name.startswith("SECURED_")}
    config = ServiceConfig(bootstrap_servers=bootstrap, namespace=namespace, kafka=kafka)
    spark = build_session(
        app_name=namespace,
        settings={
            "spark.ui.enabled": "true",
            "spark.ui.port": "0",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": f"file://{folder}/events",
            "spark.hadoop.fs.s3a.secret.key": kafka["sasl.password"],
        },
    )
    Path(folder, "address").write_text(spark.sparkContext.uiWebUrl or "", encoding="utf-8")
    tracker = SparkTracker(
        config,
        TrackerConfig(position_interval_ms=200),
        checkpoint=str(Path(folder, "checkpoint")),
        trigger_s=0.2,
        spark=spark,
    )
    with tracker:
        sys.stdin.readline()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
