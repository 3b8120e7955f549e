"""What the processes that Spark starts have time for, and what they need it for.

The streaming sources' planners are processes of their own, and Spark takes one for dead that has
not connected within ten seconds, which no setting changes. Most of that time they import PySpark
from the archive in Spark's home, which is compiled again by each of them: without the archive they
find the compiled files beside it, in a third of the time.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tests.waiting import within

__all__ = ["spark_environment"]

_CONNECT_S = 60.0  # Spark's own 15 s are of a machine that does nothing else


def spark_environment(home: Path) -> dict[str, str]:
    """The environment in which tests start Spark, with ``home`` as its home."""
    setting = f"spark.python.authenticate.socketTimeout={within(_CONNECT_S):.0f}s"
    environment = {"PYSPARK_SUBMIT_ARGS": f"--conf {setting} pyspark-shell"}
    found = find_spec("pyspark")
    if found is None or found.origin is None:
        return environment
    for entry in Path(found.origin).parent.iterdir():
        if entry.name != "python":  # the archives
            (home / entry.name).symlink_to(entry)
    return {**environment, "SPARK_HOME": str(home)}
