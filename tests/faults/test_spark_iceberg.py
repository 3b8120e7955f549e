"""``write_once`` with a real Iceberg table, on Spark 4.1 in an environment of its own.

A worker receives messages and writes them; it is killed behind a commit and wherever it is, the
leases end, and the tracker's copies come again to the next one.
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
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.integration.tracker_logs import Logs, tracker_process
from tests.spark.processes import Told, told
from tests.waiting import wait_until, within

from kafkamq.dev.artifacts import fetch_modules, parse_list
from kafkamq.types import Outcome

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-iceberg"
LIST = ROOT / "tests" / "spark" / "iceberg-1.12.0.txt"
MESSAGES = 20
MANY = 200
KILLS = 6
PATIENCE_S = 200.0
REFUSED = (
    "table ice.shop.short has no column origin_topic, origin_partition, origin_offset, ",
    "table ice.shop.worded has origin_partition as string: it must be bigint",
    r"table ice.shop.nowhere cannot be read: .*nowhere[^.]*\. Verify [^.]*[^.]$",
    r"table ice.shop.no-table cannot be read: \[INVALID_IDENTIFIER\] .*no-table.*[^.]$",
    "table ice.shop.done.branch_next is a branch or a tag by its name: .*; name the table$",
    "spark.wap.branch is set: .*; unset it",
    "the rows have no column ack_token: keep",
    "a row has no origin",
    r"pyspark is 4\.1\.\d+: it must be >=4\.2,<4\.3",
)
_ON_4_2 = """
import sys
from kafkamq.errors import ConfigError
from kafkamq.spark import write_once
from kafkamq.spark.session import build_session

spark = build_session(settings={
    "spark.jars": sys.argv[1],
    "spark.sql.catalog.ice": "org.apache.iceberg.spark.SparkCatalog",
    "spark.sql.catalog.ice.type": "hadoop",
    "spark.sql.catalog.ice.warehouse": sys.argv[2],
})
try:
    write_once(spark.sql("SELECT 'x' AS ack_token"), "ice.shop.done")
except ConfigError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def python() -> Path:
    """The Python of an environment with Spark 4.1; made once, and kept."""
    made = ENVIRONMENT / ".installed"
    subprocess.run(["make", made.relative_to(ROOT)], cwd=ROOT, check=True, timeout=within(500))
    return ENVIRONMENT / "bin" / "python"


@pytest.fixture(scope="module")
def jars() -> str:
    modules = parse_list(LIST.read_text("ascii"), source=LIST.name)
    folder = fetch_modules(LIST.stem, modules)
    return ",".join(str(folder / module.file_name) for module in modules)


class World:
    """Starts workers on Spark 4.1 that share a folder with the table."""

    def __init__(self, python: Path, jars: str, folder: Path) -> None:
        self._command = python, "-m", "tests.spark.iceberg_driver", jars, folder
        self._submit = python.with_name("spark-submit"), "--master", "local[2]", "--jars", jars
        self._warehouse = folder / "warehouse"
        paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        others = ("SPARK_HOME", "PYTHONHOME")  # of this process's Spark
        environment = {name: text for name, text in os.environ.items() if name not in others}
        self._environment = {**environment, "PYTHONPATH": paths, "PYSPARK_PYTHON": str(python)}

    @contextmanager
    def driver(self, recipe: str = "once", logs: Logs | None = None) -> Iterator[Told]:
        queue = ("", "") if logs is None else (logs.bootstrap, logs.config.namespace)
        with told([*self._command, recipe, *queue], self._environment) as process:
            yield process

    @contextmanager
    def example(self, logs: Logs) -> Iterator[Told]:
        arguments = logs.bootstrap, logs.config.namespace, "work", self._warehouse
        command = [*self._submit, ROOT / "examples" / "iceberg_inbox.py", *arguments]
        with told(command, self._environment) as process:
            yield process


@pytest.fixture
def world(python: Path, jars: str, tmp_path: Path) -> World:
    return World(python, jars, tmp_path)


def load(logs: Logs, count: int) -> None:
    for number in range(count):
        logs.send(key=b"work", value=b"%d" % number, partition=number % 2)


def test_batches_that_are_repeated_or_of_copies_are_in_the_table_once(world: World) -> None:
    with world.driver() as spark:
        count, distinct, read, passed, *operations = spark.tell("merged")
        assert (count, distinct) == ("498", "498")
        assert 1 <= int(read) < int(passed), "files that cannot have an origin are not read"
        assert operations == ["append"] * 3, "a batch that brings nothing commits nothing"
        for said, wanted in zip(spark.tell("refused"), REFUSED, strict=True):
            assert re.search(wanted, said), said


def test_a_compaction_beside_a_batch_is_no_conflict(world: World) -> None:
    with world.driver() as spark:
        times, count, distinct, *operations = spark.tell("compacted")
    assert times == "1"
    assert count == distinct == str(2 * 34)
    assert operations == ["append"] * 3 + ["replace", "append"]


@pytest.mark.parametrize(("recipe", "rows"), [("once", 1), ("merge", 2)])
def test_a_driver_that_another_one_overtakes_finds_what_that_has_written(
    world: World, recipe: str, rows: int
) -> None:
    """The second one is a control: a ``MERGE`` that only inserts sees no conflict."""
    with world.driver(recipe) as spark:
        found = Counter(spark.tell("raced"))
    assert set(found.values()) == {rows}


@pytest.mark.parametrize(("recipe", "is_once"), [("once", True), ("append", False)])
def test_a_worker_that_is_killed_between_the_table_and_the_ends(
    world: World, bootstrap: str, namespace: str, recipe: str, is_once: bool
) -> None:
    """The second one is a control: this is what goes by the origin for."""
    logs = Logs(bootstrap, namespace)
    load(logs, MESSAGES)
    with tracker_process(logs.config):
        with world.driver(recipe, logs) as spark:
            spark.tell("die")
            assert spark.process.wait(within(60)) == -signal.SIGKILL
        wait_until(lambda: logs.copied(), timeout_s=PATIENCE_S)
        with world.driver(recipe, logs) as spark:
            first = spark.tell("rows")
            assert first
            wait_until(lambda: is_done(spark, MESSAGES), timeout_s=PATIENCE_S)
            found = Counter(spark.tell("rows"))
    once = Counter(map(str, range(MESSAGES)))
    assert found == once if is_once else found == once + Counter(first)
    assert len(set(logs.ends(Outcome.ACK))) >= MESSAGES


def test_each_message_is_in_the_table_once_wherever_workers_are_killed(
    world: World, bootstrap: str, namespace: str
) -> None:
    logs, chance = Logs(bootstrap, namespace), random.Random(1)
    load(logs, MANY)
    with tracker_process(logs.config):
        for _ in range(KILLS):
            with world.driver(logs=logs) as spark:
                spark.tell("rows")  # it has started
                spark.say("run")
                with suppress(subprocess.TimeoutExpired):
                    spark.process.wait(chance.uniform(3, 15))
        with world.driver(logs=logs) as spark:
            wait_until(lambda: is_done(spark, MANY), timeout_s=PATIENCE_S)
            assert Counter(spark.tell("rows")) == Counter(map(str, range(MANY)))
    assert logs.copied(), "nothing was killed that held messages"


def test_the_example(world: World, bootstrap: str, namespace: str) -> None:
    logs = Logs(bootstrap, namespace)
    load(logs, MESSAGES)
    with world.example(logs) as spark:
        wait_until(lambda: len(set(logs.ends(Outcome.ACK))) == MESSAGES, timeout_s=PATIENCE_S)
        spark.process.terminate()
        spark.process.communicate(timeout=within(60))
    with world.driver() as spark:
        assert Counter(spark.tell("rows")) == Counter(map(str, range(MESSAGES)))


def is_done(spark: Told, count: int) -> bool:
    """Whether all messages are in the table, when the queue is empty."""
    return not spark.tell("run") and len(set(spark.tell("rows"))) == count


def test_spark_4_2_refuses_by_name_where_the_runtime_of_4_1_is_on_its_path(
    world: World, jars: str, tmp_path: Path
) -> None:
    with world.driver() as spark:
        assert spark.tell("rows") == []
    program = tmp_path / "program.py"
    program.write_text(_ON_4_2)
    command = [sys.executable, program, jars, tmp_path / "warehouse"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=within(120))
    assert "Iceberg has no runtime for Spark 4.2 yet: use a Delta table" in done.stdout, done.stderr
