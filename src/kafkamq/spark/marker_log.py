"""Writes markers from Spark's processes, outside of transactions, and reads them again."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException, Message

from kafkamq.config import ServiceConfig
from kafkamq.errors import WireError
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.transport.admin import Admin
from kafkamq.transport.clients import open_producer
from kafkamq.transport.errors import ErrorWatch, Meaning, broker_error, meaning
from kafkamq.transport.log_reader import LogRange, LogReader
from kafkamq.transport.settings import marker_settings
from kafkamq.types import Marker

__all__ = ["MarkerLog", "Place", "marker_log"]

_FLUSH_S = 40.0  # longer than message.timeout.ms
_ADDED_S = 10.0  # brokers know of a partition that was added by then
_MAX_BYTES = 17 * 1024 * 1024  # the broker's limit decides


@dataclass(frozen=True, slots=True)
class Place:
    """Where a marker stands, and its broker timestamp."""

    offset: int
    timestamp_ms: int


class _Report:
    """The delivery report of one marker."""

    __slots__ = ("error", "place")

    def __init__(self) -> None:
        self.place: Place | None = None
        self.error: KafkaError | None = None

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.error = error
        else:
            self.place = Place(message.offset() or 0, message.timestamp()[1])


class MarkerLog:
    """The markers topic of a namespace; one owner thread."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._topic = config.marker_topic
        self._retention_ms: int | None = None
        self._watch = ErrorWatch(config.bootstrap_servers)
        self._producer = open_producer(
            marker_settings(
                config,
                linger_ms=2,
                message_max_bytes=_MAX_BYTES,
                queue_buffering_max_messages=1_000_000,
            ),
            self._watch,
        )
        self._reader = LogReader(config)

    def write(self, markers: Sequence[tuple[int, bytes, bytes]]) -> list[Place]:
        """Write markers (partition, key, value) and wait until all are in the log.

        Raises:
            BrokerError, DeadlineExceededError: Not all are; some may be.
        """
        doing = f"writing to {self._topic}"
        added_s = time.monotonic() + _ADDED_S
        reports = []
        for partition, key, value in markers:
            report = _Report()
            reports.append(report)
            while True:
                try:
                    self._producer.produce(self._topic, value, key, partition, on_delivery=report)
                    break
                except BufferError:
                    self._producer.poll(0.1)
                    self._watch.check(doing)
                except KafkaException as error:
                    is_unknown = meaning(error) is Meaning.NO_PARTITION
                    if not is_unknown or time.monotonic() > added_s:
                        raise broker_error(error, f"{doing}[{partition}]") from error
                    self._look_up(doing)  # it was added just now
        deadline_s = time.monotonic() + _FLUSH_S
        while self._producer.flush(1.0):
            self._watch.check(doing)
            if time.monotonic() > deadline_s:
                raise self._watch.deadline(doing, _FLUSH_S)
        places = []
        for report in reports:
            if report.error is not None:
                raise broker_error(report.error, doing)
            assert report.place is not None, "flushed: it was reported"
            places.append(report.place)
        return places

    def _look_up(self, doing: str) -> None:
        try:
            self._producer.list_topics(self._topic, timeout=_ADDED_S)
        except KafkaException as error:
            raise broker_error(error, doing) from error
        self._producer.poll(0.1)

    def retention_ms(self) -> int:
        """Of the markers topic; negative: for ever. R8: a nack waits at most a quarter of it."""
        if self._retention_ms is None:
            with Admin(self._config) as admin:
                settings = admin.require_topic(self._topic).settings
            self._retention_ms = int(settings.get("retention.ms", "-1"))
        return self._retention_ms

    def ends(self, partitions: Sequence[int]) -> dict[int, int]:
        """Offset behind the last committed marker of each partition."""
        return self._reader.log_ends(self._topic, partitions)

    def reached(self, partitions: Sequence[int], at_ms: int) -> set[int]:
        """Those of these partitions that have a marker of this broker time or later."""
        return self._reader.reached(self._topic, partitions, at_ms)

    def tops(self, partitions: Collection[int]) -> dict[int, int]:
        """Offset behind the last marker of each partition, whether committed or not yet."""
        with Admin(self._config) as admin:
            ends = admin.log_ends(self._topic)
        return {partition: ends[partition][1] for partition in partitions}

    def read(
        self, partition: int, start: int, end: int
    ) -> Iterator[tuple[int, int, int, Marker | None]]:
        """Offset, timestamp, its kind and marker of each record; None: it is no marker."""
        wanted = LogRange(self._topic, partition, start, end)
        for records in self._reader.read(wanted, skips_lost=True):
            for record in records:
                kind, timestamp_ms = record.timestamp()
                try:
                    marker = decode_marker(record.value())
                except WireError:
                    marker = None
                yield record.offset(), timestamp_ms, kind, marker


_logs: dict[tuple[int, str, str, tuple[tuple[str, str], ...]], MarkerLog] = {}


def marker_log(config: ServiceConfig) -> MarkerLog:
    """This process's, made once."""
    key = (
        os.getpid(),
        config.bootstrap_servers,
        config.marker_topic,
        tuple(sorted(config.kafka.items())),
    )
    found = _logs.get(key)
    if found is None:
        found = _logs[key] = MarkerLog(config)
    return found
