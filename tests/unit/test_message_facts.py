"""Attempts whose STARTs say nothing of their messages are shown with what the messages say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest
from tests.sure_producer import write_records

from kafkamq.config import ServiceConfig
from kafkamq.errors import DeadlineExceededError
from kafkamq.markers.rules.attempts import Attempt
from kafkamq.queue.topics import create_topics
from kafkamq.spark.batches import of_process
from kafkamq.spark.source import folding as module
from kafkamq.spark.source.columns import columns_of, deliveries_batch
from kafkamq.spark.source.folding import MessageFacts
from kafkamq.transport.clients import open_producer
from kafkamq.transport.log_reader import Patience
from kafkamq.transport.memory.cluster import MemoryKafka, cluster_of, forget_cluster
from kafkamq.transport.settings import producer_settings
from kafkamq.types import Headers, MessageId

CONFIG = ServiceConfig(bootstrap_servers="memory://message-facts")
SENT = [("a", b"1"), ("kafkamq-delivery-count", b"3")]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryKafka]:
    create_topics(CONFIG, partitions=1, marker_partitions=1)
    producer = open_producer(producer_settings(CONFIG))
    write_records(producer, CONFIG.message_topic, [(b"x", b"q\0user", 0, SENT)] * 3)
    producer.close()
    monkeypatch.setattr(module, "Patience", lambda _: Patience(-1.0))
    yield cluster_of(CONFIG.bootstrap_servers)
    forget_cluster("message-facts")


@pytest.fixture
def facts() -> Iterator[MessageFacts]:
    facts = MessageFacts(CONFIG)
    yield facts
    facts.close()


KINDS = {
    "STRING": pa.string(),
    "BINARY": pa.binary(),
    "INT": pa.int32(),
    "BIGINT": pa.int64(),
    "BOOLEAN": pa.bool_(),
    "TIMESTAMP": pa.timestamp("us", "UTC"),
}


def attempt(offset: int, *, headers: Headers = (), sent_ms: int = 0) -> Attempt:
    return Attempt(MessageId(0, offset), b"q", headers, 1, sent_ms, 5, 9, "c")


def test_what_a_start_leaves_out_comes_from_its_message(
    cluster: MemoryKafka, facts: MessageFacts
) -> None:
    one, gone, other = (attempt(offset) for offset in (0, 7, 2))
    facts.put_into([one, gone, other])
    for each in (one, other):
        assert (each.key, each.headers, each.delivery_count) == (b"q\0user", tuple(SENT), 3)
        assert each.message_timestamp_ms > 1_600_000_000_000
    assert (gone.key, gone.headers, gone.message_timestamp_ms) == (b"q", (), 0)
    columns = columns_of("deliveries", False)
    schema = pa.schema([(name, KINDS[kind]) for name, kind in columns])
    made = deliveries_batch([one, gone], schema, message_topic="t", marker_partition=0)
    shown, unknown = made.to_pylist()
    facts_of = ("id", "delivery_count", *(name for name, _ in columns if name[:7] == "origin_"))
    assert [unknown[name] for name in facts_of] == [None] * len(facts_of)
    assert None not in [shown[name] for name in facts_of]
    assert (unknown["queue_id"], unknown["offset"]) == ("q", 7)


def test_a_start_may_name_a_partition_that_there_is_not(
    cluster: MemoryKafka, facts: MessageFacts
) -> None:
    one, invented = attempt(0), Attempt(MessageId(7, 0), b"q", (), 1, 0, 5, 9, "c")
    facts.put_into([invented, one])
    assert (invented.headers, one.delivery_count) == ((), 3)


def test_what_a_start_tells_is_not_asked_for(cluster: MemoryKafka, facts: MessageFacts) -> None:
    cluster.faults.is_down = True
    told = [attempt(0, headers=(("b", b"2"),)), attempt(1, sent_ms=1_700_000_000_000)]
    facts.put_into(told)
    assert [each.delivery_count for each in told] == [1, 1]


def test_messages_that_cannot_be_read_are_an_error(
    cluster: MemoryKafka, facts: MessageFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rows rather than wrong ones."""
    monkeypatch.setattr(module, "TIMEOUT_S", 0.5)
    cluster.faults.offline.add((CONFIG.message_topic, 0))
    with pytest.raises(DeadlineExceededError):
        facts.put_into([attempt(0)])


def test_the_tasks_of_a_process_share_a_client(cluster: MemoryKafka) -> None:
    """An audit asks a dozen queries, each of them in a task for each partition."""
    first = of_process(MessageFacts, CONFIG)
    first.put_into([attempt(0)])
    assert of_process(MessageFacts, CONFIG) is first
    assert of_process(MessageFacts, replace(CONFIG, kafka={"client.id": "other"})) is not first
    first.close()
