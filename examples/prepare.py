"""Prepares records with Spark for calls that a stream should not wait for.

    python examples/prepare.py localhost:9092 positions orders file:///var/lib/prepare

Spark takes what is quick and concerns many records: it parses, drops what is no position, and
keys the rest by device. ``examples/enrich.py`` reads the topic that this writes and calls a slow
service for each record, many devices at a time, and each device in its order. The rows are
written exactly once (``format("kafkamq")``), whatever is killed.
"""

from __future__ import annotations

import signal
import sys
import threading

from pyspark.sql import DataFrame
from pyspark.sql.functions import col, from_json, struct, to_json

from kafkamq.spark import register
from kafkamq.spark.session import build_session

POSITION = "device STRING, latitude DOUBLE, longitude DOUBLE"


def prepared(records: DataFrame) -> DataFrame:
    """Rows for the sink: ``key``, the device; ``value``, its place as JSON."""
    position = records.select(from_json(col("value").cast("string"), POSITION).alias("position"))
    rows = position.select("position.*").where(
        "device IS NOT NULL AND abs(latitude) <= 90 AND abs(longitude) <= 180"
    )
    place = to_json(struct("latitude", "longitude"))
    return rows.select(col("device").alias("key"), place.alias("value"))


def main() -> None:
    """Runs until Ctrl-C or SIGTERM."""
    stop = threading.Event()
    servers, source, target, checkpoint = sys.argv[1:5]
    spark = register(build_session(app_name=f"prepare {source}", master="local[2]"))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    kafka = {"kafka.bootstrap.servers": servers}
    records = spark.readStream.format("kafkamq").options(**kafka, topic=source).load()
    query = (
        prepared(records)
        .writeStream.format("kafkamq")
        .options(**kafka, topic=target, checkpointLocation=checkpoint)
        .trigger(processingTime="1 second")
        .start()
    )
    while not stop.is_set():
        query.awaitTermination(1)
    query.stop()
    spark.stop()


if __name__ == "__main__":
    main()
