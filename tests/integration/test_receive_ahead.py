"""What is STARTed ahead of a receive (R5), and given back when its consumer closes (R8)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.integration.queue_logs import ends, make_service, receive_all, starts, tracked
from tests.waiting import within

from kafkamq.queue.message import Message
from kafkamq.queue.service import Service
from kafkamq.types import Outcome


@pytest.fixture
def service(bootstrap: str, namespace: str) -> Iterator[Service]:
    with make_service(bootstrap, namespace) as service:
        yield service


def send(service: Service, count: int) -> None:
    producer = service.queue("a").producer()
    for delivery in [producer.send(b"%d" % number) for number in range(count)]:
        delivery.result(within(30))


def test_receive_starts_ahead_and_close_gives_back(service: Service) -> None:
    """R5, R8: what was never handed out is released, no delivery counted."""
    send(service, 50)
    with tracked(service.config):
        queue = service.queue("a", receive_buffer=20)
        consumer = queue.consumer()
        first: Message | None = None
        while first is None:
            first = consumer.receive(1.0)
        ahead = len(starts(service.config))
        assert 1 < ahead <= 20
        first.ack()
        consumer.close()
        assert len(ends(service.config, Outcome.RELEASE)) == ahead - 1
        rest = receive_all(queue.consumer(), 49)
        assert {message.delivery_count for message in rest} == {1}
        payloads = {message.payload for message in rest} | {first.payload}
        assert payloads == {b"%d" % number for number in range(50)}


def test_receive_many_starts_ahead_for_who_is_fast_and_close_gives_back(
    service: Service,
) -> None:
    """R5, R8: it begins with what is asked for, and goes on with many times as much."""
    send(service, 500)
    with tracked(service.config):
        queue = service.queue("a", max_in_flight=200)
        consumer = queue.consumer()
        done: set[bytes | None] = set()
        while len(done) == len(starts(service.config)):
            messages = consumer.receive_many(10, 1.0)
            for message in messages:
                message.ack()
                done.add(message.payload)
        ahead = len(starts(service.config)) - len(done)
        assert 0 < ahead <= 100
        consumer.close()
        again = service.queue("a", max_in_flight=500).consumer()
        rest = receive_all(again, 500 - len(done))
        assert {message.delivery_count for message in rest} == {1}
        assert done.isdisjoint(message.payload for message in rest)
