"""Streams that acknowledge, on a real broker: what is in the topics when a query has run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from pyspark.ml.functions import array_to_vector
from pyspark.sql import functions as fn
from tests.integration.tracker_logs import Logs, read_topic
from tests.spark.queue_driver import output_topic
from tests.waiting import deadline_after, wait_until, within

from kafkamq.errors import ConfigError, FencedError
from kafkamq.queue.names import group_of
from kafkamq.spark import ack, map_messages, read_queue, register, with_body
from kafkamq.spark.payloads import MALFORMED
from kafkamq.types import MarkerType, MessageId, Nack, Outcome, Reject

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from kafkamq.spark import AckQuery
    from kafkamq.spark.handlers import StreamMessage

pytestmark = pytest.mark.spark


@pytest.fixture
def logs(spark: SparkSession, bootstrap: str, namespace: str) -> Logs:
    made = Logs(bootstrap, namespace)
    register(spark, made.config)
    return made


def finish(query: AckQuery) -> None:
    assert query.wait(within(120)), "the query did not end"


def verdicts(logs: Logs) -> dict[MessageId, list[tuple[str, str]]]:
    """Outcome and reason of each END, by message."""
    found: dict[MessageId, list[tuple[str, str]]] = {}
    for _, marker in logs.said():
        if marker.type is MarkerType.END and marker.message_id is not None:
            place = MessageId(marker.message_id.partition, marker.message_id.offset)
            found.setdefault(place, []).append((marker.outcome.name, marker.reason))
    return found


def starts(logs: Logs) -> Counter[tuple[int, int]]:
    return Counter(
        (marker.message_id.partition, marker.message_id.offset)
        for _, marker in logs.said()
        if marker.type is MarkerType.START and marker.message_id is not None
    )


def committed(logs: Logs, queue_id: str) -> dict[int, int]:
    consumer = Consumer(
        {"bootstrap.servers": logs.bootstrap, "group.id": group_of(logs.config, queue_id)}
    )
    try:
        asked = [TopicPartition(logs.config.message_topic, number) for number in range(2)]
        return {
            each.partition: each.offset for each in consumer.committed(asked, timeout=within(30))
        }
    finally:
        consumer.close()


def test_each_row_gets_its_verdict(spark: SparkSession, logs: Logs, checkpoint: str) -> None:
    def handler(message: StreamMessage) -> object:
        text = (message.payload or b"").decode()
        if text == "raise":
            raise ValueError("no luck")
        return {"ack": None, "nack": Nack(2.0, "busy"), "reject": Reject("bad")}[text]

    sent = {
        text: logs.send(value=text.encode(), key=b"emails\0k")[0]
        for text in ("ack", "nack", "reject", "raise")
    }
    logs.send(3, key=b"others")
    logs.send(2, key=b"others", partition=1)
    query = ack(
        map_messages(read_queue(spark, "emails"), handler),
        checkpoint=checkpoint,
        available_now=True,
    )
    finish(query)
    assert verdicts(logs) == {
        sent["ack"]: [("ACK", "")],
        sent["nack"]: [("NACK", "busy")],
        sent["reject"]: [("REJECT", "bad")],
        sent["raise"]: [("NACK", "ValueError: no luck")],
    }
    assert set(starts(logs).values()) == {1}
    assert (query.total.ends, query.total.late) == (4, 0)
    delays = {
        marker.reason: marker.redeliver_after_ms
        for _, marker in logs.said()
        if marker.outcome is Outcome.NACK
    }
    assert delays["busy"] == 2000
    assert 800 <= delays["ValueError: no luck"] <= 1200, "the back-off of a first delivery"
    assert committed(logs, "emails") == {0: 7, 1: 2}, "others' messages are passed"


def test_payloads_are_columns_and_what_does_not_parse_is_rejected(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    payloads = {
        b'{"n": 1, "doc": {"my-field": "x"}}': "",
        b'{"n": 2}': "",
        b"no JSON": "rejected",
        b'{"n": "two"}': "rejected",
        None: "rejected",
    }
    sent = {
        logs.send(value=payload, key=b"emails", partition=n % 2)[0]: payload
        for n, payload in enumerate(payloads)
    }
    rows = read_queue(spark, "emails", schema="n INT, doc STRUCT<`my-field`: STRING>")
    seen: list[tuple[int | None, str | None]] = []

    def keep(frame: DataFrame, batch: int) -> None:
        seen.extend(frame.select("body.n", "body.doc.`my-field`", "result").collect())

    def handler(message: StreamMessage) -> str:
        return f"{message.row['body']['n']} {message.row['body']['doc']}"

    done = map_messages(rows, handler)
    finish(ack(done, checkpoint=checkpoint, each_batch=keep, available_now=True))
    assert sorted(row for row in map(tuple, seen) if row[0]) == [
        (1, "x", b"1 {'my-field': 'x'}"),
        (2, None, b"2 None"),
    ]
    assert [tuple(row) for row in seen if row[0] is None] == [(None, None, None)] * 3
    for one, said in verdicts(logs).items():
        wanted = ("REJECT", MALFORMED) if payloads[sent[one]] else ("ACK", "")
        assert said == [wanted], sent[one]
    kept = with_body(
        spark.read.format("kafkamq").option("view", "messages").load(), "n INT", malformed="keep"
    )
    assert sorted(row.n or 0 for row in kept.select("body.n").collect()) == [0, 0, 0, 1, 2]


def repeat_last_batch(checkpoint: str) -> None:
    """Make it look as if the driver had died before Spark knew that the batch was done."""
    commits = Path(checkpoint, "commits")
    last = max(int(each.name) for each in commits.iterdir() if each.name.isdigit())
    (commits / str(last)).unlink()
    (commits / f".{last}.crc").unlink(missing_ok=True)


def test_output_and_ends_are_one_transaction_and_repeated_batches_write_nothing_twice(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    out = output_topic(logs)
    ids = [logs.send(value=b"%d" % n, key=b"emails", partition=n % 2)[0] for n in range(30)]

    def run() -> AckQuery:
        rows = read_queue(spark, "emails", max_rows=12).selectExpr(
            "ack_token",
            "explode(array(concat('a', cast(value AS STRING)), concat('b', cast(value AS STRING))))"
            " AS value",
            "user_key AS key",
            "array(named_struct('key', 'h', 'value', value)) AS headers",
        )  # fmt: skip
        query = ack(rows, checkpoint=checkpoint, topic=out, available_now=True)
        finish(query)
        return query

    first = run()
    assert (first.total.ends, first.total.written) == (30, 60)
    written = sorted(each.value().decode() for each in read_topic(logs.bootstrap, out))
    assert written == sorted(f"{c}{n}" for n in range(30) for c in "ab")
    assert starts(logs) == Counter({(one.partition, one.offset): 1 for one in ids})
    repeat_last_batch(checkpoint)
    again = run()
    assert again.total.written == 0
    assert again.total.skipped > 0
    assert len(read_topic(logs.bootstrap, out)) == 60
    found = verdicts(logs)
    assert set(found) == set(ids)
    assert {outcome for ends in found.values() for outcome, _ in ends} == {"ACK"}
    assert max(map(len, found.values())) == 2, "a repeated batch writes its ENDs again"
    assert set(starts(logs).values()) == {1}, "what has its END is not STARTed again"
    logs.send(2, key=b"emails")
    assert run().total.written == 4


def test_a_repeated_batch_leaves_out_what_a_tracker_or_a_worker_settled(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    settled, open_, own, done = logs.send(4, key=b"emails")
    seen: list[list[int]] = []

    def fails(frame: DataFrame, batch: int) -> None:
        seen.append(sorted(row.offset for row in frame.collect()))
        raise RuntimeError("the sink is full")

    def works(frame: DataFrame, batch: int) -> None:
        seen.append(sorted(row.offset for row in frame.collect()))

    def run(each_batch: object) -> AckQuery:
        return ack(
            read_queue(spark, "emails"),
            checkpoint=checkpoint,
            each_batch=each_batch,  # type: ignore[arg-type]
            available_now=True,
        )

    with pytest.raises(Exception, match="the sink is full"):
        run(fails).wait(within(120))
    started = {
        marker.message_id.offset: (marker.message_id, marker.consumer_id)
        for _, marker in logs.said()
        if marker.message_id is not None
    }
    logs.end(started[settled.offset][0], outcome=Outcome.REDELIVERED, consumer="engine")
    logs.end(started[own.offset][0], consumer=started[own.offset][1])
    logs.end(started[done.offset][0], consumer="worker")
    finish(run(works))
    assert seen == [[0, 1, 2, 3], [1, 2]]
    assert starts(logs) == Counter({(0, 0): 1, (0, 1): 2, (0, 2): 1, (0, 3): 1})
    assert [outcome for outcome, _ in verdicts(logs)[open_]] == ["ACK"]


def test_a_last_delivery_is_alone_and_what_expired_is_rejected(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    logs.send(3, key=b"emails")
    logs.send(1, key=b"emails", headers=(("kafkamq-delivery-count", b"5"),))
    logs.send(2, key=b"emails")
    logs.send(2, key=b"emails", partition=1)
    (expired,) = logs.send(1, key=b"emails", headers=(("kafkamq-ttl-ms", b"0"),), partition=1)
    batches: list[set[tuple[int, int]]] = []

    def keep(frame: DataFrame, batch: int) -> None:
        batches.append({(row.partition, row.offset) for row in frame.collect()})

    finish(
        ack(
            read_queue(spark, "emails"),
            checkpoint=checkpoint,
            each_batch=keep,
            available_now=True,
        )
    )
    assert [batch for batch in batches if (0, 3) in batch] == [{(0, 3)}]
    every = {(0, n) for n in range(6)} | {(1, 0), (1, 1)}
    assert sorted(place for batch in batches for place in batch) == sorted(every)
    assert verdicts(logs)[expired] == [("REJECT", "expired")]


def test_leases_are_renewed_while_a_batch_is_worked_on(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    (one,) = logs.send(1, key=b"emails")

    def renewals() -> list[str]:
        return [
            marker.consumer_id for _, marker in logs.said() if marker.type is MarkerType.KEEPALIVE
        ]

    def waits(frame: DataFrame, batch: int) -> None:
        wait_until(lambda: len(renewals()) >= 3, "renewals")

    query = ack(
        read_queue(spark, "emails", redelivery_timeout=within(3.0)),
        checkpoint=checkpoint,
        each_batch=waits,
        available_now=True,
    )
    finish(query)
    start = next(m for _, m in logs.said() if m.type is MarkerType.START)
    assert set(renewals()) == {start.consumer_id}
    assert verdicts(logs)[one] == [("ACK", "")]
    # Each KEEPALIVE came in time by the log, so the verdict did.
    assert query.total.late == 0


def test_late_verdicts_are_counted_and_told(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    (one,) = logs.send(1, key=b"emails")
    told: list[str] = []

    def too_long(frame: DataFrame, batch: int) -> None:
        frame.count()
        route = next(m.partition() for m, _ in logs.said())
        for _ in range(3):
            time.sleep(0.6)  # log time: the longest lease is 1 s
            logs.raw_marker(route or 0, b"\xff")

    query = ack(
        read_queue(spark, "emails", redelivery_timeout=1.0, max_lease=1.0),
        checkpoint=checkpoint,
        each_batch=too_long,
        available_now=True,
        on_late=told.extend,
    )
    finish(query)
    assert (query.total.ends, query.total.late) == (1, 1)
    assert told == [f"{one.partition}/{one.offset}"]
    assert verdicts(logs)[one] == [("ACK", "")], "committed all the same"


def test_mode_ack_as_a_format(spark: SparkSession, logs: Logs, checkpoint: str) -> None:
    sent = logs.send(4, key=b"emails")
    query = (
        read_queue(spark, "emails")
        .selectExpr("ack_token", "if(offset = 2, 'reject', 'ack') AS verdict", "'no' AS reason")
        .writeStream.format("kafkamq").option("mode", "ack")
        .option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    )  # fmt: skip
    assert query.awaitTermination(120)
    expected = {one: [("ACK", "")] for one in sent} | {sent[2]: [("REJECT", "no")]}
    assert verdicts(logs) == expected
    with pytest.raises(Exception, match="a column VERDICT: write verdict, or rename it"):
        spark.createDataFrame([("x", "")], "ack_token STRING, VERDICT STRING").write.format(
            "kafkamq"
        ).option("mode", "ack").mode("append").save()
    with pytest.raises(Exception, match=r"ack_token is 'x'"):
        spark.createDataFrame([("x",)], "ack_token STRING").write.format("kafkamq").option(
            "mode", "ack"
        ).mode("append").save()
    with pytest.raises(Exception, match=r"option topic is missing.*mode = ack"):
        spark.createDataFrame([("x",)], "ack_token STRING").write.format("kafkamq").mode(
            "append"
        ).save()


def test_a_frame_that_is_read_again_is_not_started_after_its_verdicts(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    """R12 forgets: an END must not be followed by a START that nobody would end."""
    logs.send(3, key=b"emails")
    counts: list[int] = []

    def uses_it_three_times(frame: DataFrame, batch: int) -> None:
        counts.append(frame.count())
        ends = frame.select("ack_token").write.format("kafkamq").option("mode", "ack")
        ends.mode("append").save()
        counts.append(len(frame.collect()))

    query = (
        read_queue(spark, "emails").writeStream.foreachBatch(uses_it_three_times)
        .option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    )  # fmt: skip
    assert query.awaitTermination(120)
    assert counts == [3, 3]
    assert starts(logs) == Counter({(0, n): 1 for n in range(3)})
    assert all(ends == [("ACK", "")] for ends in verdicts(logs).values())


def test_a_frame_in_several_branches_is_started_once(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    """Rows that a join drops keep their leases until the batch is done, and have no verdict."""
    for number in range(2):
        logs.send(10, key=b"emails", partition=number)
    kept = spark.createDataFrame([(n,) for n in range(7)], "offset BIGINT")
    stream = read_queue(spark, "emails").select("ack_token", "partition", "offset")
    even, odd = stream.where("offset % 2 = 0"), stream.where("offset % 2 = 1")
    query = ack(
        even.union(odd).union(even).join(kept, "offset"), checkpoint=checkpoint, available_now=True
    )
    finish(query)
    places = {(number, offset) for number in range(2) for offset in range(10)}
    assert starts(logs) == Counter(dict.fromkeys(places, 1))
    holders = {m.consumer_id for _, m in logs.said() if m.type is not MarkerType.END}
    assert len(holders) == 1, "its leases are those of all branches"
    ended = {(one.partition, one.offset) for one in verdicts(logs)}
    assert ended == {place for place in places if place[1] < 7}
    assert (query.total.ends, query.total.late) == (14, 0)


def test_messages_whose_rows_an_action_skips_are_started_before_the_position_passes_them(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    """Rows of a task, whole tasks, and a batch that is not read at all."""
    sent = set()
    for number in range(2):
        logs.send(1, key=b"others", partition=number)
        sent |= {(number, one.offset) for one in logs.send(20, key=b"emails", partition=number)}
        logs.send(1, key=b"others", partition=number)
    batches: list[int] = []

    def few(frame: DataFrame, batch: int) -> DataFrame:
        batches.append(batch)
        rows = frame.limit(3).collect() if batch == 0 else []
        tokens = [(row.ack_token,) for row in rows]
        return frame.sparkSession.createDataFrame(tokens, "ack_token STRING")

    query = ack(
        read_queue(spark, "emails", options={"maxOffsetsPerTrigger": "30"}),
        checkpoint=checkpoint,
        each_batch=few,
        available_now=True,
    )
    finish(query)
    assert batches == [0, 1]
    assert (query.total.ends, len(verdicts(logs))) == (3, 3)
    assert starts(logs) == Counter(dict.fromkeys(sent, 1))
    assert committed(logs, "emails") == {0: 22, 1: 22}


def test_a_batch_whose_rows_are_lost_after_its_output_fails(
    spark: SparkSession, logs: Logs, checkpoint: str, tmp_path: Path
) -> None:
    """Its handlers do not run again for the ENDs: they might say something else."""
    logs.send(4, key=b"emails")
    context = spark.sparkContext._jsc
    before, calls = set(context.getPersistentRDDs()), tmp_path / "calls"

    def handler(message: StreamMessage) -> None:
        with calls.open("a") as file:
            file.write("called\n")

    def lose(frame: DataFrame, batch: int) -> None:
        assert frame.count() == 4
        lost = set(context.getPersistentRDDs()) - before
        assert lost
        for number in lost:
            context.sc().env().blockManager().removeRdd(number)

    def run(each_batch: Callable[[DataFrame, int], None]) -> AckQuery:
        done = map_messages(read_queue(spark, "emails"), handler)
        return ack(done, checkpoint=checkpoint, each_batch=each_batch, available_now=True)

    with pytest.raises(Exception, match="Checkpoint block rdd_"):
        finish(run(lose))
    assert calls.read_text().count("called") == 4
    assert not verdicts(logs)
    finish(run(lambda frame, batch: None))
    assert len(verdicts(logs)) == 4
    assert set(context.getPersistentRDDs()) == before, "released"


_KINDS = ["messages", "handled", "joined", "by chance", "one of each", "of Scala"]


@pytest.mark.parametrize("kind", _KINDS)
def test_rows_of_a_batch_are_made_once(
    spark: SparkSession, logs: Logs, checkpoint: str, tmp_path: Path, kind: str
) -> None:
    """Before its output where they could differ, as their output would be that of others; else by
    the first job that reads them."""
    logs.send(4, key=b"emails")
    calls, jobs = tmp_path / "calls", list[int]()

    def handler(message: StreamMessage) -> None:
        with calls.open("a") as file:
            file.write("called\n")

    rows = read_queue(spark, "emails")
    if kind == "handled":
        rows = map_messages(rows, handler)
    elif kind == "joined":
        rows = rows.join(spark.range(9).toDF("offset"), "offset")
    elif kind == "by chance":
        rows = rows.withColumn("verdict", fn.when(fn.rand() > 0.5, "nack"))
    elif kind == "one of each":
        rows = rows.dropDuplicates(["offset"])
    elif kind == "of Scala":
        rows = rows.withColumn("vector", array_to_vector(fn.array(fn.lit(1.0))))
    else:
        rows = rows.where("offset < 9").selectExpr("*", "explode(array(1)) AS one").alias("each")

    def known() -> int:
        run_id = query.query.runId
        return len(spark.sparkContext.statusTracker().getJobIdsForGroup(run_id))

    def write(frame: DataFrame, batch: int) -> None:
        wait_until(lambda: "query" in scope)
        jobs.append(known())
        assert len(frame.collect()) == 4
        assert len(frame.collect()) == 4

    scope: dict[str, AckQuery] = {}
    query = ack(rows, checkpoint=checkpoint, each_batch=write, available_now=True)
    scope["query"] = query
    finish(query)
    assert len(verdicts(logs)) == 4
    assert [bool(count) for count in jobs] == [kind != "messages"]
    if kind == "handled":
        assert calls.read_text().count("called") == 4


def test_the_later_of_two_queries_on_a_queue_goes_on(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    """They have nothing in common but the queue; each message is handed out by one of them."""
    seen: list[tuple[str, int]] = []

    def start(name: str) -> AckQuery:
        def keep(frame: DataFrame, batch: int) -> None:
            seen.extend((name, row.offset) for row in frame.collect())

        rows = read_queue(spark, "emails")
        return ack(rows, checkpoint=f"{checkpoint}/{name}", each_batch=keep, trigger_s=0.1)

    logs.send(2, key=b"emails")
    earlier = start("earlier")
    try:
        wait_until(lambda: len(seen) == 2, timeout_s=120)
        later = start("later")
        try:
            with pytest.raises(FencedError, match=r"^queue 'emails': another query .*this one end"):
                earlier.wait(within(120))
            logs.send(3, key=b"emails")
            wait_until(lambda: len(seen) >= 5, timeout_s=120)
        finally:
            later.stop()
    finally:
        earlier.stop()
    assert sorted(seen) == [("earlier", 0), ("earlier", 1), *(("later", n) for n in (2, 3, 4))]


def test_what_cannot_work_is_refused(spark: SparkSession, logs: Logs, checkpoint: str) -> None:
    stream = read_queue(spark, "emails")
    with pytest.raises(ConfigError, match="checkpoint is missing"):
        ack(stream)
    with pytest.raises(ConfigError, match="ack_token"):
        ack(stream.select("value"), checkpoint=checkpoint)
    with pytest.raises(ConfigError, match="verdict is INT"):
        ack(stream.selectExpr("ack_token", "1 AS verdict"), checkpoint=checkpoint)
    with pytest.raises(ConfigError, match=r"topic 'nowhere' does not exist.*create it"):
        ack(stream, checkpoint=checkpoint, topic="nowhere")
    with pytest.raises(ConfigError, match="needs `value`"):
        ack(stream.select("ack_token"), checkpoint=checkpoint, topic="nowhere")
    with pytest.raises(ConfigError, match="slots is 0: it must be from 1"):
        ack(stream, checkpoint=checkpoint, topic="nowhere", slots=0)
    with pytest.raises(ConfigError, match=r"column value is int: .*cast it"):
        ack(stream.selectExpr("ack_token", "1 AS value"), checkpoint=checkpoint, topic="nowhere")
    with pytest.raises(ConfigError, match="slots is for output to a topic"):
        ack(stream, checkpoint=checkpoint, slots=2)
    with pytest.raises(ConfigError, match="topic and table exclude each other"):
        ack(stream, checkpoint=checkpoint, topic="nowhere", table="done")
    with pytest.raises(ConfigError, match="trigger_s and available_now exclude each other"):
        ack(stream, checkpoint=checkpoint, trigger_s=2.0, available_now=True)
    both = map_messages(stream, lambda message: b"done")
    with pytest.raises(ConfigError, match="both the message's value and the handler's result"):
        ack(both, checkpoint=checkpoint, topic="nowhere")
    for wrong, text in (
        ("n INTT", "schema is 'n INTT'"),
        ("INT", "name the fields of an object"),
        ("", "name the fields of an object"),
        ("n VARCHAR(3)", "schema is 'n VARCHAR"),
    ):
        with pytest.raises(ConfigError, match=text):
            read_queue(spark, "emails", schema=wrong)
    with pytest.raises(ConfigError, match="map_messages needs"):
        map_messages(stream.select("ack_token"), lambda message: None)
    with pytest.raises(ConfigError, match="is for a stream"):
        ack(spark.createDataFrame([("x",)], "ack_token STRING"), checkpoint=checkpoint)
    with pytest.raises(ConfigError, match="queue_id is ''"):
        read_queue(spark, "")
    with pytest.raises(ConfigError, match="maxLease is 1: it must be at least"):
        read_queue(spark, "emails", max_lease=1.0)
    # A worker of the queue that is at work.
    consumer = Consumer(
        {"bootstrap.servers": logs.bootstrap, "group.id": group_of(logs.config, "emails")}
    )
    consumer.subscribe([logs.config.message_topic])
    try:
        deadline_s = deadline_after(60)
        while not consumer.assignment():
            consumer.poll(0.1)
            assert time.monotonic() < deadline_s, "the worker got nothing"
        with pytest.raises(ConfigError, match=r"^queue 'emails' has live workers"):
            ack(stream, checkpoint=checkpoint, available_now=True).wait(within(120))
    finally:
        consumer.close()


def test_rows_without_the_verdicts_that_were_meant_are_refused(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    stream = read_queue(spark, "emails")
    for name in ("VERDICT", "Reason"):
        with pytest.raises(ConfigError, match=f"a column {name}: write {name.lower()}, or"):
            ack(stream.selectExpr("ack_token", f"'reject' AS {name}"), checkpoint=checkpoint)
    with pytest.raises(ConfigError, match=r"a column Topic: write topic, or rename it"):
        ack(stream.selectExpr("ack_token", "value", "'x' AS Topic"), checkpoint=checkpoint)
    other = stream.selectExpr("ack_token", "id AS other")
    with pytest.raises(ConfigError, match="two sources of queue 'emails', as of a stream that is"):
        ack(stream.join(other, "ack_token").select("ack_token"), checkpoint=checkpoint)
    for delay in ("interval 5 seconds", "array(5)", "map('a', 5)", "current_date()", "true"):
        with pytest.raises(ConfigError, match=r"column delay is .*: it must be DOUBLE"):
            ack(stream.selectExpr("ack_token", f"{delay} AS delay"), checkpoint=checkpoint)
    parsed = read_queue(spark, "emails", schema="n INT").select("ack_token", "body.n")
    handled = map_messages(stream, lambda message: None).select("ack_token", "result")
    for lost in (parsed, handled):
        with pytest.raises(ConfigError, match=r"no column verdict any more.*keep verdict and"):
            ack(lost, checkpoint=checkpoint)


def test_a_verdict_of_another_table_is_none_of_the_rows(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    stream = read_queue(spark, "emails")
    known = spark.createDataFrame([(0, "fraud")], "at BIGINT, verdict STRING")
    fraud, same = known.where("verdict = 'fraud'"), stream["offset"] == known["at"]
    joined = stream.join(fraud, same, "left_anti").join(known, same, "left").selectExpr("*", "1")
    rows = joined.selectExpr("ack_token", "verdict AS judged", "'x' AS `final-verdict`")
    ack(rows, checkpoint=checkpoint).stop()
    lost = stream.selectExpr("*", "'reject' AS verdict").join(known.drop("verdict"), same, "left")
    with pytest.raises(ConfigError, match="no column verdict any more"):
        ack(lost.select("ack_token"), checkpoint=checkpoint)


def test_a_wrong_argument_is_named(spark: SparkSession, logs: Logs, checkpoint: str) -> None:
    stream = read_queue(spark, "emails")
    with pytest.raises(ConfigError, match="unknown option startingoffset"):
        read_queue(spark, "emails", options={"startingOffset": "earliest"})
    for argument, value in (
        ("redelivery_timeout", "60s"),
        ("redelivery_timeout", -1),
        ("max_lease", 0),
        ("max_deliveries", 0),
        ("max_rows", 0),
        ("batch_markers", "no"),
        ("group", 5),
    ):
        with pytest.raises(ConfigError, match=f"^{argument} is {value!r}: it must be "):
            read_queue(spark, "emails", **{argument: value})  # type: ignore[arg-type]
    address: Any = logs.bootstrap
    for call in (
        lambda: register(spark, address),
        lambda: read_queue(spark, "emails", address),
        lambda: ack(stream, address, checkpoint=checkpoint),
    ):
        with pytest.raises(ConfigError, match="config is of type str: it must be a ServiceConfig"):
            call()
    with pytest.raises(ConfigError, match="trigger_s is '1 second': it must be seconds, from 0"):
        ack(stream, checkpoint=checkpoint, trigger_s="1 second")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="each_batch is 'f': it must be a function"):
        ack(stream, checkpoint=checkpoint, each_batch="f")  # type: ignore[arg-type]
