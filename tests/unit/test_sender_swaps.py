"""Sends are confirmed or failed by their own reports, whatever became of their client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from tests.unit.worker_parts import FixedNamespace, fail_for_good
from tests.waiting import within

from kafkamq.config import QueueConfig
from kafkamq.errors import BrokerError, DeadlineExceededError
from kafkamq.queue.producer import Delivery, Producer, Sender
from kafkamq.transport.producer import end_producer


@pytest.fixture
def sender() -> Iterator[Sender]:
    namespace: Any = FixedNamespace()
    made = Sender(namespace)
    yield made
    with suppress(DeadlineExceededError):
        made.close(0.0)


def producer_of(sender: Sender) -> Producer:
    return Producer(sender, QueueConfig(queue_id="q"))


def test_what_a_client_held_that_failed_for_good_has_failed(sender: Sender) -> None:
    deliveries = [producer_of(sender).send(b"") for _ in range(2000)]
    fail_for_good(sender)
    producer_of(sender).flush(within(30))
    for delivery in deliveries:
        with pytest.raises(BrokerError):
            delivery.result(0)


def test_sends_are_not_confirmed_while_their_client_is_swapped(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new client has nothing under way: that says nothing of the former one's sends."""
    begun, may_end = threading.Event(), threading.Event()

    def slow(client: Any, **known: Any) -> None:
        begun.set()
        may_end.wait(within(10))
        end_producer(client, **known)

    monkeypatch.setattr("kafkamq.transport.producer.end_producer", slow)
    delivery = producer_of(sender).send(b"")
    fail_for_good(sender)
    try:
        sender._must_renew = True
        assert begun.wait(within(10))
        with pytest.raises(DeadlineExceededError, match="confirming 1 sends"):
            producer_of(sender).flush(0.3)
        assert not delivery.done()
    finally:
        may_end.set()
    producer_of(sender).flush(within(10))
    assert delivery.done()


def test_threads_send_while_the_client_fails_for_good(sender: Sender) -> None:
    producer, failures = producer_of(sender), []
    stop = threading.Event()
    deliveries: list[list[Delivery]] = [[] for _ in range(4)]

    def work(mine: list[Delivery]) -> None:
        try:
            while not stop.is_set():
                mine.append(producer.send(b""))
                stop.wait(0.0005)
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in deliveries]
    for thread in threads:
        thread.start()
    for _ in range(5):
        former = sender._client
        fail_for_good(sender)
        while sender._client is former:
            stop.wait(0.01)
    stop.set()
    for thread in threads:
        thread.join(within(30))
    assert not failures
    fail_for_good(sender)
    producer.flush(within(30))
    assert all(delivery.done() for mine in deliveries for delivery in mine)
