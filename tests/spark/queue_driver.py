"""A driver that works on a queue in a process of its own, its output topic, and what is open."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from tests.integration.tracker_logs import Logs, read_topic
from tests.spark.processes import below, command_of, driver
from tests.waiting import within

from kafkamq.types import MarkerType, MessageId

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
done = done.withColumnRenamed("out", "value").drop("headers", "partition", "result")
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


def output_topic(logs: Logs) -> str:
    """A new topic for what a query returns."""
    name = f"{logs.config.namespace}-out"
    admin = AdminClient({"bootstrap.servers": logs.bootstrap})
    admin.create_topics([NewTopic(name, 2, 1)])[name].result(within(30))
    return name


def output(logs: Logs, topic: str) -> Counter[bytes]:
    return Counter(message.value() or b"" for message in read_topic(logs.bootstrap, topic))


def open_messages(logs: Logs) -> set[MessageId]:
    """STARTed, and without an END that settles them."""
    found: set[MessageId] = set()
    for _, marker in logs.said():
        if marker.message_id is None:
            continue
        if marker.type is MarkerType.START:
            found.add(marker.message_id)
        elif marker.type is MarkerType.END and marker.outcome.name != "NACK":
            found.discard(marker.message_id)
    return found
