"""Attempts of one marker partition are folded here in a worker: for the views `deliveries` and
`in_flight`.

A stream's batch shows what ended in its range, which depends on what was STARTed before it. So the
fold goes on from where it was left: it is kept in the worker's memory, and now and then in a file,
under whose it is and what it is made of (query, log, beginning, next offset). Nothing depends on
finding it: without it the worker goes on from an older one, else it folds again from the beginning,
or from where the log begins by now. What STARTs of batches (R29) and kafka-mq-go's do not say of a
message is read of the message itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kafkamq.config import ServiceConfig
from kafkamq.errors import DeadlineExceededError, KafkaMQError
from kafkamq.markers.rules.attempts import Attempt, Attempts
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.markers.rules.snapshot import restore_tracker, take_snapshot
from kafkamq.markers.tracker.reading import MessageLookup
from kafkamq.queue.wire.headers import read_message_headers
from kafkamq.spark.source.columns import UNKNOWN, decoded
from kafkamq.transport.admin import Admin
from kafkamq.transport.log_reader import END_GRACE_S, LogRange, Patience, log_reader
from kafkamq.transport.record import LOG_APPEND_TIME, headers_of
from kafkamq.types import MessageId, Outcome

_log = logging.getLogger(__name__)
_MAX_BYTES = 16 * 1024 * 1024
_LOOK_S = 0.5
TIMEOUT_S = 120.0
_VERSION = 3
# Attempts at a time; one record may exceed it. Rows take memory.
_MAX_ENDED = 10_000
_UNUSED_S = 7 * 86_400.0
_WRITE_S = 30.0
_SHARE = 20
_MAX_KEPT = 16


@dataclass
class FoldedLog:
    """The attempts of one marker partition from ``begin`` on; one owner thread."""

    config: ServiceConfig
    # The range whose attempts are shown.
    wanted: LogRange
    begin: int
    # Hexadecimal; empty: unknown, then nothing is kept.
    topic_id: str
    # Of Spark; streams of one log do not touch each other's folds.
    query: str = ""
    # Whether records that retention has deleted are passed over.
    skips_lost: bool = False

    def __post_init__(self) -> None:
        wanted, begin, topic_id = self.wanted, self.begin, self.topic_id
        servers, query = self.config.bootstrap_servers, self.query
        place = [_VERSION, servers, wanted.topic, topic_id, wanted.partition, query]
        self._name = f"{hashlib.sha256(json.dumps(place).encode()).hexdigest()[:32]}-{begin}"
        self._chunks: dict[str, bytes] = {}
        self._due_s = 0.0
        self.attempts = self._found() if topic_id and begin < wanted.start else self._fresh(begin)

    def _fresh(self, begin: int) -> Attempts:
        self._chunks = {}
        return Attempts(RedeliveryTracker(begin, partition=self.wanted.partition))

    def _path(self, next_offset: int) -> Path:
        return _folder() / f"{self._name}-{next_offset}.json"

    def _paths(self) -> dict[Path, int]:
        """Return what is kept of it: up to which offset each goes."""
        paths = _folder().glob(f"{self._name}-*.json")
        return {path: int(path.stem.rpartition("-")[2]) for path in paths}

    def _skip_deleted(self) -> None:
        """Begin with the log where retention has deleted what lies before the range."""
        wanted, first = self.wanted, self.attempts.tracker.next_offset
        if first >= wanted.start:
            return
        reader = log_reader(self.config)
        begin = reader.log_starts(wanted.topic, [wanted.partition])[wanted.partition]
        if first < begin <= wanted.start:
            _log.warning(
                "records before a stream's position are deleted: folding begins with the log",
                extra={"topic": wanted.topic, "partition": wanted.partition, "offset": begin},
            )
            self.attempts = self._fresh(begin)

    def ended(self) -> Iterator[list[Attempt]]:
        """Attempts whose END is in the range, by their ENDs, some thousand at a time."""
        self._skip_deleted()
        wanted = self.wanted
        attempts = self.attempts
        first = attempts.tracker.next_offset
        whole = LogRange(wanted.topic, wanted.partition, first, wanted.end)
        found: list[Attempt] = []
        for records in log_reader(self.config).read(whole, skips_lost=self.skips_lost):
            for record in records:
                kind, timestamp_ms = record.timestamp()
                # The view `markers` shows what is none.
                marker, _ = decoded(record)
                log_time_ms = timestamp_ms if kind == LOG_APPEND_TIME else -1
                attempts.apply(record.offset(), timestamp_ms, log_time_ms, marker)
                ended = attempts.take_ended()
                if record.offset() >= wanted.start:
                    found += ended
                if len(found) >= _MAX_ENDED:
                    yield found
                    found = []
        if found:
            yield found
        attempts.tracker.next_offset = max(attempts.tracker.next_offset, wanted.end)

    # ---- kept between batches

    def keep(self) -> None:
        """Keep the fold for the batch that goes on from here; a failure only costs time.

        In the process's memory, and now and then in a file: another process, or a batch that is
        repeated, goes on from there, and reads what has come since.
        """
        if not self.topic_id:
            return
        began_s = time.monotonic()
        if began_s >= self._due_s:
            self._write()
            ended_s = time.monotonic()
            self._due_s = ended_s + max(_WRITE_S, _SHARE * (ended_s - began_s))
        with suppress(OSError):
            _kept[self._path(0)] = self.attempts, self._chunks, self._due_s
        while len(_kept) > _MAX_KEPT:
            del _kept[next(iter(_kept))]

    def _write(self) -> None:
        attempts = self.attempts
        snapshot = take_snapshot(attempts.tracker)
        self._chunks.update(snapshot.changed)
        for name in snapshot.removed:
            self._chunks.pop(name, None)
        state = {
            "index": snapshot.index.decode(),
            "chunks": self._chunks,
            "attempts": [asdict(each) for each in attempts.attempts.values()],
            "schedules": [asdict(each) for each in attempts.schedules.values()],
        }
        try:
            path = self._path(self.wanted.end)
            draft = path.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(state, default=_dump))
            draft.replace(path)
            self._forget(path)
        except OSError as error:
            _log.info("a fold could not be kept", extra={"error": str(error)})

    def _forget(self, newest: Path) -> None:
        """Delete what no batch will ask for, and what ended queries have left."""
        older = [(upto, path) for path, upto in self._paths().items() if upto <= self.wanted.start]
        # The last one serves a batch that is repeated.
        for _, path in sorted(older)[:-1]:
            path.unlink(missing_ok=True)
        long_ago_s = time.time() - _UNUSED_S
        for path in newest.parent.glob("*.json"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < long_ago_s:
                    path.unlink()

    def _found(self) -> Attempts:
        """Return the newest that does not go beyond the range's beginning."""
        try:
            remembered = _kept.pop(self._path(0), None)
            if remembered and remembered[0].tracker.next_offset <= self.wanted.start:
                attempts, self._chunks, self._due_s = remembered
                return attempts
            kept = self._paths()
            useful = [path for path, upto in kept.items() if upto <= self.wanted.start]
            if not useful:
                return self._fresh(self.begin)
            text = max(useful, key=kept.__getitem__).read_text()
            state = json.loads(text, object_hook=_load)
            self._chunks = state["chunks"]
            attempts = Attempts(
                restore_tracker(
                    state["index"].encode(),
                    self._chunks.__getitem__,
                    partition=self.wanted.partition,
                )
            )
            self._due_s = time.monotonic() + _WRITE_S
            for into, kind in ((attempts.attempts, "attempts"), (attempts.schedules, "schedules")):
                into |= {each.message_id: each for each in map(_attempt, state[kind])}
        except FileNotFoundError:
            return self._fresh(self.begin)
        except (OSError, ValueError, KeyError, TypeError, KafkaMQError) as error:
            _log.info("a fold that was kept cannot be used", extra={"error": str(error)})
            return self._fresh(self.begin)
        return attempts


_kept: dict[Path, tuple[Attempts, dict[str, bytes], float]] = {}
"""Of this process, by what would be the name of a file: the fold, and when one is due."""


def _folder() -> Path:
    """Return a folder of this user's alone."""
    folder = Path(tempfile.gettempdir()) / f"kafkamq-folds-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to somebody else")
    return folder


def _dump(data: bytes) -> dict[str, str]:
    return {"bytes": base64.b64encode(data).decode("ascii")}


def _load(found: dict[str, Any]) -> Any:
    return base64.b64decode(found["bytes"]) if found.keys() == {"bytes"} else found


def _attempt(dumped: dict[str, Any]) -> Attempt:
    outcome = dumped["outcome"]
    read = {
        "message_id": MessageId(**dumped["message_id"]),
        "headers": tuple((name, value) for name, value in dumped["headers"]),
        "outcome": None if outcome is None else Outcome(outcome),
    }
    return Attempt(**{**dumped, **read})


class MessageFacts:
    """Reads messages again in a task; one owner thread. Nothing is opened before it is needed.

    Of a message that is gone nothing is known: its attempt's ``delivery_count`` is ``UNKNOWN``.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._config = config
        self._lookup: MessageLookup | None = None

    def put_into(self, attempts: Sequence[Attempt]) -> None:
        """Key, headers, delivery count and time of those messages that are still there.

        Raises:
            BrokerError, DeadlineExceededError: They cannot be read.
        """
        try:
            bare = [each for each in attempts if not each.headers and not each.message_timestamp_ms]
            self._read(bare)
        except BaseException:
            # The next task of this process has another client.
            self.close()
            raise

    def _read(self, bare: list[Attempt]) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while bare:
            if self._lookup is None:
                self._admin = Admin(self._config, timeout_s=10.0)
                self._lookup = MessageLookup(self._config, Patience(END_GRACE_S), self._admin)
            spans = [(each.message_id, 1) for each in bare]
            read = self._lookup.read(spans, deadline_s=deadline_s, max_bytes=_MAX_BYTES)
            awaited = []
            for attempt, (records, is_awaited) in zip(bare, read, strict=False):
                if is_awaited:
                    awaited.append(attempt)
                elif (message := records[0]) is not None:
                    attempt.key = message.key() or b""
                    attempt.headers = headers_of(message)
                    attempt.delivery_count = read_message_headers(attempt.headers).delivery_count
                    attempt.message_timestamp_ms = message.timestamp()[1]
                elif attempt.delivery_count:
                    attempt.delivery_count = UNKNOWN
            bare = awaited + bare[len(read) :]
            if awaited and time.monotonic() + _LOOK_S > deadline_s:
                raise DeadlineExceededError(f"{len(bare)} messages could not be read again in time")
            if awaited:
                time.sleep(_LOOK_S)

    def close(self) -> None:
        """End the clients; idempotent."""
        if self._lookup is not None:
            self._lookup.close()
            self._admin.close()
            self._lookup = None
