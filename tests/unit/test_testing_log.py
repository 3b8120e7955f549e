"""The in-memory log behaves as Kafka does where the protocol relies on it."""

from __future__ import annotations

import pytest

from kafkamq.errors import BrokerError, FencedError, StateError
from kafkamq.transport.memory import Committed, MemoryKafka


@pytest.fixture
def kafka() -> MemoryKafka:
    result = MemoryKafka(clock_ms=1000)
    result.create_topic("t", 2)
    return result


def values(kafka: MemoryKafka, partition: int = 0, **options: bool) -> list[bytes | None]:
    return [record.value for record in kafka.read("t", partition, 0, **options)[0]]


def test_offsets_and_the_brokers_time(kafka: MemoryKafka) -> None:
    first = kafka.append("t", 0, b"k", b"a", (("h", None),))
    kafka.clock_ms = 900
    second = kafka.append("t", 0, None, None)
    assert (first.offset, first.timestamp_ms, first.headers) == (0, 1000, (("h", None),))
    assert (second.offset, second.timestamp_ms) == (1, 900)
    assert kafka.append("t", 1, b"k", b"b").offset == 0
    assert [record.value for record in kafka.records("t")] == [b"a", None, b"b"]


def test_without_log_append_time_records_tell_no_time() -> None:
    kafka = MemoryKafka()
    kafka.create_topic("t", log_append_time=False)
    assert kafka.append("t", 0, None, b"").timestamp_ms == -1


def test_read_committed_stops_at_the_first_open_transaction(kafka: MemoryKafka) -> None:
    producer = kafka.producer("id")
    producer.init()
    kafka.append("t", 0, None, b"before")
    producer.begin()
    producer.produce("t", 0, None, b"inside")
    kafka.append("t", 0, None, b"behind")
    assert values(kafka) == [b"before"]
    assert kafka.read("t", 0, 0)[1] == 1
    assert values(kafka, read_committed=False) == [b"before", b"inside", b"behind"]
    producer.commit()
    assert values(kafka) == [b"before", b"inside", b"behind"]
    assert kafka.read("t", 0, 0)[1] == kafka.end_offset("t", 0) == 4  # with the control record


def test_an_aborted_transaction_leaves_nothing_but_offsets(kafka: MemoryKafka) -> None:
    producer = kafka.producer("id")
    producer.init()
    producer.begin()
    producer.produce("t", 0, None, b"x")
    producer.send_offsets("g", {("t", 1): Committed(7)})
    producer.abort()
    assert values(kafka) == []
    assert kafka.committed("g", "t", 1) is None
    assert kafka.append("t", 0, None, b"y").offset == 2


def test_offsets_commit_with_the_transaction(kafka: MemoryKafka) -> None:
    producer = kafka.producer("id")
    producer.init()
    producer.begin()
    producer.send_offsets("g", {("t", 1): Committed(7, "note")})
    assert kafka.committed("g", "t", 1) is None
    producer.commit()
    assert kafka.committed("g", "t", 1) == Committed(7, "note")


def test_init_aborts_and_fences(kafka: MemoryKafka) -> None:
    old, new = kafka.producer("id"), kafka.producer("id")
    old.init()
    old.begin()
    old.produce("t", 0, None, b"x")
    new.init()
    assert kafka.stable_offset("t", 0) == kafka.end_offset("t", 0)
    for call in (old.commit, old.abort, old.begin, lambda: old.produce("t", 0, None, b"y")):
        with pytest.raises(FencedError):
            call()
    old.init()  # and back again
    with pytest.raises(FencedError):
        new.begin()


def test_the_broker_aborts_what_stays_open(kafka: MemoryKafka) -> None:
    producer = kafka.producer("id", transaction_timeout_ms=10_000)
    producer.init()
    producer.begin()
    producer.produce("t", 0, None, b"x")
    kafka.clock_ms += 10_000
    kafka.expire_transactions()
    assert kafka.stable_offset("t", 0) == 0
    kafka.clock_ms += 1
    kafka.expire_transactions()
    assert kafka.stable_offset("t", 0) == 2
    with pytest.raises(FencedError):
        producer.commit()


def test_retention_takes_the_oldest(kafka: MemoryKafka) -> None:
    for number in range(5):
        kafka.append("t", 0, None, b"%d" % number)
    kafka.delete_before("t", 0, 3)
    assert kafka.record_at("t", 0, 2) is None
    assert kafka.record_at("t", 0, 3) is not None
    with pytest.raises(BrokerError, match=r"3\.\.5") as error:
        kafka.read("t", 0, 0)
    assert error.value.code == "OFFSET_OUT_OF_RANGE"
    assert [record.offset for record in kafka.records("t")] == [3, 4]


@pytest.mark.parametrize("partition", [-1, 2])
def test_unknown_places(kafka: MemoryKafka, partition: int) -> None:
    with pytest.raises(BrokerError):
        kafka.append("t", partition, None, b"")
    with pytest.raises(BrokerError):
        kafka.append("u", 0, None, b"")


def test_calls_out_of_order(kafka: MemoryKafka) -> None:
    producer = kafka.producer("id")
    with pytest.raises(StateError, match="init"):
        producer.begin()
    producer.init()
    with pytest.raises(StateError, match="no transaction"):
        producer.commit()
    producer.begin()
    with pytest.raises(StateError, match="is open"):
        producer.begin()
    with pytest.raises(StateError, match="exists"):
        kafka.create_topic("t")
