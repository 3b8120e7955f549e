"""Members of one group are killed and stopped at random; a checker reads the topics afterwards."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka import Consumer, TopicPartition
from tests.integration.parallel_tools import committed, fill, make_topic

MEMBER = Path(__file__).with_name("parallel_member.py")
PARTITIONS = 6


@dataclass
class Verdict:
    """What the topics say."""

    records: int
    lost: int = 0
    repeated: int = 0
    disorder: list[str] = field(default_factory=list)
    kills: int = 0
    stops: int = 0
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
    timeout_s: float,
    protocol: str = "classic",
    mode: str = "asynchronous",
) -> Verdict:
    """Run until everything is committed, disturbed all the while for the first two thirds."""
    chance = random.Random(seed)
    out, group = f"{topic}-out", f"{topic}-g"
    make_topic(bootstrap, topic, PARTITIONS)
    make_topic(bootstrap, out, PARTITIONS)
    fill(bootstrap, topic, (f"k{chance.randrange(5000)}" for _ in range(records)))
    verdict = Verdict(records)
    began_s = time.monotonic()
    # With group.protocol=consumer the broker misses a killed member after 45 s, not 6.
    calm_from = 0.35 if protocol == "broker" else 0.5
    settings = (bootstrap, topic, out, group, protocol, mode)
    running = [_start(*settings, number=number) for number in range(members)]
    started = members
    try:
        while not _is_done(bootstrap, group, topic):
            elapsed_s = time.monotonic() - began_s
            assert elapsed_s < timeout_s, (
                f"stuck, seed {seed}: {_progress(bootstrap, group, topic)}"
            )
            if elapsed_s > timeout_s * calm_from:  # now it must come to its end
                time.sleep(0.5)
                continue
            time.sleep(chance.uniform(*pause_s))
            victim = running.pop(chance.randrange(len(running)))
            if chance.random() < kill_share:
                victim.kill()
                verdict.kills += 1
            else:
                victim.terminate()
                verdict.stops += 1
            running.append(_start(*settings, number=started))
            started += 1
            victim.wait(60)
    finally:
        for member in running:
            member.kill()
            member.wait()
    verdict.seconds = time.monotonic() - began_s
    _judge(bootstrap, out, verdict)
    return verdict


def _start(
    bootstrap: str, topic: str, out: str, group: str, protocol: str, mode: str, *, number: int
) -> subprocess.Popen[bytes]:
    names = (bootstrap, topic, out, group, f"m{number}", protocol, mode)
    return subprocess.Popen([sys.executable, str(MEMBER), *names])


def _progress(bootstrap: str, group: str, topic: str) -> list[tuple[int, int]]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "bounds"})
    ends = [consumer.get_watermark_offsets(TopicPartition(topic, p))[1] for p in range(PARTITIONS)]
    consumer.close()
    return [(committed(bootstrap, group, topic, p)[0], ends[p]) for p in range(PARTITIONS)]


def _is_done(bootstrap: str, group: str, topic: str) -> bool:
    return all(at == end for at, end in _progress(bootstrap, group, topic))


def _judge(bootstrap: str, out: str, verdict: Verdict) -> None:
    """Nothing lost; within a key, what is new comes in order, and repetitions are of the recent."""
    seen: dict[tuple[int, int], int] = defaultdict(int)
    latest: dict[tuple[int, bytes], int] = {}
    for key, partition, offset, name in _results(bootstrap, out):
        seen[partition, offset] += 1
        before = latest.get((partition, key), -1)
        if offset > before:
            latest[partition, key] = offset
        elif seen[partition, offset] == 1:  # first done after a later one of its key was
            verdict.disorder.append(f"{key!r} [{partition}]@{offset} by {name} after {before}")
    verdict.lost = verdict.records - len(seen)
    verdict.repeated = sum(seen.values()) - len(seen)


def _results(bootstrap: str, out: str) -> list[tuple[bytes, int, int, str]]:
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
                found.append((record.key(), int(partition), int(offset), name))
                continue
            place = TopicPartition(out, record.partition())
            if record.offset() == consumer.get_watermark_offsets(place)[1]:
                ended.add(record.partition())
    consumer.close()
    return found
