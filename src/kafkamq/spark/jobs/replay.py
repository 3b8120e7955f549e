"""Replay: messages that SQL chooses are sent again, each once, under their own ids.

A replay has a name. What it has sent is counted in a ledger under that name, in the same
transactions as the copies; so one that was killed goes on where it stopped when it is run again,
and sends nothing twice. Kafka drops the offset in which it is counted after a week
(``offsets.retention.minutes``), so a record of the ledger topic, which keeps all, says the same.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError, StateError
from kafkamq.markers.tracker.ledger import Ledger, LedgerKey
from kafkamq.markers.wire.records import Position, decode_position, encode_position
from kafkamq.queue.dead_letters import REPLAY_NAME, REPLAYED_FROM
from kafkamq.queue.wire.headers import Origin, message_headers
from kafkamq.queue.wire.keys import join_key, key_partition
from kafkamq.spark.jobs.sql import sql_errors
from kafkamq.transport.admin import Admin
from kafkamq.transport.errors import OutcomeUnknownError, TransactionAbortedError
from kafkamq.transport.log_reader import scan
from kafkamq.transport.transactions import NewRecord

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row, SparkSession

MAX_TRANSACTION_RECORDS = 1000
MAX_TRANSACTION_BYTES = 4 * 1024 * 1024
MAX_ATTEMPTS = 5
_COLUMNS = (
    "queue_id", "id", "user_key", "value", "headers", "ttl_ms", "partition", "offset",
    "unix_millis(timestamp) AS timestamp_ms",
)  # fmt: skip
_FIRST_COPY = (
    "row_number() OVER (PARTITION BY origin_topic, origin_partition, origin_offset "
    "ORDER BY timestamp, partition, offset)"
)


@dataclass(frozen=True, kw_only=True)
class Replay:
    name: str
    where: str = "true"
    # The broker's time of the copies, half-open; None: until now.
    from_ms: int = 0
    to_ms: int | None = None
    # A queue id; empty: each message's own.
    into: str = ""
    # Messages per second; None: as fast as it goes.
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ConfigError(
                f"rate is {self.rate!r}: it must be a finite number of messages per second, > 0"
            )
        if not self.name or len(self.name) > 100 or not self.name.isprintable():
            raise ConfigError(f"name is {self.name!r}: it must be 1 to 100 printable characters")
        if self.into:
            join_key(self.into)

    @property
    def digest(self) -> str:
        """Return a digest of everything that decides what is sent."""
        text = repr((self.where, self.from_ms, self.into))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(slots=True)
class ReplayReport:
    name: str
    to_ms: int
    selected: int = 0
    sent: int = 0
    sent_before: int = 0


def replay(
    spark: SparkSession,
    config: ServiceConfig,
    wanted: Replay,
    *,
    dry_run: bool = False,
    on_progress: Callable[[int], None] = lambda _: None,
) -> ReplayReport:
    """Send the chosen messages again; of the copies of one message the first that is chosen.

    The session has the namespace's views as tables; ``on_progress`` hears how many were sent.

    A copy starts again, with its first delivery and its whole ttl; id, key, payload and the
    sender's headers stay. Order: by broker time.

    Raises:
        ConfigError: The condition is wrong, or the name belongs to another replay.
        StateError: The same condition chooses other messages than when the name was used.
        FencedError: Another run of the same name has started.
    """
    now_ms = int(time.time() * 1000)
    report = ReplayReport(wanted.name, wanted.to_ms or now_ms)
    if dry_run:
        with sql_errors("--where"):
            report.selected = _selection(spark, wanted, report.to_ms).count()
        return report
    writer = _Writer(config, wanted, report)
    try:
        writer.open()
        with sql_errors("--where"):
            rows = _selection(spark, wanted, report.to_ms)
            rows = rows.orderBy("timestamp", "partition", "offset").selectExpr(*_COLUMNS)
            for row in rows.toLocalIterator(prefetchPartitions=True):
                writer.add(row)
                on_progress(report.sent)
        writer.flush()
        on_progress(report.sent)
        return report
    finally:
        writer.close()


def _selection(spark: SparkSession, wanted: Replay, to_ms: int) -> DataFrame:
    from pyspark.sql import functions as fn

    def is_own(header: Column) -> Column:
        name = fn.lit(wanted.name.encode())
        return (header["key"] == REPLAY_NAME) & (header["value"] == name)

    chosen = (
        spark.table("messages")
        .where(f"timestamp >= timestamp_millis({wanted.from_ms})")
        .where(f"timestamp < timestamp_millis({to_ms})")
        .where(wanted.where)
        # Its own copies are older than `to_ms` where the broker's clock is behind this machine's.
        .where(~fn.coalesce(fn.exists("headers", is_own), fn.lit(False)))
    )
    return chosen.withColumn("_copy", fn.expr(_FIRST_COPY)).where("_copy = 1").drop("_copy")


class _Writer:
    def __init__(self, config: ServiceConfig, wanted: Replay, report: ReplayReport) -> None:
        self._config = config
        self._wanted = wanted
        self._report = report
        key = LedgerKey(
            f"kafkamq.{config.message_topic}.replay.{wanted.name}", config.ledger_topic, 0
        )
        self._ledger = Ledger(config, key, engine=wanted.name, epoch=1)
        with Admin(config) as admin:
            self._partitions = admin.require_topic(config.message_topic).partitions
            self._count_key = b"kafkamq-replay\0" + wanted.name.encode()
            ledgers = admin.require_topic(config.ledger_topic).partitions
        self._count_partition = key_partition(self._count_key, ledgers)
        # A second's worth in a transaction, if the rate is bounded.
        self._size = MAX_TRANSACTION_RECORDS
        if wanted.rate is not None:
            self._size = min(self._size, max(1, math.floor(wanted.rate)))
        self._skipped = 0
        self._places = 0
        self._expected = 0
        self._pending: list[NewRecord] = []
        self._bytes = 0
        self._begin_s = 0.0

    def open(self) -> None:
        """Fence an earlier run, and learn what it has sent."""
        last = self._ledger.open() or self._kept()
        self._begin_s = time.monotonic()
        if last is None or not last.rows_done:
            return
        digest, _, places = last.source_hash.partition(" ")
        if digest != self._wanted.digest or self._wanted.to_ms not in (None, last.batch):
            raise ConfigError(
                f"--name {self._wanted.name}: another replay (other --where, --from, --to or "
                "--into) has this name; choose another one"
            )
        self._report.sent_before = last.rows_done
        self._report.to_ms = last.batch
        self._expected = int(places, 16)

    def _kept(self) -> Position | None:
        """Return what the ledger topic says, where Kafka has dropped the offset; None: nothing was
        sent.

        It is read to the end of all that was written: whose transaction is open there is waited
        for, as none of this replay's is any more.
        """
        topic, number = self._config.ledger_topic, self._count_partition
        with Admin(self._config) as admin:
            first, _ = admin.log_bounds(topic, [number])[number]
            _, end = admin.log_ends(topic)[number]
        values = (
            record.value()
            for record in scan(self._config, topic, {number: first}, ends={number: end})
            if record.key() == self._count_key
        )
        last = deque(values, maxlen=1)
        return decode_position(last[0].decode()) if last and last[0] else None

    def add(self, row: Row) -> None:
        report = self._report
        report.selected += 1
        self._places = zlib.crc32(b"%d/%d" % (row["partition"], row["offset"]), self._places)
        if self._skipped < report.sent_before:
            self._skipped += 1
            if self._skipped == report.sent_before:
                self._check()
            return
        record = self._record(row.asDict())
        self._pending.append(record)
        self._bytes += len(record[3] or b"") + 256
        if len(self._pending) >= self._size or self._bytes >= MAX_TRANSACTION_BYTES:
            self.flush(is_last=False)

    def _check(self) -> None:
        if self._places != self._expected:
            raise StateError(
                f"replay {self._wanted.name} had sent {self._report.sent_before} messages, and the "
                "same condition does not choose the same ones first any more (messages were "
                "deleted, or the condition depends on what happened since); nothing was sent. "
                "Choose what is missing under another --name"
            )

    def _record(self, row: dict[str, Any]) -> NewRecord:
        config = self._config
        key = join_key(self._wanted.into or row["queue_id"], row["user_key"])
        place = Origin(config.message_topic, row["partition"], row["offset"], row["timestamp_ms"])
        user = [(each["key"], each["value"]) for each in row["headers"] or ()]
        headers = message_headers(
            [header for header in user if header[0] not in (REPLAYED_FROM, REPLAY_NAME)],
            id=row["id"] or "",
            ttl_ms=row["ttl_ms"],
        )
        partition = key_partition(key, self._partitions)
        if row["user_key"] is None:
            partition = random.randrange(self._partitions)
        ours = (REPLAYED_FROM, place.encode()), (REPLAY_NAME, self._wanted.name.encode())
        return config.message_topic, partition, key, row["value"], (*headers, *ours)

    def flush(self, *, is_last: bool = True) -> None:
        if is_last and self._skipped < self._report.sent_before:
            self._check()
        pending, self._pending, self._bytes = self._pending, [], 0
        if not pending:
            return
        if self._wanted.rate is not None:
            due_s = self._begin_s + (self._report.sent + len(pending)) / self._wanted.rate
            time.sleep(max(0.0, due_s - time.monotonic()))
        done = self._report.sent_before + self._report.sent + len(pending)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                self._commit(pending, done)
                break
            except (OutcomeUnknownError, TransactionAbortedError):
                if attempt == MAX_ATTEMPTS:
                    raise
                last = self._ledger.open()
                if last is not None and last.rows_done == done:
                    break
        self._report.sent += len(pending)

    def _commit(self, pending: Sequence[NewRecord], done: int) -> None:
        ledger = self._ledger
        hashed = f"{self._wanted.digest} {self._places:08x}"
        position = Position(
            position=done, epoch=ledger.epoch, batch=self._report.to_ms, rows_done=done,
            source_hash=hashed, engine=ledger.engine,
        )  # fmt: skip
        value = encode_position(position).encode()
        place = (self._config.ledger_topic, self._count_partition)
        ledger.begin()
        try:
            ledger.producer.produce_records([*pending, (*place, self._count_key, value, ())])
            ledger.commit(done, batch=position.batch, rows_done=done, source_hash=hashed)
        except BaseException:
            ledger.abort()
            raise

    def close(self) -> None:
        self._ledger.close()
