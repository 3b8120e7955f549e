"""``ack(table=...)`` with a real Delta table and a real tracker.

Each time a batch is in the table, its ENDs are not, the leases end, and the tracker's copies come
again in a later batch. The query fails there, or its driver, with the JVM, is killed. Most of it is
in the fault suite: each driver is one more JVM, with Delta's jars.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from harness.spark_cluster import LocalSpark
from tests.faults.figures import say
from tests.integration.tracker_logs import Logs, tracker_process
from tests.spark.processes import Told, python_workers, told
from tests.spark.queue_driver import open_messages
from tests.waiting import wait_until, within

from kafkamq.types import Outcome

pytestmark = [pytest.mark.spark, pytest.mark.timeout(580)]

MESSAGES = 20
PATIENCE_S = 200.0
KILLS = 6
MANY = 20  # messages before each kill below a driver
REFUSED = (
    "table plain is of parquet: MERGE INTO needs one of Delta",
    "table short has no column origin_topic, origin_partition, origin_offset, origin_timestamp: ",
    "the rows have no column more, as table wide has",
    "Iceberg has no runtime for Spark 4.2 yet: use a Delta table, or write_once",
    "table nowhere cannot be read: .*nowhere",
    "table dated has origin_timestamp as date: it must be timestamp",
    "table worded has origin_partition as string: it must be bigint",
    "the rows have no column origin_offset: keep",
    "the rows have origin_timestamp as timestamp_ntz: it must be timestamp",
)
ONCE = Counter(str(number) for number in range(MESSAGES))


@contextmanager
def driver(
    logs: Logs, folder: Path, recipe: str = "table", master: str = "local[2]"
) -> Iterator[Told]:
    """``delta_driver.py``."""
    program = [sys.executable, "-m", "tests.spark.delta_driver"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    arguments = logs.bootstrap, logs.config.namespace, folder, recipe, "3", master
    with told([*program, *arguments], environment) as process:
        yield process


def load(logs: Logs, count: int = MESSAGES, first: int = 0) -> None:
    for number in range(first, first + count):
        logs.send(key=b"work", value=b"%d" % number, partition=number % 2)


@pytest.mark.slow
def test_what_copies_bring_again_is_in_the_table_once(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    logs = Logs(bootstrap, namespace)
    load(logs)
    with tracker_process(logs.config), driver(logs, tmp_path) as spark:
        spark.tell("break")
        first = Counter(spark.tell("rows"))
        assert first.total() == len(first) > 0
        wait_until(lambda: len(set(logs.copied())) >= len(first), timeout_s=PATIENCE_S)
        spark.tell("run")
        assert Counter(spark.tell("rows")) == ONCE
        files, late = map(int, spark.tell("pruned"))
        assert 1 <= late < files, "the files that cannot have an origin are not read"
        for said, wanted in zip(spark.tell("refused"), REFUSED, strict=True):
            assert re.search(wanted, said), said
        *counts, said = spark.tell("merged")
        assert counts == ["280", "280", "0"]
        assert said.startswith("a row has no origin")
    assert len(set(logs.ends(Outcome.ACK))) >= MESSAGES, "the copies, found again in the table"


@pytest.mark.faults
@pytest.mark.parametrize(("recipe", "is_once"), [("table", True), ("by batch number", False)])
def test_a_driver_that_is_killed_between_the_table_and_the_ends(
    bootstrap: str, namespace: str, tmp_path: Path, recipe: str, is_once: bool
) -> None:
    """The second one is a control: this is what goes by the origin for."""
    logs = Logs(bootstrap, namespace)
    load(logs)
    with tracker_process(logs.config):
        with driver(logs, tmp_path, recipe) as spark:
            spark.tell("die")
            assert spark.process.wait(within(60)) == -signal.SIGKILL
        wait_until(lambda: len(set(logs.copied())) >= MESSAGES // 2, timeout_s=PATIENCE_S)
        with driver(logs, tmp_path, recipe) as spark:
            assert Counter(spark.tell("rows")).total() == MESSAGES // 2
            spark.tell("run")
            found = Counter(spark.tell("rows"))
            assert set(found) == set(ONCE)
            assert found == ONCE if is_once else max(found.values()) > 1
    assert len(set(logs.ends(Outcome.ACK))) >= MESSAGES


@pytest.mark.faults
def test_each_message_is_in_the_table_once_wherever_drivers_are_killed(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    logs, count, chance = Logs(bootstrap, namespace), 200, random.Random(1)
    load(logs, count)
    with tracker_process(logs.config):
        for _ in range(KILLS):
            with driver(logs, tmp_path) as spark:
                spark.tell("rows")  # it has started
                spark.say("run")
                with suppress(subprocess.TimeoutExpired):
                    spark.process.wait(chance.uniform(3, 15))
        with driver(logs, tmp_path) as spark:
            wait_until(
                lambda: not spark.tell("run") and len(set(spark.tell("rows"))) == count,
                timeout_s=PATIENCE_S,
            )
            assert Counter(spark.tell("rows")) == Counter(map(str, range(count)))


@pytest.mark.faults
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("what", ["executor", "worker of Python"])
def test_each_message_is_in_the_table_once_whatever_is_killed_below_the_driver(
    bootstrap: str, namespace: str, tmp_path: Path, what: str
) -> None:
    """Each time the leases of the batch end, and copies of its messages come again later."""
    logs, chance, failures = Logs(bootstrap, namespace), random.Random(2), list[str]()
    with (
        tracker_process(logs.config),
        LocalSpark(tmp_path / "cluster", workers=2) as cluster,
        driver(logs, tmp_path, master=cluster.master) as spark,
    ):
        spark.tell("rows")  # it has started

        def victims() -> list[int]:
            executors = cluster.executors()
            if what == "executor":
                return executors
            return [pid for each in executors for pid in python_workers(each)]

        for turn in range(KILLS):
            load(logs, MANY, turn * MANY)
            with ThreadPoolExecutor(1) as thread:
                told = thread.submit(spark.tell, "try")
                wait_until(lambda: open_messages(logs), timeout_s=PATIENCE_S)
                wait_until(victims, timeout_s=PATIENCE_S)
                with suppress(FutureTimeoutError):
                    told.result(chance.uniform(0, 6))
                os.kill(chance.choice(victims()), signal.SIGKILL)
                failures += told.result()
            wait_until(lambda: not open_messages(logs), timeout_s=PATIENCE_S)
        wanted = Counter(map(str, range(KILLS * MANY)))

        def is_done() -> bool:
            return not spark.tell("try") and set(spark.tell("rows")) == set(wanted)

        wait_until(is_done, timeout_s=PATIENCE_S)
        assert Counter(spark.tell("rows")) == wanted
    copies = len(set(logs.copied()))
    say({"scenario": f"SIGKILLs under Delta: {what}", "failed": failures, "copies": copies})
    assert copies or what != "executor", "a task alone is tried again, in the same batch"
