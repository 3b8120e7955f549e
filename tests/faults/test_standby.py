"""Spark trackers that fail over: kills and pauses of the active one; how long until the next."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from tests.faults.figures import say
from tests.faults.test_spark import Load
from tests.integration.tracker_logs import Logs
from tests.spark.tracker_driver import tracker_driver
from tests.waiting import wait_until

from kafkamq.markers.tracker.status_reader import StatusReader
from kafkamq.markers.wire.signs import Sign, SignKind
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
        wait_until(lambda: engine_of(place) in self._engines(), timeout_s=PATIENCE_S)

    def active(self) -> Path:
        """Where the one works that is active."""
        signs = [sign for sign in self.signs() if sign.kind is SignKind.ACTIVE]
        engines = {engine_of(place): place for place in self.running}
        return engines[signs[-1].engine]

    def signs(self) -> list[Sign]:
        with closing(StatusReader(self._logs.config)) as reader:
            reader.read_to_end()
            return reader.take_signs()

    def _engines(self) -> set[str]:
        return {sign.engine for sign in self.signs()}


def engine_of(checkpoint: Path) -> str:
    notes = sorted(checkpoint.glob("kafkamq*.json"))
    return str(json.loads(notes[0].read_text())["engine"]) if notes else ""


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
    assert sorted(took_s)[int(0.99 * (KILLS - 1))] <= GOAL_S


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
        time.sleep(15.0)  # whoever would take over needlessly has time to do so
        assert trackers.active() == heir
        assert all(each.poll() is None for each in trackers.running.values())
        load.wait_until_settled()
    load.judge("F7 pause of a Spark tracker, two stand by", {"pause tracker": 1})
