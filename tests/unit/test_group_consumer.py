"""A member of a group, on a cluster in memory: what its owner raises."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence

import pytest

from kafkamq.config import ServiceConfig
from kafkamq.transport.group_consumer import GroupConsumer
from kafkamq.transport.memory.cluster import cluster_of, forget_cluster
from kafkamq.transport.record import Place


class _Interrupted:
    def assigned(self, places: Sequence[Place]) -> Mapping[Place, int]:
        return dict.fromkeys(places, 0)

    def revoked(self, places: Sequence[Place], *, is_lost: bool) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_while_partitions_go_at_the_end_is_raised() -> None:
    name = uuid.uuid4().hex
    config = ServiceConfig(bootstrap_servers=f"memory://{name}")
    cluster_of(config.bootstrap_servers).create_topic("t", 1)
    member = GroupConsumer(config, _Interrupted(), ["t"], group_id="g")
    member.join()
    deadline_s = time.monotonic() + 30
    while not member.places and time.monotonic() < deadline_s:
        member.poll(1, 0.1)
    with pytest.raises(KeyboardInterrupt):
        member.close()
    assert not member.is_member  # the client has ended all the same
    forget_cluster(name)
