"""The tracker's streaming query: source, fold and sink put together.

    markers topic -> blocks of decoded markers -> one fold per marker partition -> the driver

Blocks are grouped by marker partition, which partition p of n tasks folds in task p mod n
(``grouping.py``). A batch is one row for each, which the driver settles (``settling.py``).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kafkamq.config import ServiceConfig, TrackerConfig
from kafkamq.spark.checkpoint import CheckpointNote
from kafkamq.spark.failures import QueryFailedError, query_failure
from kafkamq.spark.formats import register_source
from kafkamq.spark.session import active, stream_settings
from kafkamq.spark.tracker.folding import FOLDED_COLUMNS, FoldSettings, most_actions
from kafkamq.spark.tracker.processor import FoldProcessor

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["QueryFailedError", "QueryPlan", "query_failure", "start_query"]


@dataclass(frozen=True, kw_only=True)
class QueryPlan:
    """What a start of the tracker decided."""

    config: ServiceConfig
    tracker: TrackerConfig
    note: CheckpointNote
    epoch: int
    checkpoint: str  # where Spark's own files are
    partitions: int
    carry_after_ms: int
    max_markers: int  # per batch: back-pressure when the log is far ahead
    token: str = field(default_factory=lambda: secrets.token_hex(8))  # of this start's TICKs (R17)


# Where the session says nothing. A batch reads each row once: a cache would only grow, 8 MB a task.
_TUNING = {"spark.sql.streaming.stateStore.rocksdb.blockCacheSizeMB": "0"}


def start_query(
    spark: SparkSession, plan: QueryPlan, on_batch: Callable[[DataFrame, int], None]
) -> StreamingQuery:
    """Start it; the clients' properties travel inside pickled classes, not as options."""
    # Spark clones the session's settings for each query, so others of the session keep theirs.
    settings = stream_settings(plan.note.tasks)
    before = {name: spark.conf.get(name, None) for name in (*settings, *_TUNING)}
    settings |= {name: value for name, value in _TUNING.items() if before[name] is None}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        with active(spark):
            return _start(spark, plan, on_batch)
    finally:
        for name, old in before.items():
            spark.conf.unset(name) if old is None else spark.conf.set(name, old)


def _start(
    spark: SparkSession, plan: QueryPlan, on_batch: Callable[[DataFrame, int], None]
) -> StreamingQuery:
    note = plan.note
    config = replace(plan.config, kafka=dict(plan.config.kafka))
    source = register_source(spark, config, name=f"kafkamq_source_{note.engine[-8:]}")
    starting = {str(number): at for number, at in note.starting.items()}
    blocks = (
        spark.readStream.format(source)
        .option("topic", config.marker_topic)
        .option("mode", "blocks")
        .option("tasks", note.tasks)
        .option("maxRowsPerTrigger", plan.max_markers)
        .option("startingOffsets", json.dumps({config.marker_topic: starting}))
        .load()
    )
    fold = FoldProcessor(
        FoldSettings(
            engine=note.engine,
            epoch=plan.epoch,
            token=plan.token,
            max_lease_ms=plan.tracker.max_lease_ms,
            carry_after_ms=plan.carry_after_ms,
            longest_ms=2 * plan.carry_after_ms,
            max_actions=most_actions(plan.tracker, plan.partitions),
            starting=note.starting,
        )
    )
    folded = blocks.groupBy("group_key").transformWithStateInPandas(
        fold, FOLDED_COLUMNS, outputMode="Append", timeMode="None"
    )
    return (
        folded.writeStream.foreachBatch(on_batch)
        .queryName(f"kafkamq tracker of {config.marker_topic} ({note.engine})")
        .outputMode("append")
        .option("checkpointLocation", plan.checkpoint)
        .trigger(processingTime="0 seconds")  # the batch before has waited until it is wanted
        .start()
    )
