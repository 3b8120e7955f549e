"""Spark's Python daemon, with the imports done before it forks instead of in each worker.

Every worker process would import pandas and its friends again: a second of CPU each, and a small
query has a dozen of them. Spark runs this module where ``spark.python.daemon.module`` names it.

A process must have no other threads when it forks. The session's settings keep the imports free of
them; should one have started a thread nevertheless, Spark's own daemon takes over.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from functools import cache
from pathlib import Path

from kafkamq.runtime.memory import calm_collector

THREADLESS = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""Environment in which importing NumPy, pandas and PyArrow starts no thread."""

_WORKER = "pyspark.worker"
IMPORTS = (
    "pandas",
    "pyspark.sql.pandas.serializers",
    "pyspark.sql.streaming.stateful_processor_api_client",
    "pyspark.sql.streaming.proto.StateMessage_pb2",
    "kafkamq.spark.tracker.query",
    "kafkamq.spark.formats",
)
_TASKS = Path("/proc/self/task")


@cache
def calm_worker() -> None:
    """``calm_collector``, once: for workers that another daemon has forked, as on a cluster."""
    calm_collector()


def main() -> None:
    """Import what the workers of this daemon need, then serve forks until Spark ends it."""
    from pyspark.daemon import manager

    module = sys.argv[1] if len(sys.argv) > 1 else _WORKER
    with contextlib.redirect_stdout(sys.stderr):
        # Spark reads the daemon's port from stdout.
        for name in (module, *(IMPORTS if module == _WORKER else ())):
            with contextlib.suppress(ImportError):
                # The worker that needs the module says it better.
                importlib.import_module(name)
    if _TASKS.exists() and len(list(_TASKS.iterdir())) > 1:
        os.execv(sys.executable, [sys.executable, "-m", "pyspark.daemon", *sys.argv[1:]])
    calm_collector()
    manager()


if __name__ == "__main__":
    main()
