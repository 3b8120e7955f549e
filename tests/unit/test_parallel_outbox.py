"""The producers of results and dead letters, where one of them fails for good."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message
from tests.unit.worker_parts import fail_for_good

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, KafkaMQError
from kafkamq.parallel.config import ParallelConfig
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.result_producer import ResultProducer
from kafkamq.transport import producer
from kafkamq.transport.clients import open_producer
from kafkamq.transport.errors import has_ended
from kafkamq.types import DeadLetterReason


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


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


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

    results.send("t", b"value", None, (), report)
    end(clients[0])
    wait_until(lambda: len(clients) == 2)
    results.send("t", b"value", None, (), report)  # by another client
    wait_until(lambda: told)  # of the first one
    (error,) = told
    assert isinstance(error, KafkaError)
    assert has_ended(error)  # and not only that its client is gone
    results.close(0.0)
    wait_until(lambda: len(told) == 2)


def test_that_of_large_records_too(results: ResultProducer, clients: list[Any]) -> None:
    def letter() -> Any:
        value = Message(topic="topic", value=b"x" * 3000, timestamp=(1, 1))
        record = ParallelRecord(value, 0, b"key")  # type: ignore[arg-type]
        return results.park("dead", "g", record, DeadLetterReason.REJECTED, "no good")

    first = letter()  # it does not fit: what refers to it goes by a producer of its own
    assert len(clients) == 2
    end(clients[1])
    with pytest.raises(BrokerError) as caught:
        first.result(30)
    assert caught.value.is_fatal
    assert not letter().done()
    assert len(clients) == 3
