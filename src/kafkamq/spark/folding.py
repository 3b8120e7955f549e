"""Attempts of one marker partition, folded in a worker: for the views `deliveries` and `in_flight`.

A stream's batch shows what ended in its range, which depends on what was STARTed before it. So the
fold goes on from where it was left: it is kept, in memory and in a file, under what it is made of
(log, beginning, next offset). Nothing depends on finding it: without it the worker folds again from
the beginning, with the same result.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME

from kafkamq.config import ServiceConfig
from kafkamq.core.attempts import Attempt, Attempts
from kafkamq.core.redelivery import RedeliveryTracker
from kafkamq.core.snapshot import restore_tracker, take_snapshot
from kafkamq.errors import KafkaMQError, UnsupportedVersionError, WireError
from kafkamq.spark.reading import LogRange, log_reader
from kafkamq.types import MessageId, Outcome
from kafkamq.wire.markers import decode_marker

__all__ = ["FoldedLog"]

_log = logging.getLogger(__name__)
_VERSION = 1


@dataclass(frozen=True, slots=True)
class _Place:
    """Which log, and where folding began."""

    servers: str
    topic: str
    topic_id: str  # hexadecimal; empty: unknown, then nothing is kept
    partition: int
    begin: int

    def path(self, next_offset: int) -> Path:
        text = json.dumps([_VERSION, self.servers, self.topic, self.topic_id, self.partition])
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        return _folder() / f"{name}-{self.begin}-{next_offset}.json"


class FoldedLog:
    """The attempts of one marker partition from ``begin`` on; one owner thread."""

    def __init__(
        self,
        config: ServiceConfig,
        wanted: LogRange,
        *,
        begin: int,
        topic_id: str,
        skips_lost: bool = False,
    ) -> None:
        self._config = config
        self._skips_lost = skips_lost
        self._wanted = wanted
        self._place = _Place(
            config.bootstrap_servers, wanted.topic, topic_id, wanted.partition, begin
        )
        self._chunks: dict[str, bytes] = {}
        self.attempts = self._found() if topic_id and begin < wanted.start else self._fresh()

    def _fresh(self) -> Attempts:
        self._chunks = {}
        place = self._place
        return Attempts(RedeliveryTracker(place.begin, partition=place.partition))

    def ended(self) -> Iterator[list[Attempt]]:
        """Attempts whose END is in the range, in the order of their ENDs."""
        wanted = self._wanted
        attempts = self.attempts
        first = attempts.tracker.next_offset
        whole = LogRange(wanted.topic, wanted.partition, first, wanted.end)
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
                log_time_ms = timestamp_ms if kind == TIMESTAMP_LOG_APPEND_TIME else -1
                attempts.apply(record.offset(), timestamp_ms, log_time_ms, marker)
            found = [each for each in attempts.take_ended() if each.end_offset >= wanted.start]
            if found:
                yield found
        attempts.tracker.next_offset = max(attempts.tracker.next_offset, wanted.end)

    # ---- kept between batches

    def keep(self) -> None:
        """Keep the fold for the batch that goes on from here; a failure only costs time."""
        if not self._place.topic_id:
            return
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
        path = self._place.path(self._wanted.end)
        draft = path.with_suffix(f".{os.getpid()}")
        try:
            draft.write_text(json.dumps(state))
            draft.replace(path)
            before = self._place.path(self._wanted.start)
            older = sorted(
                path.parent.glob(f"{path.name.split('-')[0]}-{self._place.begin}-*.json")
            )
            for each in older:  # the one before serves a batch that is repeated
                if each not in (path, before):
                    each.unlink(missing_ok=True)
        except OSError as error:
            _log.info("a fold could not be kept", extra={"said": str(error)})

    def _found(self) -> Attempts:
        try:
            state = json.loads(self._place.path(self._wanted.start).read_text())
            self._chunks = {name: _bytes(text) for name, text in state["chunks"].items()}
            tracker = restore_tracker(
                state["index"].encode(),
                self._chunks.__getitem__,
                partition=self._place.partition,
            )
            attempts = Attempts(tracker)
            for into, kind in ((attempts.attempts, "attempts"), (attempts.schedules, "schedules")):
                for dumped in state[kind]:
                    attempt = _load(dumped)
                    into[attempt.message_id] = attempt
        except FileNotFoundError:
            return self._fresh()
        except (OSError, ValueError, KeyError, TypeError, KafkaMQError) as error:
            _log.info("a fold that was kept cannot be used", extra={"said": str(error)})
            return self._fresh()
        return attempts


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
