"""Rows of ``benchmarks/spark.py``: minutes of steady load, and a million messages in flight."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import tracker_rows
from benchmarks.before import python_of
from benchmarks.rows import Row
from benchmarks.spark_tracker import processes, wait_until_live

from kafkamq.config import ServiceConfig
from kafkamq.metrics.catalog import SPARK_BATCH_SECONDS, SPARK_STATE_BYTES
from kafkamq.spark.tracker.tracker import SparkTracker

__all__ = ["in_flight_rows", "rate_before", "sustained_rows"]

_PATIENCE_S = 120.0
_EVERY_S = 2.0
_GROWTH = 1.1  # what counts as flat: the most of the last third, by the most of the middle one
_LONG_MS = 3_600_000
# Runs in the earlier revision's tree. Its own script may need what is not to be had any more.
_EARLIER = """
import sys, tempfile, threading, time, uuid
from benchmarks.spark_tracker import wait_until_live
from benchmarks.tracker_rows import write_pairs
from kafkamq.config import ServiceConfig
from kafkamq.queue.topics import create_topics
from kafkamq.spark.tracker.tracker import SparkTracker
servers, partitions = sys.argv[1], int(sys.argv[2])
seconds, rate, trigger_s = map(float, sys.argv[3:])
config = ServiceConfig(bootstrap_servers=servers, namespace=f"bench-{uuid.uuid4().hex[:8]}")
create_topics(config, partitions=partitions, marker_partitions=partitions)
with (
    tempfile.TemporaryDirectory(prefix="kafkamq-bench-") as folder,
    SparkTracker(config, checkpoint=f"{folder}/checkpoint", trigger_s=trigger_s) as running,
):
    wait_until_live(running, partitions)
    folded = lambda: sum(status.position for status in running.statuses().values())
    load = (config, round(seconds * rate / 2), partitions)
    threading.Thread(target=write_pairs, args=load, kwargs={"rate": rate}, daemon=True).start()
    before, began_s = folded(), time.monotonic()
    running.wait(seconds)
    print((folded() - before) / (time.monotonic() - began_s), flush=True)
"""


@dataclass(frozen=True)
class _Sample:
    at_s: float
    folded: int
    state_mb: float
    memory_mb: float


def sustained_rows(
    config: ServiceConfig,
    running: SparkTracker,
    *,
    seconds: float,
    rate: int,
    partitions: int,
    without: int | None,
    in_runs: bool = False,
    before: float | None = None,
) -> list[Row]:
    """STARTs and ENDs for minutes, as fast as ``rate``: what is folded, and what grows.

    Args:
        config: A fresh namespace.
        running: Its tracker.
        seconds: How long.
        rate: Markers per second that are written; in runs messages.
        partitions: Of the messages and of the markers topic.
        without: Process whose memory does not count: the broker.
        in_runs: Many messages in a marker.
        before: Messages per second of the earlier revision, whose markers are single.
    """
    wait_until_live(running, partitions)
    name = f"markers folded while they were written, {seconds:g} s"
    unit, goal, each = "markers/s", 100_000.0, 1.0
    arguments = {"rate": rate, "ended": True} if in_runs else {"rate": rate}
    if in_runs:
        name = name.replace("markers", f"messages, {tracker_rows.RUN:,} a marker,")
        unit, goal, each = "messages/s", 10.0, tracker_rows.RUN / 2
    writer = threading.Thread(
        target=tracker_rows.write_runs if in_runs else tracker_rows.write_pairs,
        args=(config, round(seconds * rate / (1 if in_runs else 2)), partitions),
        kwargs=arguments,
        daemon=True,
    )
    begin = _sample(running, without)
    samples = [begin]
    writer.start()
    while samples[-1].at_s - begin.at_s < seconds:
        running.wait(_EVERY_S)
        samples.append(_sample(running, without))
    writer.join(_PATIENCE_S)
    took_s = samples[-1].at_s - begin.at_s
    folded = (samples[-1].folded - begin.folded) * each / took_s
    ratio = round(folded / before, 2) if before else None
    reached = folded if not in_runs else goal if ratio is None else ratio
    return [Row(name, round(folded), before, ratio, unit, goal, reached >= goal), *_grown(samples)]


def _grown(samples: list[_Sample]) -> list[Row]:
    """What the last third has more than the middle one."""
    took_s = samples[-1].at_s - samples[0].at_s
    since_s = [each.at_s - samples[0].at_s for each in samples]
    pairs = list(zip(samples, since_s, strict=True))
    middle = [each for each, at_s in pairs if took_s / 3 <= at_s < 2 * took_s / 3]
    last = [each for each, at_s in pairs if at_s >= 2 * took_s / 3]
    rows = []
    for what, read in (
        ("state", lambda each: each.state_mb),
        ("memory, all processes", lambda each: each.memory_mb),
    ):
        then, before = max(map(read, last)), max(map(read, middle))
        ratio = round(then / before, 3)
        named = f"{what}: the last third beside the middle one"
        rows.append(Row(named, then, before, ratio, "MB", _GROWTH, ratio <= _GROWTH))
    return rows


def rate_before(
    revision: str, servers: str, *, seconds: float, rate: int, partitions: int, trigger_s: float
) -> float:
    """Messages per second that an earlier revision folds: a START and an END each.

    ``rate`` is that of the markers which are written; what is folded should be below it.
    """
    with python_of(revision) as python:
        values = map(str, (partitions, seconds, rate, trigger_s))
        found = subprocess.run(
            [python, "-c", _EARLIER, servers, *values],
            cwd=Path(python).parents[2],
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
    return float(found.stdout.split()[-1]) / 2


def _sample(running: SparkTracker, without: int | None) -> _Sample:
    folded = sum(status.position for status in running.statuses().values())
    return _Sample(time.monotonic(), folded, _state_mb(), _memory_mb(without))


def _state_mb() -> float:
    return SPARK_STATE_BYTES.values().get(("tracker",), 0.0) / 1e6


def _memory_mb(without: int | None) -> float:
    """Proportional memory of this process and its descendants: what forks share counts once."""
    total_kb = 0
    for pid in processes(without):
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total_kb += sum(int(line.split()[1]) for line in text.splitlines() if line[:4] == "Pss:")
    return total_kb / 1e3


def in_flight_rows(
    config: ServiceConfig,
    start: Callable[[], AbstractContextManager[SparkTracker]],
    *,
    messages: int,
    partitions: int,
    in_runs: bool = False,
) -> list[Row]:
    """So many messages held at once, single or in runs: the state, and a start with it.

    ``start`` runs a tracker of the namespace, always with the same checkpoint.
    """
    reported = _reported_batches()
    with start() as running:
        wait_until_live(running, partitions)
        if in_runs:
            messages -= messages % tracker_rows.RUN
            tracker_rows.write_runs(config, messages, partitions, ended=False)
        else:
            tracker_rows.write_starts(config, messages, partitions, timeout_ms=_LONG_MS)
        _wait_for_entries(running, messages)
        # Spark reports the state of a batch a moment after it. The first one of a checkpoint is 0.
        batches = 1 + max(each.batch for each in running.statuses().values())
        _wait_for(running, lambda: _reported_batches() - reported, batches)
        state_mb = _state_mb()
    begin_s = time.monotonic()
    with start() as running:
        wait_until_live(running, partitions)
        _wait_for_entries(running, messages)
        restart_s = time.monotonic() - begin_s
    named = f"{messages:,} in flight{' in runs' if in_runs else ''}: "
    most_mb = 3 if in_runs else 60
    return [
        Row(f"{named}state", round(state_mb, 1), None, None, "MB", most_mb, state_mb <= most_mb),
        Row(f"{named}restart", round(restart_s, 1), None, None, "s", 60, restart_s <= 60),
    ]


def _reported_batches() -> int:
    found = SPARK_BATCH_SECONDS.distributions().get(("tracker",))
    return 0 if found is None else sum(found.counts)


def _wait_for_entries(running: SparkTracker, messages: int) -> None:
    _wait_for(running, lambda: sum(each.entries for each in running.statuses().values()), messages)


def _wait_for(running: SparkTracker, count: Callable[[], float], wanted: int) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while (found := count()) < wanted:
        assert time.monotonic() < deadline_s, f"only {found} of {wanted} are known"
        running.wait(0.1)
