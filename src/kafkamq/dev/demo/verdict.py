"""The verdict: Spark SQL over the topics, and over nothing else that kafkamq says of itself.

It expects the views ``messages``, ``markers`` and ``dead_letters`` (``kafkamq.spark.views``) and
``history``, what the workers wrote down (queue, id, delivery, event). It folds no tracker code: a
lease's end is found again from R1 and R2 by window functions, so that a tracker that is wrong
cannot agree with itself. A message is known by its id; the demo gives each its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["HISTORY_SCHEMA", "STEPS", "verdict_rows"]

HISTORY_SCHEMA = "event STRING, queue STRING, id STRING, delivery INT, at_ms BIGINT"

_COPIES = """
SELECT queue_id, id, partition, offset, delivery_count, unix_millis(timestamp) AS at_ms,
       origin_partition = partition AND origin_offset = offset AS is_first,
       CAST(element_at(filter(headers, h -> h.key = 'demo-kind'), -1).value AS STRING) AS kind,
       lead(unix_millis(timestamp)) OVER (PARTITION BY id ORDER BY delivery_count, timestamp)
           AS next_at_ms
FROM messages
"""

# R1: the clock of a partition is the sum of the positive steps of its broker timestamps.
_CLOCKED = """
SELECT *, sum(step) OVER (PARTITION BY marker_partition ORDER BY marker_offset) AS clock
FROM (
  SELECT *, unix_millis(timestamp) AS at_ms,
         greatest(0, unix_millis(timestamp) - lag(unix_millis(timestamp), 1)
             OVER (PARTITION BY marker_partition ORDER BY marker_offset)) AS step
  FROM markers WHERE type IS NOT NULL)
"""

_SCHEDULES = """
SELECT first.id, first.queue_id, first.at_ms + first.redeliver_after_ms AS due_ms, ended.outcome
FROM clocked AS first
LEFT JOIN (
  SELECT partition, offset, min(outcome) AS outcome FROM clocked
  WHERE type = 'END' AND of_schedule GROUP BY partition, offset) AS ended
ON ended.partition = first.marker_partition AND ended.offset = first.marker_offset
WHERE first.type = 'SCHEDULE' AND NOT first.carried_forward
"""

# Sent: the first copies, and the delayed messages that did not come yet (cancelled ones aside).
_SENT = """
SELECT id, min(queue_id) AS queue, max(kind) AS kind FROM (
  SELECT id, queue_id, kind FROM copies WHERE is_first
  UNION ALL
  SELECT id, queue_id, NULL FROM schedules WHERE outcome IS NULL OR outcome <> 'ACK')
GROUP BY id
"""

# The END by which a tracker closed a copy: with it there must be one more copy, or a dead letter.
_SETTLED = """
SELECT copies.id, copies.next_at_ms, end.*
FROM copies JOIN (
  SELECT partition, offset, marker_partition, min(marker_offset) AS end_offset,
         min_by(outcome, marker_offset) AS outcome, count(*) AS ends
  FROM clocked
  WHERE type = 'END' AND NOT of_schedule AND outcome IN ('REDELIVERED', 'DEAD_LETTERED')
  GROUP BY partition, offset, marker_partition) AS end
ON copies.partition = end.partition AND copies.offset = end.offset
"""

# What a tracker had read of such a copy before it closed it, in log order.
_SIGNS = """
SELECT settled.partition, settled.offset, settled.end_offset, sign.marker_offset, sign.type,
       sign.outcome, sign.at_ms, sign.clock, sign.redeliver_after_ms
FROM settled JOIN clocked AS sign
ON sign.partition = settled.partition AND sign.offset = settled.offset
   AND sign.marker_partition = settled.marker_partition
   AND sign.marker_offset <= settled.end_offset
   AND sign.type IN ('START', 'KEEPALIVE', 'END') AND NOT sign.of_schedule
UNION
SELECT settled.partition, settled.offset, settled.end_offset, alive.marker_offset, alive.type,
       alive.outcome, alive.at_ms, alive.clock, alive.redeliver_after_ms
FROM settled
JOIN clocked AS start
ON start.partition = settled.partition AND start.offset = settled.offset
   AND start.marker_partition = settled.marker_partition AND start.type = 'START'
JOIN clocked AS alive
ON alive.marker_partition = settled.marker_partition AND alive.type = 'KEEPALIVE'
   AND alive.partition IS NULL AND alive.consumer_id = start.consumer_id
   AND alive.consumer_id <> '' AND alive.marker_offset > start.marker_offset
   AND alive.marker_offset < settled.end_offset
"""

# R2: a lease has ended where the clock is more than its timeout past the last sign of life.
_HELD = """
SELECT *, type <> 'END' AND next_clock - clock > redeliver_after_ms AS is_end_of_lease
FROM (
  SELECT *, lead(clock) OVER (
      PARTITION BY partition, offset, end_offset ORDER BY marker_offset) AS next_clock
  FROM signs)
"""

_CAUSES = """
SELECT partition, offset, end_offset,
  min(CASE WHEN is_end_of_lease THEN marker_offset END) AS lease_offset,
  min_by(at_ms + redeliver_after_ms, marker_offset) FILTER (WHERE is_end_of_lease) AS lease_due_ms,
  min(CASE WHEN outcome = 'ACK' THEN marker_offset END) AS ack_offset,
  min(CASE WHEN outcome IN ('NACK', 'REJECT', 'RELEASE') THEN marker_offset END) AS verdict_offset,
  min_by(at_ms + coalesce(redeliver_after_ms, 0), marker_offset)
      FILTER (WHERE outcome IN ('NACK', 'REJECT', 'RELEASE')) AS verdict_due_ms
FROM held GROUP BY partition, offset, end_offset
"""

_JUDGED = """
SELECT settled.id, settled.outcome, settled.ends,
  causes.ack_offset IS NOT NULL
    AND (lease_offset IS NULL OR lease_offset > ack_offset)
    AND (verdict_offset IS NULL OR verdict_offset > ack_offset) AS in_time,
  lease_offset IS NULL AND verdict_offset IS NULL
    AND NOT (settled.outcome = 'DEAD_LETTERED' AND coalesce(dead.reason IN ('expired', 'max-lease'),
                                                            false)) AS unexplained,
  CASE WHEN settled.outcome = 'REDELIVERED' THEN next_at_ms ELSE dead.at_ms END
    - CASE WHEN lease_offset IS NULL OR verdict_offset < lease_offset
           THEN verdict_due_ms ELSE lease_due_ms END AS late_ms
FROM settled
LEFT JOIN causes
ON settled.partition = causes.partition AND settled.offset = causes.offset
   AND settled.end_offset = causes.end_offset
LEFT JOIN dead ON settled.id = dead.id
"""

_DEAD = """
SELECT id, count(*) AS letters, min(reason) AS reason, min(error) AS error,
       min(unix_millis(timestamp)) AS at_ms
FROM dead_letters GROUP BY id
"""

_ACKED = """
SELECT DISTINCT copies.id FROM clocked AS end
JOIN copies ON copies.partition = end.partition AND copies.offset = end.offset
WHERE end.type = 'END' AND end.outcome = 'ACK' AND NOT end.of_schedule
"""

_BY_ID = """
SELECT id, count(*) FILTER (WHERE NOT is_first) AS again, count(*) FILTER (WHERE is_first) AS firsts
FROM copies GROUP BY id
"""

_SETTLED_BY_ID = """
SELECT id, sum(ends) FILTER (WHERE outcome = 'REDELIVERED') AS redelivered,
       sum(ends) FILTER (WHERE outcome = 'DEAD_LETTERED') AS dead_lettered,
       count(*) FILTER (WHERE in_time) AS in_time,
       count(*) FILTER (WHERE unexplained) AS unexplained
FROM judged GROUP BY id
"""

_SCHEDULED_BY_ID = """
SELECT id, count(*) FILTER (WHERE outcome = 'DEAD_LETTERED') AS dead_lettered
FROM schedules GROUP BY id
"""

_DONE = """
SELECT id, count(*) AS times FROM history WHERE event = 'done' GROUP BY id
"""

_MESSAGES = """
SELECT sent.queue, sent.id, acked.id IS NOT NULL AS is_acked, dead.id IS NOT NULL AS is_dead,
  coalesce(by_id.again, 0) > 0 AS is_redelivered, coalesce(done.times, 0) > 1 AS is_duplicated,
  sent.kind <=> 'poison' AS is_poison,
  coalesce(dead.reason = 'max-deliveries' AND dead.error LIKE '%PoisonError%', false)
    AS is_dead_poison,
  coalesce(closed.in_time, 0) AS in_time_redelivered,
  coalesce(closed.unexplained, 0)
    + abs(coalesce(by_id.again, 0) - coalesce(closed.redelivered, 0))
    + abs(coalesce(dead.letters, 0) - coalesce(closed.dead_lettered, 0)
          - coalesce(scheduled.dead_lettered, 0))
    + greatest(coalesce(by_id.firsts, 0) - 1, 0) AS unexplained
FROM sent
LEFT JOIN acked ON acked.id = sent.id
LEFT JOIN dead ON dead.id = sent.id
LEFT JOIN by_id ON by_id.id = sent.id
LEFT JOIN settled_by_id AS closed ON closed.id = sent.id
LEFT JOIN scheduled_by_id AS scheduled ON scheduled.id = sent.id
LEFT JOIN done ON done.id = sent.id
"""

_LATENESS = """
SELECT sent.queue, late_ms / 1000 AS late_s FROM judged JOIN sent ON judged.id = sent.id
WHERE late_ms IS NOT NULL
UNION ALL
SELECT sent.queue, (copies.at_ms - schedules.due_ms) / 1000 FROM schedules
JOIN copies ON copies.id = schedules.id AND copies.is_first
JOIN sent ON sent.id = schedules.id
WHERE schedules.outcome = 'REDELIVERED'
"""

_RESULT = """
SELECT counted.*, round(late_p50_s, 3) AS late_p50_s, round(late_p99_s, 3) AS late_p99_s
FROM (
  SELECT coalesce(queue, '') AS queue, count(*) AS sent, count_if(is_acked) AS acked,
    count_if(is_redelivered) AS redelivered, count_if(is_dead) AS dead_lettered,
    count_if(NOT is_acked AND NOT is_dead) AS lost, count_if(is_duplicated) AS duplicated,
    count_if(is_poison) AS poison, count_if(is_poison AND NOT is_dead_poison) AS poison_missing,
    coalesce(sum(in_time_redelivered), 0) AS in_time_redelivered,
    coalesce(sum(unexplained), 0) AS unexplained
  FROM followed GROUP BY ROLLUP (queue)) AS counted
LEFT JOIN (
  SELECT coalesce(queue, '') AS queue, percentile(late_s, 0.5) AS late_p50_s,
    percentile(late_s, 0.99) AS late_p99_s
  FROM lateness GROUP BY ROLLUP (queue)) AS late
ON late.queue = counted.queue
"""

STEPS = {
    "copies": _COPIES,
    "clocked": _CLOCKED,
    "schedules": _SCHEDULES,
    "sent": _SENT,
    "settled": _SETTLED,
    "signs": _SIGNS,
    "held": _HELD,
    "causes": _CAUSES,
    "dead": _DEAD,
    "judged": _JUDGED,
    "acked": _ACKED,
    "by_id": _BY_ID,
    "settled_by_id": _SETTLED_BY_ID,
    "scheduled_by_id": _SCHEDULED_BY_ID,
    "done": _DONE,
    "followed": _MESSAGES,
    "lateness": _LATENESS,
    "result": _RESULT,
}
"""Temporary views, each over those before it; ``result`` has one row per queue and one of all."""

_KEPT = ("copies", "clocked", "settled", "judged", "sent", "schedules")  # used more than once


def verdict_rows(spark: SparkSession) -> list[dict[str, Any]]:
    """The verdict's rows: one per queue, and one with an empty ``queue`` for all together."""
    for name, query in STEPS.items():
        frame = spark.sql(query)
        if name in _KEPT:
            frame = frame.cache()
        frame.createOrReplaceTempView(name)
    try:
        return [row.asDict() for row in spark.table("result").collect()]
    finally:
        for name in _KEPT:
            spark.table(name).unpersist()
