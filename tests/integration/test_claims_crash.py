"""Members that are killed, stopped and misled: nothing twice at most once, nothing lost at least
once, and never two owners at a time.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.claim_logs import ClaimTopics, read_topic
from tests.integration.claim_worker import STEPS, HandOut, overlaps, read_trace, start
from tests.waiting import wait_until, within

from kafkamq.claims.rules.log import ClaimLog
from kafkamq.dev import LocalKafka
from kafkamq.types import MarshalType

BATCH = 10


def read_to_the_end(topics: ClaimTopics, traces: list[Path], number: int, *more: str) -> None:
    """A last member, until every partition was handed out up to its end."""
    end = dict.fromkeys(range(topics.partitions), topics.filled // topics.partitions)

    def reached() -> dict[int, int]:
        ends: dict[int, int] = {}
        for each in read_trace(*traces):
            ends[each.partition] = max(each.next, ends.get(each.partition, 0))
        return ends

    process = start(traces[number], topics, *more)
    try:
        wait_until(lambda: reached() == end, timeout_s=90.0)
    finally:
        kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=within(30))


def counts(trace: list[HandOut]) -> Counter[tuple[int, int]]:
    """How often each message was handed out."""
    return Counter((e.partition, offset) for e in trace for offset in range(e.first, e.next))


def die_at_each_step(topics: ClaimTopics, folder: Path, plan: list[tuple[str, int]]) -> None:
    """One life after the other, each killed at a step; then one that reads to the end."""
    per_life = 6 * BATCH
    total = per_life * (len(plan) + 1)
    topics.fill(total)
    # One client, that takes its own up again, and another one, that waits until they are stale.
    traces = [folder / "a.trace", folder / "b.trace"]
    for number, (step, count) in enumerate(plan):
        process = start(traces[number % 3 == 2], topics, "--step", step, "--count", str(count))
        process.communicate(timeout=within(120))
        assert process.returncode == -signal.SIGKILL, step
    read_to_the_end(topics, traces, 0)
    trace = read_trace(*traces)
    handed_out = counts(trace)
    assert max(handed_out.values()) == 1, "handed out twice"
    lost = total - len(handed_out)
    sys.stdout.write(f"{len(plan)} kills: {total} messages, {lost} lost, none twice\n")
    assert lost <= BATCH * len(plan), "more than one batch was lost for a kill"
    assert overlaps(trace) == []
    assert topics.audit().dual_claims == []


@pytest.mark.faults
def test_at_most_once_killed(bootstrap: str, tmp_path: Path) -> None:
    """A few of the steps; the next test has them all."""
    topics = ClaimTopics(bootstrap, interval_s=2.0)
    steps = ("committing", "heartbeat", "returned")
    die_at_each_step(topics, tmp_path, [(step, 2) for step in steps])


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(4))
def test_at_most_once_killed_at_every_step_many_times(
    bootstrap: str, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    plan = [(step, chance.randint(1, 5)) for step in STEPS for _ in range(4)]
    chance.shuffle(plan)
    die_at_each_step(ClaimTopics(bootstrap, interval_s=0.5), tmp_path, plan)


def at_least_once_with_kills(topics: ClaimTopics, folder: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    total = 3 * 30 * kills + 60  # more than they can take
    topics.fill(total)
    traces = [folder / f"{name}.trace" for name in "abc"]
    for number in range(kills):
        trace = traces[number % 2]
        before = len(read_trace(trace))
        process = start(
            trace, topics, "--delivery", "at-least-once", "--batch", "3", "--work", "0.02"
        )
        wanted = before + chance.randint(5, 30)
        wait_until(lambda trace=trace, n=wanted: len(read_trace(trace)) >= n, timeout_s=90.0)
        kill(process)
    read_to_the_end(topics, traces, 2, "--delivery", "at-least-once")
    trace = read_trace(*traces)
    handed_out = counts(trace)
    assert len(handed_out) == total, "lost"
    again = sum(handed_out.values()) - total
    sys.stdout.write(f"{kills} kills: {total} messages, {again} of them again, none lost\n")
    assert overlaps(trace) == []
    assert topics.audit().dual_claims == []
    # A session begins where the log says: only what came since the last heartbeat is repeated.
    said, began, reached = begins(topics), set[tuple[int, int]](), Counter[int]()
    for each in trace:
        place = each.partition, each.token
        if place not in began and said[place]:
            assert each.first == said[place]
        elif place not in began:  # nobody's heartbeat was read: where Kafka has it committed, if so
            assert each.first <= reached[each.partition]
        began.add(place)
        reached[each.partition] = max(reached[each.partition], each.next)


def begins(topics: ClaimTopics) -> dict[tuple[int, int], int]:
    """Partition and token of each claim -> where its session begins, as the log says."""
    logs = [ClaimLog("safe", topics.interval_s), ClaimLog("safe", topics.interval_s)]
    found: dict[tuple[int, int], int] = {}
    for number, at, time_ms, record in topics.records():
        now_s = time_ms / 1000
        if record is not None and record.type is MarshalType.CLAIMING_PARTITION:
            claim = logs[number].claim(topics.group, topics.work, record.partition, now_s=now_s)
            found[record.partition, at] = claim.offset
        logs[number].apply(record, offset=at, observed_at_s=now_s, broker_time_s=now_s)
    return found


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_at_least_once_killed_many_times(bootstrap: str, tmp_path: Path) -> None:
    at_least_once_with_kills(ClaimTopics(bootstrap, interval_s=0.5), tmp_path, 15, 2)


def is_stopped(process: subprocess.Popen[str]) -> bool:
    """Whether a signal has stopped it."""
    text = Path(f"/proc/{process.pid}/stat").read_text()
    return text.rpartition(")")[2].split()[0] == "T"


_AT_MOST_ONCE_ZOMBIES = [
    pytest.param("at-most-once", step, marks=[] if step == "returned" else pytest.mark.faults)
    for step in STEPS
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("delivery", "step"),
    [
        pytest.param("at-least-once", "returned", marks=pytest.mark.faults),
        *_AT_MOST_ONCE_ZOMBIES,
    ],
)
def test_a_zombie_hands_nothing_out_and_rewinds_nothing(
    bootstrap: str, tmp_path: Path, delivery: str, step: str
) -> None:
    """It stops at a step of a batch, and goes on when another one has its partitions."""
    topics = ClaimTopics(bootstrap, interval_s=1.0)
    output = f"{topics.work}-out"
    topics.create(output, 1)
    topics.fill(4000)
    one, two = tmp_path / "one.trace", tmp_path / "two.trace"
    options = ("--delivery", delivery, "--work", "0.05", "--output", output)
    when = ("--signal", "SIGSTOP", "--step", step, "--count", "8")
    zombie = start(one, topics, *options, *when)
    other = None
    try:
        wait_until(lambda: is_stopped(zombie))
        stopped_at = len(read_trace(one))
        other = start(two, topics, *options)
        wait_until(lambda: len(read_trace(two)) >= 20)
        zombie.send_signal(signal.SIGCONT)
        assert zombie.stdout is not None
        awaited = ["ended:"]
        if step == "returned":  # what it was in the middle of
            awaited.append("lost: refused:")
        while awaited:
            said = zombie.stdout.readline()
            assert said, "it died"
            awaited = [each for each in awaited if said.split()[0] not in each]
        more = len(read_trace(two)) + 20
        wait_until(lambda: len(read_trace(two)) >= more)
        later = read_trace(one)[stopped_at:]
        assert not {e.token for e in later} & {e.token for e in read_trace(one)[:stopped_at]}
    finally:
        for process in (zombie, other):
            if process is not None:
                kill(process)
    assert overlaps(read_trace(one, two)) == []
    assert topics.audit().dual_claims == []
    produced = Counter(value for _, _, _, value in read_topic(bootstrap, output))
    if delivery == "at-most-once":
        assert max(produced.values()) == 1
    # Positions only rise: the zombie's heartbeats and releases count for nothing.
    handed = [each for each in read_trace(two) if each.token]
    for partition in (0, 1):
        firsts = [each.first for each in handed if each.partition == partition]
        assert firsts == sorted(firsts)


def misled(
    topics: ClaimTopics,
    folder: Path,
    rounds: int,
    *more: str,
    until: Callable[[list[Path]], object] = lambda traces: False,
) -> list[Path]:
    """Four members with wrong clocks, that come and go."""
    topics.fill(4000)
    clocks = {"ahead": (30, -60), "behind": (-30, 0), "jumps": (0, -30), "right": (0, 0)}
    traces = {name: folder / f"{name}.trace" for name in clocks}

    def begin(name: str) -> subprocess.Popen[str]:
        skew, jump = clocks[name]
        return start(
            traces[name],
            topics,
            *("--skew", str(skew), "--jump", str(jump), "--delivery", "at-least-once"),
            *("--work", "0.02", "--max-claims", "1", *more),
        )

    running = {name: begin(name) for name in clocks}
    chance = random.Random(7)
    try:
        for _ in range(rounds):
            wanted = len(read_trace(*traces.values())) + 40
            wait_until(lambda n=wanted: len(read_trace(*traces.values())) >= n, timeout_s=90.0)
            name = chance.choice(list(clocks))
            kill(running[name])
            running[name] = begin(name)
            if until(list(traces.values())):
                break
    finally:
        for process in running.values():
            kill(process)
    return list(traces.values())


def test_wrong_clocks_never_make_two_owners(bootstrap: str, tmp_path: Path) -> None:
    topics = ClaimTopics(bootstrap, interval_s=0.5)
    traces = misled(topics, tmp_path, 3)
    assert overlaps(read_trace(*traces)) == []
    audit = topics.audit()
    assert audit.dual_claims == []


def test_the_observer_finds_two_owners_when_there_are(bootstrap: str, tmp_path: Path) -> None:
    """The same with rules that accept every claim: a test that could not fail shows nothing."""
    topics = ClaimTopics(bootstrap, interval_s=0.5)

    def are_two(traces: list[Path]) -> object:
        return overlaps(read_trace(*traces)) or topics.audit().dual_claims

    traces = misled(topics, tmp_path, 30, "--unsafe", until=are_two)  # mostly in the first two
    assert are_two(traces)


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["crash", "pause"])
def test_a_broker_that_goes_away_ends_the_leases_and_comes_back(how: str) -> None:
    with LocalKafka() as kafka:
        topics = ClaimTopics(kafka.bootstrap_servers, interval_s=1.0)
        topics.fill(200)
        with (
            topics.cluster() as cluster,
            cluster.member("a", topics.group).consumer(topics.work, claims="greedy") as consumer,
        ):
            consumer.wait_for_claims(2)
            seen = set()
            for _ in range(100):
                message = consumer.receive(within(10.0))
                assert message is not None
                seen.add(message.payload)
                message.commit()
            if how == "crash":
                kafka.kill()
            else:
                kafka.pause()
            wait_until(lambda: not consumer.claims, timeout_s=30.0)
            assert consumer.receive(0.1) is None  # what is queued is not handed out without a lease
            if how == "crash":
                kafka.restart()
            else:
                kafka.resume()
            consumer.wait_for_claims(2, within(90.0))
            while len(seen) < 200:
                message = consumer.receive(within(30.0))
                assert message is not None
                seen.add(message.payload)
                message.commit()
        assert topics.audit().dual_claims == []
