"""SQL over the topics: what the views show of a namespace that a test wrote by hand."""

from __future__ import annotations

import datetime
import time
from typing import TYPE_CHECKING

import pytest
from tests.integration.tracker_logs import Logs

from kafkamq.errors import ConfigError
from kafkamq.spark.views import VIEWS, register_views
from kafkamq.types import DeadLetterReason, MessageId, Outcome
from kafkamq.wire.headers import Origin, copy_headers, dead_letter_headers

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


def test_deliveries_are_one_row_per_attempt(spark: SparkSession, logs: Logs) -> None:
    acked, nacked, open_, taken = (MessageId(0, offset) for offset in range(4))
    logs.start(acked, nacked, open_, taken, headers=SENT, timeout_ms=60_000)
    logs.end(acked)
    logs.end(nacked, outcome=Outcome.NACK, delay_ms=500, reason="busy")
    logs.end(nacked, outcome=Outcome.REDELIVERED, consumer="engine")
    logs.start(taken, consumer="second", timeout_ms=60_000)
    logs.end(MessageId(0, 99))  # an END of something that was never STARTed
    rows = ask(spark, logs, "SELECT * FROM deliveries ORDER BY offset")
    assert [(row.offset, row.outcome, row.settlement) for row in rows] == [
        (0, "ACK", None),
        (1, "NACK", "REDELIVERED"),
        (2, None, None),
        (3, None, None),
    ]
    assert [row.starts for row in rows] == [1, 1, 1, 2]
    assert [row.consumer_id for row in rows] == ["worker", "worker", "worker", "second"]
    assert (rows[1].reason, rows[1].nack_delay_ms, rows[1].id) == ("busy", 500, "id-1")
    assert rows[1].started_at <= rows[1].verdict_at <= rows[1].settled_at


def test_in_flight_by_log_time(spark: SparkSession, logs: Logs) -> None:
    held, renewed, dead, waiting, due, acked, gone = (MessageId(0, offset) for offset in range(7))
    logs.start(held, timeout_ms=60_000)
    logs.start(renewed, timeout_ms=300, consumer="alive")
    logs.start(dead, timeout_ms=300, consumer="dead")
    logs.start(waiting, due, acked, gone, timeout_ms=60_000)
    logs.end(waiting, outcome=Outcome.NACK, delay_ms=60_000)
    logs.end(due, outcome=Outcome.REJECT)
    logs.end(acked)
    logs.end(gone, outcome=Outcome.DEAD_LETTERED)
    time.sleep(0.4)
    logs.keepalive(renewed, consumer="alive", timeout_ms=60_000)
    rows = {row.offset: row for row in ask(spark, logs, "SELECT * FROM in_flight")}
    assert {offset: row.state for offset, row in rows.items()} == {
        0: "held", 1: "held", 2: "due", 3: "waiting", 4: "due",
    }  # fmt: skip
    assert 0 < rows[0].remaining_ms <= 60_000
    assert rows[2].remaining_ms < 0
    assert rows[4].outcome == "REJECT"


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
    with pytest.raises(ConfigError, match="prefix"):
        register_views(spark, logs.config, prefix="a b")
