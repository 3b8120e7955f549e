"""What a task knows of the streaming batch that it belongs to, and what its process keeps.

Spark hands the number to a writer's ``commit`` on the driver, but not to ``write`` in the workers;
there it is a property of the task, as are the query and its run. Their names are internal to Spark:
a test pins them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from pyspark import TaskContext

from kafkamq.config import ServiceConfig

BATCH_ID = "streaming.sql.batchId"
QUERY_ID = "sql.streaming.queryId"
"""Of the checkpoint: the same in all runs of a query."""
RUN_ID = "spark.jobGroup.id"
"""Of this start of the query."""

_Made = TypeVar("_Made")


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


_made: dict[tuple[object, ...], Any] = {}


def of_process(make: Callable[[ServiceConfig], _Made], config: ServiceConfig) -> _Made:
    """Return what this process has made of a namespace, once; a process that was forked has none.

    A worker runs many tasks in its life, and each would connect to the brokers.
    """
    places = config.bootstrap_servers, *config.topics.values(), *sorted(config.kafka.items())
    key = os.getpid(), make, *places
    if key not in _made:
        _made[key] = make(config)
    found: _Made = _made[key]
    return found
