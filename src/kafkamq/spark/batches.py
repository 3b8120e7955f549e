"""What a task knows of the streaming batch that it belongs to.

Spark hands the number to a writer's ``commit`` on the driver, but not to ``write`` in the workers;
there it is a property of the task, as are the query and its run. Their names are internal to Spark:
a test pins them.
"""

from __future__ import annotations

from pyspark import TaskContext

from kafkamq.errors import StateError

BATCH_ID = "streaming.sql.batchId"
QUERY_ID = "sql.streaming.queryId"
"""Of the checkpoint: the same in all runs of a query."""
RUN_ID = "spark.jobGroup.id"
"""Of this start of the query."""


class Batch(int):
    """The number of a batch, as functions for ``each_batch`` get it.

    Attributes:
        query_id: Spark's id of the query, the same in all its runs.
        is_repeated: Whether an earlier run of the query has planned it, and may have written it.
    """

    query_id: str
    is_repeated: bool

    def __new__(cls, number: int, *, query_id: str, is_repeated: bool) -> Batch:
        made = super().__new__(cls, number)
        made.query_id, made.is_repeated = query_id, is_repeated
        return made


def current_batch() -> int:
    """The number of the batch that this task works for."""
    context = TaskContext.get()
    text = None if context is None else context.getLocalProperty(BATCH_ID)
    if text is None:
        raise StateError(
            f"Spark does not tell the batch (task property {BATCH_ID}): exactly-once writing needs "
            "a streaming query on PySpark 4.2"
        )
    return int(text)


def current_query() -> str:
    """The query that this task works for, the same in all its runs; empty: none, or unknown."""
    context = TaskContext.get()
    return (None if context is None else context.getLocalProperty(QUERY_ID)) or ""
