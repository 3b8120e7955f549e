"""Rows of ``benchmarks/spark.py`` about the tracker's ends: a million due at once, and nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.tracker_rows import count
from confluent_kafka import Producer

from kafkamq.config import ServiceConfig
from kafkamq.markers.wire.markers import StartEncoder
from kafkamq.queue.wire.partitions import marker_key, marker_partition
from kafkamq.spark.tracker.tracker import SparkTracker
from kafkamq.types import MessageId

__all__ = ["cpu_s", "due_at_once_s", "idle_cores", "processes", "wait_until_live"]

_PATIENCE_S = 120.0
_CHUNK = 2_000


def wait_until_live(running: SparkTracker, partitions: int) -> None:
    """Until it has read the TICK of its start in each marker partition."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while sum(status.is_live for status in running.statuses().values()) < partitions:
        assert time.monotonic() < deadline_s, "the tracker is not live"
        running.wait(0.1)


def due_at_once_s(
    config: ServiceConfig, running: SparkTracker, *, messages: int, partitions: int, lead_s: float
) -> float:
    """Seconds from the moment at which so many leases end until all copies can be read.

    Args:
        config: A fresh namespace.
        running: Its tracker, live.
        messages: How many.
        partitions: Of the messages and of the markers topic.
        lead_s: From now to that moment: for writing and folding the STARTs.
    """
    due_s = time.time() + lead_s
    _write(config, messages, partitions, due_s=due_s)
    while sum(status.entries for status in running.statuses().values()) < messages:
        assert time.time() < due_s, "not all were folded in time: give more lead_s"
        running.wait(0.1)
    while (found := count(config, config.message_topic)) < messages:
        assert time.time() < due_s + _PATIENCE_S, f"only {found} were copied"
        running.wait(0.05)
    return time.time() - due_s


def _write(config: ServiceConfig, messages: int, partitions: int, *, due_s: float) -> None:
    """A START for each, with the timeout that is left until then."""
    producer = Producer(
        {
            "bootstrap.servers": config.bootstrap_servers,
            "enable.idempotence": True,
            "linger.ms": 20,
            "compression.type": "lz4",
            "queue.buffering.max.messages": 2_000_000,
        }
    )
    for first in range(0, messages, _CHUNK):
        left_ms = round((due_s - time.time()) * 1000)
        encoder = StartEncoder(redeliver_after_ms=left_ms, consumer_id="bench", max_deliveries=5)
        batches: dict[int, list[dict[str, bytes]]] = {}
        for number in range(first, min(first + _CHUNK, messages)):
            one = MessageId(number % partitions, number // partitions)
            place = marker_partition(one.partition, one.offset, partitions)
            value = encoder.encode(one, b"bench", b"x" * 100)
            key = marker_key(one.partition, one.offset)
            batches.setdefault(place, []).append({"value": value, "key": key})
        for place, batch in batches.items():
            assert producer.produce_batch(config.marker_topic, batch, place) == len(batch)
        producer.poll(0)
    assert producer.flush(60) == 0, "the broker did not take the load"


def idle_cores(seconds: float, *, without: int | None) -> float:
    """Cores that this process and all its descendants use, but for one of them: the broker."""
    before = _tree(without)
    time.sleep(seconds)
    after = _tree(without)
    return sum(used - before.get(pid, 0.0) for pid, used in after.items()) / seconds


def _tree(without: int | None) -> dict[int, float]:
    """Seconds of CPU of this process and its descendants, by pid."""
    return {pid: cpu_s(pid) for pid in processes(without)}


def processes(without: int | None) -> set[int]:
    """This process and its descendants, but for one of them."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents[int(folder.name)] = int(fields[1])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours - {without}:
        ours |= more
    return ours


def cpu_s(pid: int | None) -> float:
    """Seconds of CPU that a process has used; 0 for one that is gone, or elsewhere."""
    if pid is None:
        return 0.0
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
