"""The commands for claims, against a real broker."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.integration.claim_logs import ClaimTopics
from tests.integration.cli_tools import Commands
from tests.waiting import within
from typer.testing import CliRunner

from kafkamq.claims import Consumer
from kafkamq.cli.app import app
from kafkamq.cli.claims import parse_positions
from kafkamq.errors import ConfigError, KafkaMQError


@pytest.fixture
def topics(bootstrap: str) -> ClaimTopics:
    return ClaimTopics(bootstrap)


@contextmanager
def worker(topics: ClaimTopics) -> Iterator[Consumer]:
    with (
        topics.cluster() as cluster,
        cluster.member("a", topics.group).consumer(topics.work, claims="greedy") as consumer,
    ):
        consumer.wait_for_claims(2)
        yield consumer


def test_claims_from_the_command_line(topics: ClaimTopics, bootstrap: str, namespace: str) -> None:
    commands = Commands(bootstrap, namespace)
    on = ("--topic", topics.coordination, "--interval", "10")
    assert commands.json("claims", "init", *on) == [
        {"topic": topics.coordination, "created": False}
    ]
    topics.fill(4)
    read = commands.json(
        *("claims", "consume", topics.group, topics.work, "--client", "cli", "--count", "4"),
        *("--claims", "greedy", *on),
    )
    assert sorted(int(row["payload"]) for row in read) == [0, 1, 2, 3]
    with worker(topics) as consumer:
        rows = commands.json("claims", "state", "--group", topics.group, *on)
        assert [(row["partition"], row["client"], row["offset"]) for row in rows] == [
            (0, "a", 2),
            (1, "a", 2),
        ]
        moved = commands.json(
            "claims",
            "set-position",
            topics.group,
            f"{topics.work}:0=1",
            f"{topics.work}:1=earliest",
            *on,
        )
        assert [row["offset"] for row in moved] == [1, 0]
        again = [consumer.receive(within(60.0)) for _ in range(3)]
        assert sorted(int(message.payload or b"") for message in again if message) == [1, 2, 3]
        (row,) = commands.json("claims", "pause", topics.group, "--for", "60", *on)
        assert row["paused_until"]
        assert consumer.claims == {}
        commands.json("claims", "resume", topics.group, *on)
        consumer.wait_for_claims(2)
    events = commands.json("claims", "watch", "--no-follow", *on)
    kinds = [row["event"] for row in events]
    assert {"claimed", "released", "paused", "resumed"} <= set(kinds)
    assert "refused" not in kinds


def test_doctor_and_decode(topics: ClaimTopics, bootstrap: str, namespace: str) -> None:
    commands = Commands(bootstrap, namespace)
    on = ("--topic", topics.coordination)
    now, place = int(time.time()), f"{topics.group}/{topics.work}/0"
    with worker(topics):
        pass
    (report,) = commands.json("claims", "doctor", "--interval", "10", *on)
    assert report["ok"]
    assert report["dual_claims"] == []
    topics.write("nonsense", f"Heartbeat/1/{now}/i/x/{topics.group}/{topics.work}/-1/0")
    # Two that heartbeat in turn: each believes that it owns the partition.
    for number in range(2):
        topics.write(f"Heartbeat/1/{now + 30}/i1/x/{place}/{number}")
        topics.write(f"Heartbeat/1/{now}/i2/y/{place}/{number}")
    result = CliRunner().invoke(
        app, ["claims", "doctor", "--interval", "10", "--json", *on], env=commands.environment
    )
    assert result.exit_code == 1
    text = result.stdout
    for found in ("two owners at once", "malformed", "impossible", "clock of x", "Go clients"):
        assert found in text
    rows = commands.json("claims", "decode", *on)
    assert rows[-1]["client"] == "y"
    assert any("malformed" in row for row in rows)
    assert commands.json("claims", "decode", f"Heartbeat/1/7/i/c/{place}/9", "x/y") == [
        {
            "type": "Heartbeat",
            "time_s": 7,
            "instance": "i",
            "client": "c",
            "group": topics.group,
            "topic": topics.work,
            "partition": 0,
            "offset": 9,
            "expires_at_s": 0,
            "version": 1,
        },
        {"malformed": "the type of a coordination record is unknown"},
    ]


def test_what_cannot_work_is_refused(topics: ClaimTopics, bootstrap: str, namespace: str) -> None:
    environment = Commands(bootstrap, namespace).environment
    on = ("--topic", topics.coordination, "--interval", "10")
    none = ("--topic", f"{topics.coordination}-none")
    place = f"{topics.work}:0"
    for arguments, said in [
        (("state", *none), "create it with `kafkamq claims init`"),
        (("doctor", *none), "create it with `kafkamq claims init`"),
        (("decode", *none), "create it with `kafkamq claims init`"),
        (("init", *none, "--rules", "mine"), "rules is 'mine'"),
        (("init", *none, "--retention", "9"), "retention is 9 s"),
        (("consume", "g", "no-such-topic", "--client", "c", *on), "no-such-topic does not ex"),
        (("consume", "g", topics.work, "--client", "a/b", *on), "client_id is 'a/b'"),
        (("consume", "g", topics.work, "--client", "c", "--claims", "all", *on), "'greedy'"),
        (("pause", "a/b", "--for", "5", *on), "group_id is 'a/b'"),
        (("pause", "g", "--for", "1e15", *on), "for_ is"),
        (("set-position", "g", f"{topics.work}:9=0", *on), "has 2 partitions"),
        (("set-position", "g", f"{place}=0", f"{place}=1", *on), "named twice"),
        (("set-position", "g", f"{place}=-1", *on), "is no offset"),
        (("set-position", "g", "no-such-topic:0=1", *on), "no-such-topic does not exist"),
    ]:
        result = CliRunner().invoke(app, ["claims", *arguments], env=environment)
        assert isinstance(result.exception, KafkaMQError), (arguments, result.exception)
        assert said in str(result.exception), (arguments, result.exception)


def metrics_address(process: subprocess.Popen[str]) -> str:
    """Where a command that was told ``--metrics-port 0`` serves them."""
    assert process.stderr is not None
    while line := process.stderr.readline():
        found = re.search(r"(http://localhost:\d+)/metrics", line)
        if found:
            return found[1]
    raise AssertionError("it ended")


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=within(10)) as answer:  # 503 raises
        text: str = answer.read().decode()
    return text


def test_a_consumer_that_is_ended_gives_its_partitions_back(
    topics: ClaimTopics, bootstrap: str, namespace: str
) -> None:
    topics.fill(20)
    command = [
        *(sys.executable, "-m", "kafkamq.cli", "claims", "consume", topics.group, topics.work),
        *("--client", "c", "--claims", "greedy", "--delivery", "at-most-once", "--json"),
        *("--topic", topics.coordination, "--interval", "10", "--metrics-port", "0"),
    ]
    environment = {**os.environ, **Commands(bootstrap, namespace).environment}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address = metrics_address(process)
        seen = sorted(int(json.loads(process.stdout.readline())["payload"]) for _ in range(20))
        assert seen == list(range(20))
        (loop,) = json.loads(get(f"{address}/ready"))["loops"]
        assert loop["name"] == f"claims of {topics.coordination}"
        assert "kafkamq_claims_messages_handed_out_total 20.0" in get(f"{address}/metrics")
        process.send_signal(signal.SIGTERM)
        assert process.wait(within(60)) == 0
    finally:
        process.kill()
        process.communicate()
    with topics.cluster() as cluster:
        cluster.ready()
        claims = cluster.claims(topics.group)
    assert [(claim.client, claim.offset) for claim in claims] == [("", 10), ("", 10)]


def test_at_most_once_prints_every_message_of_a_batch(
    topics: ClaimTopics, bootstrap: str, namespace: str
) -> None:
    """What is announced and not printed would be with nobody."""
    topics.fill(10)
    commands = Commands(bootstrap, namespace)
    more = ("--client", "c", "--claims", "greedy", "--delivery", "at-most-once", "--count", "7")
    found: list[int] = []
    while len(found) < 10:
        rows = commands.json(
            *("claims", "consume", topics.group, topics.work, *more, "--timeout", "2"),
            *("--topic", topics.coordination, "--interval", "10"),
        )
        found += [int(row["payload"]) for row in rows]
    assert sorted(found) == list(range(10))


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
def test_ranges_from_the_command_line(bootstrap: str, namespace: str, delivery: str) -> None:
    topics = ClaimTopics(bootstrap, partitions=1, interval_s=2.0)
    topics.fill(50)
    commands = Commands(bootstrap, namespace)
    on = ("--topic", topics.coordination, "--interval", "2")
    read = commands.json(
        *("claims", "ranges", "consume", topics.group, topics.work, "--client", "cli"),
        *("--size", "20", "--count", "20", "--delivery", delivery, *on),
    )
    assert [int(row["payload"]) for row in read] == list(range(20))
    (row,) = commands.json("claims", "ranges", "state", "--group", topics.group, *on)
    assert (row["topic"], row["partition"], row["done_to"]) == (topics.work, 0, 20)
    assert all(each["first"] >= 20 and each["client"] == "cli" for each in row["ranges"])
    assert str(row["claimed_to"]) in commands.run("claims", "ranges", "state", *on)
    rest = commands.json(
        *("claims", "ranges", "consume", topics.group, topics.work, "--client", "other"),
        *("--size", "20", "--count", "30", "--delivery", delivery, *on),
    )
    assert sorted(int(row["payload"]) for row in rest) == list(range(20, 50))
    assert commands.json("claims", "ranges", "state", "--group", "nobody", *on) == []


def test_positions_as_text() -> None:
    found = parse_positions(["a:b:1=5", "t:0=latest", "t:1=2030-01-31T12:00:00Z"])
    assert found["a:b", 1] == 5
    assert found["t", 0] == "latest"
    assert getattr(found["t", 1], "year", 0) == 2030
    for text in ("t=1", "t:x=1", ":1=1", "t:1", "t:1=soon", "t:\u00b2=1"):
        with pytest.raises(ConfigError, match="position"):
            parse_positions([text])
