"""A small log for the demo's verdict: written like the real one, edited by the tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from pyspark.sql import SparkSession

from kafkamq.dev.demo.verdict import HISTORY_SCHEMA
from kafkamq.spark.source.columns import columns_of

T_MS = 4000
BASE_MS = 1_700_000_000_000


@dataclass
class FakeLog:
    """Rows of the three topics and of the workers' history, in one partition of each.

    Several logs, each with a number of its own, make one big log: see ``register``.
    """

    number: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    markers: list[dict[str, Any]] = field(default_factory=list)
    dead_letters: list[dict[str, Any]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)

    def message(
        self,
        identity: str,
        at_ms: int,
        *,
        queue: str = "orders",
        kind: str = "normal",
        count: int = 1,
        origin: int | None = None,
    ) -> int:
        """Appends a copy and returns its offset."""
        offset = len(self.messages)
        self.messages.append(
            {
                "queue_id": queue,
                "id": identity,
                "delivery_count": count,
                "partition": self.number,
                "offset": offset,
                "timestamp": at_ms,
                "value": b"{}",
                "headers": [("demo-kind", kind.encode())],
                "origin_topic": "demo.messages",
                "origin_partition": self.number,
                "origin_offset": offset if origin is None else origin,
                "origin_timestamp": at_ms,
            }
        )
        return offset

    def marker(self, type_: str, at_ms: int, **fields: Any) -> int:
        """Appends a marker and returns its offset."""
        offset = len(self.markers)
        self.markers.append(
            {
                "marker_partition": self.number,
                "marker_offset": offset,
                "timestamp": at_ms,
                "type": type_,
                "of_schedule": False,
                "carried_forward": False,
                "consumer_id": "w1",
                "redeliver_after_ms": 0,
                **fields,
            }
        )
        return offset

    def start(self, place: int, at_ms: int, **fields: Any) -> int:
        return self.marker(
            "START", at_ms, partition=self.number, offset=place, redeliver_after_ms=T_MS, **fields
        )

    def end(self, place: int, outcome: str, at_ms: int, **fields: Any) -> int:
        return self.marker(
            "END", at_ms, partition=self.number, offset=place, outcome=outcome, **fields
        )

    def dead(
        self,
        identity: str,
        at_ms: int,
        *,
        queue: str = "orders",
        reason: str = "max-deliveries",
        error: str = "PoisonError: no",
    ) -> None:
        self.dead_letters.append(
            {
                "queue_id": queue,
                "id": identity,
                "reason": reason,
                "error": error,
                "delivery_count": 3,
                "partition": self.number,
                "offset": len(self.dead_letters),
                "timestamp": at_ms,
            }
        )

    def done(self, identity: str, delivery: int = 1) -> None:
        self.history.append({"op": "end", "id": identity, "attempt": delivery})


def in_batches(log: FakeLog) -> None:
    """The same markers as records with batches; those that follow each other and agree are one."""
    merged: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    for row in log.markers:
        if row["of_schedule"] or row.get("offset") is None:
            merged.append(row)
            continue
        place, offset = row["partition"], row["offset"]
        own = ("partition", "offset", "marker_offset", "timestamp")
        before, facts = facts, {name: each for name, each in row.items() if name not in own}
        if facts == before and merged[-1].get("batches"):
            merged[-1]["batches"][0]["offsets"].append(offset)
        else:
            batch = {"partition": place, "topic_id": "", "leader_epoch": 0, "offsets": [offset]}
            merged.append({**row, "partition": None, "offset": None, "batches": [batch]})
    log.markers = merged


def register(logs: Sequence[FakeLog], spark: SparkSession) -> None:
    """Makes the rows of all logs the views that the verdict reads.

    Ids and queues get the log's number in front, so that one run of the verdict judges all logs.
    """
    for name in ("messages", "markers", "dead_letters"):
        columns = columns_of(name, False)
        names = [column for column, _ in columns]
        rows = [_row(log.number, row, names) for log in logs for row in getattr(log, name)]
        schema = ", ".join(f"{column} {kind}" for column, kind in columns)
        spark.createDataFrame(rows, schema).createOrReplaceTempView(name)
    names = [item.split()[0] for item in HISTORY_SCHEMA.split(", ")]
    rows = [_row(log.number, row, names) for log in logs for row in log.history]
    spark.createDataFrame(rows, HISTORY_SCHEMA).createOrReplaceTempView("history")


def _row(number: int, row: dict[str, Any], columns: list[str]) -> tuple[Any, ...]:
    values = []
    for column in columns:
        value = row.get(column)
        if column in ("id", "queue", "queue_id") and value is not None:
            value = f"{number}/{value}"
        if column in ("timestamp", "origin_timestamp") and value is not None:
            value = datetime.fromtimestamp((BASE_MS + value) / 1000, tz=timezone.utc)
        values.append(value)
    return tuple(values)


def good_log(number: int = 0) -> FakeLog:
    """One of each fate: acked, slow, poison, killed worker, delayed."""
    log = FakeLog(number)
    plain = log.message("plain", 0)
    slow = log.message("slow", 1, kind="slow")
    poison = log.message("poison", 2, kind="poison")
    held = log.message("held", 3, queue="mails")
    later = log.marker("SCHEDULE", 4, redeliver_after_ms=2000, id="later", queue_id="mails")
    log.start(plain, 10)
    log.end(plain, "ACK", 20)
    log.done("plain")
    log.start(slow, 30)
    log.start(poison, 40)
    log.start(held, 50, consumer_id="w2")
    log.end(poison, "NACK", 60, redeliver_after_ms=500, reason="PoisonError: no")
    again = log.message("poison", 1100, kind="poison", count=2, origin=poison)
    log.end(poison, "REDELIVERED", 1100)
    log.marker("KEEPALIVE", 1400, redeliver_after_ms=T_MS)
    log.start(again, 1500)
    log.end(again, "NACK", 1510, redeliver_after_ms=500, reason="PoisonError: no")
    fired = log.message("later", 2304, queue="mails")
    log.end(later, "REDELIVERED", 2304, of_schedule=True)
    log.end(again, "DEAD_LETTERED", 2310)
    log.dead("poison", 2310)
    log.start(fired, 2400)
    log.end(fired, "ACK", 2500)
    log.done("later")
    log.marker("KEEPALIVE", 4100, redeliver_after_ms=T_MS)
    log.marker("TICK", 5000, consumer_id="tracker")
    second = log.message("held", 5200, queue="mails", count=2, origin=held)
    log.end(held, "REDELIVERED", 5200)
    log.start(second, 5300)
    log.end(second, "ACK", 5400)
    log.done("held", 2)
    log.end(slow, "ACK", 6500)
    log.done("slow")
    return log
