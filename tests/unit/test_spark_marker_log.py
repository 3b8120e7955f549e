"""Markers that Spark writes are tried as long as those of other workers, and no longer."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.namespace import Namespace
from kafkamq.queue.topics import create_topics
from kafkamq.spark import marker_log
from kafkamq.spark.marker_log import MarkerLog
from kafkamq.spark.queues.acks import AckSettings, AckToken, End, end_records
from kafkamq.transport.admin import Admin
from kafkamq.transport.clients import open_producer
from kafkamq.transport.memory.cluster import forget_cluster
from kafkamq.types import MessageId, Outcome


def test_a_start_is_not_tried_for_longer_than_ended_ids_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Mapping[str, Any]] = []

    def keep(settings: Mapping[str, Any], *known: Any) -> Any:
        made.append(settings)
        return open_producer(settings, *known)

    monkeypatch.setattr("kafkamq.transport.producer.open_producer", keep)
    config = ServiceConfig(bootstrap_servers="127.0.0.1:1", kafka={"message.timeout.ms": "120000"})
    MarkerLog(config)
    assert [int(each["message.timeout.ms"]) for each in made] == [30_000]


class Unknown:
    """A producer that knows nothing of the partition; asking again takes a second, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, answers: bool) -> None:
        self.now_s = 0.0
        self.answers = answers
        monkeypatch.setattr(marker_log, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr("kafkamq.transport.producer.open_producer", lambda *_: self)
        self.log = MarkerLog(ServiceConfig(bootstrap_servers="127.0.0.1:1"))

    def produce(self, *_: object, **__: object) -> None:
        raise KafkaException(KafkaError(KafkaError._UNKNOWN_PARTITION))

    def list_topics(self, topic: str, timeout: float) -> None:
        self.now_s += 1.0
        assert self.now_s < 1000.0, "it asks forever"
        if not self.answers:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))

    def poll(self, _: float) -> None:
        pass


@pytest.mark.parametrize("answers", [True, False])
def test_a_partition_that_does_not_exist_is_an_error(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """The topic was recreated with fewer; and one that cannot be asked for ends no renewals."""
    with pytest.raises(BrokerError, match=r"kafkamq\.markers"):
        Unknown(monkeypatch, answers=answers).log.write([(5, b"k", b"v")])


def test_a_recreated_topic_is_asked_for_until_brokers_know_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of those that were asked first, two had not heard of it."""
    config = ServiceConfig(bootstrap_servers="memory://spark-recreated")
    create_topics(config, partitions=1, marker_partitions=1)
    log = MarkerLog(config)
    former, ask = log.namespace.facts(), log.namespace.ask_again
    with Admin(config) as admin:
        admin.client.delete_topics([config.message_topic])[config.message_topic].result()
    create_topics(config, partitions=1, marker_partitions=1)
    recreated = Namespace(config).facts().message_topic_id
    assert recreated != former.message_topic_id
    late = iter([former, former])
    monkeypatch.setattr(log.namespace, "ask_again", lambda: next(late, None) or ask())
    token = AckToken(MessageId(0, 5, recreated, 1), 0, "spark-a-b", 1, 60_000, 0, 0)
    assert len(end_records([End(token, Outcome.ACK)], AckSettings(config=config), log)) == 1
    forget_cluster("spark-recreated")


def test_a_nack_waits_no_longer_than_its_message_lasts_since_its_start() -> None:
    """R28, where nothing tells a later time: the wall clock of this worker is behind."""
    config = ServiceConfig(bootstrap_servers="memory://spark-nacks")
    create_topics(config, partitions=1, marker_partitions=1)
    sent_ms, facts = 4_000_000_000_000, Namespace(config).facts()
    start_ms = sent_ms + facts.message_retention_ms - 1000
    one = MessageId(0, 5, facts.message_topic_id, 1)
    token = AckToken(one, 0, "spark-a-b", 1, 60_000, 0, start_ms, message_ms=sent_ms)
    nack, settings = End(token, Outcome.NACK, delay_ms=30_000), AckSettings(config=config)
    ((_, _, value),) = end_records([nack], settings, MarkerLog(config))
    assert decode_marker(value).redeliver_after_ms == 500
    forget_cluster("spark-nacks")
