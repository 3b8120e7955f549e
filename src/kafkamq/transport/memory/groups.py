"""The group coordinator: members, rounds of joining, and committed offsets."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Protocol

from confluent_kafka import KafkaError, TopicPartition

from kafkamq.transport.memory.assignors import assign
from kafkamq.transport.memory.failures import kafka_error
from kafkamq.transport.memory.log import Place
from kafkamq.transport.memory.state import State

Committed = tuple[int, "str | None"]
"""Offset and metadata."""


class GroupClient(Protocol):
    """A consumer, as far as its coordinator knows it."""

    client_id: str
    max_poll_s: float
    strategies: list[str]

    @property
    def session_s(self) -> float:
        """How long its heartbeats may be missing."""

    @property
    def is_closed(self) -> bool:
        """Whether it has ended."""

    def is_member(self, member: Member) -> bool:
        """Whether it speaks for this member still."""

    def count_of(self, topic: str, *, is_classic: bool) -> int:
        """How many partitions it knows."""

    def next_heartbeat_s(self) -> float:
        """When it asks the coordinator next."""

    def take_assignment(self, member: Member, strategy: str) -> None:
        """The round is complete."""

    def work(self, now_s: float) -> None:
        """What its background thread would do."""


class Member:
    """One member, as the coordinator sees it."""

    def __init__(self, client: GroupClient, member_id: str) -> None:
        self.id = member_id or f"{client.client_id}-{uuid.uuid4()}"
        self.client = client
        self.topics: list[str] = []  # that it wants
        self.owned: set[Place] = set()  # it holds these until it says otherwise
        self.assigned: set[Place] = set()  # to hold; of the consumer protocol: it may
        self.epoch = 0  # the generation that it has been told of
        self.has_joined = False  # in this round
        self.is_removed = False  # the coordinator has dropped it; it does not know yet
        self.hears_s = math.inf  # when its next heartbeat tells it what is new
        self.silent_since_s = math.inf


class Group:
    """One group with members; either protocol."""

    def __init__(self, cluster: State, name: str, *, is_classic: bool) -> None:
        self.name = name
        self.is_classic = is_classic
        self.generation = 0
        self.members: dict[str, Member] = {}
        self.state = "EMPTY"
        self._cluster = cluster
        self._round_ends_s = math.inf

    # ---- classic: rounds

    def join(self, member: Member, owned: set[Place]) -> None:
        """A member asks for a place in the next generation."""
        self.members[member.id] = member
        member.has_joined, member.owned = True, owned
        self._begin_round()
        self._complete_round(time.monotonic())

    def remove(self, member: Member) -> None:
        """It has left, or was not heard of for too long."""
        if self.members.pop(member.id, None) is None:
            return
        member.is_removed = True
        self._tell(member)
        if not self.members:
            self.state, self.generation = "EMPTY", self.generation + 1
        elif self.is_classic:
            self._begin_round()
            self._complete_round(time.monotonic())
        else:
            self.retarget()

    def _begin_round(self) -> None:
        if self.state == "PREPARING_REBALANCING":
            return
        self.state = "PREPARING_REBALANCING"
        longest_s = max(member.client.max_poll_s for member in self.members.values())
        self._round_ends_s = time.monotonic() + longest_s
        self._cluster.due(self._round_ends_s)
        for member in self.members.values():
            if not member.has_joined:
                self._tell(member)

    def _complete_round(self, now_s: float) -> None:
        """The next generation, once everybody has come or the time is over."""
        if self.state != "PREPARING_REBALANCING":
            return
        late = [member for member in self.members.values() if not member.has_joined]
        if late and now_s < self._round_ends_s:
            self._cluster.due(self._round_ends_s)
            return
        for member in late:
            del self.members[member.id]
            member.is_removed = True
            self._tell(member)
        self.generation += 1
        self.state = "STABLE" if self.members else "EMPTY"
        strategy = self._strategy()
        owned = {member.id: member.owned for member in self.members.values()}
        found = assign(strategy, self._counts(), self._topics(), owned)
        for member in self.members.values():
            member.has_joined, member.epoch = False, self.generation
            member.assigned = found[member.id]
            if strategy == "cooperative-sticky":  # what another one holds must be revoked first
                for other, places in owned.items():
                    if other != member.id:
                        member.assigned -= places
        for member in list(self.members.values()):
            member.client.take_assignment(member, strategy)

    def _strategy(self) -> str:
        """The first one of the first member that all members know."""
        lists = [member.client.strategies for member in self.members.values()]
        common = [name for name in lists[0] if all(name in each for each in lists)] if lists else []
        return common[0] if common else "range"

    def _counts(self) -> dict[str, int]:
        """Partitions by topic, as the leader knows them: a partition that is new may be missing."""
        counts = {}
        for member in self.members.values():
            for topic in member.topics:
                if topic in self._cluster.topics and topic not in counts:
                    counts[topic] = member.client.count_of(topic, is_classic=self.is_classic)
        return counts

    def _topics(self) -> dict[str, list[str]]:
        return {member.id: member.topics for member in self.members.values()}

    # ---- the consumer protocol: a target, and who is on the way to it

    def retarget(self) -> None:
        """Members or topics have changed."""
        self.generation += 1
        self.state = "STABLE" if self.members else "EMPTY"
        owned = {member.id: member.assigned | member.owned for member in self.members.values()}
        found = assign("uniform", self._counts(), self._topics(), owned)
        for member in self.members.values():
            member.assigned = found[member.id]
            self._tell(member)

    def heartbeat(self, member: Member, owned: set[Place]) -> set[Place]:
        """What the member may hold now, given what it holds."""
        released = member.owned - member.assigned - owned
        member.owned -= released
        if member.owned <= member.assigned:
            member.epoch = self.generation
            held = [each.owned for each in self.members.values() if each is not member]
            member.owned = member.owned | member.assigned.difference(*held)
        if released:
            for other in self.members.values():
                if other is not member and other.assigned - other.owned:
                    self._tell(other)
        return member.owned & member.assigned

    def _tell(self, member: Member) -> None:
        """At its next heartbeat."""
        member.hears_s = min(member.hears_s, member.client.next_heartbeat_s())
        self._cluster.due(member.hears_s)

    # ---- time

    def _is_silent(self, member: Member) -> bool:
        """Whether its heartbeats do not arrive."""
        client = member.client
        is_gone = client.is_closed or not client.is_member(member)
        return is_gone or client in self._cluster.faults.cut

    def tick(self, now_s: float) -> None:
        """Miss members that are silent, and end a round that takes too long."""
        is_down = self._cluster.faults.is_down
        for member in list(self.members.values()):
            if is_down or not self._is_silent(member):
                member.silent_since_s = math.inf
                continue
            member.silent_since_s = min(member.silent_since_s, now_s)
            missed_s = member.silent_since_s + member.client.session_s
            if now_s >= missed_s:
                self.remove(member)
            else:
                self._cluster.due(missed_s)
        if self.is_classic and not is_down:
            self._complete_round(now_s)


class Groups:
    """All groups of a cluster; the caller holds its condition."""

    def __init__(self, cluster: State) -> None:
        self._cluster = cluster
        self.offsets: dict[str, dict[Place, Committed]] = {}
        self.groups: dict[str, Group] = {}
        self.clients: dict[GroupClient, None] = {}  # those that are subscribed
        self.on_kept: Callable[[str, Place, Committed], None] | None = None  # a test's
        self.on_known: Callable[[str, Place, int], None] | None = None  # a test's, too

    def group(self, name: str, *, is_classic: bool) -> Group:
        """The group, made when it is first asked for; an empty one takes the new protocol."""
        found = self.groups.get(name)
        if found is None:
            found = self.groups[name] = Group(self._cluster, name, is_classic=is_classic)
        elif not found.members:
            found.is_classic = is_classic
        return found

    # ---- offsets

    def keep(self, group: str, place: Place, committed: Committed) -> None:
        """Commit one offset."""
        self.offsets.setdefault(group, {})[place] = committed
        if self.on_kept is not None:
            self.on_kept(group, place, committed)

    def keep_known(self, group: str, place: Place, committed: Committed) -> None:
        """Commit one offset of a transaction, whose outcome its client asks for."""
        self.keep(group, place, committed)
        if self.on_known is not None:
            self.on_known(group, place, committed[0])

    def answered(self, group: str, partitions: Iterable[TopicPartition]) -> None:
        """A client was told that these are committed."""
        if self.on_known is not None:
            for each in partitions:
                if each.error is None and each.offset >= 0:
                    self.on_known(group, (each.topic, each.partition), each.offset)

    def committed(self, group: str, place: Place) -> Committed | None:
        """What is committed; offsets of open transactions do not count yet."""
        return self.offsets.get(group, {}).get(place)

    def refusal(
        self, name: str, generation: int, member_id: str, *, is_transactional: bool = False
    ) -> KafkaError | None:
        """Why this member may not commit."""
        group = self.groups.get(name)
        is_empty = group is None or not group.members
        if generation < 0 and (is_empty or (is_transactional and not member_id)):
            return None
        member = None if group is None else group.members.get(member_id)
        if group is None or member is None:
            return kafka_error(KafkaError.UNKNOWN_MEMBER_ID)
        if member.epoch == generation:
            return None
        if group.is_classic or is_transactional:
            return kafka_error(KafkaError.ILLEGAL_GENERATION)
        return kafka_error(KafkaError.STALE_MEMBER_EPOCH)

    def forget_topic(self, topic: str) -> None:
        """A deleted topic takes what was committed for it along."""
        for offsets in self.offsets.values():
            for place in [each for each in offsets if each[0] == topic]:
                del offsets[place]

    # ---- what a test may do

    def expire_offsets(self, group: str) -> None:
        """offsets.retention.minutes are over."""
        with self._cluster.changed:
            self.offsets.pop(group, None)

    def expel(self, client: GroupClient) -> None:
        """The coordinator drops a member, as after its session timeout."""
        with self._cluster.changed:
            for group in list(self.groups.values()):
                for member in [each for each in group.members.values() if each.client is client]:
                    group.remove(member)
            self._cluster.changed.notify_all()

    # ---- administration

    def listing(self) -> list[tuple[str, str, str]]:
        names = sorted({*self.offsets, *self.groups})
        return [
            (name, self._state(name), "CLASSIC" if self._is_classic(name) else "CONSUMER")
            for name in names
        ]

    def _state(self, name: str) -> str:
        group = self.groups.get(name)
        if group is not None:
            return group.state
        return "EMPTY" if name in self.offsets else "DEAD"

    def _is_classic(self, name: str) -> bool:
        group = self.groups.get(name)
        return group is None or group.is_classic

    def describe(self, name: str) -> tuple[str, list[tuple[str, str, set[Place]]]]:
        group = self.groups.get(name)
        members = [] if group is None else list(group.members.values())
        found = [
            (each.id, each.client.client_id, each.assigned if each.epoch else set[Place]())
            for each in members
        ]
        return self._state(name), found

    def delete(self, name: str) -> int | None:
        """Delete a group without members; the error's code, if it cannot be."""
        group = self.groups.get(name)
        if group is not None and group.members:
            return KafkaError.NON_EMPTY_GROUP
        if group is None and name not in self.offsets:
            return KafkaError.GROUP_ID_NOT_FOUND
        self.groups.pop(name, None)
        self.offsets.pop(name, None)
        return None

    # ---- time

    def topics_changed(self) -> None:
        """Topics or partitions came or went: the brokers know at once, clients in time."""
        for group in self.groups.values():
            if not group.is_classic and group.members:
                group.retarget()

    def tick(self, now_s: float) -> None:
        """Do what is due."""
        for group in list(self.groups.values()):
            if group.members:
                group.tick(now_s)
        for client in list(self.clients):
            client.work(now_s)
