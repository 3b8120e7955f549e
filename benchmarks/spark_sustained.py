"""Rows of ``benchmarks/spark.py``: minutes of steady load, and a million messages in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import tracker_rows
from benchmarks.rows import Row
from benchmarks.spark_tracker import processes, wait_until_live

from kafkamq.config import ServiceConfig
from kafkamq.metrics.catalog import SPARK_STATE_BYTES
from kafkamq.spark.tracker.tracker import SparkTracker

__all__ = ["in_flight_rows", "sustained_rows"]

_PATIENCE_S = 120.0
_EVERY_S = 2.0
_GROWTH = 1.1  # what counts as flat: the most of the last third, by the most of the middle one
_LONG_MS = 3_600_000


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
) -> list[Row]:
    """STARTs and ENDs for minutes, as fast as ``rate``: what is folded, and what grows.

    Args:
        config: A fresh namespace.
        running: Its tracker.
        seconds: How long.
        rate: Markers per second that are written.
        partitions: Of the messages and of the markers topic.
        without: Process whose memory does not count: the broker.
    """
    wait_until_live(running, partitions)
    writer = threading.Thread(
        target=tracker_rows.write_pairs,
        args=(config, round(seconds * rate / 2), partitions),
        kwargs={"rate": rate},
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
    folded = (samples[-1].folded - begin.folded) / took_s
    middle = [each for each in samples if took_s / 3 <= each.at_s - begin.at_s < 2 * took_s / 3]
    last = [each for each in samples if each.at_s - begin.at_s >= 2 * took_s / 3]
    name = f"markers folded while they were written, {seconds:g} s"
    rows = [Row(name, round(folded), None, None, "markers/s", 100_000, folded >= 100_000)]
    for what, read in (
        ("state", lambda each: each.state_mb),
        ("memory, all processes", lambda each: each.memory_mb),
    ):
        then, before = max(map(read, last)), max(map(read, middle))
        ratio = round(then / before, 3)
        named = f"{what}: the last third beside the middle one"
        rows.append(Row(named, then, before, ratio, "MB", _GROWTH, ratio <= _GROWTH))
    return rows


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
) -> list[Row]:
    """So many messages held at once: the state, and a start with it.

    ``start`` runs a tracker of the namespace, always with the same checkpoint.
    """
    with start() as running:
        wait_until_live(running, partitions)
        tracker_rows.write_starts(config, messages, partitions, timeout_ms=_LONG_MS)
        _wait_for_entries(running, messages)
        running.wait(5.0)  # the progress of its last batch
        state_mb = _state_mb()
    begin_s = time.monotonic()
    with start() as running:
        wait_until_live(running, partitions)
        _wait_for_entries(running, messages)
        restart_s = time.monotonic() - begin_s
    named = f"{messages:,} in flight: "
    return [
        Row(f"{named}state", round(state_mb, 1), None, None, "MB", 60, state_mb <= 60),
        Row(f"{named}restart", round(restart_s, 1), None, None, "s", 60, restart_s <= 60),
    ]


def _wait_for_entries(running: SparkTracker, messages: int) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while (found := sum(each.entries for each in running.statuses().values())) < messages:
        assert time.monotonic() < deadline_s, f"only {found} of {messages} are known"
        running.wait(0.1)
