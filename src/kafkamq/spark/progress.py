"""Progress of streaming queries as metrics: from Spark's listener.

with watching(spark):
    query = ...  # kafkamq_spark_* of every query of the session, by its name
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from kafkamq.metrics import catalog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FILES = "rocksdbSstFileSize"
_log = logging.getLogger(__name__)


class QueryMetrics(StreamingQueryListener):
    def __init__(self, names: Callable[[str], str]) -> None:
        """``names`` turns a query's name (its id, if it has none) into the label."""
        self._names = names
        self._labels: dict[str, str] = {}

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's
        self._label(str(event.runId), event.name or str(event.id))

    def _label(self, run_id: str, name: str) -> str:
        if run_id not in self._labels:
            self._labels[run_id] = self._names(name)
            catalog.SPARK_RUNNING.set(1, self._labels[run_id])
        return self._labels[run_id]

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802 - Spark's
        """A batch has ended, or nothing was to be done."""
        progress = json.loads(event.progress.json)
        label = self._label(progress["runId"], progress.get("name") or progress["id"])
        catalog.SPARK_BACKLOG.set(sum(map(_backlog, progress["sources"])), label)
        operators = progress["stateOperators"]
        if operators:
            memory = sum(each["memoryUsedBytes"] for each in operators)
            files = sum(each.get("customMetrics", {}).get(_FILES, 0) for each in operators)
            catalog.SPARK_STATE_BYTES.set(memory + files, label)
            catalog.SPARK_STATE_ROWS.set(sum(each["numRowsTotal"] for each in operators), label)
        took_s = progress["durationMs"].get("triggerExecution", 0) / 1000
        rows = progress["numInputRows"]
        if "addBatch" not in progress["durationMs"]:
            # There was no batch: Spark only looked.
            return
        catalog.SPARK_BATCH_SECONDS.observe(took_s, label)
        catalog.SPARK_ROWS.add(rows, label)
        if took_s > 0:
            catalog.SPARK_ROWS_PER_SECOND.set(rows / took_s, label)

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802 - Spark's
        label = self._labels.pop(str(event.runId), None)
        if label is None:
            return
        catalog.SPARK_RUNNING.set(0, label)
        catalog.SPARK_ROWS_PER_SECOND.set(0, label)
        if event.exception is not None:
            catalog.SPARK_FAILURES.add(1, label)


def _backlog(source: Mapping[str, Any]) -> int:
    """Return records behind the end of the batch, where the source tells."""
    ends, latest = (_offsets(source.get(name)) for name in ("endOffset", "latestOffset"))
    return sum(max(0, at - ends.get(place, 0)) for place, at in latest.items())


def _offsets(value: object) -> dict[tuple[str, str], int]:
    """Return Kafka's form, ``{topic: {partition: offset}}``; nothing for other sources."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    if not isinstance(value, dict):
        return {}
    return {
        (topic, number): at
        for topic, places in value.items()
        if isinstance(places, dict)
        for number, at in places.items()
        if isinstance(at, int)
    }


@contextmanager
def watching(
    spark: SparkSession, names: Callable[[str], str] = lambda name: name
) -> Iterator[None]:
    """Count what the session's queries report while the block runs."""
    metrics = QueryMetrics(names)
    spark.streams.addListener(metrics)
    try:
        yield
    finally:
        try:
            spark.streams.removeListener(metrics)
        except Exception:  # noqa: BLE001 - py4j raises anything when the JVM is gone
            _log.info("the listener could not be removed, the JVM may be gone")
