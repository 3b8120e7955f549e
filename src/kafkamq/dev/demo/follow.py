"""Reads the demo's topics while it runs and keeps the tally, in a thread of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from confluent_kafka import OFFSET_BEGINNING, Message, TopicPartition

from kafkamq.config import ServiceConfig
from kafkamq.dev.demo.recorder import Tally
from kafkamq.errors import WireError
from kafkamq.markers.wire.markers import decode_slim
from kafkamq.queue.wire.headers import read_message_headers
from kafkamq.queue.wire.keys import split_key
from kafkamq.transport.clients import open_consumer
from kafkamq.transport.port import Consumer
from kafkamq.transport.record import headers_of
from kafkamq.transport.settings import consumer_settings
from kafkamq.types import Outcome

__all__ = ["Follower", "Snapshot"]

BATCH = 2000
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the topics say at one moment."""

    sent: int = 0
    delayed: int = 0  # of these: still waiting for their time
    held: int = 0
    acked: int = 0
    redelivered: int = 0
    dead: int = 0
    open_copies: int = 0
    keepalives: int = 0
    ticks: int = 0
    is_settled: bool = False


class Follower:
    """Follows messages, markers and dead letters from their beginning; any thread may look."""

    def __init__(self, config: ServiceConfig, *, planned: int) -> None:
        self._config = config
        self._planned = planned
        self._tally = Tally()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="demo-follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def snapshot(self) -> Snapshot:
        """The tally now; raises what ended the thread."""
        if self._error is not None:
            raise self._error
        with self._lock:
            tally = self._tally
            return Snapshot(
                sent=tally.sent,
                delayed=len(tally.scheduled - tally.fired),
                held=tally.held,
                acked=tally.count(Outcome.ACK),
                redelivered=tally.count(Outcome.REDELIVERED),
                dead=sum(tally.dead.values()),
                open_copies=tally.open_copies(),
                keepalives=tally.keepalives,
                ticks=tally.ticks,
                is_settled=tally.is_settled(self._planned),
            )

    def stop(self) -> None:
        """Ends the thread; idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        try:
            consumer = open_consumer(
                consumer_settings(self._config, group_id=f"{self._config.namespace}.demo")
            )
            try:
                consumer.assign(_from_the_start(consumer, self._topics()))
                while not self._stopping.is_set():
                    self._apply(consumer.consume(BATCH, POLL_S))
            finally:
                consumer.close()
        except BaseException as error:  # noqa: BLE001  raised where the demo looks next
            self._error = error

    def _topics(self) -> tuple[str, str, str]:
        config = self._config
        return config.message_topic, config.marker_topic, config.dead_letter_topic

    def _apply(self, records: Iterable[Message]) -> None:
        messages, markers, _ = self._topics()
        with self._lock:
            for record in records:
                if record.error() is not None:
                    continue  # librdkafka retries; a real outage shows as a demo that never settles
                place = (record.partition() or 0, record.offset() or 0)
                if record.topic() == markers:
                    self._marker(place, record)
                    continue
                queue_id = split_key(record.key())[0].decode("utf-8", "replace")
                if record.topic() == messages:
                    pairs = headers_of(record)
                    is_first = read_message_headers(pairs).origin is None
                    self._tally.message(place, queue_id, is_first=is_first)
                else:
                    self._tally.dead_letter(queue_id)

    def _marker(self, place: tuple[int, int], record: Message) -> None:
        # What is no marker goes to the quarantine; the verdict counts what is really open.
        with contextlib.suppress(WireError):
            self._tally.marker(place, decode_slim(record.value()))


def _from_the_start(consumer: Consumer, topics: Iterable[str]) -> list[TopicPartition]:
    result = []
    for topic in topics:
        metadata = consumer.list_topics(topic, timeout=10.0).topics[topic]
        result += [
            TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in metadata.partitions
        ]
    return result
