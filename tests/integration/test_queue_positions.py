"""Where a queue's workers read on, when the group or the topic's id says less than it did."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.integration.queue_logs import make_service, receive_all, wait_until

from kafkamq.clients.admin import Admin
from kafkamq.kafka import Consumer, Service


def send(service: Service, queue_id: str, *payloads: bytes) -> None:
    producer = service.queue(queue_id).producer()
    for delivery in [producer.send(payload) for payload in payloads]:
        delivery.result(30)


def ack_all(consumer: Consumer, count: int) -> list[bytes | None]:
    messages = receive_all(consumer, count)
    for message in messages:
        message.ack()
    consumer.flush()
    return [message.payload for message in messages]


def test_a_topic_whose_id_becomes_known_is_the_same_topic(
    bootstrap: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brokers that are upgraded begin to tell ids, and some of them do before the others."""
    monkeypatch.setattr("kafkamq.kafka.heart.IDENTITY_AGE_S", 0.2)
    ask, asked = Admin.topics, list[bool]()
    tells = [False]  # whether the broker that answers tells ids

    def topics(self: Admin, names: object) -> object:
        asked.append(tells[0])
        found = ask(self, names)  # type: ignore[arg-type]
        if tells[0]:
            return found
        return {name: replace(topic, topic_id=b"") for name, topic in found.items()}

    monkeypatch.setattr(Admin, "topics", topics)
    with make_service(bootstrap, namespace, partitions=1) as service:
        send(service, "a", b"1", b"2", b"3")
        with service.queue("a").consumer() as consumer:
            assert ack_all(consumer, 3) == [b"1", b"2", b"3"]
            for says in (True, False, True):
                tells[0] = says
                count = len(asked)
                wait_until(lambda: len(asked) > count + 3)  # noqa: B023 - at once
                send(service, "a", b"%d" % len(asked))
                (got,) = ack_all(consumer, 1)
                assert got not in (b"1", b"2", b"3")
