"""A Kafka sink for Spark that writes every row exactly once: ``format("kafkamq-sink")``.

    register_sink(spark)
    writer = rows.writeStream.format("kafkamq-sink").option("topic", "orders")
    writer = writer.option("kafka.bootstrap.servers", "localhost:9092")
    query = writer.option("checkpointLocation", "/data/checkpoints/orders").start()

Spark repeats a batch that it does not know to be finished. Here each task writes its rows in one
transaction that also commits, in a ledger, which batch they were; a batch which the ledger holds
already is skipped (``sink_ledger.py`` has the rules). Options are in ``sink_options.py``; what is
promised and what is not, in ``docs/sink.md``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceStreamWriter
from pyspark.sql.types import StructType

from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.spark.checkpoint import (
    CheckpointNote,
    is_settled,
    last_batch,
    read_note,
    write_note,
)
from kafkamq.spark.grouping import group_key
from kafkamq.spark.parallelism import cores
from kafkamq.spark.session import activate, active
from kafkamq.spark.sink.ledger import clear
from kafkamq.spark.sink.options import SinkOptions, parse_sink_options
from kafkamq.spark.sink.rows import IDENTITY, MAX_SLOTS, SINK_COLUMNS, check_columns, slot_column
from kafkamq.spark.sink.writer import BatchWriter, StreamWriter

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = [
    "SINK_COLUMNS",
    "KafkaSink",
    "by_slot",
    "clear_sink_ledger",
    "register_sink",
    "write_stream",
]


def register_sink(
    spark: SparkSession, config: ServiceConfig | None = None, *, name: str = "kafkamq-sink"
) -> str:
    """Make ``format(name)`` known to a session; returns the name."""
    given, format_name = config, name

    class RegisteredSink(KafkaSink):
        service = given

        @classmethod
        def name(cls) -> str:
            return format_name

    with active(spark):  # where Spark looks whether somebody else's has that name
        spark.dataSource.register(RegisteredSink)
    return name


class KafkaSink(DataSource):
    """The data source; ``register_sink`` makes one with its cluster inside."""

    service: ClassVar[ServiceConfig | None] = None

    @classmethod
    def name(cls) -> str:
        return "kafkamq-sink"

    def streamWriter(  # noqa: N802 - Spark's
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        return StreamWriter(self._checked(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        if overwrite:
            raise ConfigError("mode is overwrite: a topic can only be appended to; mode('append')")
        return BatchWriter(self._checked(schema))

    def _checked(self, schema: StructType) -> SinkOptions:
        types = {field.name: field.dataType.simpleString() for field in schema.fields}
        check_columns(types)
        return parse_sink_options(self.options, self.service, has_topics="topic" in types)


def by_slot(frame: DataFrame, slots: int) -> DataFrame:
    """The rows of a frame, cut by their content and not by tasks: for ``format("kafkamq-sink")``.

    A row goes to the slot that a hash of its content names, and a slot is one transaction of the
    batch. So a batch is the same to the ledger however many cores or tasks a later start has; the
    price is a shuffle. Keep the number for the life of a checkpoint.

    Args:
        frame: Rows with the sink's columns (``SINK_COLUMNS``).
        slots: Transactions of a batch.

    Raises:
        ConfigError: A column is unknown, or slots is out of range.
    """
    from pyspark.sql import functions as fn

    if not 1 <= slots <= MAX_SLOTS:
        raise ConfigError(f"slots is {slots}: it must be from 1 to {MAX_SLOTS}")
    check_columns(dict(frame.dtypes))
    columns: list[Column] = [
        (fn.col(name) if name in frame.columns else fn.lit(None)).cast(kind).alias(name)
        for name, kind in SINK_COLUMNS.items()
    ]
    rows = frame.select(*columns)
    parts = [fn.col("topic"), fn.col("partition"), fn.col("key"), fn.col("value")]
    rows = rows.withColumn(IDENTITY, fn.xxhash64(*parts, fn.to_json(fn.col("headers"))))
    slot = slot_column(slots)
    rows = rows.withColumn(slot, fn.pmod(fn.col(IDENTITY), fn.lit(slots)).cast("int"))
    # One slot, one task: by keys that Spark's hash sends where we want them (grouping.py).
    keys = fn.array(*(fn.lit(group_key("slot", each, slots)) for each in range(slots)))
    return rows.repartition(slots, fn.element_at(keys, fn.col(slot) + 1))


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

    As ``format("kafkamq-sink")`` with rows from ``by_slot``, the number of slots kept in the
    checkpoint, and the ledger in the namespace's own topic.

    Args:
        frame: Rows with the columns ``value``, and if they have them ``key``, ``headers``,
            ``partition`` and ``topic`` (``SINK_COLUMNS``). A null partition: by murmur2 of the
            key, as Kafka's own clients choose; without a key by the row's content.
        config: The cluster, Kafka's properties and the ledger topic.
        checkpoint: Spark's folder for this query.
        topic: For rows that name none.
        slots: Transactions of a batch. None: one for each core, and at later starts more, if there
            are more cores. Another number than the checkpoint's is taken when no batch of the
            earlier start is left to be repeated.
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
    name = f"kafkamq_{note.engine.replace('-', '_')}"
    register_sink(spark, replace(config, kafka=dict(config.kafka)), name=name)
    activate(spark)
    writer = (
        by_slot(frame, note.tasks)
        .writeStream.format(name)
        .option("checkpointLocation", checkpoint)
        .option("ledgerTopic", config.ledger_topic)
        .option("sinkId", note.engine)
    )
    if topic:
        writer = writer.option("topic", topic)
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
    there = min(MAX_SLOTS, cores(spark))
    if note is None:
        note = CheckpointNote.new("sink", topic=config.ledger_topic, tasks=slots or there)
        write_note(spark, checkpoint, note)
        return note
    wanted = slots or max(there, note.tasks)
    if wanted == note.tasks:
        return note
    if is_settled(spark, checkpoint):
        note = note.cut(wanted, since=last_batch(spark, checkpoint) + 1)
        write_note(spark, checkpoint, note)
    elif slots is not None:
        raise ConfigError(
            f"slots is {slots}: checkpoint {checkpoint} was made with {note.tasks}, and its last "
            "batch is to be repeated with as many; leave slots out until that is done"
        )
    return note


def clear_sink_ledger(config: ServiceConfig, *, topic: str, sink_id: str) -> int:
    """Forget what a sink has written; returns how many entries were deleted.

    Only when its checkpoint is deleted and none of its queries runs: a batch that is repeated
    afterwards is written again. The broker forgets by itself what was not renewed for
    ``offsets.retention.minutes`` (a week).

    Args:
        config: The cluster, and Kafka's properties.
        topic: The option ``ledgerTopic``, or ``topic`` when that was left out.
        sink_id: The option ``sinkId``, or the id of the streaming query (``query.id``).
    """
    return clear(config, topic=topic, sink=sink_id)
