"""The backends beside the bare share consumer of confluent-kafka, on one broker in one run.

Run: python benchmarks/compare.py [--json] [--rows NAME[,...]] [--kafka VERSION]

Rows: work (latency, throughput, slow messages, poison), lease, kill, order, busy. Histories that
worker processes write say what happened; nothing is taken from counters of the product. The clock
of a backlog starts when its workers, which have joined before, may go on. The bare client is
measured in two forms, a consumer with a pool of threads and a consumer for each handler; the peer
of a row is the one that its goal is about. Brokers older than 4.2 have no share groups: then there
are no rows of ``share``, and no peers.

With ``--json`` the last line is one JSON list of rows
``{"row", "ours", "peer", "ratio", "unit", "goal", "ok"}``; goals are limits of our figures, and
where there is none but a peer, its figure is the limit.
"""

from __future__ import annotations

# ruff: noqa: E402
import sys
from pathlib import Path

# This file's folder is on the path first, where it would hide the standard library's `queue`.
sys.path[:] = [each for each in sys.path if Path(each).resolve() != Path(__file__).resolve().parent]
ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

import argparse
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from benchmarks.rows import Row, finish, scaled, show
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import KafkaException, ShareConsumer

from kafkamq.config import ServiceConfig
from kafkamq.dev import DEFAULT_VERSION, LocalKafka
from kafkamq.dev.compare.plan import (
    Contender,
    Item,
    Measured,
    PhaseKind,
    Work,
    encode,
    judge,
    phases,
)
from kafkamq.dev.compare.run import PHASES, why_not
from kafkamq.dev.compare.stage import ACTORS, Stage

PEER_WORKER = "benchmarks.peers.share_worker"
BROKER = {"group.share.min.record.lock.duration.ms": "1000"}  # 15 s: for the row of long handlers
POISON = 5
LETTERS_S = 25.0
MAX_GROUP = 200
OURS = ("markers", "offsets", "share")
POOL, MANY = "bare-pool", "bare-many"


def row(
    name: str, ours: float | None, peer: float | None, unit: str, *, at_most: float | None = None
) -> Row:
    """Less is better; without a limit the peer is it. None: not done in time."""
    limit = peer if at_most is None else at_most
    ratio = ours / peer if peer and ours is not None else None
    is_ok = ours is not None and (limit is None or ours <= limit)
    return Row(name, ours, peer, ratio, unit, at_most, is_ok)


class Bench:
    """The broker, and a folder for histories."""

    def __init__(self, servers: str, folder: Path) -> None:
        self._servers = servers
        self._folder = folder
        refusal = why_not(ServiceConfig(bootstrap_servers=servers), Contender.SHARE)
        if refusal:
            print(f"share, and the bare share consumer: skipped: {refusal}", file=sys.stderr)
        self._has_share = not refusal
        self.rows: list[Row] = []

    def add(self, *rows: Row) -> None:
        """Keep and say them."""
        self.rows += rows
        show(*rows)

    @contextmanager
    def stage(self, name: str, work: Work) -> Iterator[Stage]:
        """A contender, warmed up."""
        config = ServiceConfig(
            bootstrap_servers=self._servers, namespace=f"bench-{uuid.uuid4().hex[:8]}"
        )
        is_peer = name in (POOL, MANY)
        contender = Contender.SHARE if is_peer else Contender(name)
        module = PEER_WORKER if is_peer else ACTORS
        with Stage(
            config, work, contender, self._folder / uuid.uuid4().hex, module=module, name=name
        ) as made:
            made.warm_up()
            yield made

    def _able(self, *names: str) -> list[str]:
        """Those of these that the brokers have."""
        return [name for name in names if self._has_share or name in ("markers", "offsets")]

    # Latency, throughput, slow messages, poison.

    def work(self) -> None:
        """10,000 messages, 100 handlers at once in one process."""
        work = Work(messages=scaled(10_000), processes=1, concurrency=100, partitions=4)
        found: dict[str, Measured] = {}
        letters: dict[str, int] = {}
        for name in self._able(*OURS, POOL, MANY):
            with self.stage(name, work) as stage:
                found[name] = self._phases(
                    stage, PhaseKind.LATENCY, PhaseKind.THROUGHPUT, PhaseKind.BLOCKING
                )
                if name != MANY:
                    letters[name] = self._poison(stage)
        none = Measured(contender="")
        pool, many = found.get(POOL, none), found.get(MANY, none)
        for name in self._able(*OURS):
            mine, is_share = found[name], name == "share"
            self.add(
                row(f"10k x 0-5 ms, 100 at once: {name}", mine.seconds, many.seconds, "s",
                    at_most=None if is_share else 1.0),
                row(f"1 % take 1 s, 100 at once: {name}", mine.blocking_s, pool.blocking_s, "s",
                    at_most=None if is_share else 2.5),
                row(f"warm end to end p50: {name}", mine.latency_p50_ms, pool.latency_p50_ms,
                    "ms", at_most=None if is_share else 10.0),
                row(f"warm end to end p99: {name}", mine.latency_p99_ms, pool.latency_p99_ms,
                    "ms", at_most=None if is_share else 50.0),
                Row(f"poison in the dead letters: {name}", letters[name], letters.get(POOL), None,
                    f"of {POISON}", POISON, letters[name] == POISON),
            )  # fmt: skip
        if not self._has_share:
            return
        share = found["share"]
        self.add(
            row("10k x 0-5 ms, 100 at once: share beside a pool", share.seconds, pool.seconds, "s"),
            row("1 % take 1 s: share beside 100 consumers", share.blocking_s, many.blocking_s, "s"),
        )

    def _phases(self, stage: Stage, *kinds: PhaseKind) -> Measured:
        found = Measured(contender=stage.name)
        for phase in phases(stage.work, stage.contender):
            if phase.kind in kinds:
                facts = PHASES[phase.kind](stage, phase, found)
                if facts.done < facts.messages:
                    break
        return found

    def _poison(self, stage: Stage) -> int:
        """Messages that always fail: how many are dead letters with all that belongs to one."""
        first = 1 << 30
        items = [Item(first + each, f"p{each}", 0, 250) for each in range(POISON)]
        items += [Item(first + POISON + each, f"q{each}", 0) for each in range(20)]
        stage.send(items)
        stage.wait(range(first + POISON, first + len(items)), 20.0)
        wanted = {encode(item, size=stage.work.payload_bytes) for item in items[:POISON]}
        return len(whole_letters(stage, wanted, timeout_s=LETTERS_S))

    # A handler of twice the lease.

    def lease(self) -> None:
        """How often a message is handled."""
        found: dict[str, float] = {}
        # A group's session is 6 s at least, and so is the lease of offsets.
        leases = {"markers": 3.0, "offsets": 6.0, POOL: 3.0}
        for name in self._able(*leases):
            lease_s = leases[name]
            work = Work(processes=1, concurrency=20, partitions=2, lease_s=lease_s)
            items = tuple(Item(each, f"k{each}", int(lease_s * 2e6)) for each in range(20))
            with self.stage(name, work) as stage:
                begin_s = stage.send_backlog(items)
                stage.wait(range(20), 60.0)
                quiet_until(stage, quiet_s=2.5 * lease_s, limit_s=60.0)
                found[name] = judge(items, stage.events, begin_s=begin_s).runs
        for name in ("markers", "offsets"):
            self.add(row(f"runs, handler of 2x the lease: {name}", found[name], found.get(POOL),
                         "runs a message", at_most=1.0))  # fmt: skip

    # A killed process.

    def kill(self) -> None:
        """Two processes, two partitions; one of them is killed."""
        work = Work(processes=2, concurrency=50, partitions=2)
        found = {}
        for name in self._able(*OURS, POOL):
            with self.stage(name, work) as stage:
                found[name] = self._phases(stage, PhaseKind.RECOVERY).recovery_s
        for name in self._able(*OURS):
            limit = None if name == "share" else work.lease_s + 2.0
            self.add(row(f"SIGKILL until all is done: {name}", found[name], found.get(POOL), "s",
                         at_most=limit))  # fmt: skip

    # Order.

    def order(self) -> None:
        """200 keys, 8 workers, 2 % of the messages given back once."""
        work = Work(messages=scaled(2000, least=400), processes=8, concurrency=4, partitions=8)
        found = {}
        for name in self._able("offsets", POOL):
            with self.stage(name, work) as stage:
                found[name] = self._phases(stage, PhaseKind.ORDER).keys_in_order
        mine, peer = found["offsets"] or 0, found.get(POOL)
        self.add(Row("keys in order, 8 workers, 2 % nacks: offsets", mine, peer, None, "of 200",
                     200, mine == 200))  # fmt: skip

    # Handlers at once.

    def busy(self) -> None:
        """1,000 handlers over 10 processes and 16 partitions."""
        members = self._members(205) if self._has_share else None
        work = Work(processes=10, concurrency=100, partitions=16)
        count = scaled(4000)
        items = tuple(Item(each, f"k{each}", 2_000_000) for each in range(count))
        for name in ("markers", "offsets"):
            with self.stage(name, work) as stage:
                begin_s = stage.send_backlog(items)
                stage.wait(range(count), 60.0)
                found = judge(items, stage.events, begin_s=begin_s)
            self.add(Row(f"handlers at once, 10 processes, 16 partitions: {name}", found.busy,
                         members, found.busy / members if members else None, "handlers", 1000,
                         found.busy == 1000))  # fmt: skip

    def _members(self, count: int) -> int:
        """How many bare consumers a group takes, one record each at a time."""
        name = f"bench-{uuid.uuid4().hex[:8]}"
        members = []
        refused = 0
        for _ in range(count):
            member = ShareConsumer({"bootstrap.servers": self._servers, "group.id": name})
            member.subscribe([name])
            members.append(member)
        deadline_s = time.monotonic() + 20.0
        alive = list(members)
        while time.monotonic() < deadline_s and refused < count - MAX_GROUP:
            for member in list(alive):
                if _is_refused(member):
                    alive.remove(member)
                    refused += 1
        for member in members:
            member.close()
        return count - refused


def _is_refused(member: ShareConsumer) -> bool:
    try:
        records = member.poll(0.0)
    except KafkaException as error:
        return bool(error.args[0].fatal())
    return any(each.error() is not None and each.error().fatal() for each in records)


def quiet_until(stage: Stage, *, quiet_s: float, limit_s: float) -> None:
    """Wait until no handler has been called for a while."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        stage.follow()
        last_s = max(event.time_s for event in stage.events if event.op == "begin")
        if time.monotonic() - last_s > quiet_s:
            return
        time.sleep(0.2)


def whole_letters(stage: Stage, wanted: set[bytes], *, timeout_s: float) -> set[bytes]:
    """Which of these payloads are those of dead letters with reason and attempts."""
    found: set[bytes] = set()
    settings = {
        "bootstrap.servers": stage.config.bootstrap_servers,
        "group.id": f"letters-{uuid.uuid4().hex}",
        "auto.offset.reset": "earliest",
    }
    deadline_s = time.monotonic() + timeout_s
    with closing(KafkaConsumer(settings)) as consumer:
        consumer.subscribe([stage.config.dead_letter_topic])
        while found != wanted and time.monotonic() < deadline_s:
            for record in consumer.consume(100, 0.2):
                if record.error() is not None:
                    continue
                headers = dict(record.headers() or ())
                attempts = int(headers.get("kafkamq-delivery-count") or 0)
                if headers.get("kafkamq-reason") == b"max-deliveries" and attempts > 1:
                    found.add(record.value() or b"")
    return found & wanted


def main() -> int:
    """Measures, and says whether all goals are met."""
    names: dict[str, Callable[[Bench], None]] = {
        "work": Bench.work,
        "lease": Bench.lease,
        "kill": Bench.kill,
        "order": Bench.order,
        "busy": Bench.busy,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--kafka", default=DEFAULT_VERSION, help="version of the broker")
    args = parser.parse_args()
    os.chdir(ROOT)  # processes find the peer's module there
    folder = Path(tempfile.mkdtemp(prefix="kafkamq-bench-"))
    try:
        with LocalKafka(args.kafka, properties=BROKER) as broker:
            bench = Bench(broker.bootstrap_servers, folder)
            for name in args.rows.split(","):
                names[name](bench)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return finish(bench.rows, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
