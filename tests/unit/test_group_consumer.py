"""A member of a group, on a cluster in memory: what its owner raises."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence

import pytest
from tests.waiting import deadline_after

from kafkamq.config import ServiceConfig
from kafkamq.transport.clients import open_producer
from kafkamq.transport.group_consumer import GroupConsumer
from kafkamq.transport.memory.cluster import cluster_of, forget_cluster
from kafkamq.types import PartitionId


class _Interrupted:
    def assigned(self, places: Sequence[PartitionId]) -> Mapping[PartitionId, int]:
        return dict.fromkeys(places, 0)

    def revoked(self, places: Sequence[PartitionId], *, is_lost: bool) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_while_partitions_go_at_the_end_is_raised() -> None:
    name = uuid.uuid4().hex
    config = ServiceConfig(bootstrap_servers=f"memory://{name}")
    cluster_of(config.bootstrap_servers).create_topic("t", 1)
    member = GroupConsumer(config, _Interrupted(), ["t"], group_id="g")
    member.join()
    deadline_s = deadline_after(30)
    while not member.places and time.monotonic() < deadline_s:
        member.poll(1, 0.1)
    with pytest.raises(KeyboardInterrupt):
        member.close()
    assert not member.is_member  # the client has ended all the same
    forget_cluster(name)


class _Owner:
    def assigned(self, places: Sequence[PartitionId]) -> Mapping[PartitionId, int]:
        return dict.fromkeys(places, 0)

    def revoked(self, places: Sequence[PartitionId], *, is_lost: bool) -> None: ...


@pytest.mark.parametrize("step", ["incremental_unassign", "incremental_assign"])
def test_a_partition_whose_placing_was_interrupted_is_read(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    name = uuid.uuid4().hex
    config = ServiceConfig(bootstrap_servers=f"memory://{name}")
    cluster_of(config.bootstrap_servers).create_topic("t", 1)
    writer = open_producer({"bootstrap.servers": config.bootstrap_servers}, None)
    for number in range(3):
        writer.produce("t", b"%d" % number, partition=0)
    member = GroupConsumer(config, _Owner(), ["t"], group_id="g")
    member.join()
    deadline_s = deadline_after(30)
    while not member.places and time.monotonic() < deadline_s:
        member.poll(1, 0.1)

    def interrupt(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(member.client, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        member.place({("t", 0): 2})
    assert member.places == {("t", 0)}  # whoever mends knows that it is to be placed
    found: list[bytes | None] = []
    while not found and time.monotonic() < deadline_s:
        found = [record.value() for record in member.poll(10, 0.1)]
    assert found == [b"2"]
    member.close()
    writer.close()
    forget_cluster(name)


@pytest.mark.parametrize("is_lost", [True, False])
def test_an_interrupt_inside_of_a_callback_is_raised_as_one(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """confluent-kafka's ``consume`` loses it, or Python wraps it."""
    name = uuid.uuid4().hex
    member = GroupConsumer(
        ServiceConfig(bootstrap_servers=f"memory://{name}"), _Interrupted(), ["t"], group_id="g"
    )

    def consume(*_: object) -> list[object]:
        if is_lost:
            raise SystemError(
                "<method 'consume' of ...> returned NULL without setting an exception"
            )
        raise SystemError("<...> returned a result with an exception set") from KeyboardInterrupt()

    with monkeypatch.context() as patched:
        patched.setattr(member.client, "consume", consume)
        with pytest.raises(KeyboardInterrupt):
            member.poll(1, 0.1)
    member.close()
    forget_cluster(name)
