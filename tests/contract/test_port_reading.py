"""What a consumer without a group promises: the same in memory as librdkafka on a real broker."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, OFFSET_INVALID, KafkaError, TopicPartition
from tests.contract.port import KINDS, Kafka, opened, parts, refusal
from tests.waiting import deadline_after, within

from kafkamq.transport.clients import Consumer


@pytest.fixture(scope="module", params=KINDS)
def kafka(request: pytest.FixtureRequest) -> Iterator[Kafka]:
    with opened(request.param, request) as made:
        yield made


def read(consumer: Consumer, count: int, timeout_s: float = 10.0) -> list[tuple[str, int, bytes]]:
    """Records, and what else comes: code ("" for a record), offset, value."""
    found: list[tuple[str, int, bytes]] = []
    until = deadline_after(timeout_s)
    while len(found) < count and time.monotonic() < until:
        for message in consumer.consume(count - len(found), 0.05):
            error, offset = message.error(), message.offset()
            at = -1 if offset is None else offset
            if error is None:
                found.append(("", at, message.value() or b""))
            else:
                found.append((error.name(), at, b""))
    return found


def position(consumer: Consumer, topic: str, number: int = 0) -> int:
    return consumer.position(parts(topic, number))[0].offset


def test_records_come_in_order_and_then_the_end(kafka: Kafka) -> None:
    topic = kafka.topic()
    kafka.fill(topic, 3)
    consumer = kafka.consumer(enable_partition_eof=True)
    consumer.assign(parts(topic, 0))
    assert position(consumer, topic) == OFFSET_INVALID
    assert read(consumer, 2) == [("", 0, b"0"), ("", 1, b"1")]
    assert position(consumer, topic) == 2
    assert read(consumer, 2) == [("", 2, b"2"), ("_PARTITION_EOF", 3, b"")]
    assert consumer.poll(0.3) is None  # it is told once
    assert position(consumer, topic) == 3
    assert [each.offset for each in consumer.assignment()] == [0]  # as it was assigned
    kafka.fill(topic, 1)
    assert read(consumer, 2) == [("", 3, b"0"), ("_PARTITION_EOF", 4, b"")]


def test_an_end_is_told_again_after_each_assignment(kafka: Kafka) -> None:
    topic = kafka.topic()
    kafka.fill(topic, 1)
    consumer = kafka.consumer(enable_partition_eof=True)
    for _ in range(2):
        consumer.assign(parts(topic, 0, offset=1))
        assert read(consumer, 1) == [("_PARTITION_EOF", 1, b"")]
        assert position(consumer, topic) == OFFSET_INVALID  # nothing was handed out
    consumer.seek(TopicPartition(topic, 0, 1))
    assert read(consumer, 1) == [("_PARTITION_EOF", 1, b"")]


def test_fields_of_a_record(kafka: Kafka) -> None:
    topic = kafka.topic(message_timestamp_type="LogAppendTime")
    before_ms = time.time() * 1000 - 5000
    producer = kafka.producer()
    headers = [("a", b"1"), ("a", None), ("é", b"")]
    producer.produce(topic, None, "key", 0, headers=headers)
    producer.produce(topic, b"", None, 0)
    assert producer.flush(within(10.0)) == 0
    consumer = kafka.consumer()
    consumer.assign(parts(topic, 0))
    first, second = consumer.consume(2, within(10.0))
    kind, at_ms = first.timestamp()
    assert (first.topic(), first.partition(), first.offset()) == (topic, 0, 0)
    assert (first.key(), first.value(), first.headers()) == (b"key", None, headers)
    assert (first.leader_epoch(), first.error(), first.latency()) == (0, None, None)
    assert kind == 2
    assert before_ms < at_ms < before_ms + 60_000
    assert (second.key(), second.value(), second.headers(), len(second)) == (None, b"", None, 0)


@pytest.mark.parametrize("offset", [500, 0], ids=["beyond", "deleted"])
def test_a_position_outside_the_log_stands_still(kafka: Kafka, offset: int) -> None:
    topic = kafka.topic()
    kafka.fill(topic, 3)
    kafka.delete_records(topic, 0, 2)
    consumer = kafka.consumer(enable_partition_eof=True)
    consumer.assign(parts(topic, 0, offset=offset))
    assert read(consumer, 1) == [("_AUTO_OFFSET_RESET", offset, b"")]
    assert consumer.poll(0.3) is None
    assert refusal(lambda: consumer.seek(TopicPartition(topic, 0, 2))).code() == KafkaError._STATE
    error = refusal(lambda: consumer.incremental_assign(parts(topic, 0, offset=2)))
    assert error.code() == KafkaError._CONFLICT
    consumer.incremental_unassign(parts(topic, 0))
    consumer.incremental_assign(parts(topic, 0, offset=2))
    assert read(consumer, 2) == [("", 2, b"2"), ("_PARTITION_EOF", 3, b"")]
    assert consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=within(10.0)) == (2, 3)


def test_a_pause_outlives_its_assignment(kafka: Kafka) -> None:
    topic = kafka.topic(2)
    kafka.fill(topic, 1, 0)
    kafka.fill(topic, 1, 1)
    consumer = kafka.consumer()
    consumer.assign(parts(topic, 0))
    assert read(consumer, 1) == [("", 0, b"0")]
    consumer.pause(parts(topic, 0))
    consumer.unassign()
    consumer.assign(parts(topic, 0, 1))
    assert [each[1] for each in read(consumer, 2, 1.0)] == [0]  # of partition 1
    consumer.resume(parts(topic, 0))
    assert read(consumer, 1) == [("", 0, b"0")]


def test_a_partition_may_be_paused_before_it_is_assigned(kafka: Kafka) -> None:
    topic = kafka.topic()
    kafka.fill(topic, 1)
    consumer = kafka.consumer()
    consumer.list_topics(topic, timeout=within(10.0))
    consumer.pause(parts(topic, 0))
    consumer.assign(parts(topic, 0))
    assert read(consumer, 1, 0.7) == []
    consumer.resume(parts(topic, 0))
    assert len(read(consumer, 1)) == 1


def test_a_seek_in_a_paused_partition_counts_when_it_is_resumed(kafka: Kafka) -> None:
    topic = kafka.topic()
    kafka.fill(topic, 3)
    consumer = kafka.consumer()
    consumer.assign(parts(topic, 0))
    assert len(read(consumer, 3)) == 3
    consumer.pause(parts(topic, 0))
    consumer.seek(TopicPartition(topic, 0, 1))
    assert position(consumer, topic) == OFFSET_INVALID
    assert consumer.poll(0.3) is None
    consumer.resume(parts(topic, 0))
    assert read(consumer, 1) == [("", 1, b"1")]


def test_what_is_not_assigned_is_refused(kafka: Kafka) -> None:
    topic = kafka.topic(2)
    consumer = kafka.consumer()
    error = refusal(lambda: consumer.incremental_unassign(parts(topic, 0)))
    assert error.code() == KafkaError._INVALID_ARG
    consumer.assign(parts(topic, 0))
    error = refusal(lambda: consumer.incremental_unassign(parts(topic, 1)))
    assert error.code() == KafkaError._INVALID_ARG
    assert refusal(lambda: consumer.seek(TopicPartition(topic, 1, 0))).code() == KafkaError._STATE
    assert position(consumer, topic, 1) == OFFSET_INVALID


def test_logical_offsets(kafka: Kafka) -> None:
    topic = kafka.topic(2)
    kafka.fill(topic, 2, 0)
    kafka.fill(topic, 2, 1)
    consumer = kafka.consumer(enable_partition_eof=True)
    consumer.assign(parts(topic, 0, offset=OFFSET_BEGINNING))
    assert read(consumer, 2) == [("", 0, b"0"), ("", 1, b"1")]
    consumer.assign(parts(topic, 1, offset=OFFSET_END))
    assert read(consumer, 1) == [("_PARTITION_EOF", 2, b"")]


def test_questions_about_partitions(kafka: Kafka) -> None:
    topic = kafka.topic(2, message_timestamp_type="LogAppendTime")
    kafka.fill(topic, 3)
    consumer = kafka.consumer()
    place = TopicPartition(topic, 0)
    assert consumer.get_watermark_offsets(place, timeout=within(10.0)) == (0, 3)
    assert consumer.get_watermark_offsets(place, cached=True) == (OFFSET_INVALID, OFFSET_INVALID)
    now_ms = int(time.time() * 1000)
    asked = [
        (0, 0),
        (0, now_ms + 10**6),
        (0, OFFSET_END),
        (0, OFFSET_BEGINNING),
        (1, 0),
        (1, OFFSET_END),
    ]
    found = [
        consumer.offsets_for_times([TopicPartition(topic, *place)], timeout=within(10.0))[0].offset
        for place in asked
    ]
    assert found == [0, -1, 3, 0, -1, 0]
    for call in (
        lambda: consumer.get_watermark_offsets(TopicPartition(topic, 9), timeout=within(5.0)),
        lambda: consumer.offsets_for_times(parts(topic, 9), timeout=within(5.0)),
    ):
        assert refusal(call).code() == KafkaError._UNKNOWN_PARTITION
    topics = consumer.list_topics(f"{topic}-not", timeout=within(10.0)).topics
    assert topics[f"{topic}-not"].error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    consumer.assign(parts(topic, 0))
    assert len(read(consumer, 3)) == 3
    time.sleep(0.1)
    consumer.poll(0.1)
    assert consumer.get_watermark_offsets(place, cached=True) == (0, 3)


def test_a_new_partition_is_unknown_until_metadata_are_asked_for(kafka: Kafka) -> None:
    topic = kafka.topic()
    consumer, producer = kafka.consumer(), kafka.producer()
    consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=within(10.0))
    producer.produce(topic, b"0", None, 0)
    assert producer.flush(within(10.0)) == 0
    kafka.add_partition(topic)
    error = refusal(lambda: producer.produce(topic, b"1", None, 1))
    assert error.code() == KafkaError._UNKNOWN_PARTITION
    error = refusal(lambda: consumer.offsets_for_times(parts(topic, 1), timeout=within(5.0)))
    assert error.code() == KafkaError._UNKNOWN_PARTITION
    assert len(consumer.list_topics(topic, timeout=within(10.0)).topics[topic].partitions) == 2
    producer.list_topics(topic, timeout=within(10.0))
    producer.produce(topic, b"1", None, 1)
    assert producer.flush(within(10.0)) == 0
    assert consumer.get_watermark_offsets(TopicPartition(topic, 1), timeout=within(10.0)) == (0, 1)


def test_a_recreated_topic_has_another_id_and_old_positions_are_outside(kafka: Kafka) -> None:
    topic = kafka.topic()
    kafka.fill(topic, 3)
    consumer = kafka.consumer()
    consumer.assign(parts(topic, 0))
    assert len(read(consumer, 3)) == 3
    former = kafka.admin.topics([topic])[topic].topic_id
    kafka.delete(topic)
    assert kafka.admin.topics([topic]) == {}
    kafka.topic(1, topic)
    assert kafka.admin.topics([topic])[topic].topic_id not in (former, b"")
    assert read(consumer, 1) == [("_AUTO_OFFSET_RESET", 3, b"")]


def test_a_closed_client_refuses(kafka: Kafka) -> None:
    consumer, producer = kafka.consumer(), kafka.producer()
    consumer.close()
    consumer.close()
    for call in (consumer.poll, consumer.assignment, consumer.memberid, consumer.unsubscribe):
        with pytest.raises(RuntimeError):
            call()
    assert producer.close()
    assert producer.close()
    for act in (producer.poll, producer.flush, lambda: producer.produce("t", b"")):
        with pytest.raises(RuntimeError):
            act()
    assert len(producer) == 0
