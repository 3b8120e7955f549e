"""How long is too long, in tests: waiting for a state, and deadlines that fit a busy machine.

A deadline is there to end a test that hangs; it says nothing about the code. So the seconds that
tests write are those of a quiet machine, and each is taken ``slowness()`` times.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

__all__ = [
    "deadline_after",
    "measure_slowness",
    "slowness",
    "stop_process",
    "wait_until",
    "within",
]

SLOWNESS = "TESTS_SLOWNESS"
"""Variable with the factor: whoever began measured it, all processes of the tests inherit it."""
_LIMIT = 6.0
_WORK = 3_000_000
_WORK_S = 0.045  # on a quiet machine


def measure_slowness(workers: int) -> float:
    """How many times slower than a quiet machine this one is with so many workers, from 1 to 6."""
    began_s = time.perf_counter()
    sum(range(_WORK))
    work = (time.perf_counter() - began_s) / _WORK_S
    # The load of the last minute says what so short a look may miss; the workers are to come.
    load = max(workers, os.getloadavg()[0]) / (os.cpu_count() or 1)
    return min(max(1.0, work, load), _LIMIT)


def slowness() -> float:
    return float(os.environ.get(SLOWNESS, "1"))


def within(seconds: float) -> float:
    """What is enough here, when ``seconds`` are enough on a quiet machine."""
    return seconds * slowness()


def deadline_after(seconds: float) -> float:
    """The moment of the monotonic clock at which ``within(seconds)`` is over."""
    return time.monotonic() + within(seconds)


def wait_until(
    condition: Callable[[], object], what: str = "the state", timeout_s: float = 60.0
) -> None:
    """Return when it holds; how soon says how busy the machine is.

    A condition that takes long to look at, as by reading a topic, is looked at for a third of the
    time at most: the rest is for what it waits for.
    """
    end_s, pause_s = deadline_after(timeout_s), 0.002
    while True:
        looked_s = time.monotonic()
        if condition():
            return
        now_s = time.monotonic()
        assert now_s < end_s, f"not within {within(timeout_s):g} s: {what}"
        time.sleep(max(pause_s, min(2 * (now_s - looked_s), 0.5)))
        pause_s = min(1.5 * pause_s, 0.05)


def stop_process(pid: int) -> None:
    """SIGSTOP; returns when all threads of it stand still.

    One of them takes the signal and tells the others, as soon as it gets a core: until then they
    go on.
    """
    os.kill(pid, signal.SIGSTOP)

    def stands_still() -> bool:
        try:
            stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
        except OSError:  # a thread has ended
            return False
        return all(stat.rpartition(")")[2].split()[0] in "TtZX" for stat in stats)

    wait_until(stands_still, "a process that stands still")
