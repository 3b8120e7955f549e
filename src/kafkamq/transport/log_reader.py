"""Bounded reads of logs: ranges, whole topics, and single records by their offsets (R18).

Every reader is ``read_committed``: records of aborted transactions and control records take up
offsets that never arrive. A range is therefore read when the *position* has reached its end, not
when its last offset was seen.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol, cast

from confluent_kafka import KafkaError

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DataLossError, DeadlineExceededError, KafkaMQError
from kafkamq.transport.errors import Meaning, is_retriable, meaning
from kafkamq.transport.follower import READER_GROUP, Follower
from kafkamq.transport.record import Record as AnyRecord
from kafkamq.types import PartitionId

_log = logging.getLogger(__name__)
_LOG_BEGIN = -2
_LOG_END = -1
_CHUNK_RECORDS = 8192
_SHORT: dict[str, object] = {"queued_min_messages": 1, "fetch_message_max_bytes": 524_288}
_RETRY_S = 0.1
_ANSWER_S = 30.0
_WAIT_S = 0.5
_STALL_S = 60.0
STALL_S = 30.0
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
            # With more, the end of a log is known half a second late.
            fetch_wait_max_ms=10,
            **_SHORT if is_short else {"queued_min_messages": 20_000},
        )

    def log_starts(self, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        return self._offsets(topic, partitions, _LOG_BEGIN)

    def log_ends(self, topic: str, partitions: Sequence[int]) -> dict[int, int]:
        """Return each partition's last stable offset, behind its last committed record."""
        return self._offsets(topic, partitions, _LOG_END)

    def offsets_at(self, topic: str, partitions: Sequence[int], at_ms: int) -> dict[int, int]:
        """Return each partition's first offset not before ``at_ms``; else the log's end."""
        found = self._offsets(topic, partitions, max(0, at_ms))
        behind = [number for number, offset in found.items() if offset < 0]
        return found | self.log_ends(topic, behind)

    def reached(self, topic: str, partitions: Sequence[int], at_ms: int) -> set[int]:
        """Return those that have a record whose time is not before ``at_ms``."""
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
                # Partitions that were added are unknown to a client for minutes.
                is_added = is_missing and self.partition_count(topic) > max(partitions)
                if not (is_added or error.is_retriable) or time.monotonic() > deadline_s:
                    raise
            time.sleep(_RETRY_S)

    def read(
        self, wanted: LogRange, *, skips_lost: bool = False, stall_s: float = _STALL_S
    ) -> Iterator[list[Record]]:
        """Yield the committed records of a range, in offset order, some thousand at a time.

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
                if position > wanted.end:
                    # What lies before it may be control records.
                    records = [each for each in records if each.offset() < wanted.end]
                if records:
                    yield records
        finally:
            self.drop([place])

    def _lost(self, wanted: LogRange) -> DataLossError:
        """Return why a position is outside the log (R23)."""
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
    """Yield the committed records of a topic up to the end of each partition, each in log order.

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


MAX_READ_THROUGH = 280
"""Records between two wanted ones that are read and dropped; a wider gap is sought (R18)."""

MAX_READ = 1000
"""Records that are taken at once."""

# Of a partition; librdkafka's 1 MiB, decompressed, may be 100,000 records.
_FETCH_BYTES = 65_536
# A grace where nothing is lost by taking what is not there yet for gone.
END_GRACE_S = 3.0
_NONE = 1 << 63


class RecordReader:
    """A read_committed reader of one topic; one owner thread."""

    def __init__(self, config: ServiceConfig, topic: str, *, group_id: str = READER_GROUP) -> None:
        self._config = config
        self._topic = topic
        self._group_id = group_id
        self._follower: Follower | None = None
        self._patience = Patience(END_GRACE_S)
        self._answers = Answers()

    def read(self, partition: int, offset: int, *, timeout_s: float = 30.0) -> AnyRecord | None:
        """Return the record at one offset, or None; also when it lies beyond the log's end."""
        wanted = {partition: (offset,)}
        for _, found in self.sweep(wanted, timeout_s=timeout_s, patience=self._patience):
            return found[offset]
        return None

    def stream(
        self, partition: int, offsets: Sequence[int], *, timeout_s: float = 60.0
    ) -> Iterator[tuple[int, AnyRecord | None]]:
        """Yield offset and record at each of ``offsets`` (ascending, each once); see ``sweep``."""
        for _, found in self.sweep({partition: offsets}, timeout_s=timeout_s):
            yield from found.items()

    def sweep(
        self,
        wanted: Mapping[int, Sequence[int]],
        *,
        timeout_s: float = 60.0,
        patience: Patience | None = None,
        left: dict[int, int] | None = None,
    ) -> Iterator[tuple[int, dict[int, AnyRecord | None]]]:
        """Partition, and records by offset, as they come; all partitions at once.

        Those of a partition (ascending, without repetition) come in their order.
        An offset without a record (deleted, or aborted) comes with None. One beyond the log's end
        is waited for, because the caller has seen it: after a change of leaders the end may step
        back for a while. When ``patience`` is over it comes with None.

        With ``left`` nothing is waited for. What lies beyond a log's end for now does not come, nor
        do the last ones of a partition that gives no answer: ``left`` has the first of these.
        """
        scans = {number: _Scan(offsets) for number, offsets in wanted.items() if offsets}
        if left is not None:
            for number in [each for each in scans if self._answers.is_resting(each)]:
                left[number] = scans.pop(number).target
        if not scans:
            return
        deadline_s = time.monotonic() + timeout_s
        follower = self._connected()
        try:
            follower.place({self._place(number): scan.target for number, scan in scans.items()})
            while scans:
                yield from self._step(follower, scans, patience, left)
                # Each seek takes its time, all together much.
                if scans and time.monotonic() > deadline_s:
                    if left is None:
                        raise follower.deadline(timeout_s)
                    left |= {each: scan.target for each, scan in scans.items()}
                    return
        except BrokerError:
            self.close()
            raise
        finally:
            # Otherwise it would go on fetching what nobody wants.
            follower.drop(map(self._place, scans))

    def _step(
        self,
        follower: Follower,
        scans: dict[int, _Scan],
        patience: Patience | None,
        left: dict[int, int] | None,
    ) -> Iterator[tuple[int, dict[int, AnyRecord | None]]]:
        """Yield what one poll gives; scans that are over go."""
        for number, records in groupby(follower.poll(MAX_READ, _WAIT_S), AnyRecord.partition):
            if number not in scans:
                continue
            assert number is not None, "records have a partition"
            scan, asked_s = scans[number], scans[number].answered_s
            found = scan.take(records)
            self._answers.came(number, time.monotonic() - asked_s)
            if patience is not None:
                patience.found(self._place(number), scan.position)
            if found:
                yield number, found
        for number, scan in list(scans.items()):
            if found := self._passed(follower, number, scan, patience, left is None):
                yield number, found
            if left is not None and scan.remains and self._is_over(number, scan):
                left[number] = scan.target
            elif scan.remains:
                continue
            del scans[number]
            follower.drop([self._place(number)])

    def _place(self, partition: int) -> PartitionId:
        return self._topic, partition

    def _is_over(self, partition: int, scan: _Scan) -> bool:
        return scan.is_at_end or self._answers.is_given_up(partition, scan.answered_s)

    def _passed(
        self,
        follower: Follower,
        partition: int,
        scan: _Scan,
        patience: Patience | None,
        is_sure: bool,
    ) -> dict[int, AnyRecord | None]:
        """Return the wanted offsets that are known now to have no record; goes on from there.

        ``is_sure``: Raise where nobody can tell; else it is no answer.
        """
        place = self._place(partition)
        passed: list[int] = []
        if place in follower.outside:
            # The records are deleted, or the leader does not know the end yet.
            try:
                first, end = follower.bounds(place)
            except (BrokerError, DeadlineExceededError) as error:
                if is_sure or not is_retriable(error):
                    raise
                return {}
            # The log may have them again by now.
            known = max(first, min(end, scan.target))
            follower.place({place: known})
            passed += scan.pass_to(known, is_end=end <= scan.target)
        elif place in follower.ends:
            passed += scan.pass_to(max(follower.ends[place], scan.behind), is_end=True)
        if not scan.is_at_end:
            if scan.is_far:
                follower.place({place: scan.target})
        elif patience is not None:
            passed += scan.pass_from(patience.over_from(place, scan.target, scan.position))
        return dict.fromkeys(passed)

    def _connected(self) -> Follower:
        if self._follower is None:
            self._follower = Follower(
                self._config,
                f"reading {self._topic}",
                group_id=self._group_id,
                enable_partition_eof=True,
                queued_min_messages=2 * MAX_READ,
                queued_max_messages_kbytes=32_768,
                fetch_message_max_bytes=_FETCH_BYTES,
            )
        return self._follower

    def prepare(self) -> None:
        """Connect, so that the first ``stream`` need not; what fails is left to that one."""
        with contextlib.suppress(KafkaMQError):
            self._connected().bounds((self._topic, 0), timeout_s=5.0)

    def close(self) -> None:
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.close()


class _Scan:
    """The wanted offsets of one stream against what the log gives."""

    def __init__(self, offsets: Sequence[int]) -> None:
        self._offsets = offsets
        self._at = 0
        self.position = self.target
        self.behind = 0
        self.is_at_end = False
        self.answered_s = time.monotonic()

    @property
    def target(self) -> int:
        return self._offsets[self._at] if self.remains else _NONE

    @property
    def remains(self) -> bool:
        return self._at < len(self._offsets)

    @property
    def is_far(self) -> bool:
        return self.remains and self.target - self.position > MAX_READ_THROUGH

    def take(self, records: Iterable[AnyRecord]) -> dict[int, AnyRecord | None]:
        """Return what is wanted of these records; they also show which offsets before them are
        gone.
        """
        records = list(records)
        offsets = [each.offset() or 0 for each in records]
        if not offsets:
            return {}
        self.is_at_end = False
        self.answered_s = time.monotonic()
        self.position = self.behind = offsets[-1] + 1
        wanted = self._wanted_to(self.position)
        if wanted == offsets:
            # This is the usual case: nothing lies between them, and nothing is gone.
            return dict(zip(wanted, records, strict=True))
        there = dict(zip(offsets, records, strict=True))
        return {offset: there.get(offset) for offset in wanted}

    def _wanted_to(self, position: int) -> list[int]:
        """Take what is wanted before ``position``."""
        begin = self._at
        self._at = bisect_left(self._offsets, position, begin)
        return list(self._offsets[begin : self._at])

    def pass_from(self, over: int) -> list[int]:
        """Nothing wanted from there on is in the log, nor will it be."""
        kept = bisect_left(self._offsets, over, self._at)
        passed = list(self._offsets[kept:])
        if passed:
            self._offsets = self._offsets[:kept]
        self.is_at_end = self.remains
        return passed

    def pass_to(self, position: int, *, is_end: bool) -> list[int]:
        """Note that the log has nothing wanted before ``position``, which may be its end."""
        self.answered_s = time.monotonic()
        self.position = position
        passed = self._wanted_to(position)
        self.is_at_end = is_end and self.remains
        return passed


GRACE_S = 60.0
"""How long what a broker does not know is looked for.

A broker may lag behind the one that served a record. After a change of leaders, which takes less,
a log ends earlier for a while; metadata name fewer partitions, or the topic that had the name
before. A log that does not answer loses nothing, however long that is.
"""

_NEVER = 1 << 63
# The first wait for a log that does not answer, while others could be read.
_FIRST_WAIT_S = 3.0
_MAX_WAIT_S = 12.0
# Then it is left alone, for a multiple of the last wait.
_REST_WAITS = 2
# What nobody has looked for within this is looked for again from the start.
_MEMORY_S = 60.0
_CLEARING_S = 1.0
# A lagging broker explains fewer: somebody writes invented names.
_MAX_KNOWN = 1000


@dataclass(slots=True)
class _Search:
    offset: int
    began_s: float
    last_s: float
    is_over: bool = False


class Patience:
    """What is looked for in vain, and since when; readers may share it. Thread-safe.

    A search is never dropped for another one while somebody asks for it: where there is no room, a
    name has no search yet, and waits for those before it.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.grace_s = grace_s
        self._lock = threading.Lock()
        self._searches: dict[Hashable, list[_Search]] = {}
        self._count = 0
        self._cleared_s = -_CLEARING_S

    def is_over(self, where: Hashable, offset: int = 0, end: int = 0) -> bool:
        """Return whether it was looked for in vain for long enough; the first call begins the
        search.
        """
        return self.over_from(where, offset, end) <= offset

    def over_from(self, where: Hashable, offset: int = 0, end: int = 0) -> int:
        """Return from which offset on all of a log was looked for in vain for long enough.

        A log that ended before an offset all the time has nothing behind that offset either.

        Args:
            where: A log; or anything else that a broker does not know.
            offset: What is looked for in it; the first call begins the search.
            end: Where the log ends now, at or before ``offset``.
        """
        now_s = time.monotonic()
        with self._lock:
            searches = self._keep(where, now_s, end)
            if not any(each.offset <= offset for each in searches):
                if self._count >= _MAX_KNOWN and now_s - self._cleared_s > _CLEARING_S:
                    self._make_room(now_s)
                    searches = self._searches.get(where, [])
                if self._count < _MAX_KNOWN:
                    self._count += 1
                    self._searches.setdefault(where, searches).append(_Search(offset, now_s, now_s))
            for each in searches:
                each.last_s = now_s
                each.is_over = now_s - each.began_s > self.grace_s
            over = [each.offset for each in searches if each.is_over]
            # Who waits without a grace needs no search for it.
            return offset if self.grace_s < 0 else min(over, default=_NEVER)

    def found(self, where: Hashable, end: int = _NEVER) -> None:
        """End the searches for ``where``, or for what a log has before ``end``: it is there."""
        if where in self._searches:
            with self._lock:
                self._keep(where, time.monotonic(), end)

    def _keep(self, where: Hashable, now_s: float, end: int) -> list[_Search]:
        """Return the searches in a log that are still asked for, and for what it does not have."""
        before = self._searches.get(where, [])
        kept = [each for each in before if now_s - each.last_s < _MEMORY_S and each.offset >= end]
        self._count += len(kept) - len(before)
        if kept:
            self._searches[where] = kept
        else:
            self._searches.pop(where, None)
        return kept

    def _make_room(self, now_s: float) -> None:
        """Searches that are over, or that nobody asks for, go."""
        self._cleared_s = now_s
        for where in list(self._searches):
            if all(each.is_over for each in self._keep(where, now_s, 0)):
                self._count -= len(self._searches.pop(where, []))


class Answers:
    """Which logs a reader does not wait for now, as they did not answer; one owner thread.

    A wait is twice as long as the last one that was in vain, so that a log whose answers take long
    is read at last. It rests in between, so that most of the time is the other logs'.
    """

    def __init__(self) -> None:
        self._waits_s: dict[Hashable, float] = {}
        self._rest_until_s: dict[Hashable, float] = {}

    def is_resting(self, where: Hashable) -> bool:
        return time.monotonic() < self._rest_until_s.get(where, 0.0)

    def is_given_up(self, where: Hashable, since_s: float) -> bool:
        """Return whether a log that has not answered since then is waited for no more."""
        if time.monotonic() - since_s <= self._waits_s.get(where, _FIRST_WAIT_S):
            return False
        self.give_up(where)
        return True

    def give_up(self, where: Hashable) -> None:
        """A log has not answered, and is not waited for."""
        wait_s = self._waits_s.get(where, _FIRST_WAIT_S)
        self._waits_s[where] = min(2 * wait_s, _MAX_WAIT_S)
        self._rest_until_s[where] = time.monotonic() + _REST_WAITS * wait_s

    def came(self, where: Hashable, after_s: float) -> None:
        """A log has answered; one that took long is waited for as long the next time."""
        if self._waits_s and after_s <= _FIRST_WAIT_S:
            self._waits_s.pop(where, None)
            self._rest_until_s.pop(where, None)
