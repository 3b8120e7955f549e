"""How many tasks a query is cut into: by the cores that there are, and those that will be.

Executors register one after the other, some time after the session has started. What is asked for
then is a machine or two, and a query that was cut for them would never use the others. So what the
configuration announces counts from the start, and who runs for long looks again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FIRST_LOOK_S = 60.0
"""Seconds after its start until a query looks which executors there are."""
NEXT_LOOK_S = 600.0
"""Seconds between later looks: a change may cost a fold of what is open."""
_CLUSTERS = ("yarn", "k8s://")  # where an executor has one core, and there are two, unless told


def cores(spark: SparkSession) -> int:
    """Cores of the executors that are registered, or of those that are announced, if more."""
    settings = dict(spark.sparkContext.getConf().getAll())
    registered = spark.sparkContext.defaultParallelism  # asked of the scheduler at each call
    if "spark.default.parallelism" in settings:
        return registered
    return max(registered, announced_cores(settings))


def announced_cores(settings: dict[str, str]) -> int:
    """Cores that Spark's properties promise; 0: they say nothing."""
    master = settings.get("spark.master", "")
    if master.startswith("local"):
        return 0
    each = int(settings.get("spark.executor.cores", 1 if master.startswith(_CLUSTERS) else 0))
    if settings.get("spark.dynamicAllocation.enabled", "false").lower() == "true":
        names = ("minExecutors", "initialExecutors")
        counts = [settings.get(f"spark.dynamicAllocation.{name}", 0) for name in names]
        executors = max(map(int, [*counts, settings.get("spark.executor.instances", 0)]))
    else:
        usual = 2 if master.startswith(_CLUSTERS) else 0
        executors = int(settings.get("spark.executor.instances", usual))
    most = int(settings.get("spark.cores.max", 0))
    return min(each * executors, most) if most and each * executors else max(each * executors, most)


def tracker_tasks(partitions: int, cores: int) -> int:
    """Tasks of a tracker's batch: each has a fixed cost, and at least one marker partition."""
    return max(1, min(partitions, cores))
