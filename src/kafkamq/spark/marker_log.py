"""Writes markers from Spark's processes, outside of transactions, and reads them again."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, WireError
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.queue.namespace import Namespace
from kafkamq.spark.batches import of_process
from kafkamq.transport.admin import Admin
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.errors import KafkaError, Meaning, broker_error, meaning
from kafkamq.transport.log_reader import LogRange, LogReader
from kafkamq.transport.producer import IdempotentProducer
from kafkamq.transport.record import LOG_APPEND_TIME, Record
from kafkamq.transport.settings import marker_settings
from kafkamq.types import Marker

_FLUSH_S = 40.0
# How long brokers may not have heard of a new partition, or of a topic that was recreated.
_ADDED_S = 10.0


@dataclass(frozen=True, slots=True)
class RecordMetadata:
    offset: int
    timestamp_ms: int


class MarkerLog:
    """The markers topic of a namespace; one owner thread, but that any may ``write``."""

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._topic = config.marker_topic
        self.namespace = Namespace(config)
        settings = marker_settings(config, linger_ms=2, queue_buffering_max_messages=1_000_000)
        self._producer = IdempotentProducer(config, settings, max_block_s=_FLUSH_S)
        self._reader = LogReader(config)
        self._writing = threading.Lock()

    def write(self, markers: Sequence[tuple[int, bytes, bytes]]) -> list[RecordMetadata]:
        """Write markers (partition, key, value) and wait until all are in the log."""
        doing = f"writing to {self._topic}"
        places = [RecordMetadata(-1, -1)] * len(markers)
        errors: list[KafkaError] = []
        # The LogAppendTime of one of them; -1: not known.
        missing, log_ms = len(markers), -1

        def told(number: int, error: KafkaError | None, message: Record) -> None:
            nonlocal missing, log_ms
            missing -= 1
            if error is not None:
                errors.append(error)
                return
            kind, timestamp_ms = message.timestamp()
            places[number] = RecordMetadata(message.offset() or 0, timestamp_ms)
            if kind == LOG_APPEND_TIME:
                log_ms = timestamp_ms

        with self._writing:
            added_s, written_ms = time.monotonic() + _ADDED_S, monotonic_ms()
            for number, (partition, key, value) in enumerate(markers):
                report = partial(told, number)
                while True:
                    try:
                        self._producer.produce(self._topic, value, key, partition, None, report)
                        break
                    except BrokerError as error:
                        is_new = meaning(error) is Meaning.NO_PARTITION
                        if not is_new or time.monotonic() > added_s:
                            raise
                        self._producer.serve(0.1)
            self._producer.confirm(lambda: not missing, doing, _FLUSH_S)
            if errors:
                raise broker_error(self._producer.failed(errors[0]), doing)
            self.namespace.broker_clock.reported(log_ms, written_ms)
        return places

    def is_of(self, topic_ids: Set[bytes]) -> bool:
        """Return whether messages of these topic ids are of this namespace, as far as is known."""
        named = topic_ids - {b""}
        if not named:
            return True
        known, recreated_s = self.namespace.facts().message_topic_id, time.monotonic() + _ADDED_S
        while known and named != {known}:
            if time.monotonic() > recreated_s:
                return False
            time.sleep(0.1)
            known = self.namespace.ask_again().message_topic_id
        return True

    def ends(self, partitions: Sequence[int]) -> dict[int, int]:
        """Offset behind the last committed marker of each partition."""
        return self._reader.log_ends(self._topic, partitions)

    def reached(self, partitions: Sequence[int], at_ms: int) -> set[int]:
        """Return those of these partitions that have a marker of this broker time or later."""
        return self._reader.reached(self._topic, partitions, at_ms)

    def tops(self, partitions: Collection[int]) -> dict[int, int]:
        """Offset behind the last marker of each partition, whether committed or not yet."""
        with Admin(self._config) as admin:
            ends = admin.log_ends(self._topic)
        return {partition: ends[partition][1] for partition in partitions}

    def read(
        self, partition: int, start: int, end: int
    ) -> Iterator[tuple[int, int, int, Marker | None]]:
        """Yield offset, time, log time (-1: another's) and marker (None: it is none) of records."""
        wanted = LogRange(self._topic, partition, start, end)
        for records in self._reader.read(wanted, skips_lost=True):
            for record in records:
                kind, timestamp_ms = record.timestamp()
                try:
                    marker = decode_marker(record.value())
                except WireError:
                    marker = None
                log_ms = timestamp_ms if kind == LOG_APPEND_TIME else -1
                yield record.offset(), timestamp_ms, log_ms, marker


def marker_log(config: ServiceConfig) -> MarkerLog:
    return of_process(MarkerLog, config)
