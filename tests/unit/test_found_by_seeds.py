"""What clients do when a cluster in memory fails them; the simulator's seeds found these."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DeadlineExceededError
from kafkamq.markers.tracker.ticker import Ticker
from kafkamq.queue.service import Service
from kafkamq.transport import clients, transactions
from kafkamq.transport.admin import Admin
from kafkamq.transport.memory.cluster import MemoryKafka, cluster_of, forget_cluster
from kafkamq.transport.memory.faults import Fault
from kafkamq.transport.memory.producer import Producer
from kafkamq.transport.transactions import TransactionalProducer


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[MemoryKafka]:
    name = f"faults-{request.node.name}"
    with Service(f"memory://{name}", "n") as service:
        service.create_topics(partitions=1, marker_partitions=1)
    yield cluster_of(f"memory://{name}")
    forget_cluster(name)


def config_of(cluster: MemoryKafka) -> ServiceConfig:
    return ServiceConfig(bootstrap_servers=f"memory://{cluster.name}", namespace="n")


def test_the_ends_of_logs_are_not_told_in_time(cluster: MemoryKafka) -> None:
    with Admin(config_of(cluster), timeout_s=0.5) as admin:
        assert admin.log_ends("n.markers") == {0: (0, 0)}
        cluster.faults.is_down = True
        with pytest.raises(DeadlineExceededError):
            admin.log_ends("n.markers")


def test_ticks_that_are_all_refused_at_once_do_not_spin(cluster: MemoryKafka) -> None:
    refused = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    asked: list[object] = []

    def plan(kind: str, *_: object) -> Fault | None:
        asked.append(kind)
        return Fault(error=refused) if kind == "produce" else None

    cluster.faults.plan = plan
    ticker = Ticker(config_of(cluster))
    with pytest.raises((BrokerError, DeadlineExceededError)):
        ticker.tick_all([0], engine="e", epoch=1, timeout_s=1.0)
    assert 2 <= asked.count("produce") <= 20
    ticker.close()


def test_a_transactional_producer_that_failed_for_good_says_that_it_needs_another(
    cluster: MemoryKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Producer] = []

    def kept(*args: object, **kwargs: object) -> object:
        made.append(clients.open_producer(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(transactions, "open_producer", kept)
    producer = TransactionalProducer(config_of(cluster), "t")
    producer.init()
    producer.begin()
    made[0].fail(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER)
    with pytest.raises(BrokerError):
        producer.produce(("n.messages", 0, None, b"x", ()))
    assert not producer.is_ready
    producer.init()
    assert producer.is_ready
    producer.close()
