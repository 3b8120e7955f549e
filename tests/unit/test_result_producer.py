"""The producers of results and dead letters, where one of them fails for good."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message
from tests.unit.worker_parts import fail_for_good
from tests.waiting import wait_until

from kafkamq.config import ServiceConfig
from kafkamq.errors import KafkaMQError
from kafkamq.parallel.config import ParallelConfig
from kafkamq.parallel.results import OutgoingRecord, ResultProducer
from kafkamq.transport import producer
from kafkamq.transport.clients import open_producer
from kafkamq.transport.errors import has_ended
from kafkamq.transport.memory.cluster import cluster_of, forget_cluster
from kafkamq.transport.memory.state import Fault


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was opened, in this order."""
    opened: list[Any] = []

    def keep(settings: Mapping[str, object], *known: Any) -> Any:
        opened.append(open_producer(settings, *known))
        return opened[-1]

    monkeypatch.setattr(producer, "open_producer", keep)
    return opened


@pytest.fixture
def results(clients: list[Any]) -> Iterator[ResultProducer]:
    service = ServiceConfig(
        bootstrap_servers="127.0.0.1:1", kafka={"message.max.bytes": "2000", "client.id": "kafkamq"}
    )
    made = ResultProducer(ParallelConfig(service=service, topics=("topic",), group_id="g"))
    yield made
    made.close(0.0)


def end(client: Any) -> None:
    writer: Any = SimpleNamespace(_settings={"client.id": "kafkamq"}, _client=client)
    fail_for_good(writer)


def test_a_producer_is_recreated_after_a_fatal_error(
    results: ResultProducer, clients: list[Any]
) -> None:
    """What it held is told why; and who serves it goes on."""
    told: list[KafkaError | KafkaMQError | None] = []

    def report(error: KafkaError | KafkaMQError | None, _: Message) -> None:
        told.append(error)

    results.send(OutgoingRecord(topic="t", value=b"value"), report)
    end(clients[0])
    wait_until(lambda: len(clients) == 2)
    results.send(OutgoingRecord(topic="t", value=b"value"), report)  # by another client
    wait_until(lambda: told)  # of the first one
    (error,) = told
    assert isinstance(error, KafkaError)
    assert has_ended(error)  # and not only that its client is gone
    results.close(0.0)
    wait_until(lambda: len(told) == 2)


def test_a_record_is_sent_alone_when_its_batch_was_too_large(
    clients: list[Any],
) -> None:
    """Kafka refuses all of the batch; and that of large records is recreated, too."""
    name = uuid.uuid4().hex
    service = ServiceConfig(bootstrap_servers=f"memory://{name}")
    cluster = cluster_of(service.bootstrap_servers)
    cluster.create_topic("t", 1)
    too_large = Fault(error=KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))

    def plan(kind: str, client: object, _: object) -> Fault | None:
        return too_large if kind == "produce" and client is clients[0] else None

    cluster.faults.plan = plan
    results = ResultProducer(ParallelConfig(service=service, topics=("topic",), group_id="g"))
    told: list[KafkaError | KafkaMQError | None] = []
    for number in range(1, 4):
        results.send(OutgoingRecord(topic="t", value=b"value"), lambda error, _: told.append(error))
        wait_until(lambda: len(told) == number)  # noqa: B023
        if number == 2:
            clients[1].fail(KafkaError.INVALID_PRODUCER_EPOCH)
            wait_until(lambda: len(clients) == 3)
    assert told == [None] * 3
    results.close(1.0)
    forget_cluster(name)
