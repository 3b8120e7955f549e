"""The tracker's streaming query puts source, fold and driver together.

    markers topic -> blocks of decoded markers -> one fold per marker partition -> the driver

Blocks are grouped by marker partition, which partition p of n tasks folds in task p mod n
(``spark/parallelism.py``). A batch is one row for each, which the driver settles (``settling.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from kafkamq.config import ServiceConfig
from kafkamq.spark.checkpoint import CheckpointNote
from kafkamq.spark.daemon import calm_worker
from kafkamq.spark.formats import register_source
from kafkamq.spark.session import active
from kafkamq.spark.tracker.folding import FOLDED_COLUMNS, FoldSettings, PartitionFold

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass(frozen=True, kw_only=True)
class QueryPlan:
    config: ServiceConfig
    note: CheckpointNote
    fold: FoldSettings
    checkpoint: str
    max_markers: int


_STATE = "spark.sql.streaming.stateStore"
_SETTINGS = {
    # Spark does so for stateful queries anyway.
    "spark.sql.adaptive.enabled": "false",
    f"{_STATE}.providerClass":
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    f"{_STATE}.rocksdb.changelogCheckpointing.enabled": "true",
    # There are no timers, and no watermark.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # Sources and folds have the same environment without it, and so share their workers.
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
}  # fmt: skip
# Where the session says nothing. A batch reads each row once: a cache would only grow, 8 MB a task.
_TUNING = {f"{_STATE}.rocksdb.blockCacheSizeMB": "0"}


def start_query(
    spark: SparkSession, plan: QueryPlan, on_batch: Callable[[DataFrame, int], None]
) -> StreamingQuery:
    """Start it; the clients' properties travel inside pickled classes, not as options."""
    # Spark clones the session's settings for each query, so others of the session keep theirs.
    settings = {**_SETTINGS, "spark.sql.shuffle.partitions": str(plan.note.tasks)}
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
    note, config = plan.note, plan.config
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
    columns = ", ".join(f"{name} BINARY" for name in FOLDED_COLUMNS)
    folded = blocks.groupBy("group_key").transformWithStateInPandas(
        FoldProcessor(plan.fold), columns, outputMode="Append", timeMode="None"
    )
    return (
        folded.writeStream.foreachBatch(on_batch)
        .queryName(f"kafkamq tracker of {config.marker_topic} ({note.engine})")
        .outputMode("append")
        .option("checkpointLocation", plan.checkpoint)
        # The batch before has waited until it is wanted.
        .trigger(processingTime="0 seconds")
        .start()
    )


_CELL = ["topic", "partition", "range_start", "range_end", "first_offset", "block"]


class FoldProcessor(StatefulProcessor):
    def __init__(self, settings: FoldSettings) -> None:
        self._settings = settings

    def init(self, handle: StatefulProcessorHandle) -> None:
        calm_worker()
        index = handle.getValueState(
            "index", "index BINARY, epoch BIGINT, redelivered BIGINT, dead_lettered BIGINT"
        )
        chunks = handle.getMapState("chunks", "name STRING", "chunk BINARY")
        self._fold = PartitionFold(self._settings, index, chunks)

    def handleInputRows(  # type: ignore[override]  # noqa: N802 - rows come as pandas here
        self,
        key: Any,
        rows: Iterator[pd.DataFrame],
        timerValues: Any,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        """Fold a batch: rows of mode ``blocks``, all of one marker partition."""
        import pandas as pd

        parts = (frame[_CELL].itertuples(index=False, name=None) for frame in rows)
        cells = sorted(chain.from_iterable(parts), key=itemgetter(_CELL.index("first_offset")))
        yield pd.DataFrame([self._fold.fold(cells)], columns=list(FOLDED_COLUMNS))
