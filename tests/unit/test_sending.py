"""Many messages sent at once, and the ids that they get."""

from __future__ import annotations

import multiprocessing
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
from tests.waiting import within

from kafkamq import ConfigError, DeadlineExceededError, OutgoingMessage, Service
from kafkamq.queue import producer as module
from kafkamq.queue.names import uuid7
from kafkamq.transport.memory.cluster import MemoryKafka, cluster_of, forget_cluster

UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


@pytest.fixture
def service() -> Iterator[Service]:
    servers = f"memory://{uuid4().hex}"
    with Service(servers) as made:
        made.create_topics(partitions=1, marker_partitions=1)
        yield made
    forget_cluster(servers)


def kafka_of(service: Service) -> MemoryKafka:
    return cluster_of(service.config.bootstrap_servers)


def payloads(service: Service) -> list[bytes | None]:
    log = kafka_of(service).topics[service.config.message_topic].partitions[0]
    return [record.value for record in log.records]


def numbered(count: int) -> list[OutgoingMessage]:
    return [OutgoingMessage(payload=b"%d" % number) for number in range(count)]


def test_many_messages_are_sent_in_their_order(service: Service) -> None:
    """Also around one for later, which is no record of the queue yet."""
    messages = numbered(1201)
    messages[600] = OutgoingMessage(payload=b"later", delay=60.0)
    with service.queue("q").producer() as producer:
        deliveries = producer.send_many(messages)
    sent = [delivery.result(0) for delivery in deliveries]
    assert [each.id for each in sent] == sorted({each.id for each in sent})
    assert sent[600].schedule is not None
    del messages[600]
    assert payloads(service) == [message.payload for message in messages]


def test_what_stands_before_a_message_that_is_refused_is_sent(service: Service) -> None:
    messages = [*numbered(3), OutgoingMessage(payload=b"x", ttl=-1.0), *numbered(2)]
    producer = service.queue("q").producer()
    with pytest.raises(ConfigError, match="ttl"):
        producer.send_many(messages)
    producer.flush(within(30))
    assert payloads(service) == [b"0", b"1", b"2"]


def test_messages_of_an_iterator_do_not_wait_for_those_to_come(service: Service) -> None:
    producer = service.queue("q").producer()

    def come() -> Iterator[OutgoingMessage]:
        for message in numbered(3):
            yield message
            producer.flush(within(30))
            assert payloads(service)[-1] == message.payload

    assert len(producer.send_many(come())) == 3


def test_many_messages_wait_for_room_in_the_queue_of_sends(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SEND_TIMEOUT_S", 0.5)
    producer = service.queue("q").producer()
    full = iter([False, True, True, False, True] + [False] * 20)
    kafka_of(service).faults.is_full = lambda _: next(full)
    producer.send_many(numbered(5))
    producer.flush(within(30))
    assert payloads(service) == [b"%d" % number for number in range(5)]
    kafka_of(service).faults.is_full = lambda _: True
    with pytest.raises(DeadlineExceededError, match="the queue is full"):
        producer.send_many(numbered(5))
    kafka_of(service).faults.is_full = None
    producer.flush(within(30))  # what was not taken is not waited for


def test_ids_are_of_uuid_version_7_and_ascend() -> None:
    ids = [uuid7() for _ in range(20_000)]
    assert all(map(UUID7.fullmatch, ids))
    assert ids == sorted(set(ids))


def test_ids_of_one_millisecond_are_as_many_as_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by several threads, which begin blocks of them beside each other."""
    now_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)
    ids = [uuid7() for _ in range(10_000)]
    assert ids == sorted(set(ids))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: {uuid7() for _ in range(5000)}, range(4)))
    assert len(set(ids).union(*found)) == 30_000


def _ids(pipe: multiprocessing.connection.Connection) -> None:
    pipe.send([uuid7() for _ in range(100)])


def test_processes_that_are_forked_have_ids_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within one millisecond."""
    now_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)
    context, found = multiprocessing.get_context("fork"), {uuid7()}
    for _ in range(3):
        receiver, pipe = context.Pipe(duplex=False)
        child = context.Process(target=_ids, args=(pipe,))
        child.start()
        found.update(receiver.recv())
        child.join()
    assert len(found) == 301
