"""Batch markers measured: hand-out beside librdkafka alone and kmq's client, folds, memory, bytes.

Run: python benchmarks/batches.py [--json] [--before REV] [--no-peer] [--only TEXT] [--rounds N]

Each figure comes from a process of its own; ours and what stands beside it alternate; a ratio is
the median of the pairs' ratios. Floors are ``consume`` with our librdkafka settings, payloads
read, and a commit (or a transaction of offsets) for each batch. ``--before`` makes a worktree of
that revision with an environment of its own, for the rows whose goal is a gain over it. With
``--json`` the last line is one JSON list of rows
``{"row", "ours", "peer", "ratio", "unit", "goal", "ok"}``.
"""

from __future__ import annotations

# ruff: noqa: E402
import sys
from pathlib import Path

# This file's folder is on the path first, where it would hide the standard library's `queue`.
sys.path[:] = [each for each in sys.path if Path(each).resolve() != Path(__file__).resolve().parent]
sys.path.append(str(Path(__file__).resolve().parents[1]))

import argparse
import json
import statistics
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.before import python_of
from benchmarks.broker import broker_at
from benchmarks.java_peer import build_peer
from benchmarks.rows import Row, finish, scaled, show
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from kafkamq import Service

_PROGRAMS = Path(__file__).parent / "batch_programs.py"
_PARTITIONS = 4
_OTHERS = scaled(400_000)
_FEW, _MANY = scaled(1000), scaled(5000)  # in a batch

_FRESH = "fresh"  # in place of topics: each run has its own

Measure = Callable[[], float]


@dataclass(frozen=True)
class Table:
    """Who is measured, on which broker, how often."""

    servers: str
    messages: int
    rounds: int
    before: str  # the Python of the earlier revision; empty: none
    has_peer: bool
    due: int = 1_000_000
    engines: Sequence[str] = ("local", "spark")
    payload: bytes = b"x" * 100

    # ---- topics

    def topics(self, *, share: float = 1.0) -> dict[str, str]:
        """A fresh pair, with messages; of ``share`` below 1 the others are another queue's."""
        namespace = f"bench-{uuid.uuid4().hex[:8]}"
        with Service(self.servers, namespace) as service:
            service.create_topics(partitions=_PARTITIONS, marker_partitions=_PARTITIONS)
            producer, other = service.queue("work").producer(), service.queue("other").producer()
            every = round(1 / share)
            for number in range(self.messages):
                (other if number % every else producer).send(self.payload)
            producer.flush(120)
            other.flush(120)
            return {
                "servers": self.servers,
                "message_topic": service.config.message_topic,
                "marker_topic": service.config.marker_topic,
            }

    @contextmanager
    def filled(self) -> Iterator[dict[str, str]]:
        """Topics for one run: on those of another one a worker looks behind its former owner."""
        topics = self.topics()
        yield topics
        names = [topics["message_topic"], topics["marker_topic"]]
        admin = AdminClient({"bootstrap.servers": self.servers})
        for deleted in admin.delete_topics(names).values():
            deleted.result(60)

    # ---- who is measured

    def ours(self, name: str, **arguments: Any) -> Measure:
        """A program in this environment."""
        return partial(self._run, sys.executable, name, arguments)

    def earlier(self, name: str, **arguments: Any) -> Measure | None:
        """The same in the earlier one."""
        return partial(self._run, self.before, name, arguments) if self.before else None

    def _run(self, python: str, name: str, arguments: dict[str, Any]) -> float:
        if arguments.get("topics") != _FRESH:
            return _program(python, name, arguments)
        with self.filled() as topics:
            return _program(python, name, {**arguments, "topics": topics})

    def kmq(self, count: int, batch: int) -> Measure | None:
        """The client of kmq on the same messages."""
        if not self.has_peer:
            return None
        classpath = build_peer("kmq", "HandOut")

        def run() -> float:
            with self.filled() as topics:
                names = topics["servers"], topics["message_topic"], topics["marker_topic"]
                arguments = [*names, str(count), str(batch)]
                return _last_number(["java", "-Xmx1g", "-cp", classpath, "HandOut", *arguments])

        return run

    # ---- rows

    def hand_out(self) -> Iterator[Row]:
        """Batches of 1,000 and 5,000 beside the floor."""
        for batch, goal in ((_FEW, 0.4), (_MANY, 0.5)):
            wanted = {"topics": _FRESH, "count": self.messages - 4 * batch, "batch": batch}
            name = f"receive_many({batch:,}) + ack beside consume({batch:,}) + commit, 100 B"
            yield self.paired(
                name, self.ours("hand_out", **wanted), self.ours("floor", **wanted), goal
            )

    def cpu(self) -> Iterator[Row]:
        """What a worker and its tracker take; four seconds were three times the floor."""
        table = replace(self, messages=scaled(200_000), payload=b"x" * 1024)
        wanted = {"topics": _FRESH, "count": table.messages - 4 * _FEW, "batch": _FEW}
        name = "CPU seconds of a million of 1 KB, with a tracker, beside consume + commit"
        ours, floor = table.ours("cpu", **wanted), table.ours("floor_cpu", **wanted)
        yield self.paired(name, ours, floor, 3.0, unit="s")

    def beside_kmq(self) -> Iterator[Row]:
        """The same beside kmq's client."""
        wanted = {"topics": _FRESH, "count": self.messages - 4 * _FEW, "batch": _FEW}
        kmq = self.kmq(self.messages - 4 * _FEW, _FEW)
        name = "receive_many(1,000) + ack beside kmq's client, 1,000 a poll"
        yield self.paired(name, self.ours("hand_out", **wanted), kmq, 2.5)

    def one_by_one(self) -> Iterator[Row]:
        """Single messages."""
        wanted = {"topics": _FRESH, "count": self.messages // 3}
        yield self.gained("receive() + ack, one by one", "one_by_one", 1.5, **wanted)

    def exactly_once(self) -> Iterator[Row]:
        """A transaction per batch."""
        wanted = {"topics": _FRESH, "count": self.messages // 3, "batch": _FEW}
        name = "exactly_once, 1,000 a transaction, beside transactions of offsets"
        ours = self.ours("hand_out", exactly_once=True, **wanted)
        yield self.paired(name, ours, self.ours("floor_transactions", **wanted), 0.5)

    def at_most_once(self) -> Iterator[Row]:
        """Committed before it is handed out, and nothing else."""
        wanted = {"topics": _FRESH, "count": self.messages - 4 * _FEW, "batch": _FEW}
        ours = self.ours("hand_out", delivery="at-most-once", **wanted)
        name = "at most once beside at least once, receive_many(1,000) + ack"
        yield self.paired(name, ours, self.ours("hand_out", **wanted), 0.9)

    def folds(self) -> Iterator[Row]:
        """START + ACK decoded and folded."""
        for run, goal in ((1000, 100), (10, 8)):
            name = f"tracker: messages decoded and folded, {run:,} a record"
            ours = self.ours("fold", messages=scaled(1_000_000 if run > 10 else 400_000), run=run)
            yield self.paired(
                name, ours, self.earlier("fold", messages=scaled(200_000), run=1), goal
            )
        name = "tracker: messages decoded and folded, all single (at least 1 / 1.7)"
        yield self.gained(name, "fold", 0.588, messages=scaled(200_000), run=1)

    def memory(self) -> Iterator[Row]:
        """What a tracker keeps."""
        single = self.ours("memory", messages=scaled(200_000), run=1)()
        runs = self.ours("memory", messages=scaled(10_000_000), run=1000)() * 10
        yield Row("in flight, all single", single, None, None, "B/message", 200, single <= 200)
        name = "10,000,000 in flight in runs of 1,000"
        yield Row(name, runs, None, None, "MB", 100, runs <= 100)

    def marker_bytes(self) -> Iterator[Row]:
        """What a message of 1 KB adds to the markers topic."""
        table = replace(self, messages=scaled(100_000), payload=b"x" * 1024)
        topics = table.topics()
        table.ours("hand_out", topics=topics, count=scaled(90_000), batch=_FEW)()
        each = _bytes_in(topics) / scaled(90_000)
        name = "bytes in the markers topic per message of 1 KB"
        yield Row(name, each, None, None, "B", 4, each <= 4)

    def behind_others(self) -> Iterator[Row]:
        """The first message of a queue behind those of another one."""
        topics = Table(self.servers, _OTHERS, 1, "", False).topics()
        names = {name: topics[name] for name in ("message_topic", "marker_topic")}
        with Service(self.servers, "bench", **names) as service:
            producer = service.queue("mine").producer()
            producer.send(b"x")
            producer.flush(60)
        name = f"first message behind {_OTHERS:,} others, beside a bare consume of these"
        floor = self.ours("floor_behind", topics=topics, count=_OTHERS)
        yield self.paired(name, self.ours("behind", topics=topics), floor, 1.3, unit="s")

    def sparse(self) -> Iterator[Row]:
        """Every hundredth message is the queue's."""
        topics = self.topics(share=0.01)
        wanted = {"topics": topics, "count": self.messages // 100 - scaled(1500), "batch": _FEW}
        yield self.gained("every 100th message is the queue's", "hand_out", 1.3, **wanted)

    def due_at_once(self) -> Iterator[Row]:
        """All leases end at one moment; in runs of 1,000, of 10 and single.

        A window of single ones reads each message by itself, so the goals of runs of 10 and of
        single ones stand for a regression, not for what is wanted.
        """
        bare = self.ours("rewritten", servers=self.servers, messages=self.due)

        def floor() -> float:
            # A single run of it takes up to twice as long as another one.
            return statistics.median(bare() for _ in range(3))

        for engine in self.engines:
            for run, goal in ((1000, 2.5), (10, 8.0), (1, 20.0)):
                wanted = {"servers": self.servers, "messages": self.due, "run": run}
                name = f"{self.due:,} due at once, {run:,} a START, {engine}, beside a bare rewrite"
                ours = self.ours("due_at_once", engine=engine, **wanted)
                yield self.paired(name, ours, floor, goal, unit="s")

    def outage(self) -> Iterator[Row]:
        """Each message has its own reason and delay, twice."""
        used = self.ours("outage_mb", servers=self.servers, messages=scaled(100_000))()
        name = "an outage: 100,000 nacked with reasons and jitter, twice: memory of the tracker"
        yield Row(name, used, None, None, "MB more", 60, used <= 60)

    def end_to_end(self) -> Iterator[Row]:
        """Single messages, from sender to worker."""
        topics = Table(self.servers, 1, 1, "", False).topics()
        for percent in (50, 99):
            wanted = {"topics": topics, "count": scaled(2000), "percent": percent}
            name = f"send to receive of single messages, p{percent}"
            yield self.gained(name, "end_to_end", 1.05, unit="s", **wanted)

    # ---- how they are compared

    def gained(
        self, name: str, program: str, goal: float, unit: str = "messages/s", **arguments: Any
    ) -> Row:
        """Ours beside the earlier revision."""
        earlier = self.earlier(program, **arguments)
        return self.paired(name, self.ours(program, **arguments), earlier, goal, unit=unit)

    def paired(
        self,
        name: str,
        ours: Measure,
        beside: Measure | None,
        goal: float,
        *,
        unit: str = "messages/s",
    ) -> Row:
        """Medians, and the median of the pairs' ratios; of seconds, a smaller ratio is better."""
        pairs: list[tuple[float, float]] = []
        for _ in range(self.rounds):
            other = beside() if beside is not None else 0.0
            pairs.append((ours(), other))
        mine, others = (statistics.median(each) for each in zip(*pairs, strict=True))
        if beside is None:
            return Row(name, mine, None, None, unit, goal, True)
        ratio = statistics.median(one / other for one, other in pairs)
        is_ok = ratio <= goal if unit == "s" else ratio >= goal
        return Row(name, mine, others, round(ratio, 3), unit, goal, is_ok)


def _program(python: str, name: str, arguments: dict[str, Any]) -> float:
    return _last_number([python, str(_PROGRAMS), name, json.dumps(arguments)])


def _last_number(command: Sequence[str]) -> float:
    found = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=600)
    return float(found.stdout.split()[-1])


def _bytes_in(topics: dict[str, str]) -> int:
    """Keys and values of all records in the markers topic."""
    group = f"bench-{uuid.uuid4().hex}"
    consumer = KafkaConsumer({"bootstrap.servers": topics["servers"], "group.id": group})
    places = [TopicPartition(topics["marker_topic"], number, 0) for number in range(_PARTITIONS)]
    left = sum(consumer.get_watermark_offsets(place)[1] for place in places)
    consumer.assign(places)
    size = 0
    while left:
        records = consumer.consume(min(left, 10_000), 1.0)
        size += sum(len(record) + len(record.key() or b"") for record in records)
        left -= len(records)
    consumer.close()
    return size


def main() -> int:
    """Run all rows, or those whose functions' names contain ``--only``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON list, last")
    parser.add_argument("--before", default="", metavar="REV", help="an earlier revision beside it")
    parser.add_argument("--no-peer", action="store_true", help="without kmq's client")
    parser.add_argument("--messages", type=int, default=scaled(600_000), help="per round")
    parser.add_argument("--due", type=int, default=scaled(1_000_000), help="messages due at once")
    parser.add_argument("--engines", nargs="+", default=["local", "spark"], help="that settle them")
    parser.add_argument("--rounds", type=int, default=5, help="pairs")
    parser.add_argument("--bootstrap-servers", default="", help="use this cluster")
    parser.add_argument("--only", default="", help="run the rows whose names contain this")
    args = parser.parse_args()
    with ExitStack() as stack:
        servers = stack.enter_context(broker_at(args.bootstrap_servers))
        before = stack.enter_context(python_of(args.before)) if args.before else ""
        has_peer = not args.no_peer
        engines = args.engines
        table = Table(servers, args.messages, args.rounds, before, has_peer, args.due, engines)
        rows: list[Row] = []
        for run in (
            table.hand_out,
            table.cpu,
            table.beside_kmq,
            table.one_by_one,
            table.exactly_once,
            table.at_most_once,
            table.folds,
            table.memory,
            table.marker_bytes,
            table.behind_others,
            table.sparse,
            table.due_at_once,
            table.outage,
            table.end_to_end,
        ):
            if args.only in run.__name__:
                for row in run():
                    show(row)
                    rows.append(row)
    return finish(rows, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
