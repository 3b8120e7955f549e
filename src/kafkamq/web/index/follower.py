"""Follows a namespace's logs into the index: one thread, one client, whatever the viewers.

It reads without a group, ``read_committed``, and writes nothing to Kafka. Positions are written in
the same transaction of the database as the rows, so a start goes on where the last one was. When
the file is deleted or damaged, or the topics are others, the index is built again.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from kafkamq.config import ServiceConfig
from kafkamq.errors import KafkaMQError, WireError
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.markers.wire.records import TrackerStatus, decode_status, decode_status_key
from kafkamq.queue.dead_letters import redriven_place
from kafkamq.transport.admin import Admin, TopicInfo
from kafkamq.transport.errors import is_fatal
from kafkamq.transport.follower import Follower
from kafkamq.transport.record import Record
from kafkamq.types import PartitionId
from kafkamq.web.index.fold import Fold, MarkerLog
from kafkamq.web.index.live import MAX_RUNS, Counts, MarkerLag, Picture, Run, open_runs
from kafkamq.web.index.schema import (
    delete_index,
    lock_index,
    make_indexes,
    open_index,
    size_bytes,
)

MAX_POLLED = 5000
_WAIT_S = 0.25
_WRITE_EVENTS = 500_000
_WRITE_S = 0.5
# Of the first reading: each write has a price for each queue.
_FIRST_WRITE_S = 5.0
# The least time between two pictures, which take at most a tenth of the time.
_PICTURE_S = 0.5
# The pause between looks for topics that were recreated, partitions that were added, and what is
# too old.
_LOOK_S = 15.0
_RETRY_S = 5.0
_AGAIN_S = 0.5
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexOptions:
    """These say where the index lies and how much it keeps."""

    path: Path
    keep_ms: int = 7 * 86_400_000
    max_bytes: int = 4 * 1024**3
    max_letters: int = 2_000_000


class Index:
    """It keeps the index of a namespace; ``start`` and ``close`` are its owner's."""

    def __init__(self, config: ServiceConfig, options: IndexOptions) -> None:
        self.config = config
        self.options = options
        self.picture = Picture()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kafkamq-web-index", daemon=True)

    def start(self) -> None:
        """Follow from here on.

        Raises:
            ConfigError: Another process has this index.
        """
        self._lock = lock_index(self.options.path)
        self._thread.start()

    def close(self, timeout_s: float = 30.0) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        with self._lock:
            while not self._stopping.is_set():
                self._stopping.wait(self._follow_until_it_fails())

    def _follow_until_it_fails(self) -> float:
        """Follow, and return how many seconds to wait before the next attempt."""
        try:
            self._follow()
        except sqlite3.OperationalError as error:
            _log.warning("the index cannot be written", extra={"error": str(error)})
            self._fail(f"the index {self.options.path} cannot be written: {error}")
        except sqlite3.DatabaseError as error:
            _log.warning("the index is built again", extra={"error": str(error)})
            self._fail(f"the index is built again: {error}")
            delete_index(self.options.path)
            return _AGAIN_S
        except KafkaMQError as error:
            _log.warning("logs cannot be followed", extra={"error": str(error)})
            self._fail(str(error))
        except Exception as error:  # noqa: BLE001 - shown, logged, tried again: the pages stay
            _log.exception("the index has failed")
            self._fail(f"{type(error).__name__}: see the log of this process")
        else:
            return 0.0
        return _RETRY_S

    def _fail(self, why: str) -> None:
        shown = self.picture
        self.picture = replace(shown, error=why, version=shown.version + 1)

    def _follow(self) -> None:
        topics = _topics(self.config)
        identity = _identity(self.config, topics)
        connection = open_index(self.options.path, identity)
        following = Following(self.config, self.options, connection, topics)
        try:
            next_look_s = time.monotonic() + _LOOK_S
            while not self._stopping.is_set():
                following.step()
                picture = following.picture(self.picture)
                if picture is not None:
                    self.picture = picture
                if time.monotonic() > next_look_s:
                    if _identity(self.config, _topics(self.config)) != identity:
                        return
                    following.forget()
                    next_look_s = time.monotonic() + _LOOK_S
            following.write()
        finally:
            following.close()
            with suppress(sqlite3.Error):
                connection.close()


class Following:
    """It has the database open and one client; one owner thread."""

    def __init__(
        self,
        config: ServiceConfig,
        options: IndexOptions,
        connection: sqlite3.Connection,
        topics: dict[str, TopicInfo],
    ) -> None:
        self._config = config
        self._options = options
        self._connection = connection
        self._inode = options.path.stat().st_ino
        self._topics = topics
        self.fold = Fold(connection, config)
        self.fold.topic_id = topics[config.message_topic].topic_id
        self._letters_id = topics[config.dead_letter_topic].topic_id
        self._statuses: dict[int, TrackerStatus] = {}
        self._moved_s: dict[int, float] = {}
        self._ends: dict[PartitionId, int] = {}
        self._next: dict[PartitionId, int] = {}
        self._is_indexed = False
        self._read = 0
        self._written_s = self._pictured_s = time.monotonic()
        self._pause_s = _PICTURE_S
        self._has_changed = True
        self._is_unwritten = False
        self._follower = Follower(
            config,
            f"reading the topics of {config.namespace}",
            ignores=lambda error: not is_fatal(error),
            enable_partition_eof=True,
            fetch_wait_max_ms=200,
            queued_max_messages_kbytes=16_384,
        )
        try:
            self._follower.place(self._positions())
        except BaseException:
            self._follower.close()
            raise

    def close(self) -> None:
        self._follower.close()

    # ---- where to read

    def _positions(self) -> dict[PartitionId, int]:
        kept = {
            (topic, number): (next_offset, restart)
            for topic, number, next_offset, restart in self._connection.execute(
                "SELECT topic, number, next, restart FROM position"
            )
        }
        oldest_ms = round(time.time() * 1000) - self._options.keep_ms
        found: dict[PartitionId, int] = {}
        with Admin(self._config) as admin:
            for topic, info in self._topics.items():
                bounds = admin.log_bounds(topic, range(info.partitions))
                times = {}
                if topic == self._config.message_topic:
                    times = admin.offsets_for_times(topic, dict.fromkeys(bounds, oldest_ms))
                for number, (low, high) in bounds.items():
                    place = (topic, number)
                    first = times.get(number, low)
                    first = high if first < 0 else max(low, first)
                    next_offset, restart = kept.get(place, (first, first))
                    if next_offset > high:
                        raise sqlite3.DatabaseError(f"{topic}[{number}] was truncated")
                    self._ends[place] = high
                    self._next[place] = max(next_offset, low)
                    found[place] = max(restart, low)
                    if topic == self._config.marker_topic:
                        tracker = RedeliveryTracker(found[place], partition=number)
                        self.fold.markers[number] = MarkerLog(tracker, self._next[place])
        return found

    def _restart(self, place: PartitionId) -> int:
        """Return where reading begins after the next start."""
        if place[0] == self._config.tracker_topic:
            # A status is kept in memory alone.
            return 0
        log = self.fold.markers.get(place[1])
        if place[0] != self._config.marker_topic or log is None:
            return self._next[place]
        return log.tracker.committable_offset()

    # ---- a step

    def step(self) -> None:
        """Read what there is, fold it, and write when it is time."""
        records = self._follower.poll(MAX_POLLED, _WAIT_S)
        if self._follower.outside:
            self._place_again()
        for number, same in groupby(records, Record.partition):
            for topic, group in groupby(same, Record.topic):
                self._take((topic or "", number or 0), list(group))
        for place, end in self._follower.ends.items():
            self._next[place] = max(self._next.get(place, 0), end)
        self._read += len(records)
        self._is_unwritten |= bool(records)
        pause_s = _FIRST_WRITE_S if self._behind() else _WRITE_S
        is_time = time.monotonic() - self._written_s > pause_s
        if self.fold.pending > _WRITE_EVENTS or is_time:
            self.write()
            if not self._is_indexed and not self._behind():
                make_indexes(self._connection)
                self._is_indexed = True

    def _behind(self) -> int:
        """Return how many of the records that were there at the start are not read."""
        return sum(max(0, end - self._next[place]) for place, end in self._ends.items())

    def _take(self, place: PartitionId, records: Sequence[Record]) -> None:
        topic, number = place
        config, fold = self._config, self.fold
        if topic == config.marker_topic:
            for record in records:
                fold.marker(number, record)
            self._moved_s[number] = time.monotonic()
        elif topic == config.message_topic:
            fold.messages(number, records)
        elif topic == config.dead_letter_topic:
            for record in records:
                fold.letter(record)
        elif topic == config.ledger_topic:
            for record in records:
                redriven = redriven_place(record.key(), self._letters_id)
                if redriven is not None:
                    fold.redriven(*redriven, record.timestamp()[1])
        else:
            for record in records:
                with suppress(WireError):
                    of, partition = decode_status_key(record.key())
                    if of == config.marker_topic and record.value() is not None:
                        self._statuses[partition] = decode_status(record.value())
        self._next[place] = max(self._next[place], (records[-1].offset() or 0) + 1)

    def _place_again(self) -> None:
        """Go on where the log begins, as retention has passed a position."""
        outside, positions = dict(self._follower.outside), {}
        for place, position in outside.items():
            low, high = self._follower.bounds(place)
            if position > high:
                raise sqlite3.DatabaseError(f"{place[0]}[{place[1]}] was truncated")
            positions[place] = low
            self._next[place] = max(self._next[place], low)
            if place[0] == self._config.marker_topic:
                tracker = RedeliveryTracker(low, partition=place[1])
                self.fold.markers[place[1]] = MarkerLog(tracker, self._next[place])
        _log.warning("records were deleted before they were indexed", extra={"places": positions})
        self._follower.place(positions)

    def write(self) -> None:
        try:
            is_there = self._options.path.stat().st_ino == self._inode
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise sqlite3.DatabaseError("its file was deleted")
        self.fold.write(
            [(*place, offset, self._restart(place)) for place, offset in self._next.items()]
        )
        self._connection.commit()
        # Pages are made again when they can see it.
        self._has_changed |= self._is_unwritten
        self._is_unwritten = False
        self._written_s = time.monotonic()

    # ---- what is too old or too much

    def forget(self) -> None:
        """Delete what is too old, or what is more than there is room for."""
        options, execute = self._options, self._connection.execute
        # So rows of what is deleted do not come later.
        self.write()
        oldest_ms = round(time.time() * 1000) - options.keep_ms
        old = execute(
            "SELECT chunk FROM chunk WHERE last_ms < ? ORDER BY last_ms LIMIT 500", (oldest_ms,)
        ).fetchall()
        if not old and size_bytes(options.path) > options.max_bytes:
            old = execute(
                "SELECT chunk FROM chunk ORDER BY last_ms LIMIT"
                " (SELECT max(1, count(*) / 20) FROM chunk)"
            ).fetchall()
        self.fold.forget_chunks(number for (number,) in old)
        self.fold.forget_letters(options.max_letters)
        execute("DELETE FROM minute WHERE minute < ?", (oldest_ms // 60_000,))
        self.write()
        if old:
            execute("PRAGMA incremental_vacuum")

    # ---- the picture

    def picture(self, shown: Picture) -> Picture | None:
        """Return what is open now, or None when it is too early for another picture."""
        began_s = time.monotonic()
        if began_s - self._pictured_s < self._pause_s:
            return None
        ages_ms = {number: round(1000 * (began_s - at)) for number, at in self._moved_s.items()}
        counts: defaultdict[int, Counts] = defaultdict(Counts)
        runs: list[Run] = []
        for run in open_runs(self.fold, ages_ms):
            counts[run.queue].add(run)
            if len(runs) < MAX_RUNS:
                runs.append(run)
        behind = self._behind()
        made = Picture(
            made_ms=round(time.time() * 1000),
            version=shown.version + int(self._has_changed or bool(shown.error)),
            is_caught_up=self._is_indexed,
            counts=dict(counts),
            runs=tuple(runs),
            is_whole=len(runs) < MAX_RUNS,
            markers=tuple(
                MarkerLag(
                    number,
                    log.tracker.next_offset,
                    log.tracker.clock_ms,
                    log.tracker.open_count(),
                    self._statuses.get(number),
                )
                for number, log in sorted(self.fold.markers.items())
            ),
            read=self._read,
            behind=behind,
            size_bytes=size_bytes(self._options.path),
        )
        self._has_changed = False
        self._pictured_s = time.monotonic()
        self._pause_s = max(_PICTURE_S, 10 * (self._pictured_s - began_s))
        return made


def _topics(config: ServiceConfig) -> dict[str, TopicInfo]:
    """Look up the topics that are followed.

    Raises:
        BrokerError: One of them does not exist.
    """
    names = (
        config.message_topic,
        config.marker_topic,
        config.dead_letter_topic,
        config.ledger_topic,
        config.tracker_topic,
    )
    with Admin(config, timeout_s=15.0) as admin:
        return {name: admin.require_topic(name) for name in names}


def _identity(config: ServiceConfig, topics: dict[str, TopicInfo]) -> str:
    """Name what the index is of: after partitions were added the name is another one."""
    named = [(name, info.topic_id.hex(), info.partitions) for name, info in topics.items()]
    return f"{config.namespace} {named}"
