"""Spark trackers that fail over: kills and pauses of the active one; how long until the next."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from contextlib import ExitStack
from math import ceil
from pathlib import Path

import pytest
from tests.faults.figures import say
from tests.faults.test_spark import Load
from tests.integration.tracker_logs import Logs
from tests.spark.tracker_driver import tracker_driver
from tests.spark.tracker_runs import engine_of, gives_signs
from tests.waiting import wait_until

from kafkamq.markers.rules.standby import SILENT_BEATS
from kafkamq.markers.wire.records import SignKind
from kafkamq.types import Outcome

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.timeout(2700)]

KILLS = int(os.environ.get("KAFKAMQ_STANDBY_KILLS", "20"))
PATIENCE_S = 300.0
GOAL_S = 10.0
DUE_S = 1.5  # of a load


class Trackers:
    """Drivers that stand by for each other."""

    def __init__(self, logs: Logs, folder: Path, stack: ExitStack) -> None:
        self._logs = logs
        self._folder = folder
        self._stack = stack
        self._number = 0
        self.running: dict[Path, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """One more; returns when it stands by, or is active."""
        self._number += 1
        place = self._folder / f"tracker-{self._number}"
        self.running[place] = self._stack.enter_context(
            tracker_driver(self._logs, place, output=self._folder / "output", standby=True)
        )
        wait_until(lambda: gives_signs(self._logs, place), timeout_s=PATIENCE_S)

    def active(self) -> Path:
        """Where the one works that is active."""
        signs = [sign for sign in self._logs.signs() if sign.kind is SignKind.ACTIVE]
        engines = {engine_of(place): place for place in self.running}
        return engines[signs[-1].engine]

    def beats(self) -> Counter[str]:
        """How often each start that stands by has looked for a sign of the active one."""
        signs = self._logs.signs()
        return Counter(sign.start for sign in signs if sign.kind is SignKind.STANDBY)


def settles(load: Load, *, timeout_s: float = PATIENCE_S) -> float:
    """Seconds until all that was added is settled."""
    began_s = time.monotonic()
    wanted = load.silent | load.rejected
    ended = (Outcome.REDELIVERED, Outcome.DEAD_LETTERED)
    wait_until(lambda: wanted <= set(load.logs.ends(*ended)), timeout_s=timeout_s)
    return time.monotonic() - began_s


def test_the_active_tracker_is_killed_twenty_times(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    """F4: what is due when it dies is settled by the next within the goal; 0 lost, 0 twice."""
    load = Load(bootstrap, namespace)
    took_s: list[float] = []
    with ExitStack() as stack:
        trackers = Trackers(load.logs, tmp_path, stack)
        trackers.start()
        trackers.start()
        for _ in range(KILLS):
            load.add(100)  # also that both have folded a batch
            settles(load)
            time.sleep(2.0 + 2.0 * load.chance.random())  # its memory of what ended is that long
            load.add(100)
            time.sleep(DUE_S * load.chance.random() * 1.5)
            process = trackers.running.pop(trackers.active())
            os.killpg(process.pid, signal.SIGKILL)
            took_s.append(settles(load))
            trackers.start()
        load.wait_until_settled()
    say({"takeover_s": [round(each, 1) for each in took_s], "seed": load.seed})
    load.judge("F4 SIGKILL of Spark trackers beside one that stands by", {"kill driver": KILLS})
    assert sorted(took_s)[ceil(0.99 * KILLS) - 1] <= GOAL_S


def test_a_paused_tracker_comes_back_and_stands_by(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    """F7: two that stand by and a paused active one: one takes over, and keeps its place."""
    load = Load(bootstrap, namespace)
    with ExitStack() as stack:
        trackers = Trackers(load.logs, tmp_path, stack)
        for _ in range(3):
            trackers.start()
        load.add(100)
        settles(load)
        first = trackers.active()
        group = os.getpgid(trackers.running[first].pid)
        os.killpg(group, signal.SIGSTOP)
        load.add(100)
        settles(load)
        heir = trackers.active()
        assert heir != first
        os.killpg(group, signal.SIGCONT)
        load.add(100)
        settles(load)
        # Whoever would take over needlessly has had as much silence as that takes, and more.
        before = trackers.beats()
        wait_until(
            lambda: sum((trackers.beats() - before).values()) > 4 * SILENT_BEATS,
            timeout_s=PATIENCE_S,
        )
        assert trackers.active() == heir
        assert all(each.poll() is None for each in trackers.running.values())
        load.wait_until_settled()
    load.judge("F7 pause of a Spark tracker, two stand by", {"pause tracker": 1})
