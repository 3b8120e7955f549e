"""What ``benchmarks/spark.py`` asks of a tracker and of the processes around it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kafkamq.spark.tracker.tracker import SparkTracker

__all__ = ["cpu_s", "idle_cores", "processes", "wait_until_live"]

_PATIENCE_S = 120.0


def wait_until_live(running: SparkTracker, partitions: int) -> None:
    """Until it has read the TICK of its start in each marker partition."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while sum(status.is_live for status in running.statuses().values()) < partitions:
        assert time.monotonic() < deadline_s, "the tracker is not live"
        running.wait(0.1)


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
