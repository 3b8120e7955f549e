"""The audit of a namespace: what became of the messages of each queue, and who did the work.

Everything is computed from the tables ``deliveries``, ``messages``, ``dead_letters``, ``in_flight``
and ``markers``, so from the topics alone, as far back as they reach. An attempt whose message
retention has deleted counts as the first one of a message of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kafkamq.spark.jobs.sql import sql_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MAX_ATTEMPT_BARS = 10
TIME_BARS = 48
STEPS = ("times", "attempts", "poison", "consumers", "late", "times of attempts", "states",
         "letters", "queues")  # fmt: skip
LATENESS_BOUNDS_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

_DELIVERIES = """
SELECT queue_id, coalesce(nullif(id, ''), concat_ws('/', coalesce(origin_topic, topic_id),
    coalesce(origin_partition, partition), coalesce(origin_offset, offset))) AS id,
  coalesce(origin_topic, topic_id) AS origin_topic,
  coalesce(origin_partition, partition) AS origin_partition,
  coalesce(origin_offset, offset) AS origin_offset, coalesce(delivery_count, 1) AS delivery_count,
  consumer_id, started_at, ended_at, duration_ms, outcome, is_late, reason, message_timestamp,
  marker_partition, topic_id, leader_epoch, partition, offset
FROM deliveries
WHERE started_at >= timestamp_millis({from_ms}) AND started_at < timestamp_millis({to_ms})
"""

_QUEUES = """
SELECT queue_id,
  count(DISTINCT origin_topic, origin_partition, origin_offset) AS messages,
  count(DISTINCT origin_topic, origin_partition, origin_offset) - count(DISTINCT id) AS sent_again,
  count(*) AS attempts,
  count_if(outcome = 'ACK') AS acked,
  count_if(outcome = 'NACK') AS nacked,
  count_if(outcome = 'REJECT') AS rejected,
  count_if(outcome = 'RELEASE') AS released,
  count_if(outcome = 'REDELIVERED') AS leases_lost,
  count_if(outcome = 'DEAD_LETTERED') AS gave_up,
  count_if(is_late) AS late_verdicts,
  count_if(outcome IS NULL) AS not_ended,
  max(delivery_count) AS max_attempt,
  percentile_approx(wait_ms, 0.5, 1000) / 1000 AS wait_p50_s,
  percentile_approx(wait_ms, 0.99, 1000) / 1000 AS wait_p99_s,
  percentile_approx(took_ms, 0.5, 1000) / 1000 AS took_p50_s,
  percentile_approx(took_ms, 0.99, 1000) / 1000 AS took_p99_s
FROM (SELECT *, unix_millis(started_at) - unix_millis(message_timestamp) AS wait_ms,
  if(outcome = 'ACK', duration_ms, NULL) AS took_ms FROM audited)
GROUP BY queue_id ORDER BY queue_id
"""

_ATTEMPTS = f"""
SELECT queue_id, least(attempts, {MAX_ATTEMPT_BARS}) AS attempt, count(*) AS messages
FROM (
  SELECT queue_id, origin_topic, origin_partition, origin_offset, max(delivery_count) AS attempts
  FROM audited GROUP BY ALL)
GROUP BY ALL ORDER BY ALL
"""

# An id may have been sent several times: redriven, replayed, or by its sender.
_POISON = """
SELECT queue_id, id, sent, attempts, outcome, reason, unix_millis(ended_at) AS ended_ms FROM (
  SELECT *, row_number() OVER (PARTITION BY queue_id ORDER BY attempts DESC, id) AS place FROM (
    SELECT queue_id, id, count(*) AS sent, sum(attempts) AS attempts,
      max_by(outcome, last_at) AS outcome, max_by(reason, last_at) AS reason,
      max_by(ended_at, last_at) AS ended_at
    FROM (
      SELECT queue_id, origin_topic, origin_partition, origin_offset, any_value(id) AS id,
        max(delivery_count) AS attempts, max(started_at) AS last_at,
        max_by(outcome, (delivery_count, started_at)) AS outcome,
        max_by(reason, (delivery_count, started_at)) AS reason,
        max_by(ended_at, (delivery_count, started_at)) AS ended_at
      FROM audited GROUP BY queue_id, origin_topic, origin_partition, origin_offset)
    GROUP BY queue_id, id)
  WHERE attempts > 1 OR outcome IN ('REJECT', 'DEAD_LETTERED'))
WHERE place <= {top} ORDER BY queue_id, place
"""

_CONSUMERS = """
SELECT queue_id, consumer_id, count(*) AS attempts, count_if(outcome = 'ACK') AS acked,
  count_if(outcome = 'REDELIVERED') AS leases_lost,
  round(100 * count(*) / sum(count(*)) OVER (PARTITION BY queue_id), 1) AS share,
  percentile_approx(duration_ms, 0.5, 1000) FILTER (WHERE outcome = 'ACK') AS took_ms
FROM audited GROUP BY ALL ORDER BY queue_id, attempts DESC, consumer_id
"""

# From the end of a lease to its redelivery. Leases are renewed by name, or all of a consumer's.
_LATENESS = """
WITH lost AS (
  SELECT * FROM audited WHERE outcome = 'REDELIVERED'),
signs AS (
  SELECT *, unix_millis(timestamp) + redeliver_after_ms AS until_ms
  FROM markers WHERE type IN ('START', 'KEEPALIVE')),
named AS (
  SELECT marker_partition, topic_id, leader_epoch, partition, offset, max(until_ms) AS until_ms
  FROM (
    SELECT marker_partition, topic_id, leader_epoch, partition, offset, until_ms
    FROM signs WHERE partition IS NOT NULL AND NOT of_schedule
    UNION ALL
    SELECT marker_partition, batch.topic_id, batch.leader_epoch, batch.partition,
      explode(batch.offsets), until_ms
    FROM (SELECT marker_partition, explode(batches) AS batch, until_ms FROM signs))
  GROUP BY ALL),
shared AS (
  SELECT lost.marker_partition, lost.topic_id, lost.leader_epoch, lost.partition, lost.offset,
    max(unix_millis(beat.timestamp) + beat.redeliver_after_ms) AS until_ms
  FROM lost JOIN markers beat ON beat.marker_partition = lost.marker_partition
    AND beat.consumer_id = lost.consumer_id AND beat.type = 'KEEPALIVE' AND beat.partition IS NULL
    AND beat.batches IS NULL
    AND beat.timestamp BETWEEN lost.started_at AND lost.ended_at
  GROUP BY ALL)
SELECT lost.queue_id, greatest(0, unix_millis(lost.ended_at)
    - greatest(named.until_ms, coalesce(shared.until_ms, 0))) / 1000D AS late_s
FROM lost JOIN named USING (marker_partition, topic_id, leader_epoch, partition, offset)
LEFT JOIN shared USING (marker_partition, topic_id, leader_epoch, partition, offset)
"""

_LATENESS_BARS = """
SELECT queue_id, round(percentile_approx(late_s, 0.5, 1000), 3) AS late_p50_s,
  round(percentile_approx(late_s, 0.99, 1000), 3) AS late_p99_s, {bars}
FROM late GROUP BY queue_id
"""

_TIMES = """
SELECT queue_id, least({bars} - 1, floor((unix_millis(started_at) - {begin}) / {width})) AS bar,
  count(*) AS attempts
FROM audited GROUP BY ALL ORDER BY ALL
"""

_STATES = "SELECT queue_id, state, count(*) AS messages FROM in_flight GROUP BY ALL"
_LETTERS = """
SELECT queue_id, coalesce(reason, 'unknown') AS reason, count(*) AS messages FROM dead_letters
GROUP BY ALL
"""


@dataclass(frozen=True, kw_only=True)
class QueueAudit:
    """One queue; counts are of attempts unless they say messages; times in seconds."""

    queue_id: str
    messages: int
    sent_again: int
    attempts: int
    acked: int
    nacked: int
    rejected: int
    released: int
    leases_lost: int
    gave_up: int
    late_verdicts: int
    not_ended: int
    max_attempt: int
    wait_p50_s: float | None
    wait_p99_s: float | None
    took_p50_s: float | None
    took_p99_s: float | None
    late_p50_s: float | None
    late_p99_s: float | None
    lateness: Sequence[int]
    messages_by_attempts: Mapping[int, int]
    attempts_over_time: Sequence[int]
    in_flight: Mapping[str, int]
    dead_letters: Mapping[str, int]
    consumers: Sequence[Mapping[str, Any]]
    poison: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Audit:
    namespace: str
    begin_ms: int
    end_ms: int
    queues: Sequence[QueueAudit]


def audit(
    spark: SparkSession,
    *,
    namespace: str,
    queue_id: str = "",
    from_ms: int = 0,
    to_ms: int = 253_402_300_799_000,
    top: int = 10,
    on_step: Callable[[], None] = lambda: None,
) -> Audit:
    from pyspark.sql import functions as fn

    with sql_errors("audit"):
        frame = spark.sql(_DELIVERIES.format(from_ms=from_ms, to_ms=to_ms))
        if queue_id:
            frame = frame.where(fn.col("queue_id") == queue_id)
        frame = frame.persist()
        try:
            frame.createOrReplaceTempView("audited")
            return _computed(spark, namespace, queue_id, top, on_step)
        finally:
            spark.catalog.dropTempView("audited")
            frame.unpersist()


def _computed(
    spark: SparkSession, namespace: str, queue_id: str, top: int, on_step: Callable[[], None]
) -> Audit:
    def rows(statement: str) -> list[dict[str, Any]]:
        found = [row.asDict(recursive=True) for row in spark.sql(statement).collect()]
        on_step()
        return found

    (times,) = rows(
        "SELECT coalesce(unix_millis(min(started_at)), 0) AS begin, "
        "coalesce(unix_millis(max(started_at)), 0) AS end FROM audited"
    )
    begin, end = times["begin"], times["end"]
    spark.sql(_LATENESS).createOrReplaceTempView("late")
    width = max(1, -(-(end - begin + 1) // TIME_BARS))
    groups = {
        name: _by_queue(rows(statement))
        for name, statement in {
            "attempts": _ATTEMPTS,
            "poison": _POISON.replace("{top}", str(top)),
            "consumers": _CONSUMERS,
            "late": _LATENESS_BARS.format(bars=_late_bars()),
            "times": _TIMES.format(bars=TIME_BARS, begin=begin, width=width),
            "states": _STATES,
            "letters": _LETTERS,
        }.items()
    }
    found = {row["queue_id"]: row for row in rows(_QUEUES)}
    names = sorted({*found, *groups["states"], *groups["letters"]} - {None})
    if queue_id:
        names = [name for name in names if name == queue_id]
    queues = [
        _queue(name, found.get(name, {}), {part: by.get(name, []) for part, by in groups.items()})
        for name in names
    ]
    return Audit(namespace=namespace, begin_ms=begin, end_ms=end, queues=queues)


def _by_queue(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row.pop("queue_id"), []).append(row)
    return found


def _late_bars() -> str:
    lows = (0.0, *LATENESS_BOUNDS_S)
    conditions = [
        f"late_s > {low}" + (f" AND late_s <= {high}" if high else "")
        for low, high in zip(lows, (*LATENESS_BOUNDS_S, None), strict=True)
    ]
    conditions[0] = f"late_s <= {LATENESS_BOUNDS_S[0]}"
    counts = ", ".join(f"count_if({condition})" for condition in conditions)
    return f"array({counts}) AS bars"


def _queue(
    name: str, row: Mapping[str, Any], groups: Mapping[str, list[dict[str, Any]]]
) -> QueueAudit:
    counts = (
        "messages", "sent_again", "attempts", "acked", "nacked", "rejected", "released",
        "leases_lost", "gave_up", "late_verdicts", "not_ended", "max_attempt",
    )  # fmt: skip
    late = groups["late"][0] if groups["late"] else {}
    times = [0] * TIME_BARS
    for each in groups["times"]:
        times[int(each["bar"])] = each["attempts"]
    return QueueAudit(
        queue_id=name,
        **{count: row.get(count) or 0 for count in counts},
        wait_p50_s=row.get("wait_p50_s"),
        wait_p99_s=row.get("wait_p99_s"),
        took_p50_s=row.get("took_p50_s"),
        took_p99_s=row.get("took_p99_s"),
        late_p50_s=late.get("late_p50_s"),
        late_p99_s=late.get("late_p99_s"),
        lateness=late.get("bars") or [0] * (len(LATENESS_BOUNDS_S) + 1),
        messages_by_attempts={each["attempt"]: each["messages"] for each in groups["attempts"]},
        attempts_over_time=times,
        in_flight={each["state"]: each["messages"] for each in groups["states"]},
        dead_letters={each["reason"]: each["messages"] for each in groups["letters"]},
        consumers=groups["consumers"],
        poison=groups["poison"],
    )
