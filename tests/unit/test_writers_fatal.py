"""A client that fails for good is replaced, and what it held is written all the same."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from tests.waiting import deadline_after

from kafkamq.config import ServiceConfig
from kafkamq.markers.positions import Positions
from kafkamq.markers.tracker.records import Quarantine, StatusReader, Ticker
from kafkamq.markers.wire.records import TrackerStatus
from kafkamq.queue.wire.headers import Origin
from kafkamq.transport import producer
from kafkamq.transport.clients import open_producer
from kafkamq.transport.errors import KafkaError
from kafkamq.transport.memory.cluster import MemoryKafka, cluster_of, forget_cluster


class Kafka:
    """A cluster in memory that answers nobody, and the producers that were opened for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name = uuid.uuid4().hex
        self.config = ServiceConfig(bootstrap_servers=f"memory://{self.name}")
        self.cluster: MemoryKafka = cluster_of(self.config.bootstrap_servers)
        for topic in (
            self.config.tracker_topic,
            self.config.quarantine_topic,
            self.config.marker_topic,
            self.config.ledger_topic,
        ):
            self.cluster.create_topic(topic, 1)
        self.cluster.faults.is_down = True
        self.clients: list[Any] = []

        def keep(settings: Mapping[str, object], *known: Any) -> Any:
            self.clients.append(open_producer(settings, *known))
            return self.clients[-1]

        monkeypatch.setattr(producer, "open_producer", keep)

    def fail(self) -> None:
        """The present client has failed for good, and the brokers are back."""
        self.clients[-1].fail(KafkaError.INVALID_PRODUCER_EPOCH)
        self.cluster.faults.is_down = False


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kafka]:
    made = Kafka(monkeypatch)
    yield made
    forget_cluster(made.name)


def poll_until(condition: Callable[[], object], poll: Callable[[], object]) -> None:
    deadline_s = deadline_after(30)
    while not condition():
        assert time.monotonic() < deadline_s
        poll()
        time.sleep(0.01)


def test_a_status_and_a_tick(kafka: Kafka) -> None:
    ticker = Ticker(kafka.config)
    ticks: list[tuple[int, int]] = []
    ticker.publish(TrackerStatus(topic="m", partition=0, engine="e", epoch=1, batch=1))
    ticker.tick(0, engine="e", epoch=1, on_done=lambda *told: ticks.append(told))
    kafka.fail()
    poll_until(lambda: ticks == [(0, -1)], lambda: ticker.poll(0.01))  # the next one may follow
    assert ticker.tick_all([0], engine="e", epoch=1) == {0: 0}
    assert len(kafka.clients) == 2

    def statuses() -> Mapping[tuple[str, int], TrackerStatus]:
        reader = StatusReader(kafka.config)
        try:
            return reader.read_to_end()
        finally:
            reader.close()

    poll_until(lambda: ("m", 0) in statuses(), ticker.poll)  # after a second, as any refused one
    ticker.close()


def test_a_record_in_the_quarantine(kafka: Kafka) -> None:
    quarantine = Quarantine(kafka.config)
    quarantine.put(Origin("m", 0, 7, 1), key=b"k", value=b"v", error="no marker")
    kafka.fail()
    poll_until(lambda: not quarantine.has_pending, lambda: quarantine.poll(0.01))
    assert len(kafka.clients) == 2
    quarantine.close()


def test_a_position(kafka: Kafka) -> None:
    positions = Positions(kafka.config, "g", "q")
    positions.note({0: 100}, b"t" * 16)
    positions.write()
    kafka.fail()
    poll_until(lambda: len(kafka.clients) == 2, positions.write)
    positions.close()
    found = Positions(kafka.config, "g", "q").find([0], b"t" * 16)
    assert found[0].offset == 100
