"""Streams of Spark that are killed in their second batch, and go on from their checkpoints.

``leave_behind.py`` runs this with an earlier release, which it kills, and the test with this tree.
A stream's name says where it writes and when it is killed:

- ``topic_starts``, ``table_starts``: the batch is STARTed, and nothing of it is written;
- ``topic_output``, ``sink_output``: the first of the batch's two transactions is committed;
- ``table_output``: the batch is in the table, and has no END.

    python streams.py killed|resumed|careless BOOTSTRAP_SERVERS FOLDER NAME...

The careless ones go on from the same checkpoints, and write all that Spark hands them.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from tests.integration.tracker_logs import Logs
from tests.spark.delta_driver import create, session
from tests.spark.queue_driver import output_topic

from kafkamq.spark import ack, map_messages, read_queue, register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STREAMS = ("topic_starts", "topic_output", "table_starts", "table_output", "sink_output")
MESSAGES = 20
BATCH = 10
ORIGIN = (
    "origin_topic STRING, origin_partition INT, origin_offset BIGINT, origin_timestamp TIMESTAMP"
)


def run(spark: SparkSession, logs: Logs, mode: str, folder: str) -> None:
    """Work on what there is, in a namespace of the stream's own: no other's markers end leases."""
    name, group = logs.namespace, os.getpgid(0)
    kind, _, moment = name.partition("_")
    out, checkpoint = f"{name}-out", f"{folder}/checkpoints/{name}"

    def handle(message: Any) -> bytes:
        if (mode, moment) == ("killed", "starts") and int(message.payload) >= BATCH:
            os.killpg(group, signal.SIGKILL)
        return bytes(message.payload)

    def append(frame: DataFrame, _: int) -> None:
        if kind == "table":
            frame.select(*spark.table(name).columns).write.insertInto(name)
        else:
            rows = frame.selectExpr("result AS value").write.format("kafkamq")
            rows.option("topic", out).mode("append").save()

    register(spark, logs.config)
    if kind == "sink":
        options = {"topic": logs.config.message_topic, "startingOffsets": "earliest"}
        rows = spark.readStream.format("kafkamq").options(**options, maxRowsPerTrigger=BATCH).load()
        writer = rows.select("value").writeStream.format("kafkamq").option("topic", out)
        if mode == "careless":
            writer = writer.option("sinkId", "another")  # its ledger is empty
        writer = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True)
        writer.start().awaitTermination()
        return
    rows = map_messages(read_queue(spark, "work", redelivery_timeout=30, max_rows=BATCH), handle)
    output: dict[str, Any] = {"table": name}
    if kind == "table":
        create(spark, folder, name, f"{ORIGIN}, result BINARY")
    elif mode != "careless":
        rows = rows.selectExpr("ack_token", "verdict", "delay", "reason", "result AS value")
        output = {"topic": out, "slots": 2}
    if mode == "careless":
        output = {"each_batch": append}
    ack(rows, checkpoint=checkpoint, available_now=True, **output).wait()


def main(mode: str, servers: str, folder: str, *names: str) -> None:
    # One core, when it is killed: the second transaction of a batch begins behind the first.
    spark = session("local[1]" if mode == "killed" else "local[2]")
    for name in names:
        logs = Logs(servers, name)
        if mode == "killed":
            output_topic(logs)
            for number in range(MESSAGES):
                logs.send(key=b"work", value=b"%d" % number, partition=number % 2)
        run(spark, logs, mode, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
