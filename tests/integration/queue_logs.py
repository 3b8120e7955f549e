"""What a namespace's topics hold, for tests of the queue API; read from the logs alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import Message as Record
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
from tests.integration.tracker_logs import read_topic
from tests.waiting import deadline_after, wait_until, within

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.markers.starts import process_gate
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.consumer import Consumer
from kafkamq.queue.message import Message
from kafkamq.queue.service import Service
from kafkamq.queue.topics import create_topics
from kafkamq.types import Marker, MarkerType, MessageId, Outcome, expand

__all__ = [
    "MarkerRecord",
    "dead_letters",
    "delete_group",
    "die",
    "drain",
    "ends",
    "make_service",
    "markers",
    "read_topic",
    "receive_all",
    "set_topic",
    "starts",
    "tracked",
    "wait_until",
]


@dataclass
class MarkerRecord:
    """A marker and where it stands."""

    partition: int
    offset: int
    timestamp_ms: int
    marker: Marker


@contextmanager
def make_service(
    bootstrap: str, namespace: str, *, partitions: int = 2, ledger_partitions: int = 2, **kafka: str
) -> Iterator[Service]:
    """A namespace with its topics; Kafka's properties with ``_`` for ``.``."""
    settings = {name.replace("_", "."): value for name, value in kafka.items()}
    with Service(bootstrap, namespace, kafka=settings) as service:
        create_topics(
            service.config,
            partitions=partitions,
            marker_partitions=2,
            ledger_partitions=ledger_partitions,
        )
        yield service


@contextmanager
def tracked(config: ServiceConfig) -> Iterator[LocalTracker]:
    """A local tracker that runs and is live."""
    tracker = LocalTracker(config, TrackerConfig(position_interval_ms=200))
    with tracker.in_thread() as running:
        wait_until(lambda: running.is_live)
        yield running


def markers(config: ServiceConfig) -> list[MarkerRecord]:
    """All markers, per partition in their order; each message of a batch has one (R27)."""
    return [
        MarkerRecord(record.partition() or 0, record.offset() or 0, record.timestamp()[1], marker)
        for record in read_topic(config.bootstrap_servers, config.marker_topic)
        for marker in expand(decode_marker(record.value()))
    ]


def starts(config: ServiceConfig) -> list[MessageId | None]:
    """Messages that were STARTed, in no certain order."""
    return [r.marker.message_id for r in markers(config) if r.marker.type is MarkerType.START]


def ends(config: ServiceConfig, outcome: Outcome) -> list[MessageId | None]:
    """Messages with such an END."""
    return [
        record.marker.message_id
        for record in markers(config)
        if record.marker.type is MarkerType.END and record.marker.outcome is outcome
    ]


def dead_letters(config: ServiceConfig) -> list[Record]:
    """The records of the dead-letter topic."""
    return read_topic(config.bootstrap_servers, config.dead_letter_topic)


def receive_all(consumer: Consumer, count: int, *, timeout_s: float = 60.0) -> list[Message]:
    """``count`` messages, however many calls that takes."""
    messages: list[Message] = []
    deadline_s = deadline_after(timeout_s)
    while len(messages) < count:
        assert time.monotonic() < deadline_s, f"{len(messages)} of {count} messages came"
        messages += consumer.receive_many(count - len(messages), 0.5)
    return messages


def die(consumer: Consumer) -> None:
    """End a worker as a crash would: no END, no RELEASE, no KEEPALIVE any more."""
    consumer.keeper.stop()
    consumer.intake.end(30.0)
    with process_gate.rule() as rule:
        rule.leave(consumer._state.leases)  # R6: it was another process


def delete_group(bootstrap: str, group: str) -> None:
    """Forget what a group has committed, as Kafka does after offsets.retention.minutes."""
    admin = AdminClient({"bootstrap.servers": bootstrap})

    def is_gone() -> bool:
        try:
            admin.delete_consumer_groups([group])[group].result(within(30))
        except KafkaException as error:
            if error.args[0].code() != KafkaError.NON_EMPTY_GROUP:
                raise
            return False  # its members are still leaving
        return True

    wait_until(is_gone)


def set_topic(bootstrap: str, topic: str, name: str, value: str) -> None:
    """Change one setting of a topic, and wait until the broker shows it."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource("topic", topic, incremental_configs=[entry])
    for future in admin.incremental_alter_configs([resource]).values():
        future.result()

    def is_seen() -> bool:
        (future,) = admin.describe_configs([ConfigResource("topic", topic)]).values()
        return future.result()[name].value == value

    wait_until(is_seen)


def drain(consumer: Consumer, quiet_s: float, handle: Callable[[Message], None]) -> int:
    """Handle messages until none came for ``quiet_s``; returns how many."""
    handled = 0
    last_s = time.monotonic()
    while time.monotonic() - last_s < quiet_s:
        for message in consumer.receive_many(100, 0.1):
            handle(message)
            handled += 1
            last_s = time.monotonic()
    return handled
