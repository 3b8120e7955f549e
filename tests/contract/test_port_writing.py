"""What a producer promises: the same in memory as librdkafka on a real broker."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from tests.contract.port import KINDS, Kafka, Reports, opened, parts, refusal
from tests.waiting import wait_until, within

from kafkamq.transport.clients import Producer
from kafkamq.transport.errors import raised_error


@pytest.fixture(scope="module", params=KINDS)
def kafka(request: pytest.FixtureRequest) -> Iterator[Kafka]:
    with opened(request.param, request) as made:
        yield made


def name() -> str:
    return f"kafkamq.port.{uuid.uuid4().hex[:8]}"


def fatal_of(producer: Producer, *, by: str = "poll") -> KafkaError:
    """What a call raises, as our shells see it."""
    for _ in range(50):
        try:
            getattr(producer, by)(0.1)
        except (KafkaException, SystemError) as error:  # noqa: PERF203 - until it is raised
            found: KafkaError = raised_error(error).args[0]
            return found
    raise AssertionError("nothing was raised")


# ---- without transactions


def test_reports_come_in_poll_and_flush_alone(kafka: Kafka) -> None:
    topic, producer, reports = kafka.topic(), kafka.producer(), Reports()
    producer.produce(topic, b"v", b"k", 0, on_delivery=reports)
    time.sleep(0.3)
    assert not reports
    assert len(producer) >= 1
    assert producer.flush(within(10.0)) == 0
    ((error, message),) = reports
    assert error is None
    assert (message.topic(), message.partition(), message.offset()) == (topic, 0, 0)
    assert (message.key(), message.value(), message.headers()) == (b"k", b"v", None)
    assert (message.latency() or 0.0) >= 0.0


def test_a_full_queue_is_a_buffer_error_until_reports_are_served(kafka: Kafka) -> None:
    topic, reports = kafka.topic(), Reports()
    producer = kafka.producer(queue_buffering_max_messages=3)
    for _ in range(3):
        producer.produce(topic, b"v", None, 0, on_delivery=reports)
    with pytest.raises(BufferError):
        producer.produce(topic, b"v", None, 0)
    batch = [{"value": b"%d" % number, "callback": reports} for number in range(2)]
    assert producer.produce_batch(topic, batch, 0) == 0
    refused = {each["_error"].code() for each in batch}  # type: ignore[attr-defined]
    assert refused == {KafkaError._QUEUE_FULL}
    assert producer.flush(within(10.0)) == 0
    assert reports.codes == ["", "", ""]
    producer.produce(topic, b"v", None, 0)


def test_a_batch_says_which_records_were_not_taken(kafka: Kafka) -> None:
    topic, reports = kafka.topic(), Reports()
    producer = kafka.producer()
    producer.list_topics(topic, timeout=within(10.0))
    batch = [{"value": b"%d" % number, "key": b"k", "callback": reports} for number in range(3)]
    assert producer.produce_batch(topic, batch, 0) == 3
    assert not any("_error" in each for each in batch)
    assert producer.produce_batch(topic, batch, 9) == 0
    codes = {each["_error"].code() for each in batch}  # type: ignore[attr-defined]
    assert codes == {KafkaError._UNKNOWN_PARTITION}
    assert producer.flush(within(10.0)) == 0
    assert [message.offset() for _, message in reports] == [0, 1, 2]


def test_an_unknown_partition_is_refused_or_reported(kafka: Kafka) -> None:
    topic, reports = kafka.topic(), Reports()
    producer = kafka.producer()
    producer.produce(topic, b"v", None, 9, on_delivery=reports)  # the topic is not known yet
    assert producer.flush(within(10.0)) == 0
    assert reports.codes == ["_UNKNOWN_PARTITION"]
    error = refusal(lambda: producer.produce(topic, b"v", None, 9))
    assert error.code() == KafkaError._UNKNOWN_PARTITION


def test_an_unknown_topic_is_waited_for(kafka: Kafka) -> None:
    reports = Reports()
    producer = kafka.producer(message_timeout_ms=1000)
    producer.produce(name(), b"v", None, 0, on_delivery=reports)
    assert producer.flush(0.2) == 1
    assert producer.flush(within(10.0)) == 0
    assert reports.codes == ["_MSG_TIMED_OUT"]
    assert reports[0][1].offset() is None


def test_a_topic_that_stays_unknown_is_refused_at_once(kafka: Kafka) -> None:
    topic, reports = name(), Reports()
    producer = kafka.producer(topic_metadata_propagation_max_ms=100)
    producer.produce(topic, b"v", None, 0, on_delivery=reports)
    assert producer.flush(within(10.0)) == 0
    assert reports.codes == ["UNKNOWN_TOPIC_OR_PART"]
    error = refusal(lambda: producer.produce(topic, b"v", None, 0))
    assert error.code() == KafkaError._UNKNOWN_TOPIC
    kafka.topic(1, topic)
    producer.list_topics(topic, timeout=within(10.0))
    producer.produce(topic, b"v", None, 0, on_delivery=reports)
    assert producer.flush(within(10.0)) == 0
    assert reports.codes == ["UNKNOWN_TOPIC_OR_PART", ""]


def test_the_size_of_a_batch_counts(kafka: Kafka) -> None:
    topic, reports = kafka.topic(max_message_bytes="100"), Reports()
    producer = kafka.producer()
    for size in (1, 50):
        producer.produce(topic, b"v" * size, None, 0, on_delivery=reports)
        assert producer.flush(within(10.0)) == 0
    assert reports.codes == ["", "MSG_SIZE_TOO_LARGE"]


def test_too_large_here_or_for_the_broker(kafka: Kafka) -> None:
    topic, reports = kafka.topic(max_message_bytes="2000"), Reports()
    producer = kafka.producer(message_max_bytes=10_000)
    error = refusal(lambda: producer.produce(topic, b"v" * 10_001, None, 0))
    assert error.code() == KafkaError.MSG_SIZE_TOO_LARGE
    producer.produce(topic, b"v" * 3000, None, 0, on_delivery=reports)
    assert producer.flush(within(10.0)) == 0
    producer.produce(topic, b"v", None, 0, on_delivery=reports)
    assert producer.flush(within(10.0)) == 0
    assert reports.codes == ["MSG_SIZE_TOO_LARGE", ""]


def test_what_is_purged_is_reported(kafka: Kafka) -> None:
    reports = Reports()
    producer = kafka.producer()
    producer.produce(name(), b"v", None, 0, on_delivery=reports)  # waits for its topic
    producer.purge()
    assert producer.poll(within(5.0)) == 1
    assert reports.codes == ["_PURGE_QUEUE"]
    assert len(producer) == 0


def test_keys_choose_the_same_partitions(kafka: Kafka) -> None:
    topic, reports = kafka.topic(7), Reports()
    producer = kafka.producer(partitioner="murmur2_random")
    for key in (b"a", b"order-17", "é".encode()):
        producer.produce(topic, b"v", key, on_delivery=reports)
    assert producer.flush(within(10.0)) == 0
    assert sorted(message.partition() or 0 for _, message in reports) == [4, 5, 6]


# ---- transactions


def test_states_of_a_transactional_producer(kafka: Kafka) -> None:
    topic = kafka.topic()
    producer = kafka.transactional(name())
    metadata = kafka.consumer().consumer_group_metadata()
    for call in (
        lambda: producer.init_transactions(5.0),
        lambda: producer.produce(topic, b"v"),
        lambda: producer.commit_transaction(5.0),
        lambda: producer.abort_transaction(5.0),
        lambda: producer.send_offsets_to_transaction(parts(topic, 0), metadata, 5.0),
    ):
        error = refusal(call)
        assert error.code() == KafkaError._STATE
        assert not (error.fatal() or error.retriable() or error.txn_requires_abort())
    producer.begin_transaction()
    assert refusal(producer.begin_transaction).code() == KafkaError._STATE
    producer.commit_transaction(10.0)
    producer.begin_transaction()
    producer.abort_transaction(10.0)


def test_read_committed_ends_and_holes(kafka: Kafka) -> None:
    topic = kafka.topic()
    committed = kafka.consumer(enable_partition_eof=True)
    anything = kafka.consumer(isolation_level="read_uncommitted", enable_partition_eof=True)
    place = TopicPartition(topic, 0)
    producer = kafka.transactional(name())

    def ends() -> tuple[int, int]:
        low, stable = committed.get_watermark_offsets(place, timeout=within(10.0))
        assert low == 0
        return stable, anything.get_watermark_offsets(place, timeout=within(10.0))[1]

    producer.begin_transaction()
    producer.produce(topic, b"aborted", None, 0)
    assert producer.flush(within(10.0)) == 0
    assert ends() == (0, 1)
    assert kafka.admin.log_ends(topic) == {0: (0, 1)}
    producer.abort_transaction(10.0)
    producer.begin_transaction()
    producer.produce(topic, b"kept", None, 0)
    assert producer.flush(within(10.0)) == 0
    kafka.fill(topic, 1)  # behind the open transaction
    assert ends() == (2, 4)
    committed.assign(parts(topic, 0))
    assert [_said(each) for each in committed.consume(5, 1.0)] == [("_PARTITION_EOF", 2)]
    producer.commit_transaction(10.0)
    assert ends() == (5, 5)
    found = committed.consume(3, within(10.0))
    assert [_said(each) for each in found] == [("", 2), ("", 3), ("_PARTITION_EOF", 5)]
    assert committed.position([place])[0].offset == 5  # the control record counts
    anything.assign(parts(topic, 0))
    found = anything.consume(4, within(10.0))
    assert [_said(each) for each in found] == [("", 0), ("", 2), ("", 3), ("_PARTITION_EOF", 5)]


def _said(message: object) -> tuple[str, int]:
    error = message.error()  # type: ignore[attr-defined]
    return "" if error is None else error.name(), message.offset()  # type: ignore[attr-defined]


def test_a_reader_hears_of_the_end_behind_an_abort(kafka: Kafka) -> None:
    topic = kafka.topic()
    kafka.fill(topic, 1)
    consumer = kafka.consumer(enable_partition_eof=True)
    consumer.assign(parts(topic, 0))
    assert [_said(each) for each in consumer.consume(2, within(10.0))] == [
        ("", 0),
        ("_PARTITION_EOF", 1),
    ]
    producer = kafka.transactional(name())
    producer.begin_transaction()
    producer.produce(topic, b"aborted", None, 0)
    producer.flush(within(10.0))
    producer.abort_transaction(10.0)
    assert [_said(each) for each in consumer.consume(1, within(10.0))] == [("_PARTITION_EOF", 3)]
    assert consumer.position(parts(topic, 0))[0].offset == 3


def test_a_fenced_producer_learns_of_it_by_producing(kafka: Kafka) -> None:
    topic, own, reports = kafka.topic(), name(), Reports()
    former = kafka.transactional(own)
    former.begin_transaction()
    former.produce(topic, b"aborted by the next init", None, 0)
    former.flush(within(10.0))
    kafka.transactional(own)
    former.produce(topic, b"v", None, 0, on_delivery=reports)
    error = fatal_of(former, by="flush")
    assert (error.name(), error.fatal()) == ("_FENCED", True)
    for call in (
        lambda: former.commit_transaction(5.0),
        lambda: former.abort_transaction(5.0),
        former.begin_transaction,
    ):
        error = refusal(call)
        assert (error.name(), error.fatal()) == ("_FENCED", True)
    assert refusal(lambda: former.produce(topic, b"v")).name() == "_FATAL"
    assert "" not in reports.codes  # librdkafka may lose the report to the error that it raises
    assert kafka.admin.log_ends(topic) == {0: (2, 2)}  # a record and the abort


def test_a_fenced_producer_learns_of_it_by_joining_a_partition(kafka: Kafka) -> None:
    topic, own, reports = kafka.topic(), name(), Reports()
    former = kafka.transactional(own)
    kafka.transactional(own)
    former.begin_transaction()
    former.produce(topic, b"v", None, 0, on_delivery=reports)
    error = refusal(lambda: former.commit_transaction(10.0))
    assert (error.name(), error.fatal()) == ("_FENCED", True)
    former.poll(1.0)
    assert reports.codes == ["_PURGE_QUEUE"]


def test_a_fenced_producer_learns_of_it_by_its_offsets(kafka: Kafka) -> None:
    topic, own = kafka.topic(), name()
    former = kafka.transactional(own)
    kafka.transactional(own)
    former.begin_transaction()
    metadata = kafka.consumer(own).consumer_group_metadata()
    error = refusal(lambda: former.send_offsets_to_transaction(parts(topic, 0), metadata, 10.0))
    assert (error.name(), error.fatal()) == ("_FENCED", True)


def test_an_empty_transaction_of_a_fenced_producer_is_nothing(kafka: Kafka) -> None:
    own = name()
    former = kafka.transactional(own)
    kafka.transactional(own)
    former.begin_transaction()
    former.commit_transaction(10.0)
    former.begin_transaction()
    former.abort_transaction(10.0)


def test_a_refused_record_ends_its_transaction(kafka: Kafka) -> None:
    topic, reports = kafka.topic(max_message_bytes="2000"), Reports()
    producer = kafka.transactional(name())
    producer.begin_transaction()
    producer.produce(topic, b"v" * 3000, None, 0, on_delivery=reports)
    assert producer.flush(within(10.0)) == 0
    error = refusal(lambda: producer.commit_transaction(10.0))
    assert (error.name(), error.txn_requires_abort()) == ("MSG_SIZE_TOO_LARGE", True)
    assert reports.codes == ["MSG_SIZE_TOO_LARGE"]
    assert refusal(lambda: producer.produce(topic, b"v")).code() == KafkaError._STATE
    producer.abort_transaction(10.0)
    producer.begin_transaction()
    producer.produce(topic, b"v", None, 0, on_delivery=reports)
    assert producer.flush(within(10.0)) == 0
    error = refusal(lambda: producer.commit_transaction(10.0))  # a number is missing now
    assert (error.name(), error.txn_requires_abort()) == ("OUT_OF_ORDER_SEQUENCE_NUMBER", True)
    assert reports.codes == ["MSG_SIZE_TOO_LARGE", "_PURGE_QUEUE"]
    producer.abort_transaction(10.0)
    producer.begin_transaction()
    producer.produce(topic, b"v", None, 0, on_delivery=reports)
    producer.commit_transaction(10.0)
    assert reports.codes == ["MSG_SIZE_TOO_LARGE", "_PURGE_QUEUE", ""]


def test_a_record_that_times_out_ends_its_transaction(kafka: Kafka) -> None:
    reports = Reports()
    producer = kafka.transactional(name(), message_timeout_ms=1000)
    producer.begin_transaction()
    producer.produce(name(), b"v", None, 0, on_delivery=reports)  # there is no such topic
    error = refusal(lambda: producer.commit_transaction(0.2))
    assert (error.name(), error.retriable(), error.txn_requires_abort()) == (
        "_TIMED_OUT",
        True,
        False,
    )
    error = refusal(lambda: producer.commit_transaction(10.0))
    assert error.txn_requires_abort()
    assert not error.fatal()
    assert reports.codes == ["_MSG_TIMED_OUT"]
    producer.abort_transaction(10.0)
    producer.begin_transaction()


@pytest.mark.faults
def test_a_transaction_that_takes_too_long_is_aborted(kafka: Kafka) -> None:
    topic, own = kafka.topic(), name()
    producer = kafka.transactional(own, transaction_timeout_ms=1000, message_timeout_ms=1000)
    producer.begin_transaction()
    producer.produce(topic, b"v", None, 0)
    assert producer.flush(within(10.0)) == 0
    consumer = kafka.consumer()
    place = TopicPartition(topic, 0)
    # The broker looks every ten seconds.
    wait_until(lambda: consumer.get_watermark_offsets(place, timeout=within(10.0))[1] == 2)
    error = refusal(lambda: producer.commit_transaction(10.0))
    assert (error.name(), error.fatal()) == ("_FENCED", True)
