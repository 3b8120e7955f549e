"""Claims measured on a real broker: claiming, taking over, starting, at-most-once throughput.

Run: python benchmarks/claims.py [--json] [--messages N] [--rounds N] [--only NAME]

It starts a broker of its own unless one is named. Figures are medians of the rounds. The peer's
figures were recorded from Marshal's Go client on Kafka 2.8.2, at its fixed interval of 60 s: it
cannot start on Kafka 4. With ``--json`` the last line is one JSON list of rows
``{"row", "ours", "peer", "ratio", "unit", "goal", "ok"}``.
"""

from __future__ import annotations

# ruff: noqa: E402
import sys
from pathlib import Path

sys.path[:] = [each for each in sys.path if Path(each).resolve() != Path(__file__).resolve().parent]
sys.path.append(str(Path(__file__).resolve().parents[1]))

import argparse
import statistics
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.load import LoadProducer
from benchmarks.rows import Row, finish, scaled, show
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from kafkamq.claims import Cluster, init_topic
from kafkamq.dev import LocalKafka

PEER_CLAIM_S = 30.0  # 64 partitions, greedy: 30-35 s
OLD, RECENT = scaled(1_000_000), scaled(100_000)
KILL_INTERVAL_S = 3.0
_HOLDER = """
import sys, time
from kafkamq.claims import Cluster
servers, coordination, topic, interval = sys.argv[1:]
cluster = Cluster(servers, coordination_topic=coordination, heartbeat_interval=float(interval))
consumer = cluster.member("held", "group").consumer(topic, claims="greedy")
consumer.wait_for_claims(8)
print("ready", flush=True)
time.sleep(600)
"""


class Bench:
    """The broker, and fresh topics for each round."""

    def __init__(self, servers: str, messages: int, rounds: int) -> None:
        self.servers = servers
        self.messages = messages
        self.rounds = rounds
        self.admin = AdminClient({"bootstrap.servers": servers})

    def topics(self, partitions: int, *, interval: float = 60.0) -> tuple[str, str]:
        """A coordination topic and a topic of work."""
        name = uuid.uuid4().hex[:8]
        init_topic(self.servers, f"claims-{name}", heartbeat_interval=interval)
        self.create(NewTopic(f"work-{name}", partitions, 1))
        return f"claims-{name}", f"work-{name}"

    def create(self, topic: NewTopic) -> None:
        """Create a topic."""
        for future in self.admin.create_topics([topic]).values():
            future.result(30)

    def cluster(self, coordination: str, interval: float = 60.0) -> Cluster:
        """A process's view."""
        return Cluster(self.servers, coordination_topic=coordination, heartbeat_interval=interval)

    def fill(self, topic: str, count: int, partitions: int) -> None:
        """Messages that name themselves."""
        producer = LoadProducer(self.servers, linger_ms=5)
        for number in range(count):
            producer.write(topic, b"%0100d" % number, partition=number % partitions)
        producer.confirm()

    # The rows.

    def claim(self) -> Row:
        """Seconds from nothing (no client, no claim) until 64 partitions are held."""
        took = []
        for _ in range(self.rounds):
            coordination, work = self.topics(64)
            begin = time.perf_counter()
            with self.cluster(coordination) as cluster:
                consumer = cluster.member("a", "group").consumer(work, claims="greedy")
                consumer.wait_for_claims(64)
                took.append(time.perf_counter() - begin)
        ours = statistics.median(took)
        return Row("64 partitions claimed", ours, PEER_CLAIM_S, PEER_CLAIM_S / ours, "s", 2.0,
                   ours <= 2.0)  # fmt: skip

    def graceful(self) -> Row:
        """Seconds from a close until another member hands out from all that have messages left."""
        took, wrong = [], 0
        for round_ in range(self.rounds):
            coordination, work = self.topics(8)
            self.fill(work, 8000, 8)
            seen: Counter[bytes] = Counter()
            with self.cluster(coordination) as one, self.cluster(coordination) as two:
                first = one.member("a", "group").consumer(work, claims="greedy")
                first.wait_for_claims(8)
                second = two.member("b", "group").consumer(work, claims="greedy")
                left = Counter(dict.fromkeys(range(8), 1000))
                while sum(seen.values()) < 4000:
                    message = first.receive(5.0)
                    assert message is not None
                    seen[message.payload or b""] += 1
                    left[message.partition] -= 1
                    message.commit()
                begin = time.perf_counter()
                closing = threading.Thread(target=first.close)
                closing.start()
                partitions: set[int] = set()
                while sum(seen.values()) < 8000:
                    message = second.receive(5.0)
                    if message is None:
                        break
                    seen[message.payload or b""] += 1
                    message.commit()
                    partitions.add(message.partition)
                    if partitions == set(+left) and len(took) == round_:
                        took.append(time.perf_counter() - begin)
                closing.join()
            wrong += 8000 - len(seen) + sum(count - 1 for count in seen.values())
        ours = statistics.median(took)
        name = f"graceful takeover of 8 partitions ({wrong} duplicates or lost)"
        return Row(name, ours, None, None, "s", 5.0, ours <= 5.0 and not wrong)

    def killed(self) -> Row:
        """Seconds from SIGKILL of the holder of 8 partitions until another member holds them."""
        took = []
        for _ in range(self.rounds):
            coordination, work = self.topics(8, interval=KILL_INTERVAL_S)
            holder = subprocess.Popen(
                [sys.executable, "-c", _HOLDER, self.servers, coordination, work,
                 str(KILL_INTERVAL_S)],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            try:
                assert holder.stdout is not None
                assert holder.stdout.readline() == "ready\n"
                with self.cluster(coordination, KILL_INTERVAL_S) as cluster:
                    consumer = cluster.member("b", "group").consumer(work, claims="greedy")
                    holder.kill()
                    begin = time.perf_counter()
                    consumer.wait_for_claims(8)
                    took.append(time.perf_counter() - begin)
            finally:
                holder.kill()
                holder.communicate()
        ours, goal = statistics.median(took), 2 * KILL_INTERVAL_S + 5
        name = f"takeover after SIGKILL, interval {KILL_INTERVAL_S:g} s"
        return Row(name, ours, None, None, "s", goal, ours <= goal)

    def start(self) -> Row:
        """Seconds until a process is ready on 1,000,000 old and 100,000 recent records."""
        name = f"claims-{uuid.uuid4().hex[:8]}"
        settings = {"message.timestamp.type": "CreateTime", "retention.ms": "-1"}
        self.create(NewTopic(name, 1, 1, config=settings))
        hour_ago_ms = round(time.time() * 1000) - 3_600_000
        self._records(name, OLD, hour_ago_ms)
        resource = ConfigResource(
            ResourceType.TOPIC,
            name,
            incremental_configs=[
                ConfigEntry(
                    "message.timestamp.type",
                    "LogAppendTime",
                    incremental_operation=AlterConfigOpType.SET,
                )
            ],
        )
        for future in self.admin.incremental_alter_configs([resource]).values():
            future.result(30)
        self._records(name, RECENT, None)
        took = []
        for _ in range(self.rounds):
            begin = time.perf_counter()
            with self.cluster(name) as cluster:
                cluster.ready()
                took.append(time.perf_counter() - begin)
                held = len(cluster.claims())
                assert held == 1000, held
        ours = statistics.median(took)
        what = f"ready on {OLD:,} old and {RECENT:,} recent records"
        return Row(what, ours, None, None, "s", 2.0, ours <= 2.0)

    def _records(self, topic: str, count: int, timestamp_ms: int | None) -> None:
        """Heartbeats of 1000 claims."""
        producer = LoadProducer(self.servers)
        now = int(time.time())
        more = {} if timestamp_ms is None else {"timestamp": timestamp_ms}
        for number in range(count):
            group, partition = number % 10, number % 1000 // 10
            value = f"Heartbeat/1/{now}/i{group}/c/group{group}/work/{partition}/{number}"
            producer.write(topic, value, partition=0, **more)
        producer.confirm()

    def at_most_once(self) -> Row:
        """Messages per second at most once, batches of 500, 100 B, 4 partitions, one thread."""
        rates = []
        for _ in range(self.rounds):
            coordination, work = self.topics(4)
            self.fill(work, self.messages, 4)
            with self.cluster(coordination) as cluster:
                consumer = cluster.member("a", "group").consumer(
                    work, claims="greedy", delivery="at-most-once", batch=500
                )
                consumer.wait_for_claims(4)
                begin, seen = time.perf_counter(), 0
                for batch in consumer.batches(timeout=10.0):
                    seen += len(batch)
                    if seen >= self.messages:
                        break
                rates.append(seen / (time.perf_counter() - begin))
                assert seen == self.messages, seen
        ours = statistics.median(rates)
        return Row("at most once, batches of 500", ours, None, None, "messages/s", 20_000,
                   ours >= 20_000)  # fmt: skip


@contextmanager
def broker(named: str) -> Iterator[str]:
    """The one that was named, or one of our own."""
    if named:
        yield named
        return
    with LocalKafka() as kafka:
        yield kafka.bootstrap_servers


def main() -> int:
    """Run all rows, or those whose names contain ``--only``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON list, last")
    parser.add_argument(
        "--messages", type=int, default=scaled(200_000), help="at most once, per round"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="rows whose method's name contains this")
    parser.add_argument("--bootstrap-servers", default="")
    options = parser.parse_args()
    rows = []
    with broker(options.bootstrap_servers) as servers:
        bench = Bench(servers, options.messages, options.rounds)
        for measure in (bench.claim, bench.graceful, bench.killed, bench.start, bench.at_most_once):
            if options.only not in measure.__name__:
                continue
            rows.append(measure())
            show(rows[-1])
    return finish(rows, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
