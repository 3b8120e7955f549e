"""The tracker's sink: performs what the fold asked for, once per batch and marker partition.

A task writes whole rows of ``FOLDED_COLUMNS``: copies, dead letters, ENDs and position of a marker
partition are one transaction (or several with a count of rows done, R16), whose ledger tells which
batch it was (R15, R22). So a batch that Spark repeats is not written twice, whoever repeats it.
Which process of a machine does it for a partition: ``owning.py``.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.errors import KafkaMQError, StateError
from kafkamq.markers.rules.delivery import Carry, Settle
from kafkamq.markers.tracker.ledger import Ledger
from kafkamq.markers.tracker.settlement import Settler
from kafkamq.markers.tracker.ticker import Ticker
from kafkamq.markers.wire.status import decode_status
from kafkamq.spark.batches import current_batch
from kafkamq.spark.blocks import decode_actions
from kafkamq.spark.daemon import POOL, SETTLING, calm_worker
from kafkamq.spark.tracker.lateness import lateness_text
from kafkamq.spark.tracker.owners import Owners
from kafkamq.spark.tracker.partition_ledgers import PartitionLedgers

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

__all__ = ["SettleSettings", "register_settling"]

_log = logging.getLogger(__name__)
_UNUSED_S = 600.0  # a tracker that has no batch for so long may have ended: its clients are dropped
_STATUS_TIMEOUT_MS = 120_000  # nobody polls between batches: the client itself tries that long


@dataclass(frozen=True, kw_only=True)
class SettleSettings:
    """What the driver tells the workers when a query starts; travels inside the pickled class."""

    config: ServiceConfig
    tracker: TrackerConfig
    engine: str
    epoch: int
    slots: int  # processes that share the partitions of a machine


def register_settling(spark: SparkSession, settings: SettleSettings, *, name: str) -> str:
    """Make the sink known to a session as ``format(name)``; returns the name."""
    given, format_name = settings, name

    class RegisteredSettling(_Settling):
        settings = given

        @classmethod
        def name(cls) -> str:
            return format_name

    environment = spark.sparkContext.environment
    before = dict(environment)
    # Workers of another environment are other processes. Spark hands idle ones out in turn; shared
    # with the other steps, a partition's producer would be in another process at each batch, and
    # each one would have to fence the last.
    environment[POOL] = SETTLING
    try:
        spark.dataSource.register(RegisteredSettling)
    finally:
        environment.clear()
        environment.update(before)
    return name


class _Settling(DataSource):
    settings: ClassVar[SettleSettings]

    def streamWriter(  # noqa: N802 - Spark's
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """For ``df.writeStream``."""
        return _SettlingWriter(self.settings)


@dataclass
class _Settled(WriterCommitMessage):
    """What a task did."""

    actions: int


class _SettlingWriter(DataSourceStreamArrowWriter):
    def __init__(self, settings: SettleSettings) -> None:
        self._settings = settings

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a worker: settle the rows of this task."""
        calm_worker()
        batch = current_batch()
        worker = _worker(self._settings)
        done = 0
        for rows in iterator:
            for row in rows.to_pylist():
                done += worker.settle(row, batch)
        return _Settled(done)


class _Worker:
    """What a worker process keeps between batches."""

    def __init__(self, settings: SettleSettings) -> None:
        # Engines that take over from each other fence each other.
        logging.getLogger("kafkamq.librdkafka").setLevel(logging.ERROR)
        self.start = (settings.engine, settings.epoch)
        self.used_s = 0.0  # monotonic; when it was asked for last
        self._slots = settings.slots
        ticker = Ticker(settings.config, timeout_ms=_STATUS_TIMEOUT_MS)
        self._ledgers = PartitionLedgers(
            settings.config, engine=settings.engine, epoch=settings.epoch
        )
        self._desks = defaultdict[int, _Desk](partial(_Desk, settings, ticker, self._ledgers))
        self._owners = Owners(f"{settings.engine}/{settings.epoch}", self._perform)

    def settle(self, row: dict[str, object], batch: int) -> int:
        """Have one row of the fold settled; returns the number of its actions.

        One that takes long is asked for again and again: no answer takes so long that its owner is
        taken for dead, and each one has done something.
        """
        done = None
        while done is None:
            done = self._owners.run(_int(row["partition"]) % self._slots, (row, batch))
        return _int(done)

    def _perform(self, slot: int, request: object) -> int | None:
        """Returns the number of actions, when all are done; None: ask again."""
        desk = self._desks[slot]
        if isinstance(request, int):
            desk.prepare(request)
            return 0
        assert isinstance(request, tuple), "what settle() asks for"
        row, batch = request
        done = desk.settle(row, batch)
        if done is None:
            return None
        partition = _int(row["partition"])
        if desk.wants_preparing(partition):
            self._owners.soon(slot, partition)
        return done

    def close(self) -> None:
        """Leave the slots to others."""
        self._owners.close()
        self._ledgers.close()


class _Desk:
    """Settles the rows of one slot: readers, ledgers, times of positions; one caller at once."""

    def __init__(self, settings: SettleSettings, ticker: Ticker, ledgers: PartitionLedgers) -> None:
        self.settings = settings
        self._ledgers = ledgers
        self._settler = Settler(settings.config, settings.tracker)
        self._ticker = ticker
        self._written_s: dict[int, float] = {}  # monotonic; when a position was written
        self._first: dict[int, tuple[int, int, str]] = {}  # not written: position, batch, source
        self._prepared: set[int] = set()  # ... or soon

    def settle(self, row: Mapping[str, object], batch: int) -> int | None:
        """Settle one row of the fold; returns the number of its actions, None: not all yet."""
        partition, position = _int(row["partition"]), _int(row["position"])
        actions = decode_actions(_bytes(row["actions"]))
        source = str(row["range_end"])
        began_s = time.monotonic()
        if actions or self._is_position_due(partition):
            if not self._write(partition, actions, position, batch, source):
                return None
        elif partition not in self._written_s:
            self._written_s[partition] = time.monotonic()
            self._first[partition] = position, batch, source
        status = replace(
            decode_status(_bytes(row["status"])),
            batch=batch,
            lateness=lateness_text(actions, time.monotonic() - began_s),
        )
        self._ticker.publish(status)
        self._ticker.poll()
        return len(actions)

    def _write(
        self,
        partition: int,
        actions: Sequence[Settle | Carry],
        position: int,
        batch: int,
        source: str,
    ) -> bool:
        """Actions, if any, and the position; whether nothing is left to be done."""
        self._first.pop(partition, None)
        with self._ledgers.using(partition) as own:
            self._check(own, batch, source)
            report = self._settler.settle(
                own, actions, position=position, batch=batch, source_hash=source
            )
        self._written_s[partition] = time.monotonic()
        return not report.left

    def wants_preparing(self, partition: int) -> bool:
        """Whether it is to be prepared; nobody is told so twice."""
        wants = partition not in self._prepared
        self._prepared.add(partition)
        return wants

    def prepare(self, partition: int) -> None:
        """Connect before something is due: the first one would be late by that.

        The position is written, too. Spark ends processes that rest, so in a namespace with little
        to do each batch may meet a new one, which knows of no position that is due.
        """
        with suppress(KafkaMQError):  # whoever settles first meets it again
            self._settler.prepare()
            first = self._first.pop(partition, None)
            if first is not None:
                self._write(partition, (), *first)
            else:
                with self._ledgers.using(partition):
                    pass  # it is open

    def _is_position_due(self, partition: int) -> bool:
        """Where partitions share open ledgers, each writes so many times as seldom."""
        interval_s = self._ledgers.turns() * self.settings.tracker.position_interval_ms / 1000
        now_s = time.monotonic()
        return now_s - self._written_s.get(partition, now_s) >= interval_s

    def _check(self, own: Ledger, batch: int, source: str) -> None:
        """The ledger is not ahead of this batch."""
        last, key = own.last, own.key
        if last is None or last.engine != self.settings.engine:
            return
        is_other = last.batch == batch and last.source_hash not in ("", source)
        if last.batch > batch or is_other:
            raise StateError(
                f"checkpoint older than its ledger: {key.topic}[{key.partition}] is settled up to "
                f"batch {last.batch} (source {last.source_hash}), the query is at batch {batch} "
                f"(source {source}); restore the newest checkpoint, or start with an empty one"
            )


_workers: dict[tuple[int, str, str], _Worker] = {}


def _worker(settings: SettleSettings) -> _Worker:
    """This process's worker for a namespace's tracker; one of an earlier start is dropped.

    A session may run trackers of several namespaces, whose tasks share the processes.
    """
    config = settings.config
    now_s = time.monotonic()
    key = (os.getpid(), config.bootstrap_servers, config.marker_topic)
    start = (settings.engine, settings.epoch)
    found = _workers.get(key)
    if found is None or found.start != start:
        _drop(key)
        found = _workers[key] = _Worker(settings)
    found.used_s = now_s
    for other in [key for key, each in _workers.items() if now_s - each.used_s > _UNUSED_S]:
        _drop(other)
    return found


def _drop(key: tuple[int, str, str]) -> None:
    found = _workers.pop(key, None)
    if found is not None:
        found.close()


def _int(value: object) -> int:
    assert isinstance(value, int), "a column of integers"
    return value


def _bytes(value: object) -> bytes:
    assert isinstance(value, bytes), "a column of bytes"
    return value
