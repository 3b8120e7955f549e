"""What a member of a group is told, and what is committed: in memory as on a real broker."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import OFFSET_INVALID, KafkaError, TopicPartition
from tests.contract.port import KINDS, Kafka, Member, eventually, opened, parts, poll_all, refusal
from tests.waiting import deadline_after, wait_until, within

from kafkamq.transport.clients import Consumer

PROTOCOLS: dict[str, dict[str, object]] = {
    "eager": {"partition_assignment_strategy": "range"},
    "cooperative": {"partition_assignment_strategy": "cooperative-sticky"},
    "consumer": {"group_protocol": "consumer"},
}
BOTH = pytest.mark.parametrize("kafka", KINDS, indirect=True)
EACH = pytest.mark.parametrize(
    ("kafka", "protocol"),
    [
        pytest.param(
            kind,
            protocol,
            # There its heartbeats are five seconds apart.
            marks=[pytest.mark.faults] if (kind, protocol) == ("broker", "consumer") else [],
        )
        for kind in KINDS
        for protocol in PROTOCOLS
    ],
    indirect=["kafka"],
)
SLOW = pytest.mark.parametrize(
    ("kafka", "protocol"),
    [
        pytest.param(kind, protocol, marks=[pytest.mark.faults] if kind == "broker" else [])
        for kind in KINDS
        for protocol in PROTOCOLS
    ],
    indirect=["kafka"],
)
_CLASSIC = {"session_timeout_ms": 6000, "heartbeat_interval_ms": 200}
Made = Callable[..., Member]


@pytest.fixture(scope="module")
def kafka(request: pytest.FixtureRequest) -> Iterator[Kafka]:
    with opened(request.param, request) as made:
        yield made


@pytest.fixture
def group() -> str:
    return f"port-{uuid.uuid4().hex[:10]}"


def member(
    kafka: Kafka, name: str, group: str, topic: str, protocol: str, **more: object
) -> Member:
    classic = {} if protocol == "consumer" else _CLASSIC
    return Member(kafka, name, group, topic, **{**classic, **PROTOCOLS[protocol], **more})


def commit(client: Consumer, topic: str, number: int, offset: int, metadata: str = "") -> None:
    place = TopicPartition(topic, number, offset, metadata)
    (answer,) = eventually(lambda: client.commit(offsets=[place], asynchronous=False))
    assert answer.error is None


def code_of(call: Callable[[], object]) -> str:
    return refusal(call).name()


@EACH
def test_members_come_and_go(kafka: Kafka, group: str, protocol: str) -> None:
    topic = kafka.topic(4)
    first = member(kafka, "first", group, topic, protocol)
    assert (first.client.memberid() is None) == (protocol != "consumer")
    poll_all([first], lambda: len(first.partitions) == 4)
    assert first.told == [("assign", [0, 1, 2, 3])]
    assert first.client.memberid()
    second = member(kafka, "second", group, topic, protocol)
    both = first, second
    poll_all(both, lambda: {len(first.partitions), len(second.partitions)} == {2})
    assert first.partitions | second.partitions == {0, 1, 2, 3}
    if protocol == "eager":
        assert first.what("revoke") == [[0, 1, 2, 3]]
        assert (first.partitions, second.partitions) == ({0, 1}, {2, 3})
    else:  # nothing moves but what the other one gets
        (gone,) = first.what("revoke")
        assert set(gone) == second.partitions
        assert second.what("revoke") == []
    commit(first.client, topic, min(first.partitions), 1)
    commit(second.client, topic, min(second.partitions), 2)
    assert sorted(map(sorted, kafka.admin.group_assignments(group))) == [[topic], [topic]]
    assert group in kafka.admin.groups()
    left = set(first.partitions)
    first.client.close()
    assert first.what("revoke")[-1] == sorted(left)
    poll_all([second], lambda: len(second.partitions) == 4)
    assert first.what("lost") == second.what("lost") == []


@EACH
def test_who_is_no_member_commits_nothing(kafka: Kafka, group: str, protocol: str) -> None:
    topic = kafka.topic(2)
    stranger = kafka.consumer(group)
    commit(stranger, topic, 0, 1)  # of an empty group anybody may
    first = member(kafka, "first", group, topic, protocol)
    poll_all([first], lambda: len(first.partitions) == 2)
    assert code_of(lambda: commit(stranger, topic, 0, 2)) == "UNKNOWN_MEMBER_ID"
    commit(first.client, topic, 0, 3)
    first.client.unsubscribe()
    poll_all([first], lambda: not kafka.admin.group_assignments(group))
    assert first.what("revoke") == [[0, 1]]
    assert (first.client.memberid() is None) == (protocol != "consumer")
    assert code_of(lambda: commit(first.client, topic, 0, 4)) == "UNKNOWN_MEMBER_ID"
    (found,) = stranger.committed(parts(topic, 0), timeout=within(10.0))
    assert found.offset == 3


@EACH
def test_who_leaves_before_it_is_told_of_an_assignment_keeps_nothing(
    kafka: Kafka, group: str, protocol: str
) -> None:
    topic = kafka.topic(2)
    first = member(kafka, "first", group, topic, protocol)
    wait_until(lambda: kafka.admin.group_assignments(group))  # it does not poll meanwhile
    first.client.unsubscribe()
    poll_all([first], lambda: not kafka.admin.group_assignments(group))
    assert first.partitions == set()
    assert first.client.assignment() == []


@BOTH
def test_a_commit_that_nobody_waits_for_tells_its_outcome(kafka: Kafka, group: str) -> None:
    topic = kafka.topic(2)
    heard: list[tuple[str, list[int]]] = []

    def on_commit(error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        assert all(each.error == error for each in partitions)  # also if one alone was refused
        heard.append((error.name() if error else "", [each.offset for each in partitions]))

    stranger = kafka.consumer(group, on_commit=on_commit)

    def outcome(*offsets: TopicPartition) -> tuple[str, list[int]]:
        stranger.commit(offsets=list(offsets), asynchronous=True)
        assert not heard  # before the next poll
        until = deadline_after(20.0)
        while not heard and time.monotonic() < until:
            assert stranger.poll(0.1) is None
        return heard.pop()

    assert outcome(*parts(topic, 0, 1, offset=1)) == ("", [1, 1])
    assert outcome(*parts(topic, 0, 9, offset=2)) == ("UNKNOWN_TOPIC_OR_PART", [2, 2])
    first = member(kafka, "first", group, topic, "cooperative")
    poll_all([first], lambda: len(first.partitions) == 2)
    assert outcome(*parts(topic, 0, offset=3)) == ("UNKNOWN_MEMBER_ID", [3])


@EACH
def test_a_transaction_takes_offsets_of_present_members_alone(
    kafka: Kafka, group: str, protocol: str
) -> None:
    topic = kafka.topic(2)
    first = member(kafka, "first", group, topic, protocol)
    poll_all([first], lambda: len(first.partitions) == 2)
    former = first.client.consumer_group_metadata()
    second = member(kafka, "second", group, topic, protocol)
    poll_all([first, second], lambda: len(first.partitions) == len(second.partitions) == 1)
    producer = kafka.transactional(f"kafkamq.{group}")

    def send(metadata: object, offset: int) -> None:
        wanted = parts(topic, 0, offset=offset)
        producer.send_offsets_to_transaction(wanted, metadata, 10.0)

    producer.begin_transaction()
    error = refusal(lambda: send(former, 5))
    assert (error.name(), error.txn_requires_abort()) == ("ILLEGAL_GENERATION", True)
    producer.abort_transaction(10.0)
    producer.begin_transaction()
    send(first.client.consumer_group_metadata(), 6)
    producer.commit_transaction(10.0)
    (found,) = first.client.committed(parts(topic, 0), timeout=within(10.0))
    assert found.offset == 6
    gone = second.client.consumer_group_metadata()
    second.client.close()
    poll_all([first], lambda: len(first.partitions) == 2)
    producer.begin_transaction()
    error = refusal(lambda: send(gone, 7))
    assert (error.name(), error.txn_requires_abort()) == ("UNKNOWN_MEMBER_ID", True)
    producer.abort_transaction(10.0)
    producer.begin_transaction()
    send(kafka.consumer(group).consumer_group_metadata(), 8)  # nobody's: not asked for
    producer.commit_transaction(10.0)
    (found,) = first.client.committed(parts(topic, 0), timeout=within(10.0))
    assert found.offset == 8


@BOTH
def test_offsets_of_an_open_transaction_are_waited_for(kafka: Kafka, group: str) -> None:
    topic = kafka.topic()
    settled = kafka.consumer(group)
    early = kafka.consumer(group, isolation_level="read_uncommitted")
    producer = kafka.transactional(f"kafkamq.{group}")
    producer.begin_transaction()
    place = [TopicPartition(topic, 0, 5, "of a transaction")]
    producer.send_offsets_to_transaction(place, settled.consumer_group_metadata(), 10.0)
    assert [each.offset for each in early.committed(parts(topic, 0), timeout=within(10.0))] == [
        OFFSET_INVALID
    ]
    assert code_of(lambda: settled.committed(parts(topic, 0), timeout=1.0)) == "_TIMED_OUT"
    producer.commit_transaction(10.0)
    (found,) = settled.committed(parts(topic, 0), timeout=within(10.0))
    assert (found.offset, found.metadata) == (5, "of a transaction")


@BOTH
def test_who_reads_where_the_group_is_waits_for_an_open_transaction(
    kafka: Kafka, group: str
) -> None:
    topic = kafka.topic()
    kafka.fill(topic, 8)
    reader = kafka.consumer(group)
    commit(reader, topic, 0, 3)
    producer = kafka.transactional(f"kafkamq.{group}")
    producer.begin_transaction()
    metadata = reader.consumer_group_metadata()
    producer.send_offsets_to_transaction(parts(topic, 0, offset=5), metadata, 10.0)
    reader.assign([TopicPartition(topic, 0)])  # no offset: where the group is
    assert reader.consume(1, 1.0) == []
    producer.commit_transaction(10.0)
    (record,) = reader.consume(1, within(10.0))
    assert record.offset() == 5


@BOTH
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_who_never_joined_commits_for_an_empty_group(
    kafka: Kafka, group: str, protocol: str
) -> None:
    topic = kafka.topic()
    stranger = kafka.consumer(group, group_protocol=protocol)
    producer = kafka.transactional(f"kafkamq.{group}")
    metadata = stranger.consumer_group_metadata()
    for offset in (1, 2):  # the second time the group is known
        producer.begin_transaction()
        producer.send_offsets_to_transaction(parts(topic, 0, offset=offset), metadata, 10.0)
        producer.commit_transaction(10.0)
    assert stranger.committed(parts(topic, 0), timeout=within(10.0))[0].offset == 2
    commit(stranger, topic, 0, 3)


@BOTH
def test_metadata_come_back_as_they_were(kafka: Kafka, group: str) -> None:
    topic = kafka.topic(3)
    consumer = kafka.consumer(group)
    for number, metadata in enumerate(["", "é " * 1000, '{"v":1}']):
        commit(consumer, topic, number, number + 1, metadata)
    found = kafka.consumer(group).committed(parts(topic, 0, 1, 2), timeout=within(10.0))
    assert [each.offset for each in found] == [1, 2, 3]
    assert [each.metadata or "" for each in found] == ["", "é " * 1000, '{"v":1}']


@BOTH
def test_metadata_that_are_too_long(kafka: Kafka, group: str) -> None:
    topic = kafka.topic()
    consumer = kafka.consumer(group)
    long = "x" * 4096  # one more than fits: the client sends a NUL behind them
    commit(consumer, topic, 0, 1, long[1:])
    assert code_of(lambda: commit(consumer, topic, 0, 1, long)) == "OFFSET_METADATA_TOO_LARGE"
    producer = kafka.transactional(f"kafkamq.{group}")
    producer.begin_transaction()
    wanted = [TopicPartition(topic, 0, 1, long)]
    metadata = consumer.consumer_group_metadata()
    error = refusal(lambda: producer.send_offsets_to_transaction(wanted, metadata, 10.0))
    assert (error.name(), error.txn_requires_abort()) == ("OFFSET_METADATA_TOO_LARGE", True)
    producer.abort_transaction(10.0)


@BOTH
def test_nothing_committed(kafka: Kafka, group: str) -> None:
    topic = kafka.topic(2)
    consumer = kafka.consumer(group)
    found = eventually(lambda: consumer.committed(parts(topic, 0, 9), timeout=within(10.0)))
    assert [each.offset for each in found] == [OFFSET_INVALID, OFFSET_INVALID]
    consumer.assign([TopicPartition(topic, 0)])  # the group's position is asked for
    event = consumer.poll(within(10.0))
    assert event is not None
    assert event.error() is not None
    assert event.error().code() == KafkaError._AUTO_OFFSET_RESET  # type: ignore[union-attr]
    assert (event.partition(), event.offset()) == (0, None)
    assert code_of(lambda: commit(consumer, topic, 9, 1)) == "UNKNOWN_TOPIC_OR_PART"
    kafka.fill(topic, 2)
    commit(consumer, topic, 0, 1)
    consumer.assign([TopicPartition(topic, 0)])
    record = consumer.poll(within(10.0))
    assert record is not None
    assert record.offset() == 1


@BOTH
def test_committed_offsets_go_with_the_group_and_with_the_topic(kafka: Kafka, group: str) -> None:
    topic, other = kafka.topic(), kafka.topic()
    consumer = kafka.consumer(group)
    commit(consumer, topic, 0, 1)
    commit(consumer, other, 0, 1)
    kafka.delete(topic)
    kafka.topic(1, topic)

    def found(name: str) -> int:
        return consumer.committed(parts(name, 0), timeout=within(10.0))[0].offset

    wait_until(lambda: found(topic) == OFFSET_INVALID)
    assert found(other) == 1
    kafka.admin.wait(kafka.admin.client.delete_consumer_groups([group])[group], "deleting")
    assert found(other) == OFFSET_INVALID  # as after offsets.retention.minutes
    assert group not in kafka.admin.groups()


def _codes(member: Member) -> list[int]:
    errors = [each.error() for each in member.events]
    return [error.code() for error in errors if error is not None]


@SLOW
def test_a_member_that_does_not_poll_loses_its_partitions(
    kafka: Kafka, group: str, protocol: str
) -> None:
    topic = kafka.topic(2)
    limit_ms = 1000 if kafka.is_memory else 6000  # not below the session's timeout
    slow = member(kafka, "slow", group, topic, protocol, max_poll_interval_ms=limit_ms)
    poll_all([slow], lambda: len(slow.partitions) == 2)
    other = member(kafka, "other", group, topic, protocol)
    poll_all([slow, other], lambda: len(slow.partitions) == len(other.partitions) == 1)
    metadata = slow.client.consumer_group_metadata()
    lost = sorted(slow.partitions)
    if protocol == "consumer":  # librdkafka (2.16) waits for the poll in which it can be told
        until = time.monotonic() + limit_ms / 1000 + 1.0
        poll_all([other], lambda: time.monotonic() > until)
        commit(slow.client, topic, lost[0], 1)
        poll_all([slow, other], lambda: bool(slow.what("lost")))
        assert slow.what("lost") == [lost]
        assert _codes(slow) == [KafkaError._MAX_POLL_EXCEEDED]
        poll_all([slow, other], lambda: len(slow.partitions) == len(other.partitions) == 1)
        return
    poll_all([other], lambda: len(other.partitions) == 2)
    assert code_of(lambda: commit(slow.client, topic, lost[0], 1)) == "UNKNOWN_MEMBER_ID"
    producer = kafka.transactional(f"kafkamq.{group}")
    producer.begin_transaction()
    wanted = parts(topic, lost[0])
    call = lambda: producer.send_offsets_to_transaction(wanted, metadata, 10.0)  # noqa: E731
    assert code_of(call) == "UNKNOWN_MEMBER_ID"
    producer.abort_transaction(10.0)
    poll_all([slow, other], lambda: bool(slow.what("lost")))
    assert slow.what("lost") == [lost]
    assert _codes(slow) == [KafkaError._MAX_POLL_EXCEEDED]
    poll_all([slow, other], lambda: len(slow.partitions) == len(other.partitions) == 1)


@BOTH
def test_a_pause_outlives_a_revocation(kafka: Kafka, group: str) -> None:
    topic = kafka.topic(2)
    kafka.fill(topic, 1, 0)
    kafka.fill(topic, 1, 1)
    first = member(kafka, "first", group, topic, "cooperative")
    poll_all([first], lambda: len(first.records) == 2)
    first.client.pause(parts(topic, 0, 1))
    second = member(kafka, "second", group, topic, "cooperative")
    poll_all([first, second], lambda: len(first.partitions) == len(second.partitions) == 1)
    second.client.close()
    first.records.clear()
    poll_all([first], lambda: len(first.partitions) == 2)
    until = time.monotonic() + 1.0
    poll_all([first], lambda: time.monotonic() > until)
    assert first.records == []  # both are read from offset 0, and paused
    first.client.resume(parts(topic, 0, 1))
    poll_all([first], lambda: len(first.records) == 1)


@BOTH
def test_members_hear_of_new_partitions(kafka: Kafka, group: str) -> None:
    topic = kafka.topic()
    settings = {"topic_metadata_refresh_interval_ms": 1000}
    first = member(kafka, "first", group, topic, "cooperative", **settings)
    poll_all([first], lambda: first.partitions == {0})
    kafka.add_partition(topic)
    until = deadline_after(20.0)
    while len(first.client.list_topics(topic, timeout=within(10.0)).topics[topic].partitions) < 2:
        assert time.monotonic() < until  # also a member that was told by another request
    poll_all([first], lambda: first.partitions == {0, 1})
    assert first.what("assign") == [[0], [1]]
    assert first.what("revoke") == []


@BOTH
def test_a_topic_that_is_not_there_is_an_event(kafka: Kafka, group: str) -> None:
    topic = f"port-{uuid.uuid4().hex[:10]}"
    first = member(kafka, "first", group, topic, "cooperative")
    poll_all([first], lambda: bool(first.events))
    error = first.events[0].error()
    assert error is not None
    assert (error.name(), first.events[0].topic()) == ("UNKNOWN_TOPIC_OR_PART", topic)
