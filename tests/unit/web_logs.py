"""Records as confluent-kafka gives them, and an index of them without a broker."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import Message

from kafkamq.config import ServiceConfig
from kafkamq.markers.rules.redelivery import RedeliveryTracker
from kafkamq.transport.record import LOG_APPEND_TIME
from kafkamq.web.index.fold import Fold, MarkerLog
from kafkamq.web.index.packs import Pack, unpack_events
from kafkamq.web.index.schema import open_index

CONFIG = ServiceConfig(bootstrap_servers="nowhere:1", namespace="ns")


@dataclass
class FakeRecord:
    """One record of a log."""

    at: int
    stored_key: bytes | None = None
    stored_value: bytes | None = None
    stored_headers: Sequence[tuple[str, bytes | None]] = ()
    at_ms: int = 1_700_000_000_000
    number: int = 0
    kind: int = LOG_APPEND_TIME
    topic_name: str = field(default="")

    def topic(self) -> str:
        return self.topic_name

    def partition(self) -> int:
        return self.number

    def offset(self) -> int:
        return self.at

    def key(self) -> bytes | None:
        return self.stored_key

    def value(self) -> bytes | None:
        return self.stored_value

    def headers(self) -> Any:
        return list(self.stored_headers)

    def set_headers(self, value: Any) -> None:
        self.stored_headers = value

    def timestamp(self) -> tuple[int, int]:
        return self.kind, self.at_ms

    def as_consumed(self) -> Message:
        """Return the record as the client has it."""
        return Message(
            offset=self.at,
            key=self.stored_key,
            headers=list(self.stored_headers),
            timestamp=(self.kind, self.at_ms),
        )


class Logs:
    """An index that a test feeds."""

    def __init__(self, path: Path, identity: str = "one") -> None:
        self.path = path
        self.connection = open_index(path, identity)
        self.fold = Fold(self.connection, CONFIG)
        for partition, (next_offset, restart) in self.positions().items():
            self._follow(partition, next_offset, restart)

    def _follow(self, partition: int, next_offset: int, restart: int) -> None:
        tracker = RedeliveryTracker(restart, partition=partition)
        self.fold.markers[partition] = MarkerLog(tracker, next_offset)

    def positions(self) -> dict[int, tuple[int, int]]:
        return {
            number: (next_offset, restart)
            for number, next_offset, restart in self.connection.execute(
                "SELECT number, next, restart FROM position"
            )
        }

    def messages(self, *records: FakeRecord) -> None:
        self.fold.messages(records[0].number, [each.as_consumed() for each in records])

    def marker(self, record: FakeRecord) -> None:
        if record.number not in self.fold.markers:
            self._follow(record.number, record.at, record.at)
        self.fold.marker(record.number, record)  # type: ignore[arg-type]

    def letter(self, record: FakeRecord) -> None:
        self.fold.letter(record)  # type: ignore[arg-type]

    def commit(self) -> None:
        logs = self.fold.markers.items()
        self.fold.write(
            [
                ("ns.markers", n, log.next_offset, log.tracker.committable_offset())
                for n, log in logs
            ]
        )
        self.connection.commit()

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        """The rows of a table; those of packs and events as they were before they were packed."""
        rows = self.connection.execute(f"SELECT * FROM {table}").fetchall()
        if table == "pack":
            rows = [
                row
                for pack in (Pack(*each) for each in rows)
                for row in zip(
                    pack.places(),
                    pack.queues,
                    pack.times,
                    pack.ids,
                    pack.keys,
                    pack.headers,
                    strict=False,
                )
            ]
        elif table == "event":
            rows = [(chunk, *e) for _, chunk, data in rows for e in unpack_events(data)]
        return sorted(rows, key=repr)

    def close(self) -> None:
        self.connection.close()


def is_whole(path: Path) -> bool:
    with sqlite3.connect(path) as connection:
        return bool(connection.execute("PRAGMA integrity_check").fetchone() == ("ok",))
