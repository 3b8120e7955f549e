"""The member of a parallel consumer's group, where its position is outside the log."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message, TopicPartition
from tests.waiting import wait_until, within

from kafkamq import ParallelConsumer
from kafkamq.config import ServiceConfig
from kafkamq.parallel.config import ParallelConfig
from kafkamq.parallel.engine import Position, Source
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.rules.offsets import OffsetTracker
from kafkamq.parallel.work_queue import Stats
from kafkamq.transport import follower
from kafkamq.transport.clients import open_producer
from kafkamq.transport.memory import consumer as memory
from kafkamq.transport.memory.cluster import cluster_of


class Client:
    """A consumer that is assigned one partition, polls events, and notes what is asked of it."""

    def __init__(self, events: list[object], end: int) -> None:
        self.calls: list[str] = []
        self.events = events
        self.end = end

    def subscribe(self, _: Sequence[str], *, on_assign: Any, **__: object) -> None:
        self.on_assign = on_assign

    def assignment(self) -> list[TopicPartition]:
        return [TopicPartition("t", 0)]

    def get_watermark_offsets(self, *_: object, **__: object) -> tuple[int, int]:
        return 0, self.end

    def consume(self, *_: object) -> list[object]:
        events, self.events = self.events, []
        return events

    def __getattr__(self, name: str) -> Any:
        return lambda _: self.calls.append(name)


@pytest.mark.parametrize(("end", "is_another"), [(60, True), (2000, False)])
def test_another_log_is_fetched_also_if_the_one_before_was_paused(
    monkeypatch: pytest.MonkeyPatch, end: int, is_another: bool
) -> None:
    """Its member begins again and knows of no pause; in the same log it ends that itself.

    Nor does it hear that the log before was read to its end.
    """
    codes = KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET
    client = Client([Message("t", 0, 1000, error=KafkaError(code)) for code in codes], end)
    monkeypatch.setattr(follower, "open_consumer", lambda *_: client)
    service = ServiceConfig(bootstrap_servers="nowhere:1")
    config = ParallelConfig(service=service, topics=("^t",), group_id="g", on_data_loss="skip")
    begun: list[int] = []
    member: Any = SimpleNamespace(
        assigned=lambda _: None, restarted=lambda position: begun.append(position.offset)
    )
    source = Source(config, member, Stats())
    there = Position(("t", 0), 1000, OffsetTracker(1000), True)
    monkeypatch.setattr(source, "_find", lambda _: [there])
    source.subscribe()
    client.on_assign(client, [TopicPartition("t", 0)])
    client.calls.clear()
    assert source.poll(10, 0.0) == []
    assert begun == ([0] if is_another else [])
    assert client.calls == [
        "incremental_unassign",
        "incremental_assign",
        *(["resume"] if is_another else []),
    ]
    assert not source.group.outside
    assert not source.group.ends


def test_a_drain_fetches_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for what was polled; more would be thrown away."""
    servers = f"memory://{uuid.uuid4().hex}"
    cluster_of(servers).create_topic("orders", 1)
    producer = open_producer({"bootstrap.servers": servers})
    for number in range(2000):
        producer.produce("orders", b"v", b"%d" % number)
    producer.flush(5)
    held, go_on = threading.Event(), threading.Event()
    polls: list[int] = []  # of the drain
    consume = memory.Consumer.consume

    def counted(client: memory.Consumer, number: int, timeout: float) -> list[Any]:
        found = consume(client, min(number, 100), timeout)
        if consumer.health().state == "draining":
            polls.append(len([each for each in found if each.error() is None]))
        return found

    def handle(record: ParallelRecord) -> None:
        if record.offset == 0:
            held.set()
            go_on.wait(60)

    monkeypatch.setattr(memory.Consumer, "consume", counted)
    consumer = ParallelConsumer(
        "orders", group_id="g", bootstrap_servers=servers, max_open=100, max_rate=500
    )
    with consumer:
        consumer.poll(handle)
        assert held.wait(within(30))
        drain = threading.Thread(target=consumer.drain, args=(60.0,))
        drain.start()
        wait_until(lambda: len(polls) >= 30)
        go_on.set()
        drain.join()
    assert sum(polls[1:]) == 0
