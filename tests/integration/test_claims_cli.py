"""The commands for claims, against a real broker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.integration.claim_logs import ClaimTopics
from tests.integration.cli_tools import Commands
from typer.testing import CliRunner

from kafkamq.claims import Consumer
from kafkamq.cli.app import app
from kafkamq.cli.claims import parse_positions
from kafkamq.errors import ConfigError


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
        again = [consumer.poll(10.0) for _ in range(3)]
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


def test_positions_as_text() -> None:
    found = parse_positions(["a:b:1=5", "t:0=latest", "t:1=2030-01-31T12:00:00Z"])
    assert found["a:b", 1] == 5
    assert found["t", 0] == "latest"
    assert getattr(found["t", 1], "year", 0) == 2030
    for text in ("t=1", "t:x=1", ":1=1", "t:1", "t:1=soon"):
        with pytest.raises(ConfigError, match="position"):
            parse_positions([text])
