"""A streaming sink for Kafka that writes every row exactly once.

    query = write_stream(frame, config, topic="orders", checkpoint="/data/checkpoints/orders")

Spark repeats a batch that it does not know to be finished. Here each batch is written in
transactions that also commit, in a ledger (one committed offset), which batch it was; a batch which
the ledger holds already is skipped. A transaction belongs to a *slot*: rows go to slots by a hash
of their content, and the number of slots is fixed in the checkpoint. So a restart with other cores,
or with the tasks in another order, finds the same slots again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from kafkamq.clients.ledger import Ledger, LedgerKey, latest, read_positions
from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError, StateError
from kafkamq.spark.batches import current_batch
from kafkamq.spark.checkpoint import CheckpointNote, read_note, write_note
from kafkamq.spark.grouping import group_key
from kafkamq.spark.reading import log_reader
from kafkamq.spark.session import activate
from kafkamq.types import Headers
from kafkamq.wire.ledger import Position
from kafkamq.wire.partitions import key_partition

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["SINK_COLUMNS", "write_stream"]

SINK_COLUMNS: Mapping[str, str] = {
    "value": "BINARY",
    "key": "BINARY",
    "headers": "ARRAY<STRUCT<key: STRING, value: BINARY>>",
    "partition": "INT",
    "topic": "STRING",
}
"""Columns that rows may have; ``value`` they must. Strings are written as UTF-8."""

_MASK = (1 << 64) - 1


def write_stream(
    frame: DataFrame,
    config: ServiceConfig,
    *,
    checkpoint: str,
    topic: str = "",
    slots: int | None = None,
    trigger_s: float = 1.0,
    available_now: bool = False,
    query_name: str = "",
) -> StreamingQuery:
    """Start a query that writes a streaming DataFrame to Kafka, each row exactly once.

    Args:
        frame: Rows with the columns ``value``, and if they have them ``key``, ``headers``,
            ``partition`` and ``topic`` (``SINK_COLUMNS``). A null partition: by murmur2 of the
            key, as Kafka's own clients choose; without a key any.
        config: The cluster, Kafka's properties and the ledger topic.
        checkpoint: Spark's folder for this query.
        topic: For rows that name none.
        slots: Transactions of a batch; fixed with the checkpoint. None: one for each core.
        trigger_s: Shortest time between two batches.
        available_now: Write what is there, then end.
        query_name: How Spark calls it.

    Raises:
        ConfigError: Columns, topic or checkpoint cannot work.
        StateError: Later, from the query: the checkpoint is older than its ledger.
    """
    spark = frame.sparkSession
    if not topic and "topic" not in frame.columns:
        raise ConfigError("topic is missing: name one, or give the rows a column `topic`")
    note = _note(spark, config, checkpoint, slots)
    settings = _SinkSettings(
        config=replace(config, kafka=dict(config.kafka)),
        topic=topic,
        engine=note.engine,
        epoch=_next_epoch(config, note),
    )
    name = f"kafkamq_{note.engine.replace('-', '_')}"
    _register(spark, settings, name)
    activate(spark)
    rows = _with_slots(frame, note.tasks)
    writer = rows.writeStream.format(name).option("checkpointLocation", checkpoint)
    if query_name:
        writer = writer.queryName(query_name)
    if available_now:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{round(trigger_s * 1000)} milliseconds").start()


def _note(
    spark: SparkSession, config: ServiceConfig, checkpoint: str, slots: int | None
) -> CheckpointNote:
    """The checkpoint's note, written when it is new."""
    note = read_note(spark, checkpoint, topic=config.ledger_topic)
    if note is None:
        count = slots or spark.sparkContext.defaultParallelism
        note = CheckpointNote.new("sink", topic=config.ledger_topic, tasks=count)
        write_note(spark, checkpoint, note)
    elif slots is not None and slots != note.tasks:
        raise ConfigError(
            f"slots is {slots}: checkpoint {checkpoint} was made with {note.tasks}, and rows would "
            "be in other slots than the ledger knows; leave slots out, or use another checkpoint"
        )
    return note


def _key(config: ServiceConfig, engine: str, slot: int) -> LedgerKey:
    return LedgerKey(f"kafkamq.{config.ledger_topic}.{engine}.{slot}", config.ledger_topic, 0)


def _next_epoch(config: ServiceConfig, note: CheckpointNote) -> int:
    """One more than that of any earlier start of this query."""
    keys = [_key(config, note.engine, slot) for slot in range(note.tasks)]
    newest = latest(list(read_positions(config, keys).values()))
    return 1 if newest is None else newest.epoch + 1


def _with_slots(frame: DataFrame, slots: int) -> DataFrame:
    """All sink columns, with slot and identity, the rows of a slot together in one task."""
    from pyspark.sql import functions as fn

    unknown = sorted(set(frame.columns) - set(SINK_COLUMNS))
    if unknown or "value" not in frame.columns:
        raise ConfigError(
            f"the rows have the columns {', '.join(frame.columns)}: the sink needs `value` and "
            f"knows {', '.join(SINK_COLUMNS)}; select and rename before"
        )
    columns: list[Column] = [
        (fn.col(name) if name in frame.columns else fn.lit(None)).cast(kind).alias(name)
        for name, kind in SINK_COLUMNS.items()
    ]
    rows = frame.select(*columns)
    parts = [fn.col("topic"), fn.col("partition"), fn.col("key"), fn.col("value")]
    rows = rows.withColumn("_identity", fn.xxhash64(*parts, fn.to_json(fn.col("headers"))))
    rows = rows.withColumn("_slot", fn.pmod(fn.col("_identity"), fn.lit(slots)).cast("int"))
    # One slot, one task: by keys that Spark's hash sends where we want them (grouping.py).
    keys = fn.array(*(fn.lit(group_key("slot", slot, slots)) for slot in range(slots)))
    return rows.repartition(slots, fn.element_at(keys, fn.col("_slot") + 1))


@dataclass(frozen=True, kw_only=True)
class _SinkSettings:
    """What travels to the workers, inside the pickled class."""

    config: ServiceConfig
    topic: str
    engine: str
    epoch: int


def _register(spark: SparkSession, settings: _SinkSettings, name: str) -> None:
    given, format_name = settings, name

    class RegisteredSink(_Sink):
        settings = given

        @classmethod
        def name(cls) -> str:
            return format_name

    spark.dataSource.register(RegisteredSink)


class _Sink(DataSource):
    settings: ClassVar[_SinkSettings]

    def streamWriter(  # noqa: N802 - Spark's
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        return _SinkWriter(self.settings)


@dataclass
class _Written(WriterCommitMessage):
    """What a task did."""

    rows: int
    skipped: int


class _SinkWriter(DataSourceStreamArrowWriter):
    def __init__(self, settings: _SinkSettings) -> None:
        self._settings = settings

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a worker: the rows of a slot; of several, where Spark placed them together."""
        batch = current_batch()
        done = _Written(0, 0)
        slots: dict[int, _Slot] = {}
        try:
            for rows in iterator:
                for row in rows.to_pylist():
                    number = row["_slot"]
                    if number not in slots:
                        slots[number] = _Slot(self._settings, number, batch)
                    slots[number].add(row)
            for slot in slots.values():
                slot.commit(done)
        finally:
            for slot in slots.values():
                slot.close()
        return done


class _Slot:
    """The rows of one slot and batch: one transaction, unless the ledger holds it already."""

    def __init__(self, settings: _SinkSettings, number: int, batch: int) -> None:
        self.number = number
        self._settings = settings
        self._batch = batch
        self._rows = 0
        self._digest = 0
        self._counts: dict[str, int] = {}
        # A ledger of its own for each batch: workers take turns, and a producer that was kept
        # could have been fenced by the worker that had the slot in between.
        self._ledger = Ledger(
            settings.config,
            _key(settings.config, settings.engine, number),
            engine=settings.engine,
            epoch=settings.epoch,
        )
        last = self._ledger.open()
        self._written = self._found(last)
        if self._written is None:
            self._ledger.begin()

    def _found(self, last: Position | None) -> Position | None:
        """What the ledger says of this batch; None: it is not written yet."""
        if last is None or last.batch < self._batch:
            return None
        if last.batch > self._batch:
            raise StateError(
                f"checkpoint older than its ledger: slot {self.number} of {last.engine} has "
                f"written batch {last.batch}, the query is at batch {self._batch}; restore the "
                "newest checkpoint, or start with an empty one (which writes again what its "
                "source still has)"
            )
        return last

    def add(self, row: Mapping[str, Any]) -> None:
        """One row of this slot."""
        self._rows += 1
        self._digest = (self._digest + row["_identity"]) & _MASK  # in whatever order they come
        if self._written is not None:
            return
        topic = row["topic"] or self._settings.topic
        if not topic:
            raise ConfigError("a row names no topic, and the query has none: give one of them")
        headers = _headers(row["headers"])
        partition = self._partition(topic, row["partition"], row["key"])
        self._ledger.producer.produce((topic, partition, row["key"], row["value"], headers))

    def _partition(self, topic: str, given: int | None, key: bytes | None) -> int:
        if given is not None:
            return given
        if key is None:
            return -1
        count = self._counts.get(topic)
        if count is None:
            count = self._counts[topic] = log_reader(self._settings.config).partition_count(topic)
        return key_partition(key, count)

    def commit(self, done: _Written) -> None:
        """All rows of the slot were added."""
        source = f"{self._rows}:{self._digest:016x}"
        if self._written is None:
            self._ledger.commit(
                self._batch + 1, batch=self._batch, rows_done=self._rows, source_hash=source
            )
            done.rows += self._rows
        elif self._written.source_hash != source:
            raise StateError(
                f"checkpoint older than its ledger, or a source that changed: batch {self._batch} "
                f"of slot {self.number} was written with rows {self._written.source_hash}, now it "
                f"has {source}; nothing was written"
            )
        else:
            done.skipped += self._rows
        self.close()

    def close(self) -> None:
        """Abort what was not committed; idempotent."""
        self._ledger.close()


def _headers(given: Sequence[Mapping[str, Any]] | None) -> Headers:
    return tuple((header["key"], header["value"]) for header in given or ())
