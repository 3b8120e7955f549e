"""A Kafka cluster in memory: topics, and coordinators of groups and transactions.

One condition guards everything. A cluster has no threads: what falls due (timeouts of transactions,
sessions and messages) happens when somebody calls or waits.
"""

from __future__ import annotations

import math
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from confluent_kafka import KafkaError, TopicPartition, Uuid

from kafkamq.transport.memory.state import (
    Partition,
    State,
    Topic,
    Transaction,
    failure,
    kafka_error,
)
from kafkamq.types import PartitionId

_clusters: dict[str, MemoryKafka] = {}

BROKER_SETTINGS = {
    "auto.create.topics.enable": "false",
    "default.replication.factor": "1",
    "group.consumer.heartbeat.interval.ms": "5000",
    "group.consumer.session.timeout.ms": "45000",
    "message.max.bytes": "1048588",
    "num.partitions": "1",
    "offset.metadata.max.bytes": "4096",
    "offsets.retention.minutes": "10080",
    "transaction.max.timeout.ms": "900000",
}


def cluster_of(address: str) -> MemoryKafka:
    """Return the cluster of an address; made when it is first asked for."""
    name = address.removeprefix("memory://")
    return _clusters.get(name) or _clusters.setdefault(name, MemoryKafka(name))


def forget_cluster(name: str) -> None:
    """The next client of this name finds an empty cluster."""
    _clusters.pop(name, None)


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class MemoryKafka(State):
    """One cluster of one broker; its time is the wall clock by default."""

    def __init__(self, name: str, *, now_ms: Callable[[], int] = _wall_ms) -> None:
        super().__init__(now_ms)
        self.name = name
        self.settings = dict(BROKER_SETTINGS)
        self.groups = Groups(self)
        self.transactions = Transactions(self)
        self._last_id = 0

    def _work(self, now_s: float) -> None:
        self.transactions.expire(now_s)
        super()._work(now_s)
        self.groups.tick(now_s)

    # ---- topics

    def create_topic(
        self, name: str, partitions: int = 1, settings: Mapping[str, str] | None = None
    ) -> Topic:
        """Create a topic.

        Raises:
            KafkaException: It exists, or the number cannot be.
        """
        with self.changed:
            if name in self.topics:
                raise failure(KafkaError.TOPIC_ALREADY_EXISTS, f"Topic '{name}' already exists.")
            if partitions < 1:
                raise failure(KafkaError.INVALID_PARTITIONS, "Number of partitions must be >= 1")
            self._last_id += 1
            topic_id = Uuid(zlib.crc32(self.name.encode()), self._last_id)
            topic = self.topics[name] = Topic(name, topic_id, partitions, settings or {})
            self._topics_changed()
            return topic

    def delete_topic(self, name: str) -> None:
        with self.changed:
            if self.topics.pop(name, None) is None:
                raise failure(KafkaError.UNKNOWN_TOPIC_OR_PART)
            self.groups.forget_topic(name)
            self._topics_changed()

    def add_partitions(self, name: str, count: int) -> None:
        """More partitions; clients that know the topic do not hear of it at once."""
        with self.changed:
            topic = self.topics[name]
            first = len(topic.partitions)
            topic.partitions += [Partition(topic, first + number) for number in range(count)]
            self._topics_changed()

    def delete_records(self, name: str, number: int, before: int) -> None:
        """Retention: what lies below this offset is gone."""
        with self.changed:
            self.topics[name].partitions[number].delete_before(before)
            self.changed.notify_all()

    def truncate(self, name: str, number: int, end: int) -> None:
        """An unclean election: what stands from this offset on is gone, and the log goes on there.

        No transaction may be open in the partition.
        """
        with self.changed:
            self.topics[name].partitions[number].truncate(end)
            self.changed.notify_all()

    def is_too_long(self, metadata: str | None) -> bool:
        """Return whether an offset may not have such metadata; a NUL comes with them."""
        size = len(metadata.encode()) + 1 if metadata else 0
        return size > int(self.settings["offset.metadata.max.bytes"])

    def _topics_changed(self) -> None:
        self.groups.topics_changed()
        self.due(0.0)
        self.changed.notify_all()


Committed = tuple[int, "str | None"]
"""Offset and metadata."""


class GroupClient(Protocol):
    """A consumer, as far as its coordinator knows it."""

    client_id: str
    max_poll_s: float
    strategies: list[str]

    @property
    def session_s(self) -> float: ...
    @property
    def is_closed(self) -> bool: ...
    def is_member(self, member: Member) -> bool: ...
    def count_of(self, topic: str, *, is_classic: bool) -> int: ...
    def next_heartbeat_s(self) -> float: ...
    def take_assignment(self, member: Member, strategy: str) -> None: ...
    def work(self, now_s: float) -> None: ...


class Member:
    """One member, as the coordinator sees it."""

    def __init__(self, client: GroupClient, member_id: str) -> None:
        self.id = member_id or f"{client.client_id}-{uuid.uuid4()}"
        self.client = client
        self.topics: list[str] = []
        self.owned: set[PartitionId] = set()
        self.assigned: set[PartitionId] = set()
        self.epoch = 0
        self.has_joined = False
        self.is_removed = False
        self.hears_s = math.inf
        self.silent_since_s = math.inf


class Group:
    """One group and its members, by either protocol."""

    def __init__(self, cluster: State, name: str, *, is_classic: bool) -> None:
        self.name = name
        self.is_classic = is_classic
        self.generation = 0
        self.members: dict[str, Member] = {}
        self.state = "EMPTY"
        self._cluster = cluster
        self._round_ends_s = math.inf

    # ---- classic: rounds

    def join(self, member: Member, owned: set[PartitionId]) -> None:
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
        # The first one of the first member that all members know.
        lists = [member.client.strategies for member in self.members.values()]
        common = [name for name in lists[0] if all(name in each for each in lists)] if lists else []
        strategy = common[0] if common else "range"
        owned = {member.id: member.owned for member in self.members.values()}
        found = assign(strategy, self._counts(), self._topics(), owned)
        for member in self.members.values():
            member.has_joined, member.epoch = False, self.generation
            member.assigned = found[member.id]
            if strategy == "cooperative-sticky":
                # What another one holds must be revoked first.
                for other, places in owned.items():
                    if other != member.id:
                        member.assigned -= places
        for member in list(self.members.values()):
            member.client.take_assignment(member, strategy)

    def _counts(self) -> dict[str, int]:
        """Return partitions by topic as the leader knows them, perhaps without new ones."""
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

    def heartbeat(self, member: Member, owned: set[PartitionId]) -> set[PartitionId]:
        """Return what the member may hold now, given what it holds."""
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
        """Tell it at its next heartbeat."""
        member.hears_s = min(member.hears_s, member.client.next_heartbeat_s())
        self._cluster.due(member.hears_s)

    # ---- time

    def _is_silent(self, member: Member) -> bool:
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
        self.offsets: dict[str, dict[PartitionId, Committed]] = {}
        self.groups: dict[str, Group] = {}
        self.clients: dict[GroupClient, None] = {}
        self.on_kept: Callable[[str, PartitionId, Committed], None] | None = None
        self.on_known: Callable[[str, PartitionId, int], None] | None = None

    def group(self, name: str, *, is_classic: bool) -> Group:
        """Get the group, made when it is first asked for; an empty one takes the new protocol."""
        found = self.groups.get(name)
        if found is None:
            found = self.groups[name] = Group(self._cluster, name, is_classic=is_classic)
        elif not found.members:
            found.is_classic = is_classic
        return found

    # ---- offsets

    def keep(self, group: str, place: PartitionId, committed: Committed) -> None:
        self.offsets.setdefault(group, {})[place] = committed
        if self.on_kept is not None:
            self.on_kept(group, place, committed)

    def keep_known(self, group: str, place: PartitionId, committed: Committed) -> None:
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

    def committed(self, group: str, place: PartitionId) -> Committed | None:
        """Return what is committed; offsets of open transactions do not count yet."""
        return self.offsets.get(group, {}).get(place)

    def refusal(
        self, name: str, generation: int, member_id: str, *, is_transactional: bool = False
    ) -> KafkaError | None:
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
        for offsets in self.offsets.values():
            for place in [each for each in offsets if each[0] == topic]:
                del offsets[place]

    # ---- what a test may do

    def expire_offsets(self, group: str) -> None:
        """offsets.retention.minutes are over."""
        with self._cluster.changed:
            self.offsets.pop(group, None)

    def expel(self, client: GroupClient) -> None:
        """Drop a member, as after its session timeout."""
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

    def describe(self, name: str) -> tuple[str, list[tuple[str, str, set[PartitionId]]]]:
        group = self.groups.get(name)
        members = [] if group is None else list(group.members.values())
        found = [
            (each.id, each.client.client_id, each.assigned if each.epoch else set[PartitionId]())
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
        for group in list(self.groups.values()):
            if group.members:
                group.tick(now_s)
        for client in list(self.clients):
            client.work(now_s)


Assignment = dict[str, set[PartitionId]]
"""By member."""


def assign(
    strategy: str,
    counts: Mapping[str, int],
    topics: Mapping[str, Sequence[str]],
    owned: Mapping[str, set[PartitionId]],
) -> Assignment:
    if strategy == "range":
        return _range(counts, topics)
    if strategy == "roundrobin":
        return _sticky(counts, topics, {})
    return _sticky(counts, topics, owned)


def _range(counts: Mapping[str, int], topics: Mapping[str, Sequence[str]]) -> Assignment:
    found: Assignment = {member: set() for member in topics}
    for topic, count in counts.items():
        members = sorted(member for member, wanted in topics.items() if topic in wanted)
        first = 0
        for index, member in enumerate(members):
            share = count // len(members) + (index < count % len(members))
            found[member].update((topic, number) for number in range(first, first + share))
            first += share
    return found


def _sticky(
    counts: Mapping[str, int],
    topics: Mapping[str, Sequence[str]],
    owned: Mapping[str, set[PartitionId]],
) -> Assignment:
    places = [(topic, number) for topic in sorted(counts) for number in range(counts[topic])]
    found: Assignment = {member: set() for member in sorted(topics)}
    free = []
    for place in places:
        able = [member for member in found if place[0] in topics[member]]
        keeper = next((each for each in able if place in owned.get(each, ())), None)
        if keeper is not None:
            found[keeper].add(place)
        elif able:
            free.append((place, able))
    for place, able in free:
        found[min(able, key=lambda member: len(found[member]))].add(place)
    # The first ones move, as librdkafka has it.
    for place in places:
        able = [member for member in found if place[0] in topics[member]]
        holder = next((member for member in able if place in found[member]), None)
        if holder is None:
            continue
        least = min(able, key=lambda member: len(found[member]))
        if len(found[holder]) - len(found[least]) > 1:
            found[holder].remove(place)
            found[least].add(place)
    return found


class StaleEpochError(Exception):
    """Another producer of the id was initialised later, or the broker aborted the transaction."""


@dataclass(slots=True, eq=False)
class _TransactionalId:
    epoch: int = -1
    timeout_s: float = 0.0
    open: Transaction | None = None
    last_was_committed: bool | None = None


class Transactions:
    """All transactional ids of a cluster; the caller holds its condition."""

    def __init__(self, cluster: MemoryKafka) -> None:
        self._cluster = cluster
        self._ids: dict[str, _TransactionalId] = {}

    def init(self, name: str, timeout_ms: int) -> int:
        """Fence earlier producers, abort what they had open, and tell the new epoch."""
        each = self._ids.setdefault(name, _TransactionalId())
        self._end(each, is_committed=False)
        each.epoch += 1
        each.timeout_s = timeout_ms / 1000
        each.last_was_committed = None
        return each.epoch

    def current(self, name: str, epoch: int) -> Transaction:
        """Return the open transaction; begun if there is none."""
        each = self._checked(name, epoch)
        if each.open is None:
            each.open = Transaction(time.monotonic())
            self._cluster.due(each.open.began_s + each.timeout_s)
        return each.open

    def end(self, name: str, epoch: int, *, is_committed: bool) -> bool:
        """Commit or abort; the same again changes nothing. False: it was ended otherwise."""
        each = self._checked(name, epoch)
        if each.open is None:
            return each.last_was_committed is is_committed
        self._end(each, is_committed=is_committed)
        return True

    def begun_again(self, name: str, epoch: int) -> None:
        """What the last transaction became is not asked any more."""
        each = self._ids[name]
        if each.epoch == epoch:
            each.last_was_committed = None

    def expire(self, now_s: float) -> None:
        """Abort what is open for longer than its timeout; its producer is fenced."""
        for each in self._ids.values():
            if each.open is None:
                continue
            if each.open.began_s + each.timeout_s <= now_s:
                self._end(each, is_committed=False)
                each.epoch += 1
            else:
                self._cluster.due(each.open.began_s + each.timeout_s)

    def has_pending_offset(self, group: str, place: PartitionId) -> bool:
        wanted = group, place
        return any(
            each.open is not None and wanted in each.open.offsets for each in self._ids.values()
        )

    def _checked(self, name: str, epoch: int) -> _TransactionalId:
        each = self._ids[name]
        if each.epoch != epoch:
            raise StaleEpochError
        return each

    def _end(self, each: _TransactionalId, *, is_committed: bool) -> None:
        transaction, each.open = each.open, None
        if transaction is None:
            return
        each.last_was_committed = is_committed
        transaction.is_open = False
        transaction.is_aborted = not is_committed
        for partition in transaction.touched:
            partition.end_transaction(transaction)
        if is_committed:
            for (group, place), committed in transaction.offsets.items():
                self._cluster.groups.keep_known(group, place, committed)
        self._cluster.changed.notify_all()
