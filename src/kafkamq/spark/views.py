"""The life of a queue as tables for Spark SQL.

    register_views(spark, config)
    spark.sql("SELECT queue_id, outcome, count(*) FROM deliveries GROUP BY ALL").show()

Every view reads what is committed in the topics when the query runs; nothing is kept. Columns
follow the topics' decoded records (``columns.py`` lists them with their types); the two derived
views are described at their functions. Times are the brokers'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.spark.source import register_source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["VIEWS", "Views", "register_views"]

VIEWS = ("messages", "markers", "dead_letters", "deliveries", "in_flight")

# R1: the clock of a marker partition is the sum of the positive steps of its timestamps.
_CLOCKED = """
SELECT *, sum(step) OVER (PARTITION BY marker_partition ORDER BY marker_offset) AS clock_ms
FROM (
  SELECT *, greatest(0, unix_millis(timestamp) - lag(unix_millis(timestamp), 1)
      OVER (PARTITION BY marker_partition ORDER BY marker_offset)) AS step
  FROM {markers} WHERE type IS NOT NULL)
"""

# A message's identity on the wire (R13); its markers share a marker partition (R26).
_IDENTITY = "marker_partition, topic_id, leader_epoch, partition, offset"

# One row per copy that was STARTed: the first START, the last sign of life, the END that counted.
_DELIVERIES = f"""
SELECT
  any_value(queue_id) FILTER (WHERE type = 'START') AS queue_id,
  any_value(id) FILTER (WHERE type = 'START') AS id,
  any_value(user_key) FILTER (WHERE type = 'START') AS user_key,
  min_by(delivery_count, marker_offset) FILTER (WHERE type = 'START') AS delivery_count,
  partition, offset, topic_id, leader_epoch,
  max_by(consumer_id, marker_offset) FILTER (WHERE type = 'START') AS consumer_id,
  min(timestamp) FILTER (WHERE type = 'START') AS started_at,
  max(timestamp) FILTER (WHERE type IN ('START', 'KEEPALIVE')) AS renewed_at,
  count_if(type = 'START') AS starts,
  min_by(outcome, marker_offset) FILTER (WHERE is_verdict) AS outcome,
  min_by(reason, marker_offset) FILTER (WHERE is_verdict) AS reason,
  min(timestamp) FILTER (WHERE is_verdict) AS verdict_at,
  min_by(redeliver_after_ms, marker_offset) FILTER (WHERE outcome = 'NACK') AS nack_delay_ms,
  min_by(outcome, marker_offset) FILTER (WHERE is_settlement) AS settlement,
  min(timestamp) FILTER (WHERE is_settlement) AS settled_at,
  min_by(message_timestamp, marker_offset) FILTER (WHERE type = 'START') AS message_timestamp,
  marker_partition,
  min(marker_offset) FILTER (WHERE type = 'START') AS start_offset
FROM (
  SELECT *, coalesce(outcome IN ('ACK', 'NACK', 'REJECT', 'RELEASE'), false) AS is_verdict,
    coalesce(outcome IN ('REDELIVERED', 'DEAD_LETTERED'), false) AS is_settlement
  FROM {{markers}}
  WHERE type IN ('START', 'KEEPALIVE', 'END') AND NOT of_schedule AND partition IS NOT NULL)
GROUP BY {_IDENTITY}
HAVING count_if(type = 'START') > 0
"""

# Copies without an end: neither acknowledged nor settled by a tracker.
_IN_FLIGHT = f"""
WITH clocked AS ({_CLOCKED}),
now AS (SELECT marker_partition, max(clock_ms) AS now_ms FROM clocked GROUP BY marker_partition),
renewals AS (
  SELECT marker_partition, consumer_id, max(clock_ms + redeliver_after_ms) AS until_ms
  FROM clocked WHERE type = 'KEEPALIVE' AND partition IS NULL AND consumer_id <> ''
  GROUP BY marker_partition, consumer_id),
copies AS (
  SELECT {_IDENTITY},
    any_value(queue_id) FILTER (WHERE type = 'START') AS queue_id,
    any_value(id) FILTER (WHERE type = 'START') AS id,
    min_by(delivery_count, marker_offset) FILTER (WHERE type = 'START') AS delivery_count,
    max_by(consumer_id, marker_offset) FILTER (WHERE type <> 'END') AS consumer_id,
    min(timestamp) FILTER (WHERE type = 'START') AS started_at,
    max_by(clock_ms + redeliver_after_ms, marker_offset) FILTER (WHERE type <> 'END') AS lease_ms,
    max_by(outcome, marker_offset) FILTER (WHERE type = 'END') AS outcome,
    max_by(clock_ms + redeliver_after_ms, marker_offset) FILTER (WHERE outcome = 'NACK') AS wait_ms,
    min(marker_offset) FILTER (WHERE type = 'START') AS start_offset
  FROM clocked
  WHERE type IN ('START', 'KEEPALIVE', 'END') AND NOT of_schedule AND partition IS NOT NULL
  GROUP BY {_IDENTITY}
  HAVING count_if(type = 'START') > 0
    AND count_if(outcome IN ('ACK', 'REDELIVERED', 'DEAD_LETTERED')) = 0)
SELECT queue_id, id, partition, offset, topic_id, leader_epoch, delivery_count,
  copies.consumer_id, started_at,
  CASE WHEN outcome IN ('REJECT', 'RELEASE') THEN 'due'
       WHEN coalesce(wait_ms, greatest(lease_ms, coalesce(until_ms, 0))) < now_ms THEN 'due'
       WHEN outcome = 'NACK' THEN 'waiting'
       ELSE 'held' END AS state,
  outcome,
  CASE WHEN outcome IN ('REJECT', 'RELEASE') THEN 0
       ELSE coalesce(wait_ms, greatest(lease_ms, coalesce(until_ms, 0))) - now_ms
       END AS remaining_ms,
  copies.marker_partition, start_offset
FROM copies
JOIN now ON now.marker_partition = copies.marker_partition
LEFT JOIN renewals ON renewals.marker_partition = copies.marker_partition
  AND renewals.consumer_id = copies.consumer_id AND copies.outcome IS NULL
"""


class Views:
    """DataFrames over the topics of one namespace."""

    def __init__(self, spark: SparkSession, config: ServiceConfig) -> None:
        self._spark = spark
        self._config = config
        self._format = register_source(spark, config)

    def messages(self) -> DataFrame:
        """Every copy of every message in the queue topic.

        ``origin_*`` is the place of the first copy, its own for the first; ``headers`` are the
        sender's; ``delivery_count`` is what the copy's delivery is.
        """
        return self._decoded("messages", self._config.message_topic)

    def markers(self) -> DataFrame:
        """Every record of the markers topic; ``type`` is null where it is no marker."""
        return self._decoded("markers", self._config.marker_topic)

    def dead_letters(self) -> DataFrame:
        """Every dead letter, with its reason and the error's text."""
        return self._decoded("dead_letters", self._config.dead_letter_topic)

    def deliveries(self) -> DataFrame:
        """One row per attempt: a copy of a message that a worker STARTed.

        queue_id: STRING, id: STRING, user_key: BINARY  of the message
        delivery_count: INT  which attempt it was
        partition: INT, offset: BIGINT, topic_id: STRING, leader_epoch: INT  its place
        consumer_id: STRING  who STARTed it last
        started_at: TIMESTAMP  first START; starts: BIGINT  how many (more than one: a takeover)
        renewed_at: TIMESTAMP  last START, or KEEPALIVE that names the message
        outcome: STRING  first verdict of a worker: ACK, NACK, REJECT, RELEASE; null: none.
            Verdicts that came after the lease's end are among them; settlement tells.
        reason: STRING, verdict_at: TIMESTAMP, nack_delay_ms: BIGINT  of that verdict
        settlement: STRING  what a tracker did: REDELIVERED, DEAD_LETTERED; null: nothing
        settled_at: TIMESTAMP  when
        message_timestamp: TIMESTAMP  of the message's record
        marker_partition: INT, start_offset: BIGINT  place of the first START
        """
        return self._derived(_DELIVERIES)

    def in_flight(self) -> DataFrame:
        """Copies that are STARTed and have not ended, by log time (R1, R2).

        An approximation of what a tracker holds: the grace of R3, max_lease and the order of a
        RELEASE and its holder are left out. ``kafkamq stat`` shows the tracker's own numbers.

        queue_id: STRING, id: STRING, partition: INT, offset: BIGINT, topic_id: STRING,
            leader_epoch: INT, delivery_count: INT  of the message
        consumer_id: STRING  who holds it or held it last
        started_at: TIMESTAMP  first START
        state: STRING  held, waiting (nacked with a delay) or due
        outcome: STRING  last verdict, null while held
        remaining_ms: BIGINT  of the lease or the wait, by the partition's clock; negative: due
        marker_partition: INT, start_offset: BIGINT  place of the first START
        """
        return self._derived(_IN_FLIGHT)

    def _decoded(self, mode: str, topic: str) -> DataFrame:
        return self._spark.read.format(self._format).option("topic", topic).option(
            "mode", mode
        ).load()  # fmt: skip

    def _derived(self, statement: str) -> DataFrame:
        return self._spark.sql(statement, markers=self.markers())


def register_views(
    spark: SparkSession, config: ServiceConfig, *, prefix: str = ""
) -> tuple[str, ...]:
    """Make the views known to a session as temporary views; returns their names.

    Args:
        spark: The session.
        config: The namespace.
        prefix: Goes before each name, for several namespaces in one session.

    Raises:
        ConfigError: The prefix cannot begin a view's name.
    """
    if prefix and not prefix.isidentifier():
        raise ConfigError(
            f"prefix is {prefix!r}: it must begin with a letter or '_' and go on "
            "with letters, digits and '_'"
        )
    views = Views(spark, config)
    names = []
    for name in VIEWS:
        frame: DataFrame = getattr(views, name)()
        frame.createOrReplaceTempView(f"{prefix}{name}")
        names.append(f"{prefix}{name}")
    return tuple(names)
