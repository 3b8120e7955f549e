"""What a task knows of the streaming batch that it belongs to.

Spark hands the number to a writer's ``commit`` on the driver, but not to ``write`` in the workers;
there it is a property of the task, as are the query and its run. Their names are internal to Spark:
a test pins them.
"""

from __future__ import annotations

from pyspark import TaskContext

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

    def __new__(cls, number: int, *, query_id: str = "", is_repeated: bool = False) -> Batch:
        made = super().__new__(cls, number)
        made.query_id, made.is_repeated = query_id, is_repeated
        return made


def task_property(name: str) -> str:
    """Return what Spark has told this task; empty: nothing, or it is no task."""
    context = TaskContext.get()
    return (None if context is None else context.getLocalProperty(name)) or ""
