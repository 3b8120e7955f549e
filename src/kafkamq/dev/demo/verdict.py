"""The verdict: Spark SQL over the topics, and over nothing else that kafkamq says of itself.

It expects the views ``messages``, ``markers`` and ``dead_letters`` (``kafkamq.spark.Views``) and
``history``, what the workers wrote down (op, id, attempt). It folds no tracker code: a
lease's end is found again from R1 and R2 by window functions, so that a tracker that is wrong
cannot agree with itself. A message is known by its id; the demo gives each its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HISTORY_SCHEMA = "op STRING, id STRING, attempt INT"

_COPIES = """
SELECT queue_id, id, partition, offset, delivery_count, unix_millis(timestamp) AS at_ms,
       origin_partition = partition AND origin_offset = offset AS is_first,
       CAST(element_at(filter(headers, h -> h.key = 'demo-kind'), -1).value AS STRING) AS kind,
       lead(unix_millis(timestamp)) OVER (PARTITION BY id ORDER BY delivery_count, timestamp)
           AS next_at_ms
FROM messages
"""

# R1: the clock of a partition is the sum of the positive steps of its broker timestamps.
_TIMED = """
SELECT *, sum(step) OVER (PARTITION BY marker_partition ORDER BY marker_offset) AS clock
FROM (
  SELECT *, unix_millis(timestamp) AS at_ms,
         greatest(0, unix_millis(timestamp) - lag(unix_millis(timestamp), 1)
             OVER (PARTITION BY marker_partition ORDER BY marker_offset)) AS step
  FROM markers WHERE type IS NOT NULL)
"""

# R27: a record with batches is one for each of their messages.
_CLOCKED = """
SELECT marker_partition, marker_offset, type, outcome, of_schedule, carried_forward, consumer_id,
       redeliver_after_ms, id, queue_id, at_ms, clock, partition, offset
FROM timed WHERE batches IS NULL
UNION ALL
SELECT marker_partition, marker_offset, type, outcome, of_schedule, carried_forward, consumer_id,
       redeliver_after_ms, id, queue_id, at_ms, clock, batch.partition, explode(batch.offsets)
FROM (SELECT *, explode(batches) AS batch FROM timed WHERE batches IS NOT NULL)
"""

# What became of each SCHEDULE, by its first place; a carried one is the same message.
_SCHEDULES = """
SELECT max(id) AS id, max(queue_id) AS queue, max(due_ms) AS due_ms, max(outcome) AS outcome
FROM (
  SELECT marker_partition AS place, marker_offset AS place_offset, id, queue_id,
         at_ms + redeliver_after_ms AS due_ms, NULL AS outcome
  FROM clocked WHERE type = 'SCHEDULE' AND NOT carried_forward
  UNION ALL
  SELECT partition, offset, NULL, NULL, NULL, outcome
  FROM clocked WHERE type = 'END' AND of_schedule AND outcome <> 'ALREADY_ENDED')
GROUP BY place, place_offset
"""

# What the markers say of each copy. A tracker closes a copy with an END of its own.
_CLOSED = """
SELECT partition, offset,
  max(outcome = 'ACK') AS is_acked,
  count_if(outcome = 'REDELIVERED') AS redelivered,
  count_if(outcome = 'DEAD_LETTERED') AS dead_lettered,
  collect_set(consumer_id) FILTER (WHERE type = 'START' AND consumer_id <> '') AS consumers,
  min(marker_offset) FILTER (WHERE type = 'START') AS start_offset,
  min(marker_offset) FILTER (WHERE outcome IN ('REDELIVERED', 'DEAD_LETTERED')) AS end_offset,
  min_by(marker_partition, marker_offset)
    FILTER (WHERE outcome IN ('REDELIVERED', 'DEAD_LETTERED')) AS end_partition
FROM clocked
WHERE type IN ('START', 'END') AND NOT of_schedule
GROUP BY partition, offset
"""

_FATES = """
SELECT copies.*, is_acked, redelivered, dead_lettered, consumers, start_offset, end_offset,
       end_partition
FROM copies LEFT JOIN closed
ON copies.partition = closed.partition AND copies.offset = closed.offset
"""

# What a tracker had read of such a copy when it closed it, in log order.
_SIGNS = """
SELECT fate.id, fate.partition, fate.offset, fate.next_at_ms, sign.marker_offset, sign.type,
       sign.outcome, sign.at_ms, sign.clock, sign.redeliver_after_ms
FROM fates AS fate JOIN clocked AS sign
ON sign.partition = fate.partition AND sign.offset = fate.offset
   AND sign.marker_partition = fate.end_partition AND sign.marker_offset <= fate.end_offset
WHERE fate.end_offset IS NOT NULL AND sign.type IN ('START', 'KEEPALIVE', 'END')
      AND NOT sign.of_schedule
UNION ALL
SELECT fate.id, fate.partition, fate.offset, fate.next_at_ms, sign.marker_offset, sign.type,
       sign.outcome, sign.at_ms, sign.clock, sign.redeliver_after_ms
FROM (SELECT *, explode(consumers) AS consumer FROM fates WHERE end_offset IS NOT NULL) AS fate
JOIN clocked AS sign
ON sign.marker_partition = fate.end_partition AND sign.consumer_id = fate.consumer
   AND sign.marker_offset > fate.start_offset AND sign.marker_offset < fate.end_offset
WHERE sign.type = 'KEEPALIVE' AND sign.partition IS NULL
"""

# R2: a lease has ended where the clock is more than its timeout past the last sign of life.
_HELD = """
SELECT *, type <> 'END' AND next_clock - clock > redeliver_after_ms AS is_end_of_lease,
       coalesce(outcome IN ('NACK', 'REJECT', 'RELEASE'), false) AS is_given_back,
       coalesce(outcome IN ('REDELIVERED', 'DEAD_LETTERED'), false) AS is_close
FROM (
  SELECT *, lead(clock) OVER (PARTITION BY partition, offset ORDER BY marker_offset) AS next_clock
  FROM signs)
"""

_CAUSES = """
SELECT any_value(id) AS id, any_value(next_at_ms) AS next_at_ms,
  min_by(outcome, marker_offset) FILTER (WHERE is_close) AS outcome,
  min_by(at_ms, marker_offset) FILTER (WHERE is_close) AS closed_at_ms,
  min(marker_offset) FILTER (WHERE is_end_of_lease) AS lease_offset,
  min_by(at_ms + redeliver_after_ms, marker_offset) FILTER (WHERE is_end_of_lease) AS lease_due_ms,
  min(marker_offset) FILTER (WHERE outcome = 'ACK') AS ack_offset,
  min(marker_offset) FILTER (WHERE is_given_back) AS back_offset,
  min_by(at_ms + coalesce(redeliver_after_ms, 0), marker_offset) FILTER (WHERE is_given_back)
    AS back_due_ms
FROM held GROUP BY partition, offset
"""

_JUDGED = """
SELECT id,
  ack_offset IS NOT NULL AND (lease_offset IS NULL OR lease_offset > ack_offset)
    AND (back_offset IS NULL OR back_offset > ack_offset) AS in_time,
  outcome = 'REDELIVERED' AND lease_offset IS NULL AND back_offset IS NULL AS is_needless_copy,
  outcome = 'DEAD_LETTERED' AND lease_offset IS NULL AND back_offset IS NULL AS is_needless_death,
  if(outcome = 'REDELIVERED', next_at_ms, closed_at_ms)
    - if(lease_offset IS NULL OR back_offset < lease_offset, back_due_ms, lease_due_ms) AS late_ms
FROM causes
"""

# Everything that is known of an id, one below the other, so that one aggregation joins it.
_FACTS = """
SELECT id, queue_id AS queue, kind, is_first, if(is_first, at_ms, NULL) AS first_at_ms, is_acked,
  redelivered, dead_lettered, NULL AS due_ms, 0 AS letters, NULL AS reason, NULL AS error,
  0 AS done, NULL AS in_time, NULL AS is_needless_copy, NULL AS is_needless_death, NULL AS late_ms
FROM fates
UNION ALL
SELECT id, if(outcome <=> 'ACK', NULL, queue), NULL, NULL, NULL, NULL,
  0, int(outcome <=> 'DEAD_LETTERED'), if(outcome = 'REDELIVERED', due_ms, NULL), 0, NULL, NULL,
  0, NULL, NULL, NULL, NULL
FROM schedules
UNION ALL
SELECT id, NULL, NULL, NULL, NULL, NULL, 0, 0, NULL, 1, reason, error, 0, NULL, NULL, NULL, NULL
FROM dead_letters
UNION ALL
SELECT id, NULL, NULL, NULL, NULL, NULL, 0, 0, NULL, 0, NULL, NULL, 1, NULL, NULL, NULL, NULL
FROM history WHERE op = 'end'
UNION ALL
SELECT id, NULL, NULL, NULL, NULL, NULL, 0, 0, NULL, 0, NULL, NULL, 0, in_time, is_needless_copy,
  is_needless_death, late_ms
FROM judged
"""

_BY_ID = """
SELECT id, min(queue) AS queue, max(kind) <=> 'poison' AS is_poison,
  count_if(is_first) AS firsts, count_if(NOT is_first) AS again,
  coalesce(max(is_acked), false) AS is_acked,
  sum(redelivered) AS redelivered, sum(dead_lettered) AS dead_lettered, sum(letters) AS letters,
  coalesce(max(reason = 'max-deliveries' AND error LIKE '%PoisonError%'), false) AS is_dead_poison,
  coalesce(max(reason IN ('expired', 'max-lease')), false) AS is_dead_by_time,
  sum(done) AS done, count_if(in_time) AS in_time, count_if(is_needless_copy) AS needless_copies,
  count_if(is_needless_death) AS needless_deaths,
  concat(collect_list(late_ms), array(min(first_at_ms) - min(due_ms))) AS late_ms
FROM facts GROUP BY id
"""

# Sent: first copies, and delayed messages that have not come yet (cancelled ones aside).
_FOLLOWED = """
SELECT queue, is_acked, letters > 0 AS is_dead, again > 0 AS is_redelivered,
  done > 1 AS is_duplicated, is_poison, is_poison AND NOT is_dead_poison AS is_poison_missing,
  in_time AS in_time_redelivered,
  needless_copies + if(is_dead_by_time, 0, needless_deaths) + abs(again - redelivered)
    + abs(letters - dead_lettered) + greatest(firsts - 1, 0) AS unexplained,
  late_ms
FROM by_id WHERE queue IS NOT NULL
"""

_RESULT = """
SELECT coalesce(queue, '') AS queue, count(is_acked) AS sent, count_if(is_acked) AS acked,
  count_if(is_redelivered) AS redelivered, count_if(is_dead) AS dead_lettered,
  count_if(NOT is_acked AND NOT is_dead) AS lost, count_if(is_duplicated) AS duplicated,
  count_if(is_poison) AS poison, count_if(is_poison_missing) AS poison_missing,
  coalesce(sum(in_time_redelivered), 0) AS in_time_redelivered,
  coalesce(sum(unexplained), 0) AS unexplained,
  round(percentile(late, 0.5) / 1000, 3) AS late_p50_s,
  round(percentile(late, 0.99) / 1000, 3) AS late_p99_s
FROM (
  SELECT queue, is_acked, is_dead, is_redelivered, is_duplicated, is_poison, is_poison_missing,
    in_time_redelivered, unexplained, NULL AS late
  FROM followed
  UNION ALL
  SELECT queue, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, explode(late_ms) FROM followed)
GROUP BY ROLLUP (queue)
"""

STEPS = {
    "copies": _COPIES,
    "timed": _TIMED,
    "clocked": _CLOCKED,
    "schedules": _SCHEDULES,
    "closed": _CLOSED,
    "fates": _FATES,
    "signs": _SIGNS,
    "held": _HELD,
    "causes": _CAUSES,
    "judged": _JUDGED,
    "facts": _FACTS,
    "by_id": _BY_ID,
    "followed": _FOLLOWED,
    "result": _RESULT,
}
"""Temporary views, each over those before it; ``result`` has one row per queue and one of all."""

_KEPT = ("clocked", "fates", "followed")


def verdict_rows(spark: SparkSession) -> list[dict[str, Any]]:
    """Get the verdict's rows: one per queue, and one with an empty ``queue`` for all together."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueResult:
    """One queue, or all of them; counts are of messages, not of copies."""

    queue: str
    sent: int = 0
    acked: int = 0
    redelivered: int = 0
    dead_lettered: int = 0
    lost: int = 0
    duplicated: int = 0
    poison: int = 0
    poison_missing: int = 0
    in_time_redelivered: int = 0
    unexplained: int = 0
    late_p50_s: float | None = None
    late_p99_s: float | None = None

    @property
    def is_ok(self) -> bool:
        return not (
            self.lost or self.poison_missing or self.in_time_redelivered or self.unexplained
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    total: QueueResult
    queues: Sequence[QueueResult]
    # What the senders were told; None: nobody counted.
    sent_confirmed: int | None = None
    is_settled: bool = True
    seconds: float = 0.0
    errors: Sequence[str] = ()

    @property
    def failures(self) -> list[str]:
        if self.errors:
            return list(self.errors)
        total = self.total
        found = []
        if total.sent == 0:
            found.append("the topics hold no message at all")
        if self.sent_confirmed is not None and total.sent != self.sent_confirmed:
            found.append(
                f"Kafka confirmed {self.sent_confirmed:,} messages, the topics hold {total.sent:,}"
            )
        if total.lost:
            found.append(f"{total.lost:,} messages are neither acknowledged nor dead letters")
        if total.poison_missing:
            found.append(f"{total.poison_missing:,} poison messages are not in the dead letters")
        if total.in_time_redelivered:
            found.append(
                f"{total.in_time_redelivered:,} messages were acknowledged in time and came again"
            )
        if total.unexplained:
            found.append(f"{total.unexplained:,} copies or ENDs that the log does not explain")
        if not self.is_settled:
            found.append("some messages were still open when the time was over")
        return found

    @property
    def is_ok(self) -> bool:
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        """Totals, the verdict in one word, and one object per queue."""
        totals = asdict(self.total)
        del totals["queue"]
        return {
            **totals,
            "verdict": "ok" if self.is_ok else "failed",
            "failures": self.failures,
            "seconds": round(self.seconds, 1),
            "queues": [asdict(queue) for queue in self.queues],
        }

    @classmethod
    def from_rows(cls, rows: Sequence[dict[str, Any]], **more: Any) -> Verdict:
        """Make a verdict from the rows of its SQL; the one with an empty queue is of all."""
        names = {item.name for item in fields(QueueResult)}
        results = [
            QueueResult(**{name: value for name, value in row.items() if name in names})
            for row in rows
        ]
        totals = [item for item in results if not item.queue] or [QueueResult(queue="")]
        queues = sorted((item for item in results if item.queue), key=lambda item: item.queue)
        return cls(total=totals[0], queues=queues, **more)
