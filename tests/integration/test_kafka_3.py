"""A queue's whole life on the older Kafka that is tested: the newest of the release line 3."""

from __future__ import annotations

import os

import pytest
from tests.integration.queue_logs import (
    dead_letters,
    die,
    make_service,
    receive_all,
    tracked,
)
from tests.waiting import wait_until, within

from kafkamq import ConfigError, Service
from kafkamq.config import Backoff
from kafkamq.dev import LocalKafka
from kafkamq.dev.environment import cache_dir_from, java_from


@pytest.mark.faults
def test_a_queue_on_kafka_3_9(namespace: str) -> None:
    """Sent, lost with its worker, delivered again, given back, and dead after its last delivery."""
    places = {"cache_dir": cache_dir_from(os.environ), "java": java_from(os.environ)}
    with (
        LocalKafka("3.9.1", **places) as broker,
        make_service(broker.bootstrap_servers, namespace) as service,
        tracked(service.config),
    ):
        backoff = Backoff(first=0.1, max=0.1)
        queue = service.queue("a", redelivery_timeout=3.0, max_deliveries=3, backoff=backoff)
        sent = queue.producer().send(b"x", key="k", headers={"h": b"1"}, id="i").result(within(30))
        consumer = queue.consumer()
        (first,) = receive_all(consumer, 1)
        assert (first.timestamp_ms, first.delivery_count) == (sent.timestamp_ms, 1)
        die(consumer)
        with queue.consumer() as consumer:
            (second,) = receive_all(consumer, 1)
            assert (second.id, second.key, second.headers) == ("i", b"k", {"h": b"1"})
            assert second.delivery_count == 2
            second.nack(reason="not yet")
            (third,) = receive_all(consumer, 1)
            third.nack(reason="no good")
            wait_until(lambda: dead_letters(service.config))
        (letter,) = dead_letters(service.config)
        other_backends(service)
    headers = dict(letter.headers() or [])
    assert (letter.key(), letter.value(), headers["h"]) == (b"a\0k", b"x", b"1")
    assert headers["kafkamq-reason"] == b"max-deliveries"
    assert (headers["kafkamq-error"], headers["kafkamq-delivery-count"]) == (b"no good", b"3")


def other_backends(service: Service) -> None:
    """Offsets and claims work; share groups are for newer brokers, and the error says so."""
    for backend in ("offsets", "claims"):
        queue = service.queue(backend, backend=backend)
        queue.create_topics(partitions=1)
        queue.producer().send(b"x", key="k").result(within(30))
        with queue.consumer() as consumer:
            (message,) = receive_all(consumer, 1)
            assert (message.payload, message.key) == (b"x", b"k")
            message.ack(wait=True)
    share = service.queue("share", backend="share")
    share.create_topics(partitions=1)
    with pytest.raises(ConfigError, match=r"needs Kafka 4\.2 or newer.*claims work"):
        share.consumer()
