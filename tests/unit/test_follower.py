"""A follower whose placing is interrupted."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest
from tests.waiting import deadline_after

from kafkamq.config import ServiceConfig
from kafkamq.transport.clients import open_producer
from kafkamq.transport.follower import Follower
from kafkamq.transport.memory.cluster import cluster_of, forget_cluster
from kafkamq.transport.record import place_of
from kafkamq.types import PartitionId

A, B = ("t", 0), ("t", 1)
STEPS = ["assign", "incremental_unassign", "incremental_assign"]


@pytest.fixture
def follower() -> Iterator[Follower]:
    """It reads both partitions of a topic, from 0 on; they have two records each."""
    name = uuid.uuid4().hex
    config = ServiceConfig(bootstrap_servers=f"memory://{name}")
    cluster_of(config.bootstrap_servers).create_topic("t", 2)
    writer = open_producer({"bootstrap.servers": config.bootstrap_servers}, None)
    for number in range(4):
        writer.produce("t", b"", partition=number % 2)
    follower = Follower(config, "reading", enable_partition_eof=True)
    follower.place({A: 0, B: 0})
    yield follower
    follower.close()
    writer.close()
    forget_cluster(name)


def interrupt(
    monkeypatch: pytest.MonkeyPatch, follower: Follower, step: str, *, is_done: bool
) -> None:
    """The next call of the client's is interrupted, before or behind what it does."""
    call = getattr(follower.client, step)

    def interrupted(partitions: object) -> None:
        monkeypatch.undo()
        if is_done:
            call(partitions)
        raise KeyboardInterrupt

    monkeypatch.setattr(follower.client, step, interrupted)


def read(follower: Follower, *places: PartitionId) -> dict[PartitionId, list[int | None]]:
    """All that it reads until it is at the ends of these."""
    found: dict[PartitionId, list[int | None]] = {}
    ends: dict[PartitionId, int] = {}
    deadline_s = deadline_after(30)
    while not ends.keys() >= set(places) and time.monotonic() < deadline_s:
        for record in follower.poll(10, 0.1):
            found.setdefault(place_of(record), []).append(record.offset())
        ends |= follower.ends
    return found


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("is_placed_again", [False, True])
def test_a_placing_that_was_interrupted_is_made(
    monkeypatch: pytest.MonkeyPatch,
    follower: Follower,
    step: str,
    is_done: bool,
    is_placed_again: bool,
) -> None:
    """By the next poll, or by the next one that places or drops."""
    positions = {A: 1, B: 1} if step == "assign" else {A: 1}
    interrupt(monkeypatch, follower, step, is_done=is_done)
    with pytest.raises(KeyboardInterrupt):
        follower.place(positions)
    assert follower.places == {A, B}
    if is_placed_again:
        follower.place({A: 1})
        follower.drop([B])
        assert read(follower, A) == {A: [1]}
    else:
        assert read(follower, A, B) == {A: [1], B: [0, 1]} | {each: [1] for each in positions}


@pytest.mark.parametrize("is_done", [False, True])
def test_a_drop_that_was_interrupted_is_made(
    monkeypatch: pytest.MonkeyPatch, follower: Follower, is_done: bool
) -> None:
    interrupt(monkeypatch, follower, "incremental_unassign", is_done=is_done)
    with pytest.raises(KeyboardInterrupt):
        follower.drop([A])
    assert follower.places == {B}
    assert read(follower, B) == {B: [0, 1]}
    follower.place({A: 1})
    assert read(follower, A) == {A: [1]}
