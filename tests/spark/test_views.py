"""SQL over the topics: what the views show of a namespace that a test wrote by hand."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.integration.tracker_logs import Logs

from kafkamq.errors import ConfigError
from kafkamq.queue.wire.headers import Origin, copy_headers, dead_letter_headers
from kafkamq.spark.formats import Views, register_views
from kafkamq.spark.options import VIEWS
from kafkamq.types import DeadLetterReason, Marker, MarkerType, MessageId, Outcome

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

pytestmark = pytest.mark.spark

MINE = (("trace", b"1"), ("none", None))
SENT = (*MINE, ("kafkamq-id", b"id-1"), ("kafkamq-ttl-ms", b"60000"))


@pytest.fixture
def logs(bootstrap: str, namespace: str) -> Logs:
    return Logs(bootstrap, namespace)


def ask(spark: SparkSession, logs: Logs, statement: str) -> list[Row]:
    register_views(spark, logs.config)
    return spark.sql(statement).collect()


def test_messages_and_dead_letters(spark: SparkSession, logs: Logs) -> None:
    first = logs.send(key=b"orders\0user", headers=SENT)[0]
    origin = Origin(logs.config.message_topic, 0, first.offset, logs.sent[first])
    logs.send(
        key=b"orders\0user",
        headers=copy_headers(SENT, delivery_count=2, origin=origin),
        partition=1,
    )
    logs.send(key=b"plain", value=None)
    letter = dead_letter_headers(
        SENT, reason=DeadLetterReason.REJECTED, error="no stock", delivery_count=3,
        origin=origin, queue_id="orders",
    )  # fmt: skip
    logs._write(logs.config.dead_letter_topic, [(0, b"orders\0user", b"payload", letter)])

    rows = ask(spark, logs, "SELECT * FROM messages ORDER BY partition, offset")
    one, plain, copy = rows
    assert (one.queue_id, one.id, one.user_key, one.value) == (
        "orders",
        "id-1",
        b"user",
        b"payload",
    )
    assert [(header.key, header.value) for header in one.headers] == list(MINE)
    assert (one.delivery_count, one.ttl_ms, one.partition, one.offset) == (1, 60000, 0, 0)
    assert (one.origin_topic, one.origin_offset) == (logs.config.message_topic, 0)
    assert (plain.queue_id, plain.user_key, plain.value, plain.ttl_ms) == (
        "plain",
        None,
        None,
        None,
    )
    assert (copy.delivery_count, copy.partition, copy.origin_partition) == (2, 1, 0)
    assert copy.origin_timestamp == one.timestamp
    sent_at = datetime.datetime.fromtimestamp(logs.sent[first] / 1000, datetime.timezone.utc)
    assert one.timestamp.replace(tzinfo=datetime.timezone.utc) == sent_at

    (dead,) = ask(spark, logs, "SELECT * FROM dead_letters")
    assert (dead.queue_id, dead.id, dead.reason, dead.error) == (
        "orders", "id-1", "rejected", "no stock",
    )  # fmt: skip
    assert (dead.delivery_count, dead.user_key, dead.value) == (3, b"user", b"payload")
    assert (dead.origin_partition, dead.origin_offset) == (0, first.offset)
    assert [(header.key, header.value) for header in dead.headers] == list(MINE)


def test_markers(spark: SparkSession, logs: Logs) -> None:
    one = MessageId(0, 5, b"0123456789abcdef", 3)
    logs.start(one, key=b"orders\0user", headers=SENT, max_deliveries=7, max_lease_ms=9000)
    logs.end(one, outcome=Outcome.NACK, delay_ms=250, reason="busy")
    logs.schedule(1000, headers=SENT, partition=logs.place(one))
    logs.raw_marker(logs.place(one), b"\xff\xff")
    rows = ask(spark, logs, "SELECT * FROM markers ORDER BY marker_offset")
    start, end, schedule, broken = rows
    assert (start.type, start.queue_id, start.user_key, start.id) == (
        "START", "orders", b"user", "id-1",
    )  # fmt: skip
    assert (start.partition, start.offset, start.topic_id) == (0, 5, b"0123456789abcdef".hex())
    assert (start.leader_epoch, start.max_deliveries, start.max_lease_ms) == (3, 7, 9000)
    assert (end.type, end.outcome, end.reason, end.redeliver_after_ms) == (
        "END", "NACK", "busy", 250,
    )  # fmt: skip
    assert (end.delivery_count, end.queue_id, end.outcome) == (None, None, "NACK")
    assert (schedule.type, schedule.partition, schedule.queue_id) == ("SCHEDULE", None, "queue")
    assert (broken.type, broken.error) == (None, "the record is not a marker")
    assert {row.marker_partition for row in rows} == {logs.place(one)}


def test_markers_of_batches(spark: SparkSession, logs: Logs) -> None:
    one, two, three = (MessageId(0, offset, b"0123456789abcdef", 3) for offset in (5, 6, 9))
    logs.start_batch(one, two, three, key=b"orders")
    logs.end(two)
    start, end = ask(spark, logs, "SELECT * FROM markers ORDER BY marker_offset")
    ((partition, topic_id, leader_epoch, offsets),) = start.batches
    assert (partition, topic_id, leader_epoch) == (0, one.topic_id.hex(), 3)
    assert offsets == [5, 6, 9]
    assert (start.type, start.queue_id, start.partition, start.offset) == (
        "START", "orders", None, None,
    )  # fmt: skip
    assert (start.by_reference, start.delivery_count) == (True, None)
    assert (end.batches, end.offset) == (None, 6)
    each = "SELECT explode(batch.offsets) FROM (SELECT explode(batches) AS batch FROM markers)"
    assert [row[0] for row in ask(spark, logs, each)] == [5, 6, 9]


def test_deliveries_are_one_row_per_attempt(spark: SparkSession, logs: Logs) -> None:
    origin = Origin("elsewhere", 7, 70, 1_700_000_000_000)
    copy = copy_headers(SENT, delivery_count=2, origin=origin)
    acked, nacked, open_, taken, lost, zombie = (MessageId(0, offset) for offset in range(6))
    logs.start(acked, key=b"orders\0user", headers=copy, count=2, timeout_ms=60_000)
    logs.start(nacked, open_, taken, headers=SENT, timeout_ms=60_000)
    logs.end(acked)
    logs.end(nacked, outcome=Outcome.NACK, delay_ms=500, reason="busy")
    logs.end(nacked, outcome=Outcome.REDELIVERED, consumer="engine")
    logs.start(taken, consumer="second", timeout_ms=60_000)
    logs.start(lost, timeout_ms=100)
    logs.start(zombie, timeout_ms=60_000)
    logs.end(zombie)
    logs.start(zombie, consumer="zombie", timeout_ms=60_000)  # R12: no second attempt
    logs.end(MessageId(0, 99))  # an END of something that was never STARTed
    for _ in range(2):  # the first record behind a gap brings a grace (R3), the second its end
        time.sleep(0.2)
        logs.keepalive(lost, consumer="another", timeout_ms=60_000)
    logs.end(lost)  # too late
    logs.end(lost, outcome=Outcome.REDELIVERED, consumer="engine")
    rows = ask(spark, logs, "SELECT * FROM deliveries ORDER BY offset")
    assert [(row.offset, row.outcome, row.starts, row.is_late) for row in rows] == [
        (0, "ACK", 1, False),
        (1, "NACK", 1, False),
        (2, None, 1, None),
        (3, None, 2, None),
        (4, "ACK", 1, True),
        (5, "ACK", 1, False),
    ]
    assert [row.consumer_id for row in rows[:4]] == ["worker", "worker", "worker", "second"]
    one, two = rows[:2]
    assert (one.queue_id, one.user_key, one.delivery_count) == ("orders", b"user", 2)
    assert (one.origin_topic, one.origin_partition, one.origin_offset) == ("elsewhere", 7, 70)
    assert (two.origin_topic, two.origin_offset) == (logs.config.message_topic, 1)
    assert (two.reason, two.nack_delay_ms, two.id) == ("busy", 500, "id-1")
    assert two.started_at <= two.ended_at
    assert two.duration_ms == (two.ended_at - two.started_at).total_seconds() * 1000
    assert rows[4].duration_ms >= 300


def test_in_flight_by_log_time(spark: SparkSession, logs: Logs) -> None:
    held, renewed, dead, waiting, due, acked, gone = (MessageId(0, offset) for offset in range(7))
    logs.start(held, timeout_ms=60_000)
    logs.start(renewed, timeout_ms=20_000, consumer="alive")
    logs.start(dead, timeout_ms=300, consumer="dead")
    logs.start(waiting, due, acked, gone, timeout_ms=60_000)
    logs.end(waiting, outcome=Outcome.NACK, delay_ms=60_000)
    logs.end(due, outcome=Outcome.REJECT)
    logs.end(acked)
    logs.end(gone, outcome=Outcome.DEAD_LETTERED)
    later = logs.schedule(60_000, partition=logs.place(held))
    cancelled = logs.schedule(60_000, partition=logs.place(held))
    logs.end_schedule(cancelled)
    for pause_s in (0.4, 0.2):  # the first record behind a gap brings a grace (R3)
        time.sleep(pause_s)
        logs.keepalive(renewed, consumer="alive", timeout_ms=60_000)
    rows = ask(spark, logs, "SELECT * FROM in_flight")
    found = {(row.offset, row.delivery_count): row for row in rows}  # None: the message is gone
    assert {place: row.state for place, row in found.items()} == {
        (0, None): "held",
        (1, None): "held",
        (2, None): "due",
        (3, None): "waiting",
        (4, None): "due",
        (later.offset, 0): "scheduled",
    }
    assert 0 < found[0, None].remaining_ms <= 60_000
    assert found[1, None].remaining_ms > 20_000
    assert found[2, None].remaining_ms < 0
    assert (found[4, None].outcome, found[1, None].consumer_id) == ("REJECT", "alive")


@pytest.mark.faults
def test_streamed_deliveries_are_those_of_a_batch(
    spark: SparkSession, logs: Logs, checkpoint: str, tmp_path: Path
) -> None:
    """Cut into many small batches, with a restart and without what the fold had kept."""
    seen: list[Row] = []

    def run() -> None:
        stream = spark.readStream.format("kafkamq").option("view", "deliveries")
        query = (
            stream.option("maxRowsPerTrigger", "7").load()
            .writeStream.foreachBatch(lambda frame, _: seen.extend(frame.collect()))
            .option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        )  # fmt: skip
        assert query.awaitTermination(120)

    register_views(spark, logs.config)
    ids = [MessageId(0, offset) for offset in range(12)]
    logs.start(*ids, timeout_ms=60_000)
    logs.end(*ids[:5])
    run()
    folds = Path(tempfile.gettempdir(), f"kafkamq-folds-{os.getuid()}")
    for each in folds.glob("*.json"):
        each.unlink()
    logs.end(*ids[3:7], outcome=Outcome.NACK, delay_ms=100, reason="busy")
    logs.start(*ids[3:9], consumer="second", timeout_ms=60_000)
    logs.end(*ids[4:10], outcome=Outcome.REDELIVERED)
    run()
    batch = spark.sql("SELECT * FROM deliveries WHERE outcome IS NOT NULL").collect()
    assert len(batch) == 10
    assert sorted(seen) == sorted(batch)


def test_filters_reach_the_readers(spark: SparkSession, logs: Logs) -> None:
    logs.send(3, key=b"orders")
    logs.send(4, key=b"orders\0user", partition=1)
    time.sleep(0.05)
    late = logs.send(2, key=b"mails", partition=1)
    since = datetime.datetime.fromtimestamp(logs.sent[late[0]] / 1000, datetime.timezone.utc)
    register_views(spark, logs.config)

    def read(where: str) -> tuple[int, int]:
        """Rows that match, and tasks that were needed."""
        frame = spark.table("messages").where(where)
        return frame.count(), frame.rdd.getNumPartitions()

    assert read("queue_id = 'orders'") == (7, 2)
    assert read("queue_id IN ('orders', 'mails') AND partition = 1") == (6, 1)
    assert read("partition = 1 AND offset >= 2 AND offset < 4") == (2, 1)
    assert read(f"timestamp >= '{since.isoformat()}'") == (2, 1)
    assert read(f"timestamp < '{since.isoformat()}'") == (7, 2)
    assert read("partition = 0 AND partition = 1")[0] == 0
    assert read("queue_id = 'orders' AND NOT partition = 1") == (3, 2)


def test_views_of_two_namespaces_live_side_by_side(
    spark: SparkSession, logs: Logs, bootstrap: str
) -> None:
    other = Logs(bootstrap, f"{logs.config.namespace}-other")
    logs.send(2)
    other.send(3)
    register_views(spark, logs.config, prefix="a_")
    assert register_views(spark, other.config, prefix="b_") == tuple(f"b_{name}" for name in VIEWS)
    counts = spark.sql(
        "SELECT (SELECT count(*) FROM a_messages) AS a, (SELECT count(*) FROM b_messages) AS b"
    ).collect()[0]
    assert (counts.a, counts.b) == (2, 3)
    earlier, later = Views(spark, logs.config), Views(spark, other.config)
    assert (earlier.messages().count(), later.messages().count()) == (2, 3)
    register_views(spark, prefix="c_")
    assert spark.table("c_messages").count() == 3
    with pytest.raises(ConfigError, match="prefix"):
        register_views(spark, logs.config, prefix="a b")


@pytest.mark.slow
def test_deliveries_of_batches_say_what_their_messages_say(spark: SparkSession, logs: Logs) -> None:
    """A row for each message; their START says no more than queue, times and limits (R29)."""
    origin = Origin("elsewhere", 7, 70, 1_700_000_000_000)
    copy = copy_headers(SENT, delivery_count=2, origin=origin)
    acked, held = logs.send(2, key=b"orders\0user", headers=copy)
    gone = MessageId(1, 77)
    logs.start_batch(acked, held, gone, key=b"orders", timeout_ms=60_000)
    logs.batch(acked, marker=Marker(MarkerType.END, consumer_id="worker"))
    rows = ask(spark, logs, "SELECT * FROM deliveries ORDER BY partition, offset")
    assert [(row.partition, row.offset, row.outcome) for row in rows] == [
        (0, acked.offset, "ACK"), (0, held.offset, None), (1, 77, None),
    ]  # fmt: skip
    assert [(row.queue_id, row.user_key, row.id) for row in rows] == [
        ("orders", b"user", "id-1"), ("orders", b"user", "id-1"), ("orders", None, None),
    ]  # fmt: skip
    assert [row.delivery_count for row in rows] == [2, 2, None]  # one is gone
    assert (rows[0].origin_topic, rows[0].origin_offset) == ("elsewhere", 70)
    in_flight = ask(spark, logs, "SELECT * FROM in_flight ORDER BY partition, offset")
    assert [(row.offset, row.state, row.id) for row in in_flight] == [
        (held.offset, "held", "id-1"), (77, "held", None),
    ]  # fmt: skip
