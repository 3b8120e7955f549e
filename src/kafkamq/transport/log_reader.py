"""Reads ranges of logs, and whole ones: where they begin and end, and what lies between.

Every reader is ``read_committed``: records of aborted transactions and control records take up
offsets that never arrive. A range is therefore read when the *position* has reached its end, not
when its last offset was seen.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from confluent_kafka import KafkaError

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DataLossError
from kafkamq.transport.errors import Meaning, meaning
from kafkamq.transport.follower import READER_GROUP, Follower
from kafkamq.transport.record import Record as AnyRecord

_log = logging.getLogger(__name__)
_LOG_BEGIN = -2  # ListOffsets' names for the ends of a log
_LOG_END = -1
_CHUNK_RECORDS = 8192
_SHORT: dict[str, object] = {"queued_min_messages": 1, "fetch_message_max_bytes": 524_288}
_RETRY_S = 0.1
_ANSWER_S = 30.0
_WAIT_S = 0.5
_STALL_S = 60.0  # without a record or an end of the log: give up
STALL_S = 30.0  # the same of a scan
_SCAN_RECORDS = 1000


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


class LogReader(Follower):
    """A follower of one range at a time; it never commits. One owner thread."""

    def __init__(
        self,
        config: ServiceConfig,
        *,
        doing: str = "reading ranges of logs",
        group_id: str = READER_GROUP,
        is_short: bool = False,
    ) -> None:
        """``is_short``: for ranges of a few MB, behind which the client fetches little ahead.

        What it has fetched beyond a range is thrown away: that was twice as much as the range.
        """
        super().__init__(
            config,
            doing,
            group_id=group_id,
            enable_partition_eof=True,
            fetch_wait_max_ms=10,  # else the end of a log is known half a second late
            **_SHORT if is_short else {"queued_min_messages": 20_000},
        )

    def log_starts(self, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        return self._offsets(topic, partitions, _LOG_BEGIN)

    def log_ends(self, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        """Offset behind each partition's last committed record (its last stable offset)."""
        return self._offsets(topic, partitions, _LOG_END)

    def offsets_at(self, topic: str, partitions: Sequence[int], at_ms: int) -> dict[int, int]:
        """First offset of each partition whose time is not before ``at_ms``; else the log's end."""
        found = self._offsets(topic, partitions, max(0, at_ms))
        behind = [number for number, offset in found.items() if offset < 0]
        return found | self.log_ends(topic, behind)

    def reached(self, topic: str, partitions: Sequence[int], at_ms: int) -> set[int]:
        """Those that have a record whose time is not before ``at_ms``."""
        found = self._offsets(topic, partitions, max(0, at_ms))
        return {number for number, offset in found.items() if offset >= 0}

    def _offsets(self, topic: str, partitions: Sequence[int], which: int) -> dict[int, int]:
        """Asked again while the cluster says so: leaders move, and new topics have none yet."""
        deadline_s = time.monotonic() + _ANSWER_S
        wanted = dict.fromkeys(partitions, which)
        while True:
            try:
                return self.offsets_for_times(topic, wanted, timeout_s=_ANSWER_S)
            except BrokerError as error:
                is_missing = meaning(error) is Meaning.NO_PARTITION
                is_added = is_missing and self._knows_now(topic, partitions)
                if not (is_added or error.is_retriable) or time.monotonic() > deadline_s:
                    raise
            time.sleep(_RETRY_S)

    def _knows_now(self, topic: str, partitions: Sequence[int]) -> bool:
        """Ask again: partitions that were added are unknown to a client for minutes."""
        return self.partition_count(topic) > max(partitions)

    def read(
        self, wanted: LogRange, *, skips_lost: bool = False, stall_s: float = _STALL_S
    ) -> Iterator[list[Record]]:
        """The committed records of a range, in offset order, some thousand at a time.

        Args:
            wanted: The range.
            skips_lost: Go on where the log begins when the range begins below it, with a warning.
            stall_s: Give up without a record or an end of the log for so long.

        Raises:
            DataLossError: The range begins below the log's start; says how many records are gone.
            BrokerError: The log ends before the range does, or the broker does not answer.
        """
        try:
            yield from self._read(wanted, stall_s)
        except DataLossError as error:
            if not skips_lost:
                raise
            start = self.log_starts(wanted.topic, [wanted.partition])[wanted.partition]
            if start <= wanted.start:
                raise
            _log.warning("records were lost and are skipped", extra={"error": str(error)})
            yield from self._read(replace(wanted, start=min(start, wanted.end)), stall_s)

    def _read(self, wanted: LogRange, stall_s: float) -> Iterator[list[Record]]:
        position = wanted.start
        if position >= wanted.end:
            return
        place = (wanted.topic, wanted.partition)
        self.place({place: position})
        try:
            last_news = time.monotonic()
            while position < wanted.end:
                records = cast("list[Record]", self.poll(_CHUNK_RECORDS, _WAIT_S))
                if self.outside:
                    raise self._lost(wanted)
                reached = self.ends.get(place, -1)
                if records:
                    reached = max(reached, records[-1].offset() + 1)
                if reached > position:
                    position = reached
                    last_news = time.monotonic()
                elif time.monotonic() - last_news > stall_s:
                    doing = f"reading {wanted.topic}[{wanted.partition}]"
                    doing_it = f"{doing} from {position} to {wanted.end}"
                    raise self.watch.deadline(doing_it, stall_s)
                if position > wanted.end:  # what lies before it may be control records
                    records = [each for each in records if each.offset() < wanted.end]
                if records:
                    yield records
        finally:
            self.drop([place])

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
            "nothing was skipped. Longer retention prevents it; to go on without them, start again "
            "from a position inside the log",
            code="OFFSET_OUT_OF_RANGE",
        )


def scan(
    config: ServiceConfig,
    topic: str,
    starts: Mapping[int, int] | None = None,
    *,
    group_id: str = READER_GROUP,
    ends: Mapping[int, int] | None = None,
    until_s: float = math.inf,
) -> Generator[AnyRecord, None, None]:
    """The committed records of a topic up to the end of each partition, each in log order.

    Args:
        config: Of the client.
        topic: What is read.
        starts: The first offset by partition; None: all there is.
        group_id: Of the client.
        ends: Offsets to read to at least, also where a transaction is open before them.
        until_s: Monotonic: longest wait.

    Raises:
        BrokerError: The topic does not exist, a start is outside the log, or the broker refuses.
        DeadlineExceededError: No broker answers, or the time is over.
    """
    reader = LogReader(config, doing=f"reading {topic}", group_id=group_id)
    try:
        if starts is None:
            numbers = range(reader.partition_count(topic))
            known_ends = reader.log_ends(topic, numbers)
            # Told to begin at the beginning librdkafka takes half a second to find it.
            first = reader.log_starts(topic, numbers)
            starts = {number: at for number, at in first.items() if at < known_ends[number]}
        places = {(topic, partition): offset for partition, offset in starts.items()}
        missing = set(places)
        reader.place(places)
        last_news_s = time.monotonic()
        while missing:
            if time.monotonic() > until_s:
                raise reader.deadline(0.0)
            records = reader.poll(_SCAN_RECORDS, 0.2)
            reader.require_inside()
            if records or reader.ends:
                last_news_s = time.monotonic()
            elif time.monotonic() - last_news_s > STALL_S:
                raise reader.deadline(STALL_S)
            missing -= {
                place for place, end in reader.ends.items() if end >= (ends or {}).get(place[1], 0)
            }
            yield from records
    finally:
        reader.close()


_readers: dict[tuple[int, bool, str, tuple[tuple[str, str], ...]], LogReader] = {}


def log_reader(config: ServiceConfig, *, is_short: bool = False) -> LogReader:
    """This process's reader of that cluster; a Spark worker reads many ranges in its life.

    One thread at a time may use it. A forked process starts with none.
    """
    key = (os.getpid(), is_short, config.bootstrap_servers, tuple(sorted(config.kafka.items())))
    reader = _readers.get(key)
    if reader is None:
        reader = _readers[key] = LogReader(config, is_short=is_short)
    return reader
