"""A driver that works on a queue in a process of its own; what its output topic must hold."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.tracker_logs import Logs
from tests.spark.processes import below, command_of, driver

TIMEOUT_S = 4.0

_PROGRAM = """
import sys, time
from kafkamq.config import ServiceConfig
from kafkamq.spark import ack, map_messages, read_queue, register
from kafkamq.spark.session import build_session
config = ServiceConfig(bootstrap_servers=sys.argv[1], namespace=sys.argv[2])
spark = build_session(settings={"spark.sql.shuffle.partitions": "2"})
register(spark, config)
def handler(message):
    time.sleep(0.002)
    return message.payload
stream = read_queue(
    spark, "work", redelivery_timeout=float(sys.argv[5]), max_deliveries=1000, max_rows=300
)
done = map_messages(stream, handler).selectExpr("*", "result AS out").drop("value")
done = done.withColumnRenamed("out", "value").drop("headers", "partition")
ack(done, checkpoint=sys.argv[3], topic=sys.argv[4], trigger_s=0.1).wait()
"""


@contextmanager
def queue_driver(logs: Logs, checkpoint: Path, topic: str) -> Iterator[subprocess.Popen[bytes]]:
    """A driver with its JVM, in a process group of their own; killed at the end."""
    config = logs.config
    arguments = [config.bootstrap_servers, config.namespace, str(checkpoint), topic]
    with driver(_PROGRAM, *arguments, str(TIMEOUT_S)) as process:
        yield process


def children_of(driver_pid: int, name: str) -> list[int]:
    """Processes below a driver whose command line has that name in it."""
    return [pid for pid in below(driver_pid) if name in command_of(pid)]
