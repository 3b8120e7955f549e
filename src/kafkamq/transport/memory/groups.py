"""The group coordinator: committed offsets, and (``members``) who is in a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import KafkaError

from kafkamq.transport.memory.failures import kafka_error
from kafkamq.transport.memory.log import Place

if TYPE_CHECKING:
    from kafkamq.transport.memory.cluster import Cluster

__all__ = ["Groups"]

Committed = tuple[int, "str | None"]
"""Offset and metadata."""


class Groups:
    """All groups of a cluster; the caller holds its condition."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.offsets: dict[str, dict[Place, Committed]] = {}

    # ---- offsets

    def keep(self, group: str, place: Place, committed: Committed) -> None:
        """Commit one offset."""
        self.offsets.setdefault(group, {})[place] = committed

    def committed(self, group: str, place: Place) -> Committed | None:
        """What is committed; offsets of open transactions do not count yet."""
        return self.offsets.get(group, {}).get(place)

    def refusal(
        self, group: str, generation: int, member: str, *, is_simple: bool | None
    ) -> KafkaError | None:
        """Why this member may not commit; ``is_simple`` None: inside a transaction."""
        if generation < 0 and not member:
            return None
        return kafka_error(KafkaError.UNKNOWN_MEMBER_ID)

    def forget_topic(self, topic: str) -> None:
        """A deleted topic takes what was committed for it along."""
        for offsets in self.offsets.values():
            for place in [each for each in offsets if each[0] == topic]:
                del offsets[place]

    def expire_offsets(self, group: str) -> None:
        """A test's: offsets.retention.minutes are over."""
        self.offsets.pop(group, None)

    # ---- administration

    def listing(self) -> list[tuple[str, str, str]]:
        """Name, state and kind of all groups."""
        return [(name, "EMPTY", "CLASSIC") for name in sorted(self.offsets)]

    def describe(self, group: str) -> tuple[str, list[tuple[str, str, list[Place]]]]:
        """The state, and name, client and partitions of each member."""
        return ("EMPTY" if group in self.offsets else "DEAD"), []

    def delete(self, group: str) -> int | None:
        """Delete a group without members; the error's code, if it cannot be."""
        if group not in self.offsets:
            return KafkaError.GROUP_ID_NOT_FOUND
        del self.offsets[group]
        return None

    # ---- time

    def topics_changed(self) -> None:
        """Topics or partitions came or went."""

    def tick(self, now_s: float) -> None:
        """Do what is due."""
