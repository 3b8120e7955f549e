"""Progress of queries as metrics: what Spark reports is what is counted."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from tests.spark.test_source import produce
from tests.waiting import wait_until, within

from kafkamq.metrics import catalog
from kafkamq.spark.formats import register_source
from kafkamq.spark.progress import QueryMetrics, watching

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark]

PATIENCE_S = 120.0


@pytest.mark.slow
def test_a_query_is_counted_while_it_is_watched(
    spark: SparkSession, bootstrap: str, namespace: str, checkpoint: str
) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(namespace, 1, 1)])[namespace].result(within(30))
    produce(bootstrap, namespace, 70)
    label = (f"rows of {namespace}",)
    frame = spark.readStream.format(register_source(spark)).options(
        **{"kafka.bootstrap.servers": bootstrap, "topic": namespace, "maxRowsPerTrigger": "50"}
    )

    def take(rows: DataFrame, batch: int) -> None:
        if batch == 1:
            raise RuntimeError("no more")
        rows.count()

    with watching(spark):
        query = (
            frame.load().writeStream.queryName(label[0]).foreachBatch(take)
            .option("checkpointLocation", checkpoint).start()
        )  # fmt: skip
        with pytest.raises(Exception, match="no more"):
            query.awaitTermination(PATIENCE_S)
        failures = catalog.SPARK_FAILURES.values
        wait_until(lambda: failures().get(label) == 1, timeout_s=PATIENCE_S)
    assert catalog.SPARK_ROWS.values()[label] == 50
    assert catalog.SPARK_RUNNING.values()[label] == 0
    assert catalog.SPARK_BACKLOG.values()[label] == 20
    assert sum(catalog.SPARK_BATCH_SECONDS.distributions()[label].counts) == 1


def test_state_and_rates_are_what_a_batch_reports() -> None:
    metrics = QueryMetrics(names=lambda name: f"<{name}>")
    progress = {
        "runId": "run", "id": "id", "name": None, "numInputRows": 500,
        "durationMs": {"triggerExecution": 250, "addBatch": 200},
        "sources": [{"endOffset": {"t": {"0": 5}}, "latestOffset": '{"t":{"0":9,"1":2}}'}, {}],
        "stateOperators": [
            {"memoryUsedBytes": 10, "numRowsTotal": 3, "customMetrics": {"rocksdbSstFileSize": 7}},
        ],
    }  # fmt: skip

    def progressed(**of: object) -> Any:
        return SimpleNamespace(progress=SimpleNamespace(json=json.dumps({**progress, **of})))

    metrics.onQueryProgress(progressed())
    label = ("<id>",)
    assert catalog.SPARK_ROWS_PER_SECOND.values()[label] == 2000
    assert catalog.SPARK_STATE_BYTES.values()[label] == 17
    assert catalog.SPARK_STATE_ROWS.values()[label] == 3
    assert catalog.SPARK_BACKLOG.values()[label] == 6
    metrics.onQueryProgress(progressed(durationMs={"triggerExecution": 3}, numInputRows=0))
    assert sum(catalog.SPARK_BATCH_SECONDS.distributions()[label].counts) == 1  # no batch ran
    metrics.onQueryTerminated(SimpleNamespace(runId="run", exception=None))
    metrics.onQueryTerminated(SimpleNamespace(runId="unknown", exception="it failed"))
    assert catalog.SPARK_ROWS_PER_SECOND.values()[label] == 0
