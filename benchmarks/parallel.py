"""The parallel consumer beside Confluent's Parallel Consumer for Java, on the same topics.

Run: python benchmarks/parallel.py [--json] [--rounds N] [--rows TEXT] [--no-peer]

Each value is the time in microseconds that its record's handler sleeps. Rounds of ours and of the
peer alternate; a figure is the median of messages a second from the first record polled to the last
one processed. The peer's rounds begin with a row that does not count, as its JVM has to warm up.
Rows that the same sleeps bound on both sides are ties; all-distinct keys flatter every system.
Rows "auto beside the best fixed setting" are those of ``auto_rows``: the peer is the best of some
fixed settings; they come with coroutines, and with threads where the name says so.
Rows of "10,000 at once" are coroutines of one process beside 1,000 threads of the peer, with the
garbage collector set as ``kafkamq consume`` sets it; the CPU that a record takes is a row beside.
Rows of "100 at once" with many keys come four times: with threads and with coroutines in one
process, and with both in two processes, which begin before the first record is polled.

With ``--json`` the last line is one JSON list of rows
``{"row", "ours", "peer", "ratio", "unit", "goal", "ok"}``; goals are ratios where there is a peer,
and figures where the row's name ends with "alone". CPU and memory are rows of their own.
"""

from __future__ import annotations

# ruff: noqa: E402
import sys
from pathlib import Path

# This file's folder is on the path first, where it would hide the standard library's `queue`.
sys.path[:] = [each for each in sys.path if Path(each).resolve() != Path(__file__).resolve().parent]
sys.path.append(str(Path(__file__).resolve().parents[1]))

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, count
from typing import Any

from benchmarks.auto_rows import AutoCase, auto_rows
from benchmarks.broker import broker_at
from benchmarks.java_peer import build_peer
from benchmarks.load import LoadProducer
from benchmarks.rows import Row, finish, scaled, show
from confluent_kafka.admin import AdminClient, NewTopic

from kafkamq import ParallelConsumer, ParallelRecord
from kafkamq.parallel.record import PlainRecord
from kafkamq.runtime.memory import calm_collector

RATIO_GOAL = 0.97
KEY_COUNTS = (1, 2, 5, 10, 20, 50, 100, 1000, 10_000)


@dataclass(frozen=True)
class Load:
    """What is in a topic."""

    messages: int
    keys: int
    sleep_us: int = 0  # the most; 0: no work
    is_fixed: bool = False  # all sleep alike
    is_zipf: bool = False

    @property
    def topic(self) -> str:
        """Its name."""
        kind = "zipf" if self.is_zipf else "even"
        return f"bench-{self.messages}-{self.keys}-{self.sleep_us}-{kind}"

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        """Values and keys; the same each time."""
        chance = random.Random(42)
        keys: Iterator[int] = (number % self.keys for number in count())
        if self.is_zipf:
            weights = list(accumulate(1 / rank for rank in range(1, self.keys + 1)))
            keys = iter(chance.choices(range(self.keys), cum_weights=weights, k=self.messages))
        for _ in range(self.messages):
            us = (
                self.sleep_us
                if self.is_fixed or not self.sleep_us
                else chance.randrange(self.sleep_us)
            )
            yield b"%d" % us, b"k%d" % next(keys)


@dataclass(frozen=True)
class Case:
    """One row: a load, and how it is worked off."""

    name: str
    load: Load
    ordering: str
    concurrency: int
    goal: float | None = None  # messages a second of ours alone
    has_peer: bool = True
    processes: int = 0
    is_async: bool = False
    same_as: str = ""  # the row whose peer it is compared with; empty: its own
    peer_concurrency: int = 0  # 0: the same
    ratio_goal: float = RATIO_GOAL
    max_open: int = 10_000

    @property
    def is_judged(self) -> bool:
        """Whether the peer must be reached: of ways to the same end, the best one counts."""
        return bool(self.processes and not self.is_async) or not self.is_variant

    @property
    def is_variant(self) -> bool:
        """Whether a row of the same load is worked off in other ways as well."""
        return self.concurrency == 100 and self.load.keys >= 1000 and self.ordering == "key"

    def variants(self) -> Iterator[Case]:
        """The other ways."""
        for processes, is_async in ((0, True), (2, False), (2, True)):
            kind = "coroutines" if is_async else "threads"
            where = f"2 processes of 50 {kind}" if processes else kind
            name = f"{self.name}, {where}"
            yield replace(
                self, name=name, processes=processes, is_async=is_async, same_as=self.name
            )


@dataclass
class Result:
    """One measurement."""

    seconds: float
    cpu_s: float
    memory_mib: int
    done: bool


def cases() -> list[Case]:
    """All rows."""
    found = []
    for at_once in (16, 100):
        for keys in KEY_COUNTS:
            load = Load(scaled(10_000), keys, 5000)
            found.append(Case(f"0-5 ms, {keys} keys, KEY, {at_once} at once", load, "key", at_once))
        load = Load(scaled(10_000), 1000, 5000)
        found.append(Case(f"0-5 ms, UNORDERED, {at_once} at once", load, "unordered", at_once))
        found.append(Case(f"0-5 ms, PARTITION, {at_once} at once", load, "partition", at_once))
    for kind, is_zipf in (("even", False), ("Zipf", True)):
        load = Load(scaled(100_000), 1000, 100, is_fixed=True, is_zipf=is_zipf)
        found.append(Case(f"100 us, 1000 keys {kind}, KEY, 16 at once", load, "key", 16))
        found.append(Case(f"100 us, 1000 keys {kind}, KEY, 100 at once", load, "key", 100))
    for sleep_ms, ratio_goal in ((10, 1.0), (100, 5.0)):
        load = Load(scaled(200_000), 20_000, sleep_ms * 1000, is_fixed=True)
        for ordering in ("key", "unordered"):
            case = Case(
                f"{sleep_ms} ms, 20,000 keys, {ordering.upper()}, 10,000 at once, coroutines",
                load,
                ordering,
                10_000,
                is_async=True,
                peer_concurrency=1_000,
                ratio_goal=ratio_goal,
                max_open=40_000,
            )
            found.append(case)
    many, one = Load(scaled(1_000_000), 10_000), Load(scaled(1_000_000), 1)
    found.append(Case("no work, 10,000 keys, KEY", many, "key", 16, goal=300_000))
    found.append(Case("no work, UNORDERED", many, "unordered", 16, goal=600_000))
    # One key never passes 910 messages a second there: 1,000,000 of them are for ours alone.
    found.append(Case("no work, one key, KEY", one, "key", 16, goal=100_000, has_peer=False))
    found.append(Case("no work, one key, 10,000 messages, KEY", Load(scaled(10_000), 1), "key", 16))
    return [way for case in found for way in (case, *(case.variants() if case.is_variant else ()))]


_AUTO_MESSAGES = {1: 5_000, 2: 10_000, 5: 25_000, 10: 50_000, 20: 80_000, 50: 200_000}


def auto_cases() -> list[tuple[Load, AutoCase]]:
    """The same loads, for as long as it takes to find a limit."""
    loads = [
        (
            f"0-5 ms, {keys} keys, KEY",
            Load(scaled(_AUTO_MESSAGES.get(keys, 400_000)), keys, 5000),
            "key",
        )
        for keys in KEY_COUNTS
    ]
    many = Load(scaled(400_000), 1000, 5000)
    loads.append(("0-5 ms, UNORDERED", many, "unordered"))
    loads.append(("0-5 ms, PARTITION", Load(scaled(5_000), 1, 5000), "partition"))
    for kind, is_zipf in (("even", False), ("Zipf", True)):
        load = Load(scaled(1_000_000), 1000, 100, is_fixed=True, is_zipf=is_zipf)
        loads.append((f"100 us, 1000 keys {kind}, KEY", load, "key"))
    loads.append(("no work, 10,000 keys, KEY", Load(scaled(1_000_000), 10_000), "key"))
    loads.append(("no work, UNORDERED", Load(scaled(1_000_000), 10_000), "unordered"))
    found = [
        (load, AutoCase(name, load.topic, load.messages, ordering, handle_async))
        for name, load, ordering in loads
    ]
    for where, processes in (("threads", 0), ("2 processes of threads", 2)):
        name = f"0-5 ms, 1000 keys, KEY, {where}"
        found.append((many, AutoCase(name, many.topic, many.messages, "key", handle, processes)))
    return found


def fill(servers: str, load: Load) -> None:
    """Make the topic, one partition, unless it is there."""
    admin = AdminClient({"bootstrap.servers": servers})
    if load.topic in admin.list_topics(timeout=10).topics:
        return
    admin.create_topics([NewTopic(load.topic, 1, 1)])[load.topic].result(30)
    producer = LoadProducer(servers)
    for value, key in load.records():
        producer.write(load.topic, value, key)
    producer.confirm()


# Ours.


def handle(record: ParallelRecord | PlainRecord) -> None:
    """Sleeps for as long as the record says."""
    us = int(record.value or b"0")
    if us:
        time.sleep(us / 1e6)


async def handle_async(record: ParallelRecord | PlainRecord) -> None:
    """The same."""
    us = int(record.value or b"0")
    if us:
        await asyncio.sleep(us / 1e6)


def run_ours(servers: str, case: Case) -> Result:
    """One row, in this process, or in processes of it."""
    if case.peer_concurrency:
        calm_collector()
    times = [0.0, 0.0]
    clock = time.perf_counter
    cpu_s = _cpu_s()
    consumer = ParallelConsumer(
        case.load.topic,
        group_id=f"ours-{uuid.uuid4().hex}",
        bootstrap_servers=servers,
        ordering=case.ordering,
        concurrency=case.concurrency,
        processes=case.processes,
        threads=case.concurrency // case.processes if case.processes else 1,
        max_open=case.max_open,
    )
    engine = consumer._engine
    poll = engine._source.poll

    def timed(limit: int, wait_s: float) -> list:
        pool: Any = engine._pool
        while case.processes and len(pool.pids) < case.processes:
            time.sleep(0.01)
        groups = poll(limit, wait_s)
        if groups and not times[0]:
            times[0] = clock()
        return groups

    def is_done() -> bool:
        return engine.stats.processed >= case.load.messages

    engine._source.poll = timed  # type: ignore[method-assign]
    with consumer:
        consumer.poll(handle_async if case.is_async else handle)
        deadline_s = clock() + 170
        while not is_done() and clock() < deadline_s:
            time.sleep(0.001)
        times[1] = clock()
        memory = _memory_mib()
    return Result(times[1] - times[0], _cpu_s() - cpu_s, memory, is_done())


def _cpu_s() -> float:
    """Of this process, and of its children that have ended."""
    return sum(os.times()[:4])


def _memory_mib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) // 1024
    return -1


def run_ours_apart(servers: str, chosen: list[Case]) -> list[Result]:
    """A round, in a process of its own."""
    names = [case.name for case in chosen]
    command = [sys.executable, __file__, "--worker", servers, json.dumps(names)]
    return _results(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


# The peer.


def run_peer(servers: str, chosen: list[Case], classpath: str) -> list[Result]:
    """A round, in one JVM; its first row is run twice and counted once."""
    rows = [
        f"{case.load.topic}:{case.ordering.upper()}:{case.peer_concurrency or case.concurrency}"
        f":{case.load.messages}"
        for case in chosen
    ]
    warm_up = Case("", Load(scaled(10_000), 1000, 5000), "key", 100)
    fill(servers, warm_up.load)
    first = f"{warm_up.load.topic}:KEY:100:{warm_up.load.messages}"
    command = ["java", "-Xmx1g", "-cp", classpath, "Bench", servers, first, *rows]
    found = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return _results(found.stdout)[1:]


def _results(text: str) -> list[Result]:
    return [Result(**json.loads(line)) for line in text.splitlines() if line.startswith("{")]


# The table.


def rows_of(case: Case, ours: list[Result], peer: list[Result]) -> list[Row]:
    """Speed, CPU and memory of one case."""
    speed = _speed(case, ours)
    is_done = all(result.done for result in (*ours, *peer))
    rows = []
    if case.goal is not None:
        is_ok = is_done and speed >= case.goal
        rows.append(Row(f"{case.name}, alone", speed, None, None, "messages/s", case.goal, is_ok))
    if case.peer_concurrency:
        mine, its = _cpu_us(case, ours), _cpu_us(case, peer) if peer else None
        name = f"{case.name}: CPU a record"
        rows.append(Row(name, mine, its, its and its / mine, "us", None, is_done))
    if not peer:
        alone = Row(case.name, speed, None, None, "messages/s", None, is_done)
        return [alone, *rows] if case.goal is None else rows
    other = _speed(case, peer)
    ratio = speed / other
    goal = case.ratio_goal if case.is_judged else None
    is_ok = is_done and (goal is None or ratio >= goal)
    rows.append(Row(case.name, speed, other, ratio, "messages/s", goal, is_ok))
    if case.goal is not None:
        for what, unit in (("cpu_s", "CPU s"), ("memory_mib", "MiB")):
            mine = statistics.median(getattr(result, what) for result in ours)
            its = statistics.median(getattr(result, what) for result in peer)
            name = f"{case.name}: {'CPU' if what == 'cpu_s' else 'memory'}"
            rows.append(Row(name, mine, its, its / max(mine, 1e-9), unit, 1.0, mine < its))
    return rows


def _speed(case: Case, results: list[Result]) -> float:
    return statistics.median(case.load.messages / result.seconds for result in results)


def _cpu_us(case: Case, results: list[Result]) -> float:
    return statistics.median(result.cpu_s * 1e6 / case.load.messages for result in results)


def _worker(servers: str, names: list[str]) -> None:
    by_name = {case.name: case for case in cases()}
    for name in names:
        print(json.dumps(asdict(run_ours(servers, by_name[name]))), flush=True)


def main() -> int:
    """Run all rows, or those whose names contain ``--rows``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON list, last")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", default="", help="only rows whose names contain this; | for or")
    parser.add_argument("--no-peer", action="store_true", help="ours alone")
    parser.add_argument("--bootstrap-servers", default="", help="use this cluster")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        _worker(args.worker[0], json.loads(args.worker[1]))
        return 0
    wanted = args.rows.split("|")
    chosen = [case for case in cases() if any(text in case.name for text in wanted)]
    auto = [each for each in auto_cases() if any(text in each[1].row for text in wanted)]
    classpath = "" if args.no_peer or not chosen else build_peer("parallel-consumer", "Bench")
    ours: dict[str, list[Result]] = {case.name: [] for case in chosen}
    peer: dict[str, list[Result]] = {case.name: [] for case in chosen}
    with broker_at(args.bootstrap_servers) as servers:
        for load in (*(case.load for case in chosen), *(load for load, _ in auto)):
            fill(servers, load)
        for _ in range(args.rounds):
            paired = [case for case in chosen if case.has_peer and not case.same_as]
            if classpath and paired:
                for case, result in zip(paired, run_peer(servers, paired, classpath), strict=True):
                    peer[case.name].append(result)
            for case, result in zip(chosen, run_ours_apart(servers, chosen), strict=True):
                ours[case.name].append(result)
        rows = auto_rows(servers, [case for _, case in auto], args.rounds)
    rows[:0] = [
        row
        for case in chosen
        for row in rows_of(case, ours[case.name], peer.get(case.same_as or case.name, []))
    ]
    show(*rows)
    return finish(rows, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
