"""The recipe of docs/spark.md for Delta, with a real Delta table and a real tracker.

Each time a batch is in the table, its ENDs are not, the leases end, and the tracker's copies come
again in a later batch. The query fails there, or its driver, with the JVM, is killed. All of it is
in the fault suite: each driver is one more JVM, with Delta's jars.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.integration.tracker_logs import Logs, tracker_process
from tests.waiting import wait_until, within

from kafkamq.types import Outcome

pytestmark = [pytest.mark.spark, pytest.mark.faults, pytest.mark.timeout(580)]

MESSAGES = 20
PATIENCE_S = 200.0
ONCE = Counter(str(number) for number in range(MESSAGES))


class Driver:
    """``delta_driver.py``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def tell(self, command: str) -> list[str]:
        """Have it do something; what it says. Nothing: it died."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("said "):
                said: list[str] = json.loads(line.removeprefix("said "))
                return said
        assert command == "die", "the driver ended by itself"
        return []


@contextmanager
def driver(logs: Logs, folder: Path, recipe: str = "documented") -> Iterator[Driver]:
    program = [sys.executable, "-m", "tests.spark.delta_driver"]
    process = subprocess.Popen(
        [*program, logs.bootstrap, logs.config.namespace, str(folder), recipe, "3"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield Driver(process)
    finally:
        with suppress(ProcessLookupError):  # it has killed itself
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def load(logs: Logs) -> None:
    for number in range(MESSAGES):
        logs.send(key=b"work", value=b"%d" % number, partition=number % 2)


def await_copies(logs: Logs) -> None:
    wait_until(lambda: len(set(logs.copied())) == MESSAGES, timeout_s=PATIENCE_S)


def test_the_documented_recipe_writes_each_message_once(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    logs = Logs(bootstrap, namespace)
    load(logs)
    with tracker_process(logs.config), driver(logs, tmp_path) as spark:
        spark.tell("break")
        assert Counter(spark.tell("rows")) == ONCE
        await_copies(logs)
        spark.tell("run")
        assert Counter(spark.tell("rows")) == ONCE
    assert len(set(logs.ends(Outcome.ACK))) >= MESSAGES, "the copies, found again in the table"


@pytest.mark.parametrize(("recipe", "is_once"), [("documented", True), ("by batch number", False)])
def test_the_documented_recipe_when_its_driver_is_killed_before_the_ends(
    bootstrap: str, namespace: str, tmp_path: Path, recipe: str, is_once: bool
) -> None:
    """The second one is a control: this is what a recipe is needed for."""
    logs = Logs(bootstrap, namespace)
    load(logs)
    with tracker_process(logs.config):
        with driver(logs, tmp_path, recipe) as spark:
            spark.tell("die")
            assert spark.process.wait(within(60)) == -signal.SIGKILL
        await_copies(logs)
        with driver(logs, tmp_path, recipe) as spark:
            assert Counter(spark.tell("rows")) == ONCE
            spark.tell("run")
            found = Counter(spark.tell("rows"))
            assert found == ONCE if is_once else min(found.values()) > 1
    assert len(set(logs.ends(Outcome.ACK))) >= MESSAGES
