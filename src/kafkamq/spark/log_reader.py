"""Reads half-open ranges of a topic partition: where logs begin and end, and what lies between.

Every reader is ``read_committed``: records of aborted transactions and control records take up
offsets that never arrive. A range is therefore read when the *position* has reached its end, not
when its last offset was seen.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Protocol, cast

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DataLossError
from kafkamq.transport.clients import open_consumer
from kafkamq.transport.deadline import ask_in_slices
from kafkamq.transport.errors import ErrorWatch, Meaning, broker_error, meaning
from kafkamq.transport.settings import consumer_settings

__all__ = ["LogRange", "LogReader", "Record", "log_reader", "shared_out"]

_log = logging.getLogger(__name__)
_LOG_BEGIN = -2  # ListOffsets' names for the ends of a log
_LOG_END = -1
_CHUNK_RECORDS = 8192
_RETRY_S = 0.1
_STALL_S = 60.0  # without a record or an end of the log: give up
_error_of = methodcaller("error")


@dataclass(frozen=True, slots=True)
class LogRange:
    """Offsets ``start`` to ``end`` (not included) of one topic partition."""

    topic: str
    partition: int
    start: int
    end: int


class Record(Protocol):
    """A consumed record, as confluent-kafka gives it; one that was read has all of this."""

    def topic(self) -> str: ...
    def partition(self) -> int: ...
    def offset(self) -> int: ...
    def timestamp(self) -> tuple[int, int]: ...
    def key(self) -> bytes | None: ...
    def value(self) -> bytes | None: ...
    def headers(self) -> list[tuple[str, bytes | None]] | None: ...
    def set_headers(self, value: list[tuple[str, bytes | None]]) -> None: ...
    def leader_epoch(self) -> int | None: ...
    def error(self) -> KafkaError | None: ...


class LogReader:
    """One consumer that is assigned what it shall read; never subscribes, never commits.

    Not thread-safe.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._servers = config.bootstrap_servers
        self._watch = ErrorWatch(config.bootstrap_servers)
        settings = consumer_settings(
            config,
            group_id="kafkamq.reader",  # librdkafka wants one; nothing is committed
            enable_partition_eof=True,
            fetch_wait_max_ms=10,  # else the end of a log is known half a second late
            queued_min_messages=20_000,
        )
        self._consumer = open_consumer(settings, self._watch)

    def partition_count(self, topic: str, *, timeout_s: float = 30.0) -> int:
        """Partitions of a topic.

        Raises:
            BrokerError: There is no such topic; DeadlineExceededError: no answer.
        """
        doing = f"looking up topic {topic}"
        try:
            found = ask_in_slices(
                lambda slice_s: self._consumer.list_topics(topic, timeout=slice_s).topics[topic],
                self._consumer,
                self._watch,
                doing,
                timeout_s,
            )
        except KafkaException as error:
            raise self._watch.deadline(doing, timeout_s) from error
        if found.error is not None:
            raise broker_error(found.error, f"{doing} at {self._servers}")
        return len(found.partitions)

    def log_starts(self, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        """First offset that each partition still has."""
        return self._offsets(topic, partitions, _LOG_BEGIN, 30.0)

    def log_ends(self, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        """Offset behind each partition's last committed record (its last stable offset)."""
        return self._offsets(topic, partitions, _LOG_END, 30.0)

    def offsets_at(self, topic: str, partitions: Sequence[int], at_ms: int) -> dict[int, int]:
        """First offset of each partition whose time is not before ``at_ms``; else the log's end."""
        found = self._offsets(topic, partitions, max(0, at_ms), 30.0)
        behind = [number for number, offset in found.items() if offset < 0]
        return found | self.log_ends(topic, behind)

    def reached(self, topic: str, partitions: Sequence[int], at_ms: int) -> set[int]:
        """Those that have a record whose time is not before ``at_ms``."""
        found = self._offsets(topic, partitions, max(0, at_ms), 30.0)
        return {number for number, offset in found.items() if offset >= 0}

    def _offsets(
        self, topic: str, partitions: Sequence[int], which: int, timeout_s: float
    ) -> dict[int, int]:
        """Asked again while the cluster says so: leaders move, and new topics have none yet."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return self._offsets_once(topic, partitions, which, timeout_s)
            except BrokerError as error:
                is_new = meaning(error) is Meaning.NO_PARTITION
                is_added = is_new and self._knows_now(topic, partitions)
                if not (is_added or error.is_retriable) or time.monotonic() > deadline_s:
                    raise
            time.sleep(_RETRY_S)

    def _knows_now(self, topic: str, partitions: Sequence[int]) -> bool:
        """Ask anew: partitions that were added are unknown to a client for minutes."""
        return self.partition_count(topic) > max(partitions)

    def _offsets_once(
        self, topic: str, partitions: Sequence[int], which: int, timeout_s: float
    ) -> dict[int, int]:
        if not partitions:
            return {}
        doing = f"asking for offsets of {topic} at {self._servers}"
        asked = [TopicPartition(topic, partition, which) for partition in partitions]
        try:
            answers = ask_in_slices(
                lambda slice_s: self._consumer.offsets_for_times(asked, timeout=slice_s),
                self._consumer,
                self._watch,
                doing,
                timeout_s,
            )
        except KafkaException as error:
            raise broker_error(error, doing) from error
        for answer in answers:
            if answer.error is not None:
                raise broker_error(answer.error, f"{doing}, partition {answer.partition},")
        return {answer.partition: answer.offset for answer in answers}

    def read(self, wanted: LogRange, *, skips_lost: bool = False) -> Iterator[list[Record]]:
        """The committed records of a range, in offset order, some thousand at a time.

        Args:
            wanted: The range.
            skips_lost: Go on where the log begins when the range begins below it, with a warning.

        Raises:
            DataLossError: The range begins below the log's start; says how many records are gone.
            BrokerError: The log ends before the range does, or the broker does not answer.
        """
        try:
            yield from self._read(wanted)
        except DataLossError as error:
            if not skips_lost:
                raise
            start = self.log_starts(wanted.topic, [wanted.partition])[wanted.partition]
            if start <= wanted.start:
                raise
            _log.warning("records were lost and are skipped", extra={"said": str(error)})
            yield from self._read(replace(wanted, start=min(start, wanted.end)))

    def _read(self, wanted: LogRange) -> Iterator[list[Record]]:
        position = wanted.start
        if position >= wanted.end:
            return
        where = f"reading {wanted.topic}[{wanted.partition}]"
        self._consumer.assign([TopicPartition(wanted.topic, wanted.partition, position)])
        try:
            last_news = time.monotonic()
            while position < wanted.end:
                records, reached = self._next(wanted, where)
                if records:
                    position = reached
                    last_news = time.monotonic()
                    yield records
                elif reached > position:
                    position = reached
                    last_news = time.monotonic()
                elif time.monotonic() - last_news > _STALL_S:
                    raise self._watch.deadline(f"{where} from {position} to {wanted.end}", _STALL_S)
        finally:
            self._consumer.unassign()

    def _next(self, wanted: LogRange, where: str) -> tuple[list[Record], int]:
        """Records that are there, and the position behind them (-1: nothing new)."""
        first = self._consumer.poll(0.5)
        self._watch.check(where)
        if first is None:
            return [], -1
        rest = self._consumer.consume(_CHUNK_RECORDS - 1, timeout=0)
        batch = cast("list[Record]", [first, *rest])
        if not any(map(_error_of, batch)) and batch[-1].offset() < wanted.end:
            return batch, batch[-1].offset() + 1
        records: list[Record] = []
        position = -1
        end = wanted.end
        for message in batch:
            error = message.error()
            if error is not None:
                position = max(position, self._read_error(error, message, wanted, where))
                continue
            offset = message.offset()
            if offset >= end:  # what lies before it is control records
                return records, end
            records.append(message)
            position = offset + 1
        return records, position

    def _read_error(self, error: KafkaError, message: Record, wanted: LogRange, where: str) -> int:
        """The position that an end of the log tells; any other error is raised."""
        if meaning(error) is Meaning.LOG_END:
            return message.offset()
        ours = broker_error(error, where)
        if isinstance(ours, DataLossError):
            raise self._lost(wanted) from None
        if isinstance(ours, BrokerError) and ours.is_retriable:
            return -1  # librdkafka goes on trying; the stall limit ends it
        raise ours

    def _lost(self, wanted: LogRange) -> DataLossError:
        """Why a position is outside the log (R23)."""
        start = self.log_starts(wanted.topic, [wanted.partition])[wanted.partition]
        end = self.log_ends(wanted.topic, [wanted.partition])[wanted.partition]
        where = f"{wanted.topic}[{wanted.partition}]"
        if wanted.start < start:
            gone = f"{start - wanted.start} records are gone"
        else:
            gone = "the topic was recreated or truncated"
        return DataLossError(
            f"{where} holds offsets {start} to {end}, the position is {wanted.start}: {gone}; "
            "nothing was skipped. Longer retention prevents it; to go on without them, start anew "
            "from a position inside the log",
            code="OFFSET_OUT_OF_RANGE",
        )

    def close(self) -> None:
        """End the consumer; idempotent."""
        self._consumer.close()


def shared_out(starts: dict[int, int], ends: dict[int, int], limit: int | None) -> dict[int, int]:
    """Ends that together lie at most ``limit`` offsets behind the starts, shared out by backlog.

    Every partition with a backlog advances, so the sum may be over the limit by their number.
    """
    backlogs = {partition: max(0, end - starts[partition]) for partition, end in ends.items()}
    total = sum(backlogs.values())
    if limit is None or total <= limit:
        return {partition: starts[partition] + backlog for partition, backlog in backlogs.items()}
    return {
        partition: starts[partition] + min(backlog, -(-backlog * limit // total))
        for partition, backlog in backlogs.items()
    }


_readers: dict[tuple[int, str, tuple[tuple[str, str], ...]], LogReader] = {}


def log_reader(config: ServiceConfig) -> LogReader:
    """This process's reader of that cluster; a Spark worker reads many ranges in its life.

    One thread at a time may use it. A forked process starts with none.
    """
    key = (os.getpid(), config.bootstrap_servers, tuple(sorted(config.kafka.items())))
    reader = _readers.get(key)
    if reader is None:
        reader = _readers[key] = LogReader(config)
    return reader
