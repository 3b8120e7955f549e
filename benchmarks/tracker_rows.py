"""Rows of ``benchmarks/queue.py`` about trackers: folding, a million in flight, many partitions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import tracemalloc
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.load import LoadProducer
from benchmarks.rows import Row, scaled

from kafkamq.config import ServiceConfig
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.markers.wire.marker_writer import StartEncoder, encode_batch_start, encode_end
from kafkamq.markers.wire.markers import encode_marker
from kafkamq.queue.wire.keys import marker_key, marker_partition
from kafkamq.transport.admin import Admin
from kafkamq.types import Marker, MarkerType, MessageBatch, MessageId, Outcome

__all__ = [
    "LOAD_TOPIC_ID",
    "RUN",
    "TrackerProcess",
    "density",
    "start_many",
    "wait_until",
    "write_pairs",
    "write_runs",
    "write_starts",
]

_CHUNK = 10_000
_HOUR_MS = 3_600_000
_ESTABLISHED = "01"  # in /proc/net/tcp
RUN = 1024
"""Messages of a marker in runs: four are a chunk of 4096 offsets, and none lies in two."""

LOAD_TOPIC_ID = b"t" * 16
"""Of messages that only their markers know."""


def write_pairs(
    config: ServiceConfig,
    messages: int,
    partitions: int,
    *,
    rate: float | None = None,
    is_over: threading.Event | None = None,
) -> None:
    """A START and an END for each of so many messages, in batches, as workers write them.

    ``rate`` is that of the markers, per second; None: as fast as it goes. ``is_over`` ends it.
    """
    _write(
        config,
        messages,
        partitions,
        timeout_ms=_HOUR_MS,
        ended=True,
        rate=rate,
        is_over=is_over,
    )


def write_starts(config: ServiceConfig, messages: int, partitions: int, *, timeout_ms: int) -> None:
    """A START for each of so many messages, 100 bytes each."""
    _write(config, messages, partitions, timeout_ms=timeout_ms, ended=False)


def write_runs(
    config: ServiceConfig,
    messages: int,
    partitions: int,
    *,
    ended: bool,
    rate: float | None = None,
) -> None:
    """STARTs, and ENDs behind them, of ``RUN`` messages each; ``rate`` is that of the messages."""
    producer = LoadProducer(config.bootstrap_servers)
    encoder = _encoder(_HOUR_MS)
    began_s = time.perf_counter()
    for number in range(messages // RUN):
        if rate is not None:
            time.sleep(max(0.0, began_s + number * RUN / rate - time.perf_counter()))
        partition, offset = number % partitions, number // partitions * RUN
        route, key = marker_partition(partition, offset, partitions), marker_key(partition, offset)
        batch = MessageBatch(partition, LOAD_TOPIC_ID, 1, offset, (1 << RUN) - 1)
        start = encode_batch_start(encoder, [batch], b"work")
        producer.produce(config.marker_topic, start, key, route)
        if ended:
            end = Marker(MarkerType.END, consumer_id="c" * 24, batches=(batch,))
            producer.produce(config.marker_topic, encode_marker(end), key, route)
        producer.poll(0)
    producer.confirm()


def _encoder(timeout_ms: int) -> StartEncoder:
    return StartEncoder(
        consumer_id="c" * 24,
        redeliver_after_ms=timeout_ms,
        max_deliveries=5,
        max_lease_ms=12 * _HOUR_MS,
    )


def _write(
    config: ServiceConfig,
    messages: int,
    partitions: int,
    *,
    timeout_ms: int,
    ended: bool,
    rate: float | None = None,
    is_over: threading.Event | None = None,
) -> None:
    producer, encoder = LoadProducer(config.bootstrap_servers), _encoder(timeout_ms)
    headers = (("kafkamq-id", b"0" * 36),)
    began_s = time.perf_counter()
    for first in range(0, messages, 1000):
        if is_over is not None and is_over.is_set():
            break
        if rate is not None:
            time.sleep(max(0.0, began_s + 2 * first / rate - time.perf_counter()))
        starts: dict[int, list[dict[str, bytes]]] = {}
        ends: dict[int, list[dict[str, bytes]]] = {}
        for number in range(first, min(first + 1000, messages)):
            identity = MessageId(number % partitions, number // partitions, LOAD_TOPIC_ID, 1)
            place = identity.partition, identity.offset
            route, key = marker_partition(*place, partitions), marker_key(*place)
            start = encoder.encode(identity, b"work", b"x" * 100, headers=headers)
            starts.setdefault(route, []).append({"value": start, "key": key})
            if ended:
                end = encode_end(identity, Outcome.ACK, consumer_id="c" * 24)
                ends.setdefault(route, []).append({"value": end, "key": key})
        for batches in (starts, ends):
            for route, batch in batches.items():
                producer.write_batch(config.marker_topic, batch, route)
        producer.poll(0)
        if not first % _CHUNK:
            producer.flush()
    producer.confirm()


class TrackerProcess:
    """``kafkamq tracker --engine local`` with its metrics."""

    def __init__(self, process: subprocess.Popen[str], port: str) -> None:
        self._process = process
        self._port = port

    @classmethod
    @contextmanager
    def running(cls, config: ServiceConfig) -> Iterator[TrackerProcess]:
        """Started; killed at the end of the block."""
        command = [sys.executable, "-m", "kafkamq.cli", "tracker", "--engine", "local"]
        where = ["-b", config.bootstrap_servers, "-n", config.namespace, "--metrics-port", "0"]
        with subprocess.Popen([*command, *where], stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                port = None
                while port is None:
                    line = process.stderr.readline()
                    assert line, "the tracker has ended"
                    port = re.search(r"http://localhost:(\d+)/metrics", line)
                yield cls(process, port[1])
            finally:
                process.kill()

    def total(self, name: str) -> float:
        """A metric, summed over its labels."""
        url = f"http://127.0.0.1:{self._port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            text = answer.read().decode()
        found = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for value in found)

    def resident_mb(self) -> float:
        """Memory of the process."""
        with open(f"/proc/{self._process.pid}/statm", encoding="ascii") as statm:  # noqa: PTH123
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def connections(self) -> int:
        """TCP connections of the process that are established, to brokers nearly all of them."""
        proc = Path(f"/proc/{self._process.pid}")
        own = set()
        for entry in (proc / "fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                own.add(str(entry.readlink()))
        found = 0
        for family in ("tcp", "tcp6"):
            for line in (proc / "net" / family).read_text().splitlines()[1:]:
                columns = line.split()
                found += columns[3] == _ESTABLISHED and f"socket:[{columns[9]}]" in own
        return found

    @contextmanager
    def most_connections(self) -> Iterator[list[int]]:
        """Looked at all through the block; the list holds the most of them."""
        most = [0]
        ends = threading.Event()

        def look() -> None:
            while not ends.wait(0.2):
                most[0] = max(most[0], self.connections())

        looking = threading.Thread(target=look)
        looking.start()
        try:
            yield most
        finally:
            ends.set()
            looking.join()


def start_many(config: ServiceConfig, partitions: int) -> list[Row]:
    """A namespace's first start of a tracker, and one that finds messages due in most partitions.

    Args:
        config: Of a namespace whose markers topic has so many partitions.
        partitions: How many.
    """
    name = f"{partitions:,} marker partitions"
    with TrackerProcess.running(config) as tracker, tracker.most_connections() as most:
        ready = lambda: tracker.total("kafkamq_tracker_live") == partitions  # noqa: E731
        first_s = wait_until(ready, timeout_s=600)
    write_starts(config, partitions, partitions, timeout_ms=1)
    before = count(config, config.message_topic)
    began_s = time.perf_counter()
    with TrackerProcess.running(config) as tracker, tracker.most_connections() as again:
        found = lambda: count(config, config.message_topic) - before  # noqa: E731
        wait_until(lambda: found() > 0, timeout_s=600)
        redelivery_s = time.perf_counter() - began_s
        copied = lambda: tracker.total("kafkamq_tracker_redelivered_total")  # noqa: E731
        wait_until(lambda: copied() >= partitions, timeout_s=600)  # ends count commits, too
        all_s = time.perf_counter() - began_s
    used = max(*most, *again)
    return [
        Row(f"{name}: first start, all live", first_s, None, None, "s", None, True),
        Row(f"{name}: first redelivery", redelivery_s, None, None, "s", 60, redelivery_s <= 60),
        Row(f"{name}: one of each redelivered", all_s, None, None, "s", None, True),
        Row(f"{name}: connections", used, None, None, "connections", 100, used <= 100),
    ]


def density(entries: int = scaled(1_000_000)) -> list[Row]:
    """Bytes of an open message, where a queue has one in so many of its partition's offsets.

    What tracemalloc counts; it needs no broker.
    """
    rows = []
    for one_in in (1, 10, 60, 100, 1000, 10_000):
        tracker = RedeliveryTracker()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for number in range(entries):
            message_id = MessageId(0, number * one_in, LOAD_TOPIC_ID, 1)
            start = Marker(MarkerType.START, message_id, _HOUR_MS, consumer_id="c" * 24)
            tracker.apply(number, 1_000_000 + number // 100, start)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert tracker.open_count() == entries
        each = (after - before) / entries
        name = f"{entries:,} open, one in {one_in:,} offsets: each"
        rows.append(Row(name, each, None, None, "bytes", 200, each <= 200))
    return rows


def count(config: ServiceConfig, topic: str) -> int:
    """Where the log of a topic ends, over its partitions; read_committed."""
    with Admin(config) as admin:
        return sum(stable for stable, _ in admin.log_ends(topic).values())


def wait_until(condition: Callable[[], bool], *, timeout_s: float) -> float:
    """Seconds until it holds."""
    began_s = time.perf_counter()
    while not condition():
        if time.perf_counter() - began_s > timeout_s:
            raise TimeoutError("waited in vain")
        time.sleep(0.05)
    return time.perf_counter() - began_s
