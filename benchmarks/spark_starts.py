"""Rows of ``benchmarks/spark.py`` about young JVMs: the first settlement, the first answer."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count

from benchmarks.load import LoadProducer
from benchmarks.rows import Row
from benchmarks.tracker_rows import LOAD_TOPIC_ID, write_pairs
from confluent_kafka import Consumer, TopicPartition

from kafkamq.config import ServiceConfig
from kafkamq.markers.wire.marker_writer import StartEncoder
from kafkamq.queue.wire.keys import marker_key, marker_partition
from kafkamq.transport.admin import Admin
from kafkamq.types import MessageId

__all__ = ["answer_rows", "restart_row"]

_MESSAGES = 100
_ATTEMPTS = 1000
_BARE = """
from kafkamq.spark.session import build_session
spark = build_session()
print("ready", flush=True)
"""
_TRACKER = """
import sys
from kafkamq.config import ServiceConfig
from kafkamq.spark.tracker.tracker import run_spark_tracker
servers, namespace, checkpoint = sys.argv[1:]
config = ServiceConfig(bootstrap_servers=servers, namespace=namespace)
run_spark_tracker(config, checkpoint=checkpoint)
"""
_FIRST = "SELECT outcome, count(*) AS n FROM deliveries GROUP BY ALL;"
_SECOND = "SELECT queue_id, count(*) AS n FROM deliveries WHERE outcome = 'ACK' GROUP BY ALL;"


def restart_row(config: ServiceConfig, checkpoint: str, *, partitions: int, rounds: int) -> Row:
    """From the start behind a SIGKILL until a copy can be read, without what Spark itself takes.

    A driver is killed when it has settled some messages; others fall due while none runs.
    """
    turns = count()

    def settles() -> float:
        """Seconds from the start of a driver until one more copy can be read; it is killed then."""
        _hold_some(config, next(turns), partitions)
        with _copies(config) as copies:
            began_s = time.monotonic()
            arguments = (config.bootstrap_servers, config.namespace, checkpoint)
            with _running([sys.executable, "-c", _TRACKER, *arguments]) as driver:
                found_s, copied = 0.0, 0
                while copied < _MESSAGES:  # all of them, or the next one would find what is left
                    assert driver.poll() is None, "the tracker has ended"
                    copied += len(copies.consume(_MESSAGES, 0.05))
                    found_s = found_s or (copied and time.monotonic() - began_s)
                return found_s

    settles()
    pairs: list[tuple[float, float]] = []
    for _ in range(rounds):
        began_s = time.monotonic()
        with _running([sys.executable, "-c", _BARE]) as bare:
            _line(bare)
            bare_s = time.monotonic() - began_s
        pairs.append((settles() - bare_s, bare_s))
    beyond_s, bare_s = (statistics.median(each) for each in zip(*pairs, strict=True))
    name = "first settlement behind a SIGKILLed driver, beyond Spark's own start"
    return Row(name, beyond_s, bare_s, None, "s", 10, beyond_s <= 10)


def _hold_some(config: ServiceConfig, turn: int, partitions: int) -> None:
    """STARTs of some messages, whose leases are over at once."""
    encoder = StartEncoder(redeliver_after_ms=1, consumer_id="bench", max_deliveries=5)
    producer = LoadProducer(config.bootstrap_servers)
    for number in range(_MESSAGES):
        place = number % partitions, turn * _MESSAGES + number // partitions
        value = encoder.encode(MessageId(*place, LOAD_TOPIC_ID, 1), b"work", b"x" * 100)
        route = marker_partition(*place, partitions)
        producer.write(config.marker_topic, value, marker_key(*place), route)
    producer.confirm()


@contextmanager
def _copies(config: ServiceConfig) -> Iterator[Consumer]:
    """Reads what is committed to the messages from now on."""
    with Admin(config) as admin:
        ends = {number: end for number, (end, _) in admin.log_ends(config.message_topic).items()}
    settings = {"group.id": f"look-{uuid.uuid4().hex}", "isolation.level": "read_committed"}
    consumer = Consumer({"bootstrap.servers": config.bootstrap_servers, **settings})
    topic = config.message_topic
    consumer.assign([TopicPartition(topic, number, end) for number, end in ends.items()])
    yield consumer
    consumer.close()


def answer_rows(config: ServiceConfig, *, partitions: int, rounds: int) -> list[Row]:
    """``kafkamq sql``: an answer that needs no topic, and the second question in a prompt."""
    write_pairs(config, _ATTEMPTS, partitions)
    where = ["-b", config.bootstrap_servers, "-n", config.namespace, "--json"]
    command = [sys.executable, "-m", "kafkamq.cli", "sql", *where]
    once, second = [], []
    for _ in range(rounds):
        began_s = time.monotonic()
        subprocess.run([*command, "select 1"], check=True, stdout=subprocess.DEVNULL)
        once.append(time.monotonic() - began_s)
        with _running(command, stdin=subprocess.PIPE) as prompt:
            assert prompt.stdin is not None
            for question in (_FIRST, _SECOND):
                began_s = time.monotonic()
                prompt.stdin.write(f"{question}\n")
                prompt.stdin.flush()
                assert json.loads(_line(prompt))
            second.append(time.monotonic() - began_s)
    rows = []
    for name, seconds, goal in (
        ('kafkamq sql "select 1"', once, 12.0),
        ("the second question in a prompt of kafkamq sql", second, 2.0),
    ):
        took_s = statistics.median(seconds)
        rows.append(Row(name, took_s, None, None, "s", goal, took_s <= goal))
    return rows


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the program has ended"
    return line


@contextmanager
def _running(command: Sequence[str], stdin: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """A program with its JVM; all of it is killed at the end of the block."""
    process = subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
