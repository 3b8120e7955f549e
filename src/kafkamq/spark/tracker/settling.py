"""The tracker's sink: performs what the fold asked for, once per batch and marker partition.

A task writes whole rows of ``FOLDED_COLUMNS``; ``slot_settler.py`` settles one. Which process of a
machine does it for a partition: ``owners.py``.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterator
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

from kafkamq.markers.tracker.ticker import Ticker
from kafkamq.spark.batches import current_batch
from kafkamq.spark.daemon import POOL, SETTLING, calm_worker
from kafkamq.spark.tracker.owners import Owners
from kafkamq.spark.tracker.partition_ledgers import PartitionLedgers
from kafkamq.spark.tracker.slot_settler import SettleSettings, SlotSettler, epoch_of, integer

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)
UNUSED_S = 600.0  # a tracker that has no batch for so long may have ended: its clients are dropped
_STATUS_TIMEOUT_MS = 120_000  # nobody polls between batches: the client itself tries that long


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
        done = 0
        for rows in iterator:
            for row in rows.to_pylist():
                epoch = epoch_of(row)
                if epoch:  # else it stands by, and owns nothing (R36)
                    done += _worker(replace(self._settings, epoch=epoch)).settle(row, batch)
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
        self._settlers = defaultdict[int, SlotSettler](
            partial(SlotSettler, settings, ticker, self._ledgers)
        )
        self._owners = Owners(f"{settings.engine}/{settings.epoch}", self._perform)

    def settle(self, row: dict[str, object], batch: int) -> int:
        """Have one row of the fold settled; returns the number of its actions.

        One that takes long is asked for again and again: no answer takes so long that its owner is
        taken for dead, and each one has done something.
        """
        done = None
        while done is None:
            done = self._owners.run(integer(row["partition"]) % self._slots, (row, batch))
        return integer(done)

    def _perform(self, slot: int, request: object) -> int | None:
        """Returns the number of actions, when all are done; None: ask again."""
        settler = self._settlers[slot]
        if isinstance(request, int):
            settler.prepare(request)
            return 0
        assert isinstance(request, tuple), "what settle() asks for"
        row, batch = request
        done = settler.settle(row, batch)
        if done is None:
            return None
        partition = integer(row["partition"])
        if settler.wants_preparing(partition):
            self._owners.soon(slot, partition)
        return done

    def close(self) -> None:
        """Leave the slots to others."""
        self._owners.close()
        self._ledgers.close()


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
    for other in [key for key, each in _workers.items() if now_s - each.used_s > UNUSED_S]:
        _drop(other)
    return found


def _drop(key: tuple[int, str, str]) -> None:
    found = _workers.pop(key, None)
    if found is not None:
        found.close()
