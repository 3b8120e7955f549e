"""Members of one group are killed and stopped at random; a checker reads the topics afterwards."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka import Consumer, TopicPartition
from tests.integration.parallel_tools import committed, fill, make_topic
from tests.waiting import within

MEMBER = Path(__file__).with_name("parallel_member.py")
PARTITIONS = 6


@dataclass
class Verdict:
    """What the topics say."""

    records: int
    lost: int = 0
    repeated: int = 0
    unexplained: list[str] = field(default_factory=list)  # repeated, and nobody was killed for it
    by_losses: int = 0  # repeated, as a live member was taken for dead
    disorder: list[str] = field(default_factory=list)
    kills: int = 0
    stops: int = 0
    killed_ms: dict[str, int] = field(default_factory=dict)  # when each was, by name
    oldest_repeat_ms: int = 0  # how long before its member's death it was done first
    seconds: float = 0.0


def soak(
    bootstrap: str,
    topic: str,
    *,
    seed: int,
    members: int,
    records: int,
    pause_s: tuple[float, float],
    kill_share: float,
    calm_after_s: float,
    timeout_s: float,
    protocol: str = "classic",
    mode: str = "asynchronous",
) -> Verdict:
    """Run until everything is committed; nobody is disturbed any more after ``calm_after_s``."""
    chance = random.Random(seed)
    out, group = f"{topic}-out", f"{topic}-g"
    make_topic(bootstrap, topic, PARTITIONS)
    make_topic(bootstrap, out, PARTITIONS)
    fill(bootstrap, topic, (f"k{chance.randrange(5000)}" for _ in range(records)))
    verdict = Verdict(records)
    began_s = time.monotonic()
    folder = tempfile.TemporaryDirectory()
    losses = Path(folder.name) / "losses"
    losses.touch()
    settings = (bootstrap, topic, out, group, protocol, mode, str(losses))
    running = {number: _start(*settings, number=number) for number in range(members)}
    started = members
    try:
        while not _is_done(bootstrap, group, topic):
            elapsed_s = time.monotonic() - began_s
            assert elapsed_s < timeout_s, (
                f"stuck, seed {seed}: {_progress(bootstrap, group, topic)}"
            )
            if elapsed_s > calm_after_s:
                time.sleep(0.5)
                continue
            time.sleep(chance.uniform(*pause_s))
            number = chance.choice(list(running))
            victim = running.pop(number)
            if chance.random() < kill_share:
                verdict.killed_ms[f"m{number}"] = time.time_ns() // 1_000_000
                victim.kill()
                verdict.kills += 1
            else:
                victim.terminate()
                verdict.stops += 1
            running[started] = _start(*settings, number=started)
            started += 1
            victim.wait(within(60))
    finally:
        for member in running.values():
            member.kill()
            member.wait()
    verdict.seconds = time.monotonic() - began_s
    found = [line.split() for line in losses.read_text().splitlines()]
    folder.cleanup()
    _judge(bootstrap, out, verdict, {(name, int(partition)) for name, partition in found})
    return verdict


def _start(
    bootstrap: str,
    topic: str,
    out: str,
    group: str,
    protocol: str,
    mode: str,
    losses: str,
    *,
    number: int,
) -> subprocess.Popen[bytes]:
    names = (bootstrap, topic, out, group, f"m{number}", protocol, mode, losses)
    return subprocess.Popen([sys.executable, str(MEMBER), *names])


def _progress(bootstrap: str, group: str, topic: str) -> list[tuple[int, int]]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "bounds"})
    ends = [consumer.get_watermark_offsets(TopicPartition(topic, p))[1] for p in range(PARTITIONS)]
    consumer.close()
    return [(committed(bootstrap, group, topic, p)[0], ends[p]) for p in range(PARTITIONS)]


def _is_done(bootstrap: str, group: str, topic: str) -> bool:
    return all(at == end for at, end in _progress(bootstrap, group, topic))


def _judge(bootstrap: str, out: str, verdict: Verdict, lost: set[tuple[str, int]]) -> None:
    """Nothing lost; within a key, what is new comes in order; repeated is what a kill explains.

    A result is explained when the member that wrote the one before it was killed in between, or
    was told that the group had taken it for dead and given its partition away.
    """
    seen: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    latest: dict[tuple[int, bytes], int] = {}
    for key, partition, offset, name, at_ms in _results(bootstrap, out):
        earlier = seen[partition, offset]
        before = latest.get((partition, key), -1)
        if offset > before:
            latest[partition, key] = offset
        elif not earlier:  # first done after a later one of its key was
            verdict.disorder.append(f"{key!r} [{partition}]@{offset} by {name} after {before}")
        if earlier:
            first, first_ms = earlier[-1]
            died_ms = verdict.killed_ms.get(first)
            if (first, partition) in lost:
                verdict.by_losses += 1
            elif died_ms is None or died_ms > at_ms:
                verdict.unexplained.append(f"[{partition}]@{offset} by {first}, then by {name}")
            else:
                verdict.oldest_repeat_ms = max(verdict.oldest_repeat_ms, died_ms - first_ms)
        earlier.append((name, at_ms))
    verdict.lost = verdict.records - len(seen)
    verdict.repeated = sum(map(len, seen.values())) - len(seen)


def _results(bootstrap: str, out: str) -> list[tuple[bytes, int, int, str, int]]:
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "judge", "enable.partition.eof": True}
    )
    places = [TopicPartition(out, number, 0) for number in range(PARTITIONS)]
    consumer.assign(places)
    found, ended = [], set()
    while len(ended) < PARTITIONS:  # what is still in a dead member's transaction is waited for
        for record in consumer.consume(10_000, 1.0):
            if record.error() is None:
                partition, offset, name = record.value().decode().split()
                at_ms = record.timestamp()[1]
                found.append((record.key(), int(partition), int(offset), name, at_ms))
                continue
            place = TopicPartition(out, record.partition())
            if record.offset() == consumer.get_watermark_offsets(place, cached=True)[1]:
                ended.add(record.partition())
    consumer.close()
    return found
