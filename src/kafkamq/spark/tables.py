"""Writes messages of a queue into a Delta or Iceberg table, each of them once.

Rows are merged by the origin of their messages, which all copies share (docs/spark.md has why):
what the table does not have is inserted, all rows of a message or none. The condition also names
the ranges of the batch's offsets, by which the table's format leaves out the files that cannot have
them: each batch reads the origins of a few files, not of the whole table.

In Delta this is a ``MERGE INTO``. For Iceberg Spark makes an append of a ``MERGE`` that only
inserts, and no append conflicts with another: two drivers at once would both insert. Iceberg looks
for conflicts in overwrites, so there it is an overwrite of nothing, by what a snapshot lacks.
"""

from __future__ import annotations

import random
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from kafkamq.errors import ConfigError, KafkaMQError
from kafkamq.queue.wire.headers import Origin, read_message_headers
from kafkamq.spark.failures import first_line, spark_errors, without_spark_log
from kafkamq.spark.parallelism import check_spelling

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from kafkamq.queue.message import Message

ORIGIN = ("origin_topic", "origin_partition", "origin_offset", "origin_timestamp")
"""The columns of ``read_queue`` that tell a message from all others, and that its copies share."""

_HELD = (
    "queue_id STRING, id STRING, user_key BINARY, value BINARY, delivery_count INT, "
    "origin_topic STRING, origin_partition INT, origin_offset BIGINT, origin_timestamp TIMESTAMP, "
    "ack_token STRING"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_NUMBERS = ("int", "bigint")
_KINDS = dict(zip(ORIGIN, (("string",), _NUMBERS, _NUMBERS, ("timestamp",)), strict=True))
_CHUNK = 10_000
_MAX_RANGES = 64
_PATIENCE_S = 60.0
_FIRST_PAUSE_S = 0.3
_MAX_PAUSE_S = 5.0
_CONFLICT = re.compile(
    r"io\.delta\S*(Concurrent\w*|(Metadata|Protocol)Changed)Exception"
    r"|\[DELTA_(CONCURRENT_|METADATA_CHANGED|PROTOCOL_CHANGED)"
    r"|org\.apache\.iceberg\.exceptions\.(Validation|CommitFailed|CommitStateUnknown)Exception"
)
# Iceberg takes a last part of a name like these for a reference, as behind '#' of a path.
_REFERENCE = re.compile(r"[.#`](branch|tag)_[^.#`]*`?$", re.IGNORECASE)
_SAME = " AND ".join(f"done.{name} <=> new.{name}" for name in ORIGIN)
_NO_ICEBERG = (
    "Iceberg has no runtime for Spark 4.2 yet: use a Delta table, or write_once() on Spark 4.1 "
    "(docs/spark.md, Exactly once into Iceberg)"
)


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    columns: tuple[str, ...]
    is_iceberg: bool


def check_table(frame: DataFrame, table: str) -> Table:
    """Look at a table, whose columns the rows must have, the origin among them.

    Raises:
        ConfigError: It cannot be merged into, or the rows do not fit it.
    """
    columns, is_iceberg = _described(frame.sparkSession, table)
    if is_iceberg:
        _check_stage(frame.sparkSession, table)
    for owner, kinds, advice in (
        (f"table {table} has", columns, "the messages in it are known by them"),
        ("the rows have", dict(frame.dtypes), "keep them through your transformations"),
    ):
        if missing := [name for name in ORIGIN if name not in kinds]:
            raise ConfigError(f"{owner} no column {', '.join(missing)}: {advice}")
        # A value that another type cuts or changes is not found again.
        for name, wanted in _KINDS.items():
            if kinds[name] not in wanted:
                raise ConfigError(f"{owner} {name} as {kinds[name]}: it must be {wanted[-1]}")
    if unknown := [name for name in columns if name not in frame.columns]:
        raise ConfigError(
            f"the rows have no column {', '.join(unknown)}, as table {table} has: select them"
        )
    return Table(table, tuple(columns), is_iceberg)


def _check_stage(spark: SparkSession, table: str) -> None:
    """A batch is compared with a table's main branch, so it must be written there, too."""
    if _REFERENCE.search(table):
        raise ConfigError(
            f"table {table} is a branch or a tag by its name: a batch is compared with the main "
            "branch of an Iceberg table, and is written there only; name the table"
        )
    for name in ("spark.wap.id", "spark.wap.branch"):
        if spark.conf.get(name, None):
            raise ConfigError(
                f"{name} is set: what is staged is not in table {table}, and would be written once "
                "more for each copy; unset it for this session"
            )


def _described(spark: SparkSession, table: str) -> tuple[dict[str, str], bool]:
    lacks_iceberg = spark.version.startswith("4.2")
    try:
        with without_spark_log():
            rows = spark.sql(f"DESCRIBE TABLE EXTENDED {table}").collect()
            columns = dict(spark.table(table).dtypes)
    except spark_errors() as error:
        text = first_line(error).rstrip(" ;.")
        advice = f". {_NO_ICEBERG}" if lacks_iceberg and "iceberg" in str(error).lower() else ""
        raise ConfigError(f"table {table} cannot be read: {text}{advice}") from error
    kinds = {row.data_type.lower() for row in rows if row.col_name == "Provider"}
    if "iceberg" in kinds and lacks_iceberg:
        raise ConfigError(f"table {table} is of Iceberg. {_NO_ICEBERG}")
    if kinds.isdisjoint(("delta", "iceberg")):
        raise ConfigError(
            f"table {table} is of {', '.join(kinds) or 'no known format'}: MERGE INTO needs one of "
            "Delta or Iceberg; write other tables in each_batch, at least once"
        )
    return columns, "iceberg" in kinds


def rows_of(spark: SparkSession, messages: Sequence[Message]) -> DataFrame:
    """Return messages that a worker holds as rows for ``write_once``.

    For sessions that cannot read a queue as a stream. The columns are called as those of
    ``read_queue``: ``queue_id``, ``id``, ``user_key``, ``value``, ``delivery_count``, ``ORIGIN``
    and ``ack_token``, which only tells copies from each other here. The worker acknowledges the
    messages when they are written.
    """
    return spark.createDataFrame([_row(message) for message in messages], _HELD)


def _row(message: Message) -> tuple[object, ...]:
    place = message.message_id
    origin = read_message_headers(message.raw_headers).origin or Origin(
        message.topic, place.partition, place.offset, message.timestamp_ms
    )
    return (
        *(message.queue_id, message.id, message.key, message.payload, message.delivery_count),
        *(origin.topic, origin.partition, origin.offset),
        _EPOCH + timedelta(milliseconds=origin.timestamp_ms),
        f"{place.partition}/{place.offset}",
    )


def write_once(frame: DataFrame, table: str) -> None:
    """Insert the rows of messages that the table does not have, all rows of a message together.

    For ``each_batch``; ``ack(table=...)`` does it and needs no function. Rows of messages that are
    nacked or rejected are left out. A batch costs a merge: its rows are shuffled, the origins
    in the files that may have them are read and joined, and a few files are written. The table
    keeps origins for as long as messages may come again.

    Args:
        frame: Rows with the columns of the table, ``ack_token`` and, where not all is well,
            ``verdict``. It is read twice: keep it by
            ``localCheckpoint()``, unless ``ack`` gave it to you.
        table: A Delta table, or on Spark 4.1 an Iceberg table, with the columns ``ORIGIN``, by
            its name in SQL.

    Raises:
        ConfigError: The table cannot be merged into, or the rows do not fit it.
        KafkaMQError: Another writer was first each time, for a minute.
    """
    insert_once(frame, check_table(frame, table))


def insert_once(frame: DataFrame, table: Table) -> None:
    try:
        _insert(frame, table)
    except spark_errors():
        # What cannot be looked at again leaves the failure before, which has the reason.
        found = table
        try:
            found = check_table(frame, table.name)
        except ConfigError as error:
            if error.__cause__ is None:
                # The rows do not fit the table as it is now.
                raise
        except spark_errors():
            pass
        if found == table:
            raise
        _insert(frame, found)


def _insert(frame: DataFrame, table: Table) -> None:
    rows = _accepted(frame).select(*table.columns)
    if ranges := origin_ranges(frame):
        write = _append if table.is_iceberg else _merge
        repeated(lambda: write(rows, table.name, ranges), table.name)


def repeated(write: Callable[[], None], table: str) -> None:
    """Write again where it is refused for what another writer or ``OPTIMIZE`` has committed.

    Raises:
        KafkaMQError: Another writer was first each time, for a minute.
    """
    ends, pause_s = time.monotonic() + _PATIENCE_S, _FIRST_PAUSE_S
    while True:
        try:
            write()
            return
        except spark_errors() as error:
            if not (found := _CONFLICT.search(str(error))):
                raise
            if time.monotonic() + pause_s > ends:
                raise KafkaMQError(
                    f"table {table}: another writer was first each time for {_PATIENCE_S:g} s "
                    f"({found[0]}); let fewer write at once, or each of them larger batches"
                ) from error
        time.sleep(random.uniform(pause_s / 2, pause_s))
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def _merge(rows: DataFrame, table: str, ranges: str) -> None:
    spark = rows.sparkSession
    view = f"kafkamq_batch_{uuid.uuid4().hex}"
    rows.createOrReplaceTempView(view)
    try:
        spark.sql(
            f"MERGE INTO {table} AS done USING {view} AS new ON {_SAME} AND ({ranges}) "
            "WHEN NOT MATCHED THEN INSERT *"
        ).collect()
    finally:
        spark.catalog.dropTempView(view)


def _append(rows: DataFrame, table: str, ranges: str) -> None:
    """Append to an Iceberg table what it lacks, if nobody has added to it since it was read."""
    from pyspark.sql import functions as fn

    spark = rows.sparkSession
    # Iceberg's catalogs keep a table as it was for half a minute.
    spark.sql(f"REFRESH TABLE {table}")
    (known,) = spark.sql(f"SHOW TBLPROPERTIES {table} ('current-snapshot-id')").collect()
    done = spark.table(table).alias("done").where(ranges)
    # What is new is found once, and not again when it is written.
    new: Any = rows.alias("new").join(done, fn.expr(_SAME), "left_anti").localCheckpoint()
    try:
        # A commit without files would be an overwrite, at which streams of the table end.
        if not new.isEmpty():
            writer = new.writeTo(table).option("isolation-level", "serializable")
            if known.value != "none":
                writer = writer.option("validate-from-snapshot-id", known.value)
            writer.overwrite(fn.lit(False))
    finally:
        # Spark Connect's server does it when the frame is collected.
        if (made := getattr(new, "_jdf", None)) is not None:
            made.queryExecution().logical().rdd().unpersist(False)


def _accepted(frame: DataFrame) -> DataFrame:
    """Rows of messages that are acked, and of the copies of one message those of one copy."""
    from pyspark.sql import Window
    from pyspark.sql import functions as fn

    if "ack_token" not in frame.columns:
        raise ConfigError("the rows have no column ack_token: keep it through your transformations")
    check_spelling(frame.columns, ("verdict",))
    rows = frame
    if "verdict" in frame.columns:
        is_ack = fn.lower("verdict").isin("ack", "") | fn.isnull("verdict")
        copy = Window.partitionBy(*ORIGIN, "ack_token")
        rows = rows.withColumn("_is_done", fn.min(is_ack).over(copy)).where("_is_done")
    first = fn.min("ack_token").over(Window.partitionBy(*ORIGIN))
    return rows.withColumn("_copy", first).where("_copy = ack_token")


def origin_ranges(frame: DataFrame) -> str:
    """Return where the batch's origins are, as a condition on the table; empty: there are no rows.

    Raises:
        ConfigError: A row has no origin.
    """
    from pyspark.sql import functions as fn

    chunk = fn.floor(fn.col("origin_offset") / _CHUNK)
    for keys in (("origin_partition", chunk), ("origin_partition",), ()):
        found = (
            frame.groupBy(*keys)
            .agg(
                fn.min("origin_offset").alias("first"),
                fn.max("origin_offset").alias("last"),
                fn.max(fn.isnull("origin_partition") | fn.isnull("origin_offset")).alias("lacks"),
            )
            .limit(_MAX_RANGES + 1)
            .collect()
        )
        if any(row.lacks for row in found):
            raise ConfigError(
                "a row has no origin (origin_partition or origin_offset is null): the table would "
                "have it once more for each copy; leave such rows out"
            )
        if len(found) <= _MAX_RANGES:
            break
    return " OR ".join(
        f"(done.origin_offset BETWEEN {row.first} AND {row.last}"
        + (f" AND done.origin_partition = {row.origin_partition})" if keys else ")")
        for row in found
    )
