"""Twenty SIGKILLs each of drivers, executors and Python workers in a stream into a Delta table.

Meanwhile copies are redelivered: of messages that are nacked, and of those whose leases end with
what is killed. The files of the table and the log say what became of each message, and where each
kill fell: in the newest run of a batch, between its STARTs and the table's next version, between
that and its ENDs, or amid these.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote

import pyarrow.parquet as pq
import pytest
from confluent_kafka import Consumer, TopicPartition
from harness.faults import read_namespace
from harness.spark_cluster import LocalSpark
from tests.faults.figures import say
from tests.integration.tracker_logs import Logs, tracker_process
from tests.spark.delta_driver import LATER, SLOW, delta_driver, in_hands
from tests.spark.processes import Told, busy, python_workers
from tests.spark.queue_driver import children_of, open_messages
from tests.waiting import wait_until, within

from kafkamq.errors import WireError
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.wire.headers import read_message_headers
from kafkamq.testing.checker import check_logs
from kafkamq.types import MarkerType, expand

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.timeout(1500)]

KILLS = 20
AT_WORK = 12  # of the Python workers
MESSAGES = 12  # before each kill, for two batches
NACKED = 4  # one of so many is nacked at first
PATIENCE_S = 200.0
BETWEEN = ("between STARTs and table", "between table and ENDs", "amid ENDs", "between batches")

Place = tuple[int, int]


class Table:
    """A Delta table as its files have it, without Delta."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def written_s(self) -> float:
        """When its last version was written."""
        return max(path.stat().st_mtime for path in self._folder.glob("_delta_log/[0-9]*.json"))

    def rows(self) -> Counter[tuple[str, int, int, bytes]]:
        """Origin (topic, partition, offset) and result of each row."""
        paths: dict[str, None] = {}
        for version in sorted(self._folder.glob("_delta_log/[0-9]*.json")):
            for action in map(json.loads, version.read_text().splitlines()):
                if added := action.get("add"):
                    assert not added.get("deletionVector"), "rows that only Delta can leave out"
                    paths[added["path"]] = None
                if removed := action.get("remove"):
                    del paths[removed["path"]]
        found: Counter[tuple[str, int, int, bytes]] = Counter()
        names = ["origin_topic", "origin_partition", "origin_offset", "result"]
        for path in paths:
            read = pq.read_table(self._folder / unquote(path), columns=names).to_pydict()
            found.update(zip(*(read[name] for name in names), strict=True))
        return found


class Runs:
    """Which messages the runs of batches have STARTed and ended, as the markers go on."""

    def __init__(self, logs: Logs) -> None:
        self._consumer = Consumer({"bootstrap.servers": logs.bootstrap, "group.id": "runs"})
        topic, numbers = logs.config.marker_topic, range(logs.marker_partitions)
        self._consumer.assign([TopicPartition(topic, number, 0) for number in numbers])
        self.started: dict[str, set[Place]] = {}
        self.ended: dict[str, set[Place]] = {}
        self._began_s = 0.0

    def look(self) -> int:
        """How many runs there are by now."""
        while records := self._consumer.consume(1000, 0.05):
            for record in records:
                try:
                    markers = list(expand(decode_marker(record.value())))
                except WireError:
                    continue
                for one in markers:
                    place, run = one.message_id, one.consumer_id
                    if place is None or not run.startswith("spark-") or run.endswith("-left"):
                        continue
                    if one.type is MarkerType.START and run not in self.started:
                        self._began_s = record.timestamp()[1] / 1000
                    if one.type in (MarkerType.START, MarkerType.END):
                        kind = self.started if one.type is MarkerType.START else self.ended
                        kind.setdefault(run, set()).add((place.partition, place.offset))
        return len(self.started)

    @property
    def newest(self) -> set[Place]:
        return self.started[next(reversed(self.started))]

    def is_done(self) -> bool:
        """Whether each message of the newest run has its verdict."""
        return self.newest <= self.ended.get(next(reversed(self.started)), set())

    def is_written(self, table: Table) -> bool:
        """Whether the table has a version since the newest run began."""
        return table.written_s() > self._began_s

    def where(self, table: Table) -> str:
        """In which part of its batch the newest run is."""
        if self.is_done():
            return BETWEEN[3]
        if self.ended.get(next(reversed(self.started))):
            return BETWEEN[2]
        return BETWEEN[self.is_written(table)]

    def close(self) -> None:
        self._consumer.close()


class World:
    """Messages, a tracker, a table, and what was killed where."""

    def __init__(self, logs: Logs, folder: Path) -> None:
        self.logs, self.folder = logs, folder
        self.table = Table(folder / "done")
        self.seed = random.SystemRandom().randrange(10**6)
        self.chance = random.Random(self.seed)
        self.sent: dict[Place, bytes] = {}
        self.fell: Counter[str] = Counter()
        self.with_copies = 0
        self.killed: Counter[str] = Counter()
        self._runs = Runs(logs)

    def load(self, count: int = MESSAGES) -> None:
        for number in range(len(self.sent), len(self.sent) + count):
            value = (b"" if number % NACKED else LATER) + SLOW + b"%d" % number
            (one,) = self.logs.send(key=b"work", value=value, partition=number % 2)
            self.sent[one.partition, one.offset] = value

    def wait_for_moment(self, is_over: Callable[[], bool]) -> None:
        """Wait for any moment in a batch, or until the query has ended.

        Half of the moments are behind the table's next version, a short one that would be missed.
        """
        known, wanted = self._runs.look(), self.chance.randrange(1, 3)
        wait_until(lambda: is_over() or self._runs.look() >= known + wanted, timeout_s=PATIENCE_S)
        if self.chance.random() < 0.5:
            time.sleep(self.chance.uniform(0, 3))
        else:
            wait_until(lambda: is_over() or self._runs.is_written(self.table), timeout_s=PATIENCE_S)
            time.sleep(self.chance.uniform(0, 0.5))

    def note(self, what: str) -> None:
        """Something was killed just now: where."""
        self._runs.look()
        self.fell[self._runs.where(self.table)] += 1
        self.killed[what] += 1
        messages = self.logs.read(self.logs.config.message_topic)
        copies = {
            (one.partition(), one.offset())
            for one in messages
            if read_message_headers(one.headers()).origin is not None
        }
        self.with_copies += not copies.isdisjoint(self._runs.newest)

    def is_settled(self) -> bool:
        return not open_messages(self.logs) and len(self.table.rows()) >= len(self.sent)

    def problems(self) -> list[str]:
        """What is not as it must be, by the files of the table and the log."""
        topic, found = self.logs.config.message_topic, self.table.rows()
        wanted = Counter((topic, *place, value) for place, value in self.sent.items())
        said = [f"{count} times too often: {row}" for row, count in (found - wanted).items()]
        said += [f"missing: {row}" for row in wanted - found]
        read = read_namespace(self.logs.config)
        verdict = check_logs(
            messages=read.messages, markers=read.markers, dead_letters=read.dead_letters
        )
        said += map(str, verdict.problems)
        if (verdict.sent, verdict.acked) != (len(self.sent), len(self.sent)):
            said.append(f"of {len(self.sent)} the log has {verdict.sent}, acked {verdict.acked}")
        return said

    def judge(self, title: str, failures: int = 0, parts: tuple[str, ...] = BETWEEN[:2]) -> None:
        """Kills must have fallen in each of the parts, and on copies."""
        copies = self.logs.copied()
        row = {"scenario": title, "seed": self.seed, "sent": len(self.sent), "copies": len(copies)}
        row |= {"killed": self.killed, "fell": self.fell, "with copies": self.with_copies}
        say({**row, "failed": failures})
        assert self.problems() == [], f"seed {self.seed}"
        for part in parts:
            assert self.fell[part] >= 3, f"seed {self.seed}: few kills fell {part}"
        assert self.with_copies >= 3, f"seed {self.seed}: few kills fell on copies"

    def close(self) -> None:
        self._runs.close()


@pytest.fixture
def world(bootstrap: str, namespace: str, tmp_path: Path) -> Iterator[World]:
    logs = Logs(bootstrap, namespace)
    with tracker_process(logs.config), closing(World(logs, tmp_path)) as made:
        yield made


@pytest.mark.parametrize(("recipe", "is_once"), [("table", True), ("by batch number", False)])
def test_a_driver_that_is_killed_between_the_table_and_the_ends(
    world: World, recipe: str, is_once: bool
) -> None:
    """The second one is a control: this is what goes by the origin for, and what judges it."""
    world.load()
    with delta_driver(world.logs, world.folder, recipe) as spark:
        spark.tell("die")
        assert spark.process.wait(within(60)) == -signal.SIGKILL
    first = world.table.rows()
    assert first
    wait_until(lambda: len(set(world.logs.copied())) >= len(first), timeout_s=PATIENCE_S)
    with delta_driver(world.logs, world.folder, recipe) as spark:
        settle(world, spark)
    problems = world.problems()
    assert not problems if is_once else any("too often" in each for each in problems)


def settle(world: World, spark: Told) -> None:
    wait_until(lambda: not spark.tell("try") and world.is_settled(), timeout_s=PATIENCE_S)


def test_each_message_is_in_the_table_once_wherever_drivers_are_killed(world: World) -> None:
    while world.killed.total() < KILLS:
        world.load()
        with delta_driver(world.logs, world.folder) as spark:
            spark.tell("rows")  # it has started
            with begun(spark) as query:
                world.wait_for_moment(query.done)
                if query.done():
                    assert not query.result(), "the query failed by itself"
                else:
                    os.killpg(spark.process.pid, signal.SIGKILL)
                    spark.process.wait(within(30))
                    world.note("driver")
    with delta_driver(world.logs, world.folder) as spark:
        settle(world, spark)
    world.judge("SIGKILLs under Delta: drivers")


@contextmanager
def begun(spark: Told) -> Iterator[Future[list[str]]]:
    """A query that works on what there is; what it failed with, when it has ended."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(spark.tell, "try")


def test_each_message_is_in_the_table_once_whatever_executors_are_killed(world: World) -> None:
    with (
        LocalSpark(world.folder / "cluster", workers=2) as cluster,
        delta_driver(world.logs, world.folder, master=cluster.master) as spark,
    ):
        failures = kill_below(
            world,
            spark,
            lambda: dict.fromkeys(cluster.executors(), "executor"),
            world.wait_for_moment,
        )
    world.judge("SIGKILLs under Delta: executors", failures.total())


def test_each_message_is_in_the_table_once_whatever_workers_of_python_are_killed(
    world: World,
) -> None:
    """Where a task is tried again; and the process of the source, which STARTs and renews.

    A worker that idles dies unnoticed. So half of the turns wait for one with a row in its hands, a
    quarter for one that runs at any moment.
    """
    with delta_driver(world.logs, world.folder, master="local[2,4]") as spark:

        def turn() -> int:
            return world.killed.total() % 4

        def victims() -> dict[int, str]:
            if turn() == 3:
                beside = children_of(spark.process.pid, "streaming_source_runner")
                return dict.fromkeys(beside, "process of the source")
            found = python_workers(spark.process.pid)
            if turn() == 2:
                found = busy(found)
            else:
                found = [pid for pid in found if in_hands(world.folder, pid).exists()]
            return dict.fromkeys(found, "Python worker")

        def moment(is_over: Callable[[], bool]) -> None:
            if turn() >= 2:
                world.wait_for_moment(is_over)

        failures = kill_below(world, spark, victims, moment)
        (tasks,) = map(int, spark.tell("failed"))
    # Where it works without a task, the query fails.
    at_work = tasks + failures["Python worker"]
    title = "SIGKILLs under Delta: Python workers and the process of the source"
    world.judge(title, failures.total(), BETWEEN[:1])
    say({"scenario": "Python workers that were at work when they were killed", "count": at_work})
    assert at_work >= AT_WORK, f"seed {world.seed}: only {at_work} workers were at work"


def kill_below(
    world: World,
    spark: Told,
    victims: Callable[[], dict[int, str]],
    moment: Callable[[Callable[[], bool]], None],
) -> Counter[str]:
    """Kill one of these at a time, whose pids and kinds are told, and start what has failed.

    How often the query has failed, by what was killed.
    """
    failures: Counter[str] = Counter()
    spark.tell("rows")  # it has started
    while max(world.killed.values(), default=0) < KILLS:
        world.load()
        with begun(spark) as query:
            moment(query.done)
            what = kill_one(world, victims, query)
            failures[what] += len(query.result())
    settle(world, spark)
    return failures


def kill_one(world: World, victims: Callable[[], dict[int, str]], query: Future[list[str]]) -> str:
    """The kind of what was killed, as soon as there was one; empty: the query ended before."""
    found: dict[int, str] = {}

    def has_found() -> bool:
        found.update(victims())
        return bool(found) or query.done()

    wait_until(has_found, timeout_s=PATIENCE_S)
    with suppress(ProcessLookupError):  # it has just ended
        for pid in world.chance.sample(sorted(found), min(len(found), 1)):
            os.kill(pid, signal.SIGKILL)
            world.note(found[pid])
            return found[pid]
    return ""
