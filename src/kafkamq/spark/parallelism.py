"""Into how many tasks a query is cut, and which of them gets what.

Executors register one after the other, some time after the session has started. What is asked for
then is a machine or two, and a query that was cut for them would never use the others. So what the
configuration announces counts from the start, and who runs for long looks again.

Spark puts a row into shuffle partition ``murmur3(key) mod n``. Small integers collide there (eight
of them reach five tasks), so a marker partition, or a slot of the sink, is grouped by a text whose
salt is chosen so that number p lands in task ``p mod n``. A test pins the hash against Spark's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from typing import TYPE_CHECKING

from kafkamq.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

FIRST_LOOK_S = 60.0
"""Seconds after its start until a query looks which executors there are."""
NEXT_LOOK_S = 600.0
"""Seconds between later looks: a change may cost a fold of what is open."""
# There an executor has one core, and there are two executors, unless told otherwise.
_CLUSTERS = ("yarn", "k8s://")


def cores(spark: SparkSession) -> int:
    """Cores of the executors that are registered, or of those that are announced, if more."""
    settings = dict(spark.sparkContext.getConf().getAll())
    registered = spark.sparkContext.defaultParallelism
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


_MASK = 0xFFFF_FFFF
_SEED = 42


def spark_hash(text: str) -> int:
    """Spark SQL's ``hash(text)``: a signed 32-bit murmur3 whose tail is mixed byte by byte."""
    data = text.encode()
    whole = len(data) & ~3
    value = _SEED
    for start in range(0, whole, 4):
        value = _mix(value, int.from_bytes(data[start : start + 4], "little"))
    for byte in data[whole:]:
        value = _mix(value, (byte - 256 if byte > 127 else byte) & _MASK)
    value ^= len(data)
    value = ((value ^ (value >> 16)) * 0x85EB_CA6B) & _MASK
    value = ((value ^ (value >> 13)) * 0xC2B2_AE35) & _MASK
    value ^= value >> 16
    return value - (1 << 32) if value >> 31 else value


def _mix(value: int, word: int) -> int:
    word = (word * 0xCC9E_2D51) & _MASK
    word = (word << 15 | word >> 17) & _MASK
    value ^= (word * 0x1B87_3593) & _MASK
    value = (value << 13 | value >> 19) & _MASK
    return (value * 5 + 0xE654_6B64) & _MASK


def group_key(topic: str, partition: int, tasks: int) -> str:
    """Get the group key of a marker partition: of ``tasks`` shuffle partitions, for p mod tasks."""
    for salt in count():
        key = f"{topic}/{partition}/{salt}"
        if spark_hash(key) % tasks == partition % tasks:
            return key
    raise AssertionError("count() has no end")


def check_spelling(columns: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a column that Spark takes for a known one, and that would be passed over."""
    for name in columns:
        if name.lower() in known and name not in known:
            raise ConfigError(f"the rows have a column {name}: write {name.lower()}, or rename it")


def with_columns(frame: DataFrame, kinds: Mapping[str, str]) -> DataFrame:
    """Return a frame's rows with these columns alone, by type; null what it has not."""
    from pyspark.sql import functions as fn

    return frame.select(
        *(
            (fn.col(name) if name in frame.columns else fn.lit(None)).cast(kind).alias(name)
            for name, kind in kinds.items()
        )
    )


def in_slots(rows: DataFrame, name: str, hashed: Column, slots: int) -> DataFrame:
    """Return the rows with a column of their slots, by a hash; one slot is in one task."""
    from pyspark.sql import functions as fn

    cut = rows.withColumn(name, fn.pmod(hashed, fn.lit(slots)).cast("int"))
    keys = fn.array(*(fn.lit(group_key("slot", each, slots)) for each in range(slots)))
    return cut.repartition(slots, fn.element_at(keys, fn.col(name) + 1))
