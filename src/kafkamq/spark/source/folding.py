"""Attempts of one marker partition, folded in a worker: for the views `deliveries` and `in_flight`.

A stream's batch shows what ended in its range, which depends on what was STARTed before it. So the
fold goes on from where it was left: it is kept in the worker's memory, so that a batch costs what
it reads and not what is open, and now and then in a file, under whose it is and what it is made of
(query, log, beginning, next offset). Nothing depends on finding it: without it the worker goes on
from an older one (another executor had the batches between), else it folds again from the
beginning, with the same result; where retention has deleted the beginning, from where the log
begins, which lacks only what was STARTed longer ago than the retention.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kafkamq.config import ServiceConfig
from kafkamq.errors import KafkaMQError, UnsupportedVersionError, WireError
from kafkamq.markers.rules.attempts import Attempt, Attempts
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.markers.rules.snapshot import restore_tracker, take_snapshot
from kafkamq.markers.wire.markers import decode_marker
from kafkamq.transport.log_reader import LogRange, log_reader
from kafkamq.transport.record import LOG_APPEND_TIME
from kafkamq.types import MessageId, Outcome

_log = logging.getLogger(__name__)
_VERSION = 2
_MAX_ENDED = 10_000  # attempts at a time; one record may exceed it. Rows take memory
_UNUSED_S = 7 * 86_400.0  # a stream that stood still for so long folds again
_WRITE_S = 30.0  # between two files of a fold, at least: each has all that is open
_SHARE = 20  # ... and so many times as long as one takes
_MAX_KEPT = 16  # folds in a process's memory


@dataclass(frozen=True, slots=True)
class _Place:
    """Which log, and where folding began."""

    servers: str
    topic: str
    topic_id: str  # hexadecimal; empty: unknown, then nothing is kept
    partition: int
    begin: int
    query: str  # of Spark; streams of one log do not touch each other's folds

    def name(self) -> str:
        place = [_VERSION, self.servers, self.topic, self.topic_id, self.partition, self.query]
        return f"{hashlib.sha256(json.dumps(place).encode()).hexdigest()[:32]}-{self.begin}"

    def path(self, next_offset: int) -> Path:
        return _folder() / f"{self.name()}-{next_offset}.json"

    def kept(self) -> dict[Path, int]:
        """What is kept of it: up to which offset each goes."""
        paths = _folder().glob(f"{self.name()}-*.json")
        return {path: int(path.stem.rpartition("-")[2]) for path in paths}


class FoldedLog:
    """The attempts of one marker partition from ``begin`` on; one owner thread."""

    def __init__(
        self,
        config: ServiceConfig,
        wanted: LogRange,
        *,
        begin: int,
        topic_id: str,
        query: str = "",
        skips_lost: bool = False,
    ) -> None:
        self._config = config
        self._skips_lost = skips_lost
        self._wanted = wanted
        self._place = _Place(
            config.bootstrap_servers, wanted.topic, topic_id, wanted.partition, begin, query
        )
        self._chunks: dict[str, bytes] = {}
        self._due_s = 0.0  # monotonic; when a file is due
        self.attempts = self._found() if topic_id and begin < wanted.start else self._fresh()

    def _fresh(self, begin: int | None = None) -> Attempts:
        self._chunks = {}
        place = self._place
        first = place.begin if begin is None else begin
        return Attempts(RedeliveryTracker(first, partition=place.partition))

    def _skip_deleted(self) -> None:
        """Begin with the log where retention has deleted what lies before the range."""
        wanted, first = self._wanted, self.attempts.tracker.next_offset
        if first >= wanted.start:
            return
        reader = log_reader(self._config)
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
        wanted = self._wanted
        attempts = self.attempts
        first = attempts.tracker.next_offset
        whole = LogRange(wanted.topic, wanted.partition, first, wanted.end)
        found: list[Attempt] = []
        for records in log_reader(self._config).read(whole, skips_lost=self._skips_lost):
            for record in records:
                kind, timestamp_ms = record.timestamp()
                try:
                    marker = decode_marker(
                        record.value(),
                        topic=wanted.topic,
                        partition=wanted.partition,
                        offset=record.offset(),
                    )
                except UnsupportedVersionError:
                    raise
                except WireError:
                    marker = None  # the view `markers` shows it
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
        if not self._place.topic_id:
            return
        began_s = time.monotonic()
        if began_s >= self._due_s:
            self._write()
            ended_s = time.monotonic()
            self._due_s = ended_s + max(_WRITE_S, _SHARE * (ended_s - began_s))
        with suppress(OSError):
            _kept[self._place.path(0)] = self.attempts, self._chunks, self._due_s
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
            "chunks": {name: _text(data) for name, data in self._chunks.items()},
            "attempts": [_dump(each) for each in attempts.attempts.values()],
            "schedules": [_dump(each) for each in attempts.schedules.values()],
        }
        try:
            path = self._place.path(self._wanted.end)
            draft = path.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(state))
            draft.replace(path)
            self._forget(path)
        except OSError as error:
            _log.info("a fold could not be kept", extra={"error": str(error)})

    def _forget(self, newest: Path) -> None:
        """Delete what no batch will ask for, and what ended queries have left."""
        older = [
            (upto, path) for path, upto in self._place.kept().items() if upto <= self._wanted.start
        ]
        for _, path in sorted(older)[:-1]:  # the last one serves a batch that is repeated
            path.unlink(missing_ok=True)
        long_ago_s = time.time() - _UNUSED_S
        for path in newest.parent.glob("*.json"):
            with suppress(FileNotFoundError):  # its owner was quicker
                if path.stat().st_mtime < long_ago_s:
                    path.unlink()

    def _found(self) -> Attempts:
        """The newest that does not go beyond the range's beginning."""
        try:
            remembered = _kept.pop(self._place.path(0), None)  # until this batch is done
            if remembered and remembered[0].tracker.next_offset <= self._wanted.start:
                attempts, self._chunks, self._due_s = remembered
                return attempts
            kept = self._place.kept()
            useful = [path for path, upto in kept.items() if upto <= self._wanted.start]
            if not useful:
                return self._fresh()
            state = json.loads(max(useful, key=kept.__getitem__).read_text())
            self._chunks = {name: _bytes(text) for name, text in state["chunks"].items()}
            tracker = restore_tracker(
                state["index"].encode(),
                self._chunks.__getitem__,
                partition=self._place.partition,
            )
            attempts = Attempts(tracker)
            self._due_s = time.monotonic() + _WRITE_S
            for into, kind in ((attempts.attempts, "attempts"), (attempts.schedules, "schedules")):
                for dumped in state[kind]:
                    attempt = _load(dumped)
                    into[attempt.message_id] = attempt
        except FileNotFoundError:
            return self._fresh()
        except (OSError, ValueError, KeyError, TypeError, KafkaMQError) as error:
            _log.info("a fold that was kept cannot be used", extra={"error": str(error)})
            return self._fresh()
        return attempts


_kept: dict[Path, tuple[Attempts, dict[str, bytes], float]] = {}
"""Of this process, by what would be the name of a file: the fold, and when one is due."""


def _folder() -> Path:
    """A folder of this user's alone."""
    folder = Path(tempfile.gettempdir()) / f"kafkamq-folds-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to somebody else")
    return folder


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _dump(attempt: Attempt) -> dict[str, Any]:
    one = attempt.message_id
    return asdict(attempt) | {
        "message_id": [one.partition, one.offset, one.topic_id.hex(), one.leader_epoch],
        "key": _text(attempt.key),
        "headers": [
            [name, None if value is None else _text(value)] for name, value in attempt.headers
        ],
    }


_NAMES = {each.name for each in fields(Attempt)}


def _load(dumped: dict[str, Any]) -> Attempt:
    partition, offset, topic_id, leader_epoch = dumped["message_id"]
    outcome = dumped["outcome"]
    values = {name: value for name, value in dumped.items() if name in _NAMES}
    return Attempt(
        **values
        | {
            "message_id": MessageId(partition, offset, bytes.fromhex(topic_id), leader_epoch),
            "key": _bytes(dumped["key"]),
            "headers": tuple(
                (name, None if value is None else _bytes(value))
                for name, value in dumped["headers"]
            ),
            "outcome": None if outcome is None else Outcome(outcome),
        }
    )
