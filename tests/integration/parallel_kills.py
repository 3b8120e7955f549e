"""Handlers in processes that are killed, and what they saw."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.integration.parallel_tools import committed, fill, make
from tests.unit import parallel_handlers as handlers
from tests.waiting import wait_until, within

from kafkamq import ParallelConsumer
from kafkamq.runtime.process_executor import ProcessExecutor

ROOT = Path(__file__).parents[2]


class Notes:
    """What handlers wrote, in the order in which they wrote it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        os.environ[handlers.SEEN] = str(path)

    def count(self) -> int:
        """Lines."""
        return self.path.read_bytes().count(b"\n")

    def judge(self, records: int) -> int:
        """All were seen, those of a key in order. Returns how many were seen again."""
        seen: Counter[tuple[str, str]] = Counter()
        last: dict[tuple[str, str], int] = {}
        for line in self.path.read_text().splitlines():
            _, partition, offset, key = line.split()
            seen[partition, offset] += 1
            before = last.get((partition, key), -1)
            assert int(offset) >= before, f"{key}: {offset} behind {before}"
            last[partition, key] = int(offset)
        assert len(seen) == records, f"{records - len(seen)} unseen"
        return sum(seen.values()) - records


def signal_children(
    bootstrap: str,
    topic: str,
    group: str,
    notes: Notes,
    *,
    records: int,
    count: int,
    numbers: Sequence[int] = (signal.SIGKILL,),
    **options: Any,
) -> int:
    """Work off records in bursts, and send processes signals between them and within.

    Returns:
        How many records were seen again.
    """
    chance = random.Random(7)
    consumer = make(bootstrap, topic, group, processes=2, **options)
    sent = 0
    with consumer:
        consumer.poll(handlers.note)
        wait_until(lambda: consumer.health().is_ready, what="its partitions")
        for number in range(count):
            burst = records // count if number < count - 1 else records - sent
            fill(bootstrap, topic, [f"k{chance.randrange(100)}" for _ in range(burst)])
            sent += burst
            if number % 2:  # all is done: they are idle
                wait_until(lambda: notes.count() >= sent, what="a burst")  # noqa: B023
            else:
                time.sleep(chance.uniform(0.0, 0.3))
            wait_until(lambda: ready_children(consumer), what="a process")
            os.kill(chance.choice(ready_children(consumer)), chance.choice(numbers))
        wait_until(lambda: done(bootstrap, topic, group) == records, "the commit", 120)
        assert consumer.health().is_alive
    return notes.judge(records)


def ready_children(consumer: ParallelConsumer) -> list[int]:
    """The processes of its handlers that have begun."""
    pool = consumer._engine._pool
    assert isinstance(pool, ProcessExecutor)
    return [pid for pid in pool.pids if Path(f"/proc/{pid}").exists()]


def signal_groups(
    bootstrap: str, topic: str, group: str, notes: Notes, *, records: int, signals: int
) -> int:
    """Work off records in a program whose whole group gets signals, and is started again.

    Returns:
        How many records were seen again.
    """
    chance = random.Random(7)
    fill(bootstrap, topic, [f"k{chance.randrange(100)}" for _ in range(records)])
    command = [sys.executable, "-m", "tests.unit.parallel_handlers", bootstrap, topic, group, "2"]
    for number in range(signals + 1):
        before = notes.count()
        program = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            if number == signals:
                wait_until(lambda: done(bootstrap, topic, group) == records, "the commit", 120)
            elif before < records:
                wait_until(lambda: notes.count() > before, what="work")  # noqa: B023
                time.sleep(chance.uniform(0.0, 0.3))
            wait_until(lambda: catches_signals(program.pid), what="its handlers")  # noqa: B023
            os.killpg(program.pid, (signal.SIGINT, signal.SIGTERM)[number % 2])
            assert program.wait(within(60)) == 0
        finally:
            program.kill()
            program.wait()
    return notes.judge(records)


def done(bootstrap: str, topic: str, group: str) -> int:
    """What is committed, of two partitions."""
    places = [committed(bootstrap, group, topic, number) for number in range(2)]
    return sum(max(offset, 0) for offset, _ in places)


def catches_signals(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM: before it has one, that would end it."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask, 16) & 1 << signal.SIGTERM - 1)
