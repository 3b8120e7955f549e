"""The producers of results and dead letters, where one of them fails for good."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message
from tests.unit.worker_parts import fail_for_good

from kafkamq.config import ServiceConfig
from kafkamq.parallel.config import ParallelConfig
from kafkamq.parallel.result_producer import Outbox


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    service = ServiceConfig(bootstrap_servers="127.0.0.1:1")
    made = Outbox(ParallelConfig(service=service, topics=("topic",), group_id="g"))
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


@pytest.mark.parametrize("name", ["_client", "_alone"])
def test_a_producer_is_recreated_after_a_fatal_error(outbox: Outbox, name: str) -> None:
    """Also that of large records; and whoever serves both hears of it, and goes on."""
    told: list[KafkaError | None] = []

    def report(error: KafkaError | None, _: Message) -> None:
        told.append(error)

    def send() -> None:
        if name == "_client":
            outbox.send("t", b"value", None, (), report)
        else:
            outbox._send_alone(Message(topic="t"), "t", b"value", None, (), report, -1)

    outbox._connected()  # and its thread
    send()
    first = getattr(outbox, name)
    end(first)
    send()  # by another one
    assert getattr(outbox, name) is not first
    wait_until(lambda: told)  # of the first one
    assert all(told)
    assert outbox._thread is not None
    assert outbox._thread.is_alive()
    assert len(told) == 1
    outbox.close(0.0)
    wait_until(lambda: len(told) == 2)
