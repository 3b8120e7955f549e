"""The tracker on Spark, measured on a real broker: how much it folds, how late it fires.

Run: python benchmarks/spark.py [--json] [--markers N] [--seconds N] [--master local[2]]

It starts a broker of its own unless one is named. With ``--json`` the last line is one JSON list of
rows ``{"row", "ours", "peer", "ratio", "unit", "goal", "ok"}``. What is measured is read from the
topics: broker timestamps for lateness, and for throughput the positions that the tracker publishes
after its first batch, so that the start of the JVM does not count.
"""

from __future__ import annotations

# ruff: noqa: E402
import sys
from pathlib import Path

# This file's folder is on the path first, where queue.py would hide the standard library's `queue`.
sys.path[:] = [each for each in sys.path if Path(each).resolve() != Path(__file__).resolve().parent]
sys.path.append(str(Path(__file__).resolve().parents[1]))

import argparse
import logging
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks.connector import connector_jars
from benchmarks.load import LoadProducer
from benchmarks.rows import IS_BRIEF, Row, finish, scaled, show
from benchmarks.spark_sink import sink_rates
from benchmarks.spark_source import source_rates
from benchmarks.spark_sparse import sparse_row
from benchmarks.spark_starts import answer_rows, restart_row
from benchmarks.spark_sustained import in_flight_rows, rate_before, sustained_rows
from benchmarks.spark_tracker import cpu_s, idle_cores, wait_until_live
from confluent_kafka import Consumer, TopicPartition
from harness.spark_cluster import EXECUTOR_SETTINGS, LocalSpark

from kafkamq.config import ServiceConfig
from kafkamq.dev import LocalKafka
from kafkamq.markers.wire.marker_writer import StartEncoder, encode_end
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.topics import create_topics
from kafkamq.queue.wire.keys import marker_key, marker_partition
from kafkamq.spark.session import build_session
from kafkamq.spark.tracker.tracker import SparkTracker
from kafkamq.types import MarkerType, MessageId, Outcome, expand

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAYLOAD = b"x" * 100
MARKER_PARTITIONS = 4
CHUNK = 500  # messages that a worker STARTs, then ENDs
SILENT_EVERY = 100
TIMEOUT_MS = 6_000
SINGLE_RATE = scaled(110_000)  # markers/s for minutes: a bit more than the goal
WARM_UP = scaled(500_000)  # markers; three batches
PATIENCE_S = 300.0
PARTS = (
    "tracker", "in_flight", "sparse", "sustained", "runs", "source", "sink", "executors", "starts",
)  # fmt: skip


class Load:
    """Writes markers as workers do, in chunks: STARTs, then ENDs for most of them."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._producer = LoadProducer(config.bootstrap_servers, linger_ms=5, compression_type="lz4")
        self._start = StartEncoder(
            redeliver_after_ms=TIMEOUT_MS, consumer_id="bench", max_deliveries=5
        )
        self._next = 0

    def chunk(self, *, silent_every: int = 0) -> None:
        """STARTs of one chunk of messages and their ENDs; every n-th falls silent."""
        ids = [
            MessageId(number % 4, number // 4) for number in range(self._next, self._next + CHUNK)
        ]
        self._next += CHUNK
        for one in ids:
            self._write(one, self._start.encode(one, b"bench", PAYLOAD))
        for number, one in enumerate(ids):
            if not silent_every or number % silent_every:
                self._write(one, encode_end(one, Outcome.ACK, consumer_id="bench"))
        self._producer.poll(0)

    def _write(self, one: MessageId, value: bytes) -> None:
        place = marker_partition(one.partition, one.offset, MARKER_PARTITIONS)
        topic, key = self._config.marker_topic, marker_key(one.partition, one.offset)
        self._producer.write(topic, value, key, place)

    def flush(self) -> None:
        """Everything is in the log."""
        self._producer.confirm()


@contextmanager
def namespace(
    servers: str, marker_partitions: int = MARKER_PARTITIONS
) -> Iterator[tuple[ServiceConfig, str]]:
    """A fresh namespace and a checkpoint folder."""
    config = ServiceConfig(bootstrap_servers=servers, namespace=f"bench-{uuid.uuid4().hex[:8]}")
    create_topics(config, partitions=4, marker_partitions=marker_partitions)
    with tempfile.TemporaryDirectory(prefix="kafkamq-bench-") as folder:
        yield config, f"{folder}/checkpoint"


def measure_throughput(servers: str, markers: int, trigger_s: float) -> Row:
    """Markers that wait in the log, folded as fast as it goes."""
    with namespace(servers) as (config, checkpoint):
        load = Load(config)
        for _ in range(markers // (2 * CHUNK)):
            load.chunk()
        load.flush()
        seen: list[tuple[float, int]] = []  # monotonic s, markers folded
        with tracker(config, checkpoint, trigger_s) as running:
            began_s = time.monotonic()
            deadline_s = began_s + PATIENCE_S
            folded = 0
            while folded < markers:
                assert time.monotonic() < deadline_s, f"only {folded} of {markers} were folded"
                running.wait(0.01)
                statuses = list(running.statuses().values())
                now = sum(status.position for status in statuses)
                if len(statuses) == MARKER_PARTITIONS and now > folded:
                    folded = now
                    seen.append((time.monotonic(), folded))
            assert all(status.entries == 0 for status in running.statuses().values())
    # From the first batch on, which waits for Python's workers; few markers are that one alone.
    begin_s, begin = seen[0] if len(seen) > 1 else (began_s, 0)
    end_s, end = seen[-1]
    rate = (end - begin) / (end_s - begin_s)
    return Row("tracker throughput", round(rate), None, None, "markers/s", 120_000, rate >= 120_000)


def measure_lateness(servers: str, seconds: float, rate: int, trigger_s: float) -> list[Row]:
    """A steady load in which every hundredth message falls silent."""
    with namespace(servers) as (config, checkpoint):
        load = Load(config)
        with tracker(config, checkpoint, trigger_s) as running:
            deadline_s = time.monotonic() + PATIENCE_S
            wait_until_live(running, MARKER_PARTITIONS)
            chunks = round(seconds * rate / (2 * CHUNK))
            begin_s = time.monotonic()
            for number in range(chunks):
                time.sleep(max(0.0, begin_s + number * 2 * CHUNK / rate - time.monotonic()))
                load.chunk(silent_every=SILENT_EVERY)
            load.flush()
            silent = chunks * (CHUNK // SILENT_EVERY)
            while sum(s.redelivered for s in running.statuses().values()) < silent:
                assert time.monotonic() < deadline_s + seconds, "not all were redelivered"
                running.wait(0.1)
        late_ms = lateness(config)
    assert len(late_ms) == silent, f"{len(late_ms)} of {silent} were redelivered"
    rows = []
    for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        late_s = late_ms[min(len(late_ms) - 1, int(share * len(late_ms)))] / 1000
        goal = 2.0 if name == "p99" else None
        rows.append(
            Row(
                f"redelivery {name} after its deadline, at {rate} markers/s",
                round(late_s, 3),
                None,
                None,
                "s",
                goal,
                goal is None or late_s <= goal,
            )
        )
    return rows


def measure_idle(
    servers: str, options: argparse.Namespace, trigger_s: float, broker: int | None
) -> Row:
    """What a tracker costs that has nothing in progress."""
    with (
        namespace(servers) as (config, checkpoint),
        tracker(config, checkpoint, trigger_s) as running,
    ):
        wait_until_live(running, MARKER_PARTITIONS)
        load = Load(config)
        load.chunk()
        load.flush()
        running.wait(5.0)  # what its batches have left to do
        cores = round(idle_cores(options.idle, without=broker), 3)
    name = "the tracker with nothing in progress"
    return Row(name, cores, None, None, "cores", 0.1, cores <= 0.1)


def measure_in_flight(
    servers: str, options: argparse.Namespace, *, in_runs: bool = False
) -> list[Row]:
    """Many messages held at once, and a restart with them."""
    with namespace(servers) as (config, checkpoint):
        return in_flight_rows(
            config,
            lambda: tracker(config, checkpoint, options.trigger),
            messages=options.due,
            partitions=MARKER_PARTITIONS,
            in_runs=in_runs,
        )


def measure_sparse(spark: SparkSession, servers: str, options: argparse.Namespace) -> Row:
    """A small batch beside a state of many chunks, and beside none."""
    with (
        namespace(servers, 2) as (config, checkpoint),
        tracker(config, checkpoint, 0.05) as running,
    ):
        return sparse_row(
            config, running, spark, schedules=options.sparse, batches=options.sparse_batches
        )


def measure_sustained(
    servers: str,
    options: argparse.Namespace,
    broker: int | None,
    *,
    in_runs: bool = False,
    before: float | None = None,
) -> list[Row]:
    """Minutes of load, a bit more than the goal."""
    with (
        namespace(servers) as (config, checkpoint),
        tracker(config, checkpoint, options.trigger) as running,
    ):
        return sustained_rows(
            config,
            running,
            seconds=options.sustained,
            rate=options.run_rate if in_runs else SINGLE_RATE,
            partitions=MARKER_PARTITIONS,
            without=broker,
            in_runs=in_runs,
            before=before,
        )


def lateness(config: ServiceConfig) -> list[int]:
    """Milliseconds from the end of each lease to the END of its redelivery, by the broker."""
    consumer = Consumer(
        {
            "bootstrap.servers": config.bootstrap_servers,
            "group.id": "bench",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.assign(
        [TopicPartition(config.marker_topic, number, 0) for number in range(MARKER_PARTITIONS)]
    )
    due: dict[MessageId, int] = {}
    late: list[int] = []
    ended = 0
    while ended < MARKER_PARTITIONS:
        for message in consumer.consume(10_000, 1.0):
            if message.error() is not None:
                ended += 1
                continue
            _, stamp_ms = message.timestamp()
            for marker in expand(decode_marker(message.value())):
                if marker.message_id is None:
                    continue
                if marker.type is MarkerType.START:
                    due[marker.message_id] = stamp_ms + marker.redeliver_after_ms
                elif marker.outcome is Outcome.REDELIVERED:
                    late.append(stamp_ms - due[marker.message_id])
    consumer.close()
    return sorted(late)


@contextmanager
def tracker(config: ServiceConfig, checkpoint: str, trigger_s: float) -> Iterator[SparkTracker]:
    """A tracker in the session that the rows share."""
    from pyspark.sql import SparkSession

    spark = SparkSession.getActiveSession()
    with SparkTracker(config, checkpoint=checkpoint, spark=spark, trigger_s=trigger_s) as running:
        yield running


def measure_source(spark: SparkSession, servers: str, records: int, rounds: int) -> list[Row]:
    """The source beside Spark's own, in a batch and as a stream; medians."""
    rates = source_rates(spark, servers, records=records, rounds=rounds)
    rows = []
    for headers, goal in ((False, 1.0), (True, 0.75)):
        for kind in ("batch", "stream"):
            ours = statistics.median(rates[kind, "kafkamq", headers])
            peer = statistics.median(rates[kind, "kafka", headers])
            name = f"source, {kind}{', with headers' if headers else ''}"
            ratio = round(ours / peer, 3)
            rows.append(Row(name, round(ours), round(peer), ratio, "rows/s", goal, ratio >= goal))
    return rows


def measure_sink(spark: SparkSession, servers: str, batches: int, rounds: int) -> list[Row]:
    """The exactly-once sink beside Spark's at-least-once one; medians."""
    rates = sink_rates(spark, servers, batches=batches, rounds=rounds)
    rows = []
    for headers in (False, True):
        ours = statistics.median(rates["kafkamq-sink", headers])
        peer = statistics.median(rates["kafka", headers])
        name = f"exactly-once sink{', with headers' if headers else ''}"
        ratio = round(ours / peer, 3)
        rows.append(Row(name, round(ours), round(peer), ratio, "rows/s", 0.85, ratio >= 0.85))
    return rows


def measure_executors(servers: str, markers: int, trigger_s: float, broker: int | None) -> Row:
    """Two executors with a core each beside one: the same tracker on a standalone cluster.

    On a machine of two cores the broker and the driver take their part of them: what that was is
    said beside the figure.
    """
    rates: list[float] = []
    share = 0.0
    for workers in (1, 2):
        with (
            tempfile.TemporaryDirectory(prefix="kafkamq-bench-") as folder,
            LocalSpark(Path(folder, "cluster"), workers=workers) as cluster,
        ):
            spark = build_session(master=cluster.master, settings=EXECUTOR_SETTINGS)
            try:
                if not IS_BRIEF:
                    measure_throughput(servers, WARM_UP, trigger_s)
                begin_s, used_s = time.monotonic(), cpu_s(broker)
                rates.append(measure_throughput(servers, markers, trigger_s).ours)
                share = (cpu_s(broker) - used_s) / (time.monotonic() - begin_s)
            finally:
                spark.stop()
    ratio = round(rates[1] / rates[0], 3)
    name = f"two executors beside one (the broker: {share:.2f} of {os.cpu_count()} cores)"
    return Row(name, round(rates[1]), round(rates[0]), ratio, "markers/s", None, True)


def measure_starts(servers: str, rounds: int) -> Iterator[Row]:
    """Young JVMs: what a restart of the tracker takes, and a question in SQL."""
    with namespace(servers) as (config, checkpoint):
        yield restart_row(config, checkpoint, partitions=MARKER_PARTITIONS, rounds=rounds)
    with namespace(servers) as (config, _):
        yield from answer_rows(config, partitions=MARKER_PARTITIONS, rounds=rounds)


def measure_earlier(servers: str, options: argparse.Namespace) -> float | None:
    """Messages per second of the revision that the part ``runs`` is compared with."""
    if "runs" not in options.parts or not options.before:
        return None
    return rate_before(
        options.before,
        servers,
        seconds=options.sustained,
        rate=SINGLE_RATE,
        partitions=MARKER_PARTITIONS,
        trigger_s=options.trigger,
    )


def measure(servers: str, options: argparse.Namespace, broker: int | None) -> list[Row]:
    """Run the parts that are chosen."""
    rows: list[Row] = []

    def add(*measured: Row) -> None:
        show(*measured)
        rows.extend(measured)

    if set(options.parts) - {"executors", "starts"}:
        before = measure_earlier(servers, options)  # while there is no other session
        measure_in_session(servers, options, broker, before, add)
    if "executors" in options.parts:
        add(measure_executors(servers, options.markers, options.trigger, broker))
    if "starts" in options.parts:
        for row in measure_starts(servers, options.rounds):
            add(row)
    return rows


def measure_in_session(
    servers: str,
    options: argparse.Namespace,
    broker: int | None,
    before: float | None,
    add: Callable[..., None],
) -> None:
    """Parts that share a session; its first query is only there to warm it up."""
    spark = build_session(
        app_name="kafkamq benchmark",
        master=options.master,
        settings={"spark.jars": ",".join(map(str, connector_jars()))},
    )
    try:
        if "tracker" in options.parts:
            if not IS_BRIEF:
                measure_throughput(servers, WARM_UP, options.trigger)
            add(measure_throughput(servers, options.markers, options.trigger))
            for rate in options.rate:
                add(*measure_lateness(servers, options.seconds, rate, options.trigger))
            add(measure_idle(servers, options, options.trigger, broker))
        if "in_flight" in options.parts:
            add(*measure_in_flight(servers, options))
            add(*measure_in_flight(servers, options, in_runs=True))
        if "sparse" in options.parts:
            add(measure_sparse(spark, servers, options))
        if "sustained" in options.parts:
            add(*measure_sustained(servers, options, broker))
        if "runs" in options.parts:
            add(*measure_sustained(servers, options, broker, in_runs=True, before=before))
        if "source" in options.parts:
            add(*measure_source(spark, servers, options.records, options.rounds))
        if "sink" in options.parts:
            add(*measure_sink(spark, servers, options.batches, options.rounds))
    finally:
        spark.stop()


def main() -> int:
    """Measure and print; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, last")
    parser.add_argument("--markers", type=int, default=scaled(1_200_000), help="for the throughput")
    parser.add_argument("--seconds", type=float, default=30.0, help="of load for the lateness")
    parser.add_argument(
        "--rate", type=int, nargs="+", default=[5_000, 10_000], help="markers/s of that load"
    )
    parser.add_argument("--due", type=int, default=scaled(1_000_000), help="messages held at once")
    parser.add_argument("--sparse", type=int, default=scaled(100_000), help="SCHEDULEs, far apart")
    parser.add_argument("--sparse-batches", type=int, default=scaled(15), help="of one record")
    parser.add_argument("--sustained", type=float, default=300.0, help="seconds of steady load")
    parser.add_argument("--run-rate", type=int, default=scaled(1_000_000), help="messages/s")
    parser.add_argument("--before", default="", metavar="REV", help="an earlier revision: of runs")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds without any work")
    parser.add_argument("--trigger", type=float, default=1.0, help="seconds between batches")
    parser.add_argument("--master", default="local[2]", help="where Spark runs")
    parser.add_argument("--batches", type=int, default=scaled(5), help="of the sink: 200,000 rows")
    parser.add_argument("--records", type=int, default=scaled(1_000_000), help="for the source")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of source and sink, their peers' in between"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure; default: all"
    )
    parser.add_argument("--bootstrap-servers", default="", help="a broker that is there already")
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    if options.bootstrap_servers:
        rows = measure(options.bootstrap_servers, options, None)
    else:
        with LocalKafka(heap="1g", jvm_options=()) as broker:
            rows = measure(broker.bootstrap_servers, options, broker.pid)
    return finish(rows, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
