"""What a test may do to a cluster in memory, and what its clients say then."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException
from tests.contract.port import Kafka, Member, Reports, parts, poll_all, refusal

from kafkamq.transport.memory.consumer import Consumer
from kafkamq.transport.memory.producer import Producer
from kafkamq.transport.memory.state import Fault

COOPERATIVE: dict[str, object] = {
    "partition_assignment_strategy": "cooperative-sticky",
    "session_timeout_ms": 500,
    "heartbeat_interval_ms": 50,
}


@pytest.fixture
def kafka() -> Iterator[Kafka]:
    with ExitStack() as stack:
        yield Kafka(f"memory://{uuid.uuid4().hex[:8]}", stack)


def once(kafka: Kafka, kind: str, fault: Fault) -> None:
    """The next request of this kind fares so."""

    def plan(asked: str, _client: object, _place: object) -> Fault | None:
        if asked != kind:
            return None
        kafka.cluster.faults.plan = None
        return fault

    kafka.cluster.faults.plan = plan


def written(kafka: Kafka, topic: str) -> int:
    return kafka.cluster.topics[topic].partitions[0].end


def test_a_late_answer(kafka: Kafka) -> None:
    topic = kafka.topic()
    consumer = kafka.consumer("g")
    once(kafka, "commit", Fault(latency_s=0.1))
    began_s = time.monotonic()
    consumer.commit(offsets=parts(topic, 0, offset=3), asynchronous=False)
    assert time.monotonic() - began_s >= 0.1
    once(kafka, "committed", Fault(latency_s=1.0))
    error = refusal(lambda: consumer.committed(parts(topic, 0), timeout=0.1))
    assert error.code() == KafkaError._TIMED_OUT
    assert consumer.committed(parts(topic, 0), timeout=1.0)[0].offset == 3


def test_an_answer_that_says_no(kafka: Kafka) -> None:
    topic = kafka.topic()
    consumer = kafka.consumer("g")
    once(kafka, "commit", Fault(error=KafkaError(KafkaError.NOT_COORDINATOR)))
    with pytest.raises(KafkaException) as caught:
        consumer.commit(offsets=parts(topic, 0, offset=3), asynchronous=False)
    assert caught.value.args[0].code() == KafkaError.NOT_COORDINATOR
    assert consumer.committed(parts(topic, 0), timeout=1.0)[0].offset == OFFSET_INVALID


def test_what_librdkafka_tries_again_is_not_told(kafka: Kafka) -> None:
    topic, reports = kafka.topic(), Reports()
    producer = kafka.transactional("t")
    metadata = kafka.consumer("g").consumer_group_metadata()
    moved = Fault(error=KafkaError(KafkaError.NOT_COORDINATOR))
    producer.begin_transaction()
    once(kafka, "produce", Fault(error=KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION)))
    producer.produce(topic, b"v", None, 0, on_delivery=reports)
    assert producer.flush(1.0) == 0
    assert reports.codes == [""]
    once(kafka, "send_offsets", moved)
    producer.send_offsets_to_transaction(parts(topic, 0, offset=1), metadata, 1.0)
    once(kafka, "end_transaction", moved)
    error = refusal(lambda: producer.commit_transaction(0.01))
    assert (error.code(), error.retriable()) == (KafkaError._TIMED_OUT, True)
    producer.commit_transaction(1.0)


@pytest.mark.parametrize(("fault", "offset"), [("lost", OFFSET_INVALID), ("unanswered", 3)])
def test_a_commit_without_an_answer(kafka: Kafka, fault: str, offset: int) -> None:
    topic = kafka.topic()
    consumer = kafka.consumer("g", socket_timeout_ms=50)
    lost = fault == "lost"
    once(kafka, "commit", Fault(is_lost=lost, is_answer_lost=not lost))
    error = refusal(lambda: consumer.commit(offsets=parts(topic, 0, offset=3), asynchronous=False))
    assert error.code() == KafkaError._TIMED_OUT
    assert consumer.committed(parts(topic, 0), timeout=1.0)[0].offset == offset


@pytest.mark.parametrize(("fault", "count"), [("lost", 0), ("unanswered", 1)])
def test_a_record_without_an_answer(kafka: Kafka, fault: str, count: int) -> None:
    topic, reports = kafka.topic(), Reports()
    producer = kafka.producer(message_timeout_ms=100)
    lost = fault == "lost"
    once(kafka, "produce", Fault(is_lost=lost, is_answer_lost=not lost))
    producer.produce(topic, b"1", None, 0, on_delivery=reports)
    producer.produce(topic, b"2", None, 0, on_delivery=reports)
    assert producer.flush(1.0) == 0
    if lost:  # what stands behind it waits for as long
        assert reports.codes[0] == "_MSG_TIMED_OUT"
    else:
        assert sorted(reports.codes) == ["", "_MSG_TIMED_OUT"]
    assert written(kafka, topic) >= count


def test_a_full_queue(kafka: Kafka) -> None:
    topic = kafka.topic()
    producer = kafka.producer()
    kafka.cluster.faults.is_full = lambda client: client is producer
    with pytest.raises(BufferError):
        producer.produce(topic, b"v", None, 0)
    kafka.cluster.faults.is_full = None
    producer.produce(topic, b"v", None, 0)


def test_a_record_that_takes_a_while_keeps_its_place(kafka: Kafka) -> None:
    topic, reports = kafka.topic(), Reports()
    producer = kafka.producer()
    once(kafka, "produce", Fault(latency_s=0.05))
    for value in (b"1", b"2"):
        producer.produce(topic, value, None, 0, on_delivery=reports)
    assert written(kafka, topic) == 0
    assert producer.flush(1.0) == 0
    assert [(message.value(), message.offset()) for _, message in reports] == [(b"1", 0), (b"2", 1)]


def test_a_commit_of_a_transaction_without_an_answer_goes_on_when_it_is_called_again(
    kafka: Kafka,
) -> None:
    topic = kafka.topic()
    producer = kafka.transactional("t")
    producer.begin_transaction()
    producer.produce(topic, b"v", None, 0)
    once(kafka, "end_transaction", Fault(is_answer_lost=True))
    error = refusal(lambda: producer.commit_transaction(0.1))
    assert (error.code(), error.retriable()) == (KafkaError._TIMED_OUT, True)
    assert kafka.admin.log_ends(topic) == {0: (2, 2)}  # it is committed
    producer.commit_transaction(1.0)
    producer.begin_transaction()


def test_a_partition_without_a_leader(kafka: Kafka) -> None:
    topic, reports = kafka.topic(2), Reports()
    producer, consumer = kafka.producer(), kafka.consumer()
    kafka.fill(topic, 1, 0)
    kafka.fill(topic, 1, 1)
    consumer.assign(parts(topic, 0, 1))
    kafka.cluster.faults.offline.add((topic, 0))
    with pytest.raises(KafkaException) as caught:
        consumer.get_watermark_offsets(*parts(topic, 0), timeout=1.0)
    assert caught.value.args[0].code() == KafkaError._UNKNOWN_PARTITION
    for number in (0, 1):
        producer.produce(topic, b"v", None, number, on_delivery=reports)
    assert producer.flush(0.1) == 1
    assert {message.partition() for message in consumer.consume(5, 0.1)} == {1}
    kafka.cluster.faults.offline.clear()
    assert producer.flush(1.0) == 0
    assert reports.codes == ["", ""]
    assert {message.partition() for message in consumer.consume(2, 1.0)} == {0}


def test_a_fatal_error_is_raised_once_and_ends_the_client(kafka: Kafka) -> None:
    topic, reports = kafka.topic(), Reports()
    producer = kafka.producer()
    kafka.cluster.faults.is_down = True
    producer.produce(topic, b"v", None, 0, on_delivery=reports)
    assert isinstance(producer, Producer)
    producer.fail(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER)
    kafka.cluster.faults.is_down = False
    error = refusal(lambda: producer.poll(0.1))
    assert (error.name(), error.fatal()) == ("OUT_OF_ORDER_SEQUENCE_NUMBER", True)
    producer.poll(0.0)
    assert refusal(lambda: producer.produce(topic, b"v")).code() == KafkaError._FATAL
    producer.purge()
    producer.flush(1.0)
    assert reports.codes == ["_PURGE_QUEUE"]
    assert written(kafka, topic) == 0


def test_expired_offsets_and_a_moved_log_start(kafka: Kafka) -> None:
    topic = kafka.topic()
    kafka.fill(topic, 3)
    consumer = kafka.consumer("g")
    consumer.commit(offsets=parts(topic, 0, offset=1), asynchronous=False)
    kafka.cluster.groups.expire_offsets("g")
    kafka.cluster.delete_records(topic, 0, 2)
    assert consumer.committed(parts(topic, 0), timeout=1.0)[0].offset == OFFSET_INVALID
    assert kafka.admin.log_bounds(topic, [0]) == {0: (2, 3)}


@pytest.mark.parametrize("how", ["cut", "killed", "expelled"])
def test_a_member_that_is_missed(kafka: Kafka, how: str) -> None:
    topic = kafka.topic(2)
    first = Member(kafka, "first", "g", topic, **COOPERATIVE)
    second = Member(kafka, "second", "g", topic, **COOPERATIVE)
    both = [first, second]
    poll_all(both, lambda: len(first.partitions) == len(second.partitions) == 1)
    client = first.client
    assert isinstance(client, Consumer)
    if how == "cut":
        kafka.cluster.faults.cut.add(client)
    elif how == "killed":
        client.kill()
    else:
        kafka.cluster.groups.expel(client)
    began_s = time.monotonic()
    poll_all([second], lambda: len(second.partitions) == 2, 5.0)
    if how != "expelled":
        assert time.monotonic() - began_s > 0.4
    if how == "killed":
        return
    poll_all(both, lambda: bool(first.what("lost")), 5.0)  # also who is cut off
    kafka.cluster.faults.cut.clear()
    poll_all(both, lambda: len(first.partitions) == len(second.partitions) == 1, 5.0)


def test_a_killed_producer_leaves_its_transaction_to_the_timeout(kafka: Kafka) -> None:
    topic = kafka.topic()
    producer = kafka.transactional("t", transaction_timeout_ms=100, message_timeout_ms=100)
    assert isinstance(producer, Producer)
    producer.begin_transaction()
    producer.produce(topic, b"v", None, 0)
    producer.kill()
    assert kafka.admin.log_ends(topic) == {0: (0, 1)}
    time.sleep(0.15)
    kafka.consumer().poll(0.0)  # somebody calls
    assert kafka.admin.log_ends(topic) == {0: (2, 2)}


def test_the_brokers_time_may_step(kafka: Kafka) -> None:
    topic, reports = kafka.topic(message_timestamp_type="LogAppendTime"), Reports()
    producer = kafka.producer()
    for now_ms in (5000, 3000):
        kafka.cluster.now_ms = lambda at=now_ms: at  # type: ignore[misc]
        producer.produce(topic, b"v", None, 0, on_delivery=reports)
    assert producer.flush(1.0) == 0
    assert [message.timestamp() for _, message in reports] == [(2, 5000), (2, 3000)]


def test_a_topic_of_which_one_client_has_not_heard(kafka: Kafka) -> None:
    topic, reports = kafka.topic(), Reports()
    producer = kafka.producer()
    kafka.cluster.faults.hidden.add((producer, topic))
    producer.produce(topic, b"v", None, 0, on_delivery=reports)
    found = producer.list_topics(topic, timeout=1.0).topics[topic]
    assert found.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert topic in kafka.admin.topics([topic])
    kafka.cluster.faults.hidden.clear()
    assert producer.flush(1.0) == 0
    assert reports.codes == [""]


def test_an_asynchronous_commit_never_waits(kafka: Kafka) -> None:
    topic = kafka.topic()
    consumer = kafka.consumer("g")
    once(kafka, "commit", Fault(is_lost=True))
    for offset in (1, 2):
        consumer.commit(offsets=parts(topic, 0, offset=offset), asynchronous=True)
        found = consumer.committed(parts(topic, 0), timeout=1.0)[0].offset
        assert found == (OFFSET_INVALID if offset == 1 else 2)
