"""Members of groups and followers, on a broker and on the cluster in memory."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]
from tests.sure_producer import write_records
from tests.waiting import wait_until, within

from kafkamq.config import ServiceConfig
from kafkamq.errors import (
    BrokerError,
    DataLossError,
    DeadlineExceededError,
    FencedError,
    StateError,
)
from kafkamq.transport import log_reader
from kafkamq.transport.admin import Admin
from kafkamq.transport.clients import open_producer
from kafkamq.transport.follower import COMMITTED, Follower
from kafkamq.transport.group_consumer import GroupConsumer
from kafkamq.transport.log_reader import LogRange, LogReader, RecordReader, scan
from kafkamq.transport.memory.cluster import cluster_of, forget_cluster
from kafkamq.transport.record import Record, TopicPartition
from kafkamq.transport.settings import producer_settings
from kafkamq.transport.transactions import TransactionalProducer
from kafkamq.types import PartitionId

PARTITIONS = 2
Seen = dict[PartitionId, list[int]]


@pytest.fixture(params=["memory", "broker"])
def servers(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "broker":
        yield request.getfixturevalue("bootstrap")
        return
    cluster_of("readers").settings["group.consumer.heartbeat.interval.ms"] = "200"
    yield "memory://readers"
    forget_cluster("readers")


@pytest.fixture
def config(servers: str) -> ServiceConfig:
    return ServiceConfig(bootstrap_servers=servers)


@pytest.fixture
def topic(config: ServiceConfig) -> str:
    name = f"readers-{uuid.uuid4().hex[:8]}"
    with Admin(config) as admin:
        admin.create_topics({name: (PARTITIONS, {})}, replication_factor=1)
    return name


def write(config: ServiceConfig, topic: str, count: int) -> None:
    """So many records in each partition."""
    producer = open_producer(producer_settings(config))
    numbers = range(count * PARTITIONS)
    records = [(b"%d" % number, None, number % PARTITIONS, ()) for number in numbers]
    write_records(producer, topic, records)
    producer.close()


def add_partition(config: ServiceConfig, topic: str) -> None:
    servers = config.bootstrap_servers
    if servers.startswith("memory://"):
        cluster_of(servers).add_partitions(topic, 1)
        return
    client = AdminClient({"bootstrap.servers": servers})
    client.create_partitions([NewPartitions(topic, PARTITIONS + 1)])[topic].result(within(30))
    with Admin(config) as admin:
        wait_until(lambda: admin.require_topic(topic).partitions == PARTITIONS + 1)


def write_in_transaction(config: ServiceConfig, topic: str, *, is_aborted: bool = False) -> None:
    producer = TransactionalProducer(config, f"{topic}-writer")
    producer.init()
    producer.begin()
    producer.produce((topic, 0, None, b"x", ()))
    if is_aborted:
        producer.abort()
    else:
        producer.commit()
    producer.close()


class Member:
    """A group consumer and its owner, which notes what it is told."""

    def __init__(self, config: ServiceConfig, topic: str, strategy: str = "cooperative") -> None:
        kafka = {"group.protocol": "consumer"} if strategy == "consumer" else {}
        name = "cooperative-sticky" if strategy == "cooperative" else strategy
        self.gone: list[tuple[PartitionId, bool]] = []
        self.seen: Seen = {}
        self.answer: Callable[[Sequence[PartitionId]], Mapping[PartitionId, int]] = _from_the_start
        config = ServiceConfig(bootstrap_servers=config.bootstrap_servers, kafka=kafka)
        self.group = GroupConsumer(config, self, [topic], group_id=f"{topic}-g", strategy=name)
        self.group.join()

    def assigned(self, places: Sequence[PartitionId]) -> Mapping[PartitionId, int]:
        return self.answer(places)

    def revoked(self, places: Sequence[PartitionId], *, is_lost: bool) -> None:
        self.gone += [(place, is_lost) for place in places]

    def turn(self, timeout_s: float = 0.1) -> None:
        note(self.seen, self.group.poll(100, timeout_s))

    def has(self, count: int) -> bool:
        self.turn()
        return len(self.group.places) == count

    def has_seen(self, wanted: Seen) -> bool:
        self.turn()
        return self.seen == wanted


def note(seen: Seen, records: Sequence[Record]) -> None:
    for record in records:
        seen.setdefault((record.topic() or "", record.partition() or 0), []).append(
            record.offset() or 0
        )


def _from_the_start(places: Sequence[PartitionId]) -> Mapping[PartitionId, int]:
    return dict.fromkeys(places, 0)


@pytest.fixture(params=["cooperative", "range", "consumer"])
def strategy(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_what_was_assigned_stands_still_until_it_is_placed(
    config: ServiceConfig, topic: str, strategy: str
) -> None:
    write(config, topic, 5)
    member = Member(config, topic, strategy)
    member.answer = lambda _: {}
    wait_until(lambda: member.has(2))
    for _ in range(10):
        member.turn()
    assert not member.seen
    member.group.place({(topic, 0): 3})
    wait_until(lambda: member.has_seen({(topic, 0): [3, 4]}))
    member.group.place({(topic, 1): 4, ("another", 0): 0})
    assert member.group.places == {(topic, 0), (topic, 1)}
    wait_until(lambda: member.has_seen({(topic, 0): [3, 4], (topic, 1): [4]}))
    member.group.close()
    assert sorted(member.gone) == [((topic, 0), False), ((topic, 1), False)]


def test_a_pause_ends_with_the_assignment(config: ServiceConfig, topic: str, strategy: str) -> None:
    first = Member(config, topic, strategy)
    wait_until(lambda: first.has(2))
    first.group.pause(first.group.places)
    second = Member(config, topic, strategy)
    wait_until(lambda: first.has(1) and second.has(1))
    first.group.pause(first.group.places)
    second.group.close()
    wait_until(lambda: first.has(2))
    first.group.resume(first.group.places - {place for place, _ in first.gone})
    write(config, topic, 1)
    wait_until(lambda: first.has_seen({(topic, 0): [0], (topic, 1): [0]}))
    first.group.close()


def test_others_stay_where_they_are_when_one_is_placed(
    config: ServiceConfig, topic: str, strategy: str
) -> None:
    """Also those of which nothing was read yet, and which nobody has committed."""
    write(config, topic, 5)
    member = Member(config, topic, strategy)
    member.answer = lambda places: dict.fromkeys(places, 5)
    wait_until(lambda: member.has(2))
    member.group.place({(topic, 0): 2})
    wait_until(lambda: member.has_seen({(topic, 0): [2, 3, 4]}))
    write(config, topic, 1)
    wait_until(lambda: member.has_seen({(topic, 0): [2, 3, 4, 5], (topic, 1): [5]}))
    assert not member.group.outside
    member.group.close()


def test_a_group_without_positions_has_none_in_the_log(
    config: ServiceConfig, topic: str, strategy: str
) -> None:
    write(config, topic, 1)
    member = Member(config, topic, strategy)
    member.answer = lambda places: dict.fromkeys(places, COMMITTED)
    wait_until(lambda: member.has(2) and len(member.group.outside) == 2)
    assert all(position < 0 for position in member.group.outside.values())
    assert set(member.group.committed(member.group.places).values()) == {COMMITTED}
    member.group.place(dict.fromkeys(member.group.outside, 0))
    wait_until(lambda: member.has_seen({(topic, 0): [0], (topic, 1): [0]}))
    assert not member.group.outside
    member.group.close()


def test_poll_raises_what_its_owner_raised_inside_of_it(config: ServiceConfig, topic: str) -> None:
    member = Member(config, topic)

    def fail(_: Sequence[PartitionId]) -> Mapping[PartitionId, int]:
        raise StateError("not now")

    member.answer = fail
    with pytest.raises(StateError, match="not now"):
        wait_until(lambda: member.has(3))
    assert not member.seen
    member.group.close()


def test_an_interrupt_inside_a_rebalance_leaves_what_can_be_placed(
    config: ServiceConfig, topic: str, strategy: str
) -> None:
    write(config, topic, 1)
    member = Member(config, topic, strategy)

    def interrupt(_: Sequence[PartitionId]) -> Mapping[PartitionId, int]:
        raise KeyboardInterrupt

    member.answer = interrupt
    with pytest.raises(KeyboardInterrupt):
        wait_until(lambda: member.has(3))
    wait_until(lambda: member.has(2) and len(member.group.outside) == 2)
    member.group.place(dict.fromkeys(member.group.places, 0))
    wait_until(lambda: member.has_seen({(topic, 0): [0], (topic, 1): [0]}))
    member.group.close()


def test_a_follower_is_placed_paused_and_dropped(config: ServiceConfig, topic: str) -> None:
    write(config, topic, 4)
    follower = Follower(config, "reading", enable_partition_eof=True)
    seen: Seen = {}
    follower.place({(topic, 0): 1, (topic, 1): 3})
    wait_until(lambda: followed(follower, seen) == {(topic, 0): [1, 2, 3], (topic, 1): [3]})
    assert follower.positions(follower.places) == {(topic, 0): 4, (topic, 1): 4}
    follower.drop([(topic, 1)])
    follower.pause([(topic, 0)])
    follower.place({(topic, 0): 2})
    write(config, topic, 1)
    for _ in range(5):
        followed(follower, seen)
    assert seen == {(topic, 0): [1, 2, 3], (topic, 1): [3]}
    assert follower.positions(follower.places) == {(topic, 0): 2}
    follower.resume([(topic, 0)])
    wait_until(lambda: followed(follower, seen)[topic, 0] == [1, 2, 3, 2, 3, 4])
    follower.close()
    follower.close()


def followed(follower: Follower, seen: Seen) -> Seen:
    note(seen, follower.poll(100, 0.1))
    return seen


def test_a_position_outside_of_the_log_is_told(config: ServiceConfig, topic: str) -> None:
    write(config, topic, 1)
    follower = Follower(config, "reading")
    follower.place({(topic, 0): 7, (topic, 1): 0})
    seen: Seen = {}
    wait_until(lambda: bool(followed(follower, seen) and follower.outside))
    assert follower.outside == {(topic, 0): 7}
    assert follower.bounds((topic, 0)) == (0, 1)
    with pytest.raises(DataLossError, match="position of partition 0 is 7, and the log has 0 to 1"):
        follower.require_inside()
    follower.place({(topic, 0): 0})
    wait_until(lambda: followed(follower, seen) == {(topic, 0): [0], (topic, 1): [0]})
    follower.require_inside()
    follower.close()


def test_the_end_of_a_log_lies_behind_control_records(
    config: ServiceConfig, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "END_GRACE_S", 0.1)
    write_in_transaction(config, topic)
    write_in_transaction(config, topic, is_aborted=True)
    with Admin(config) as admin:
        end = admin.log_bounds(topic, [0])[0][1]  # librdkafka may abort before it has sent
    assert end >= 2
    follower = Follower(config, "reading", enable_partition_eof=True)
    follower.place({(topic, 0): 0})
    ends: dict[PartitionId, int] = {}
    seen: Seen = {}

    def is_over() -> bool:
        followed(follower, seen)
        ends.update(follower.ends)
        return ends == {(topic, 0): end}

    wait_until(is_over)
    assert seen == {(topic, 0): [0]}
    follower.close()
    assert [record.offset() for record in scan(config, topic)] == [0]
    ranges = LogReader(config)
    (records,) = ranges.read(LogRange(topic, 0, 0, end))
    assert [record.offset() for record in records] == [0]
    assert list(ranges.read(LogRange(topic, 0, 1, end))) == []
    ranges.close()
    reader = RecordReader(config, topic)
    found = reader.stream(0, range(end))
    assert [(at, record is not None) for at, record in found] == [(n, n == 0) for n in range(end)]
    assert reader.read(1, 0) is None
    reader.close()


def test_a_reader_takes_batches_that_are_larger_than_what_it_asks_for(
    config: ServiceConfig, topic: str
) -> None:
    """Of several such partitions a broker answers for one at a time."""
    producer = open_producer(producer_settings(config, linger_ms=200))
    payloads = [os.urandom(1000) for _ in range(500)]
    records = [(each, None, at % PARTITIONS, ()) for at, each in enumerate(payloads)]
    write_records(producer, topic, records)
    producer.close()
    reader, found = RecordReader(config, topic), dict[tuple[int, int], Record | None]()
    wanted = {number: range(500 // PARTITIONS) for number in range(PARTITIONS)}
    for number, some in reader.sweep(wanted):
        found |= {(number, offset): record for offset, record in some.items()}
    there = [found[at % PARTITIONS, at // PARTITIONS] for at in range(500)]
    assert [None if each is None else each.value() for each in there] == payloads
    reader.close()


def test_a_reader_finds_a_partition_that_was_added_meanwhile(
    config: ServiceConfig, topic: str
) -> None:
    """Clients hear of it after minutes, and what is due there would wait for that."""
    reader = RecordReader(config, topic)
    write(config, topic, 1)
    assert reader.read(0, 0) is not None
    add_partition(config, topic)
    producer = open_producer(producer_settings(config))
    write_records(producer, topic, [(b"added", None, PARTITIONS, ())])
    producer.close()
    found = reader.read(PARTITIONS, 0, timeout_s=within(20))
    assert found is not None
    assert found.value() == b"added"
    reader.close()


@pytest.mark.parametrize("late", ["flush", "produce", "commit"])
def test_who_was_fenced_is_told_so_by_each_call(
    config: ServiceConfig, topic: str, late: str
) -> None:
    """Also where Python wraps librdkafka's fatal error, or a delivery report loses it."""
    former, later = (TransactionalProducer(config, f"{topic}-writer") for _ in range(2))
    former.init()
    former.begin()
    later.init()
    records = [(topic, 0, None, b"x", ())] * 100

    def write() -> None:
        former.produce_records(records, on_delivery=lambda *_: None)
        if late == "flush":
            former.flush(timeout_s=within(10))
        elif late == "commit":
            former.commit()
        else:
            while True:
                former.produce(records[0])

    with pytest.raises(FencedError):
        write()
    assert not former.is_ready
    former.close()
    later.close()


def test_a_transaction_takes_no_offsets_from_whom_the_group_does_not_name(
    config: ServiceConfig, topic: str
) -> None:
    """Kafka would take them from anybody."""
    producer = TransactionalProducer(config, f"{topic}-writer")
    producer.init()
    with (
        pytest.raises(BrokerError, match="UNKNOWN_MEMBER_ID"),
        producer.transaction(),
    ):
        producer.send_offsets([TopicPartition(topic, 0, 7)], b"")
    producer.close()
    with Admin(config) as admin:
        (found,) = admin.committed([(topic, (topic, 0))])
    assert found.offset < 0


@pytest.mark.parametrize("is_many", [False, True])
def test_a_transaction_finds_a_partition_that_was_added_meanwhile(
    config: ServiceConfig, topic: str, is_many: bool
) -> None:
    producer = TransactionalProducer(config, f"{topic}-writer")
    producer.init()
    for partition in (0, PARTITIONS):  # the first one makes the client know the topic
        if partition:
            add_partition(config, topic)
        with producer.transaction():
            if is_many:
                producer.produce_many(topic, partition, [{"value": b"x"}, {"value": b"y"}])
            else:
                producer.produce((topic, partition, None, b"x", ()))
    producer.close()
    reader = RecordReader(config, topic)
    assert reader.read(PARTITIONS, int(is_many)) is not None
    reader.close()


def test_a_scan_that_is_told_the_ends_waits_for_an_open_transaction(
    config: ServiceConfig, topic: str
) -> None:
    write(config, topic, 1)
    producer = TransactionalProducer(config, f"{topic}-open")
    producer.init()
    producer.begin()
    producer.produce((topic, 0, None, b"y", ()))
    producer.flush()
    with Admin(config) as admin:
        end = admin.log_ends(topic)[0][1]
    with pytest.raises(DeadlineExceededError):
        list(scan(config, topic, {0: 0}, ends={0: end}, until_s=time.monotonic() + 1.0))
    records = scan(config, topic, {0: 0}, ends={0: end})
    assert next(records).offset() == 0
    producer.commit()
    assert [record.offset() for record in records] == [1]
    producer.close()
