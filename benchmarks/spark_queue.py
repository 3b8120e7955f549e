"""How a queue on Spark shares its batches out: one partition of twelve is trouble.

It holds last deliveries, each of which is a batch by itself, or most of the backlog. Batches are
planned as Spark's driver plans them, against a real broker; nothing is handed out, no JVM runs.

- batches until every other partition has had messages, with last deliveries at one's head;
- the share of a batch's messages that is used when nearly all of the backlog is in one partition;
- records that the driver reads for each message that it plans.
"""

from __future__ import annotations

# ruff: noqa: E402
import sys
from pathlib import Path

# This file's folder is on the path first, where it would hide the standard library's `queue`.
sys.path[:] = [each for each in sys.path if Path(each).resolve() != Path(__file__).resolve().parent]
sys.path.append(str(Path(__file__).resolve().parents[1]))

import argparse
import uuid
from collections.abc import Iterator

from benchmarks.load import LoadProducer
from benchmarks.rows import Row, finish, show
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import StructType

from kafkamq.config import ServiceConfig
from kafkamq.dev import LocalKafka
from kafkamq.queue.topics import create_topics
from kafkamq.spark.options import parse_source_options
from kafkamq.spark.queues.leasing import QueueReader
from kafkamq.transport.log_reader import LogRange, LogReader, Record

PARTITIONS = 12
ROWS = 1_000
LAST = [("kafkamq-delivery-count", b"5")]


class Batches:
    """Plans batches of a queue whose partitions hold so many messages."""

    def __init__(self, servers: str, counts: list[int], *, last: int = 0) -> None:
        config = ServiceConfig(bootstrap_servers=servers, namespace=f"b{uuid.uuid4().hex[:8]}")
        create_topics(config, partitions=len(counts), marker_partitions=2)
        producer = LoadProducer(servers)
        for partition, count in enumerate(counts):
            for number in range(count):
                headers = LAST if partition == 0 and number < last else None
                producer.produce(
                    config.message_topic, b"x" * 100, b"work", partition, headers=headers
                )
                producer.poll(0)
        producer.confirm()
        options = {"view": "messages", "queue": "work", "acknowledge": "true"}
        self.reader = QueueReader(parse_source_options(options, config), StructType())
        self.topic = config.message_topic
        self.at = self.reader.initialOffset()

    def plan(self) -> dict[int, int]:
        """Messages of the next batch, by partition; all are the queue's."""
        end = self.reader.latestOffset(self.at, ReadMaxRows(ROWS))
        before, self.at = self.at[self.topic], end
        return {int(n): int(at) - int(before[n]) for n, at in end[self.topic].items()}


def measure_last(servers: str) -> Row:
    """One partition begins with 300 last deliveries."""
    batches = Batches(servers, [300] + [500] * (PARTITIONS - 1), last=300)
    waiting = set(range(1, PARTITIONS))
    count = 0
    while waiting and count < 400:
        waiting -= {number for number, taken in batches.plan().items() if taken}
        count += 1
    batches.reader.stop()
    name = "batches until all other partitions advance, 300 last deliveries"
    return Row(name, count, None, None, "batches", 2, count <= 2)


def measure_hot(servers: str) -> list[Row]:
    """One partition has nearly everything, the others a message each."""
    total = 20 * ROWS
    read = 0
    plain = LogReader.read

    def counted(
        self: LogReader, wanted: LogRange, *, skips_lost: bool = False
    ) -> Iterator[list[Record]]:
        nonlocal read
        for records in plain(self, wanted, skips_lost=skips_lost):
            read += len(records)
            yield records

    LogReader.read = counted  # type: ignore[method-assign]
    try:
        batches = Batches(servers, [total] + [1] * (PARTITIONS - 1))
        first = sum(batches.plan().values())
        planned = first
        while more := sum(batches.plan().values()):
            planned += more
        batches.reader.stop()
    finally:
        LogReader.read = plain  # type: ignore[method-assign]
    assert planned == total + PARTITIONS - 1
    used, reads = first / ROWS, read / planned
    return [
        Row("share of a batch that one hot partition may use", used, None, None, "", 1, used >= 1),
        Row("records that the driver reads per message", reads, None, None, "", 1.1, reads <= 1.1),
    ]


PARTS = ("last", "hot")


def main() -> int:
    """Measure and print; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, last")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--bootstrap-servers", default="", help="a broker that is there already")
    options = parser.parse_args()

    def measure(servers: str) -> list[Row]:
        found = [measure_last(servers)] if "last" in options.only else []
        found += measure_hot(servers) if "hot" in options.only else []
        show(*found)
        return found

    if options.bootstrap_servers:
        rows = measure(options.bootstrap_servers)
    else:
        with LocalKafka() as broker:
            rows = measure(broker.bootstrap_servers)
    return finish(rows, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
