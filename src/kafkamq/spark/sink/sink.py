"""A Kafka sink for Spark that writes every row exactly once, to topics or into a queue.

    register(spark)
    writer = rows.writeStream.format("kafkamq").option("topic", "orders")
    writer = writer.option("kafka.bootstrap.servers", "localhost:9092")
    query = writer.option("checkpointLocation", "/data/checkpoints/orders").start()

Spark repeats a batch that it does not know to be finished. Here each task writes its rows in one
transaction that also commits, in a ledger, which batch they were; a batch which the ledger holds
already is skipped (``ledger.py`` has the rules). Options are in ``rows.py``; what is promised
and what is not, in ``docs/sink.md``.
"""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.spark.checkpoint import Checkpoint, CheckpointNote
from kafkamq.spark.failures import opens_checkpoint
from kafkamq.spark.formats import register_source
from kafkamq.spark.parallelism import cores, in_slots, with_columns
from kafkamq.spark.session import active
from kafkamq.spark.sink.ledger import SinkLedger
from kafkamq.spark.sink.rows import (
    IDENTITY,
    MAX_SLOTS,
    MESSAGE_COLUMNS,
    SINK_COLUMNS,
    check_columns,
    sink_name,
    slot_column,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

__all__ = ["SINK_COLUMNS", "by_slot", "clear_sink_ledger", "write_stream"]


def by_slot(frame: DataFrame, slots: int) -> DataFrame:
    """Return the rows of a frame, cut by their content and not by tasks, for ``format("kafkamq")``.

    A row goes to the slot that a hash of its content names, and a slot is one transaction of the
    batch. So a batch is the same to the ledger however many cores or tasks a later start has; the
    price is a shuffle. Keep the number for the life of a checkpoint.

    Args:
        frame: Rows with the columns of a sink or of messages (``payload``).
        slots: Transactions of a batch.

    Raises:
        ConfigError: A column is unknown, or slots is out of range.
    """
    from pyspark.sql import functions as fn

    _require_slots(slots)
    are_messages = "payload" in frame.columns
    check_columns(dict(frame.dtypes), are_messages=are_messages)
    kinds = MESSAGE_COLUMNS if are_messages else SINK_COLUMNS
    rows = with_columns(frame, kinds)
    parts = [fn.col(name) for name in reversed(list(kinds)) if name != "headers"]
    rows = rows.withColumn(IDENTITY, fn.xxhash64(*parts, fn.to_json(fn.col("headers"))))
    return in_slots(rows, slot_column(slots), fn.col(IDENTITY), slots)


@opens_checkpoint
def write_stream(
    frame: DataFrame,
    config: ServiceConfig,
    *,
    checkpoint: str,
    topic: str = "",
    queue: str = "",
    slots: int | None = None,
    trigger_s: float | None = None,
    available_now: bool = False,
    query_name: str = "",
) -> StreamingQuery:
    """Start a query that writes a streaming DataFrame to Kafka, each row exactly once.

    As ``writeStream.format("kafkamq")`` with rows from ``by_slot``, the number of slots kept in the
    checkpoint, and the ledger in the namespace's own topic.

    Args:
        frame: Rows with the columns ``value``, and if they have them ``key``, ``headers``,
            ``partition`` and ``topic`` (``SINK_COLUMNS``). A null partition: by murmur2 of the
            key, as Kafka's own clients choose; without a key by the row's content. With
            ``queue`` the columns of its messages: ``payload``, and ``key``, ``id``, ``headers``,
            ``delay`` and ``ttl``.
        config: The cluster, Kafka's properties and the ledger topic.
        checkpoint: Spark's folder for this query, of one topic or queue.
        topic: For rows that name none.
        queue: Send to this queue.
        slots: Transactions of a batch. None: one for each core, and at later starts more, if there
            are more cores. Another number than the checkpoint's is taken when no batch of the
            earlier start is left to be repeated.
        trigger_s: Shortest time between two batches; None: 1 s.
        available_now: Write what is there, then end.
        query_name: How Spark calls it.

    Raises:
        ConfigError: Columns, topic or checkpoint cannot work.
        QueryFailedError: Spark cannot open the checkpoint.
        StateError: Later, from the query: the checkpoint is older than its ledger.
    """
    spark = frame.sparkSession
    if not (topic or queue or "topic" in frame.columns):
        raise ConfigError(
            "topic is missing: name one, or give the rows a column `topic`; or name a queue"
        )
    if slots is not None:
        _require_slots(slots)
    folder = Checkpoint(spark, checkpoint)
    note = _note(folder, config, checkpoint, slots, queue, topic)
    name = f"kafkamq_{note.engine.replace('-', '_')}"
    register_source(spark, config, name=name)
    writer = (
        by_slot(frame, note.tasks)
        .writeStream.format(name)
        .option("checkpointLocation", checkpoint)
        .option("ledgerTopic", config.ledger_topic)
        .option("sinkId", note.engine)
    )
    for option, value in (("topic", topic), ("queue", queue)):
        writer = writer.option(option, value) if value else writer
    with active(spark):
        query = start_query(
            writer, trigger_s=trigger_s, available_now=available_now, query_name=query_name
        )
    if note.into is None:
        folder.write(replace(note, into=topic, number=note.number + 1))
    return query


def _require_slots(slots: int) -> None:
    if not 1 <= slots <= MAX_SLOTS:
        raise ConfigError(f"slots is {slots}: it must be from 1 to {MAX_SLOTS}")


def start_query(
    writer: DataStreamWriter, *, trigger_s: float | None, available_now: bool, query_name: str
) -> StreamingQuery:
    """Start a query that its writer describes but for its trigger and its name."""
    if query_name:
        writer = writer.queryName(query_name)
    if available_now:
        if trigger_s is not None:
            raise ConfigError("trigger_s and available_now exclude each other: give one of them")
        return writer.trigger(availableNow=True).start()
    every_s: object = 1.0 if trigger_s is None else trigger_s
    if not isinstance(every_s, (int, float)) or not 0 <= every_s < math.inf:
        raise ConfigError(f"trigger_s is {trigger_s!r}: it must be seconds, from 0")
    return writer.trigger(processingTime=f"{round(every_s * 1000)} milliseconds").start()


def _note(
    folder: Checkpoint,
    config: ServiceConfig,
    checkpoint: str,
    slots: int | None,
    queue: str,
    into: str,
) -> CheckpointNote:
    topic = config.ledger_topic
    note, there = folder.note(topic), min(MAX_SLOTS, cores(folder.spark))
    if note is None:
        tasks = slots or there
        new = CheckpointNote.new("sink", topic=topic, tasks=tasks, queue=queue, into=into)
        return folder.write(new)
    of = _target(note.queue, into if note.into is None else note.into)
    now = _target(queue, into)
    if of != now:
        raise ConfigError(f"checkpoint {checkpoint} is of {of}, not {now}: name another folder")
    wanted = slots or max(there, note.tasks)
    if wanted == note.tasks:
        return note
    if folder.is_settled():
        return folder.write(note.cut(wanted, since=folder.last_batch() + 1))
    if slots is not None:
        raise ConfigError(
            f"slots is {slots}: checkpoint {checkpoint} was made with {note.tasks}, and its last "
            "batch is to be repeated with as many; leave slots out until that is done"
        )
    return note


def _target(queue: str, topic: str) -> str:
    if queue:
        return f"queue {queue}"
    return f"topic {topic}" if topic else "topics that the rows name"


def clear_sink_ledger(
    config: ServiceConfig, *, topic: str = "", sink_id: str, queue: str = ""
) -> int:
    """Forget what a sink has written; returns how many entries were deleted.

    Only when its checkpoint is deleted and none of its queries runs: a batch that is repeated
    afterwards is written again. The broker forgets by itself what was not renewed for
    ``offsets.retention.minutes`` (a week).

    Args:
        config: The cluster, and Kafka's properties.
        topic: The option ``ledgerTopic``, or ``topic`` when that was left out; of a queue, too,
            may it be left out.
        sink_id: The option ``sinkId``, or the id of the streaming query (``query.id``).
        queue: The option ``queue``.
    """
    topic, sink = topic or config.ledger_topic, sink_name(sink_id, queue)
    with closing(SinkLedger(config, topic=topic, sink=sink)) as ledger:
        return ledger.delete()
