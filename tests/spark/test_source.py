"""The source on a real broker: what is committed comes once, in order, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from tests.integration.raw_producer import write_raw
from tests.sure_producer import SureProducer
from tests.waiting import wait_until, within

from kafkamq.config import ServiceConfig
from kafkamq.spark.daemon import THREADLESS
from kafkamq.spark.formats import register_source
from kafkamq.spark.parallelism import group_key, spark_hash
from kafkamq.transport.log_reader import LogRange, log_reader
from kafkamq.transport.record import all_headers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def topic(bootstrap: str, namespace: str) -> str:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(namespace, 2, 1)])[namespace].result(within(30))
    return namespace


@pytest.fixture
def source(spark: SparkSession, bootstrap: str) -> str:
    return register_source(spark, ServiceConfig(bootstrap_servers=bootstrap))


def produce(bootstrap: str, topic: str, count: int, *, partition: int = 0, first: int = 0) -> None:
    producer = SureProducer({"bootstrap.servers": bootstrap, "linger.ms": 5})
    for number in range(first, first + count):
        headers = [("n", b"%d" % number), ("null", None)] if number % 2 else None
        producer.produce(topic, b"%d" % number, b"k%d" % number, partition, headers=headers)
    producer.confirm(30)


def test_a_header_name_that_is_no_text_costs_that_record_its_headers_alone(
    bootstrap: str, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = {b"trace": b"1", b"tenant": b""}
    for headers in (good, {b"\xff": b"1"}, {b"a": b"1", b"\xfe": b"2"}, {}, good):
        write_raw(bootstrap, topic, key=b"k", value=b"v", headers=headers)
    reader = log_reader(ServiceConfig(bootstrap_servers=bootstrap))
    records = [one for chunk in reader.read(LogRange(topic, 0, 0, 5)) for one in chunk]
    expected = [("trace", b"1"), ("tenant", b"")]
    for _ in range(2):  # the client gives those of a failed record no second time
        assert list(map(list, all_headers(records))) == [expected, [], [], [], expected]
    said = [each for each in caplog.records if "cannot be read" in each.message]
    assert [each.__dict__["offset"] for each in said] == [1, 2]


def transact(bootstrap: str, topic: str, *, aborted: list[bool], each: int = 50) -> None:
    """Transactions on partition 0, one after the other; record n of the committed ones is n."""
    producer = SureProducer({"bootstrap.servers": bootstrap, "transactional.id": topic})
    producer.init_transactions(30)
    number = 0
    for is_aborted in aborted:
        producer.begin_transaction()
        for _ in range(each):
            producer.produce(topic, b"aborted" if is_aborted else b"%d" % number, partition=0)
            number += not is_aborted
        producer.confirm(30)
        if is_aborted:
            producer.abort_transaction(30)
        else:
            producer.commit_transaction(30)


def read(spark: SparkSession, source: str, topic: str, **options: str) -> DataFrame:
    return spark.read.format(source).option("topic", topic).options(**options).load()


def values(frame: DataFrame, partition: int = 0) -> list[int]:
    rows = frame.where(f"partition = {partition}").orderBy("offset").collect()
    return [int(row.value) for row in rows]


def test_the_format_is_found_in_a_session_that_it_was_not_registered_in(
    spark: SparkSession, bootstrap: str, topic: str
) -> None:
    produce(bootstrap, topic, 7)
    reader = spark.newSession().read.format("kafkamq").option("topic", topic)
    frame = reader.option("kafka.bootstrap.servers", bootstrap).load()
    assert frame.where("offset >= 2").count() == 5


def test_an_option_that_means_nothing_is_refused(
    spark: SparkSession, source: str, topic: str
) -> None:
    stream = spark.readStream.format(source).option("topic", topic).option("minPartitions", "8")
    with pytest.raises(Exception, match="minPartitions means nothing to a stream") as said:
        stream.load().writeStream.format("noop").start().awaitTermination(within(60))
    assert "UnboundLocalError" not in str(said.value)
    with pytest.raises(Exception, match="maxRowsPerTrigger means nothing to a batch"):
        read(spark, source, topic, maxRowsPerTrigger="1").count()


def test_batch_reads_records_with_all_columns(
    spark: SparkSession, source: str, bootstrap: str, topic: str
) -> None:
    produce(bootstrap, topic, 300)
    produce(bootstrap, topic, 10, partition=1)
    frame = read(spark, source, topic, includeHeaders="true")
    assert values(frame) == list(range(300))
    assert values(frame, 1) == list(range(10))
    row = frame.where("partition = 0 AND offset = 7").collect()[0]
    assert (row.topic, row.key, row.value, row.timestamp_type) == (topic, b"k7", b"7", 0)
    assert [(header.key, header.value) for header in row.headers] == [("n", b"7"), ("null", None)]
    assert frame.where("offset = 8 AND size(headers) = 0").count() == 2


def test_batch_ranges_and_splits_leave_nothing_out(
    spark: SparkSession, source: str, bootstrap: str, topic: str
) -> None:
    produce(bootstrap, topic, 200)
    starting = json.dumps({topic: {"0": 20}})
    ending = json.dumps({topic: {"0": 150, "1": -1}})
    frame = read(
        spark, source, topic, startingOffsets=starting, endingOffsets=ending, minPartitions="7"
    )
    assert frame.rdd.getNumPartitions() >= 7
    assert values(frame) == list(range(20, 150))


def test_an_empty_topic_is_an_empty_frame(spark: SparkSession, source: str, topic: str) -> None:
    assert read(spark, source, topic).count() == 0


def test_aborted_records_and_control_records_are_passed(
    spark: SparkSession, source: str, bootstrap: str, topic: str
) -> None:
    transact(bootstrap, topic, aborted=[False, True, True, False, True])
    assert values(read(spark, source, topic)) == list(range(100))
    # Ranges that begin or end at a control record, and one with nothing but aborted ones.
    for start, end, expected in ((0, 51, 50), (50, 51, 0), (51, 153, 0), (152, 205, 50)):
        frame = read(
            spark,
            source,
            topic,
            startingOffsets=json.dumps({topic: {"0": start}}),
            endingOffsets=json.dumps({topic: {"0": end}}),
        )
        assert frame.count() == expected, (start, end)


def test_stream_is_limited_and_sees_each_record_once(
    spark: SparkSession, source: str, bootstrap: str, topic: str, checkpoint: str
) -> None:
    transact(bootstrap, topic, aborted=[False, True] * 4)
    produce(bootstrap, topic, 150, partition=1)
    seen: list[tuple[int, list[tuple[int, int]]]] = []

    def take(frame: DataFrame, batch: int) -> None:
        seen.append((batch, sorted((row.partition, int(row.value)) for row in frame.collect())))

    def run() -> None:
        stream = spark.readStream.format(source).option("topic", topic)
        query = (
            stream.option("maxRowsPerTrigger", "100").load()
            .writeStream.foreachBatch(take).option("checkpointLocation", checkpoint)
            .trigger(availableNow=True).start()
        )  # fmt: skip
        assert query.awaitTermination(120)

    run()
    batches = [rows for _, rows in seen]
    assert len(batches) >= 4
    assert max(map(len, batches)) <= 102
    rows = [row for rows in batches for row in rows]
    assert sorted(rows) == [(0, n) for n in range(200)] + [(1, n) for n in range(150)]
    seen.clear()
    produce(bootstrap, topic, 5, partition=1, first=150)
    run()
    assert [row for _, rows in seen for row in rows] == [(1, n) for n in range(150, 155)]


def test_a_partition_that_is_added_is_read_from_its_beginning(
    spark: SparkSession, source: str, bootstrap: str, topic: str, checkpoint: str
) -> None:
    from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined]

    seen: list[int] = []

    def run() -> None:
        query = (
            spark.readStream.format(source).option("topic", topic).load()
            .writeStream.foreachBatch(lambda frame, _: seen.extend(values(frame, 2)))
            .option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        )  # fmt: skip
        assert query.awaitTermination(120)

    produce(bootstrap, topic, 3)
    run()
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(within(30))
    produce(bootstrap, topic, 4, partition=2)
    run()
    assert seen == [0, 1, 2, 3]


def test_deleted_records_stop_it_and_are_counted(
    spark: SparkSession, source: str, bootstrap: str, topic: str
) -> None:
    from confluent_kafka import TopicPartition

    produce(bootstrap, topic, 100)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for deleted in admin.delete_records([TopicPartition(topic, 0, 60)]).values():
        deleted.result(within(30))
    assert values(read(spark, source, topic)) == list(range(60, 100))
    starting = json.dumps({topic: {"0": 10}})
    with pytest.raises(Exception, match=r"50 records are gone.*nothing was skipped"):
        read(spark, source, topic, startingOffsets=starting).count()


@pytest.mark.faults
def test_loss_under_a_stream_stops_it_or_is_passed(
    spark: SparkSession, source: str, bootstrap: str, topic: str, checkpoint: str
) -> None:
    """Deleted records, then a topic that is recreated under the checkpoint."""
    from confluent_kafka import TopicPartition

    seen: list[int] = []
    admin = AdminClient({"bootstrap.servers": bootstrap})

    def run(fail: str) -> list[int]:
        seen.clear()
        query = (
            spark.readStream.format(source).option("topic", topic).option("failOnDataLoss", fail)
            .load().writeStream.foreachBatch(lambda frame, _: seen.extend(values(frame)))
            .option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        )  # fmt: skip
        assert query.awaitTermination(120)
        return list(seen)

    produce(bootstrap, topic, 100)
    assert run("true") == list(range(100))
    produce(bootstrap, topic, 100, first=100)
    for deleted in admin.delete_records([TopicPartition(topic, 0, 150)]).values():
        deleted.result(within(30))
    with pytest.raises(Exception, match=r"50 records are gone.*nothing was skipped"):
        run("true")
    assert run("false") == list(range(150, 200))
    admin.delete_topics([topic])[topic].result(within(30))
    wait_until(lambda: topic not in admin.list_topics(timeout=within(10)).topics)
    wait_until(lambda: made(admin, topic))
    produce(bootstrap, topic, 250, first=1000)  # more than the position: only its id tells
    with pytest.raises(Exception, match=r"is not the one of the checkpoint.*failOnDataLoss"):
        run("true")
    assert run("false") == list(range(1000, 1250))


def made(admin: AdminClient, topic: str) -> bool:
    """Made again: the broker may still be deleting the one before."""
    try:
        admin.create_topics([NewTopic(topic, 2, 1)])[topic].result(within(30))
    except KafkaException:
        return False
    return True


@pytest.mark.faults
def test_times_and_a_partition_that_is_much_larger(
    spark: SparkSession, source: str, bootstrap: str, topic: str, checkpoint: str
) -> None:
    produce(bootstrap, topic, 30_000)
    produce(bootstrap, topic, 300, partition=1)
    frame = read(spark, source, topic, minPartitions="4")
    assert frame.count() == 30_300
    assert frame.rdd.getNumPartitions() >= 4
    row = frame.where("partition = 0 AND offset = 29000").selectExpr("unix_millis(timestamp) AS t")
    at_ms = row.collect()[0].t
    expected = frame.where(f"unix_millis(timestamp) >= {at_ms}").count()
    assert read(spark, source, topic, startingTimestamp=str(at_ms)).count() == expected
    assert read(spark, source, topic, startingTimestamp="2099-01-01T00:00:00Z").count() == 0
    counts: list[int] = []
    query = (
        spark.readStream.format(source).option("topic", topic).option("maxRowsPerTrigger", 10_000)
        .load().writeStream.foreachBatch(lambda frame, _: counts.append(frame.count()))
        .option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    )  # fmt: skip
    assert query.awaitTermination(120)
    assert sum(counts) == 30_300
    assert max(counts) <= 10_002


def test_an_unknown_topic_says_what_to_do(spark: SparkSession, source: str) -> None:
    with pytest.raises(Exception, match=r"no-such-topic.*create the topics first"):
        read(spark, source, "no-such-topic").count()


def test_secrets_are_in_no_plan_and_no_option(
    spark: SparkSession, bootstrap: str, topic: str, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = "hunter2-very-secret"
    config = ServiceConfig(
        bootstrap_servers=bootstrap, kafka={"sasl.password": secret, "ssl.key.password": secret}
    )
    produce(bootstrap, topic, 3)
    name = register_source(spark, config, name="kafkamq_secret")
    frame = read(spark, name, topic)
    assert frame.count() == 3, "the properties reached a client that accepts them"
    frame.explain(True)
    plan = frame._jdf.queryExecution()
    text = plan.toString() + plan.analyzed().toJSON() + capfd.readouterr().out
    assert topic in text or name in text
    assert secret not in text
    everything = spark.sparkContext._conf.toDebugString()
    assert secret not in everything
    # Given as options they can be seen in the plan, but Spark hides them where it prints.
    shown = read(
        spark, "kafkamq_secret", topic, **{"kafka.sasl.password": secret, "kafka.a.b": "c"}
    )
    assert secret not in shown._jdf.queryExecution().toString()


def test_sparks_hash_is_ours(spark: SparkSession) -> None:
    texts = ["", "a", "abc", "abcd", "hé€😀x", *(group_key("t.markers", p, 8) for p in range(16))]
    rows = spark.createDataFrame([(t,) for t in texts], "t STRING").selectExpr("t", "hash(t) AS h")
    assert {row.t: row.h for row in rows.collect()} == {text: spark_hash(text) for text in texts}


def test_group_keys_reach_the_tasks_they_are_made_for(spark: SparkSession) -> None:
    keys = [(group_key("t.markers", number, 5), number) for number in range(13)]
    frame = spark.createDataFrame(keys, "k STRING, n INT").repartition(5, "k")
    placed = frame.rdd.glom().map(lambda rows: sorted(row.n for row in rows)).collect()
    assert placed == [[n for n in range(13) if n % 5 == task] for task in range(5)]


def test_workers_come_with_their_imports_done(spark: SparkSession) -> None:
    """The daemon that forks them did them, from PySpark's folder (see daemon.py)."""

    def look(frames):  # type: ignore[no-untyped-def]
        import gc
        import sys

        import pandas as pd
        import pyspark

        early = "kafkamq.spark.tracker.query" in sys.modules
        for _ in frames:
            frozen = gc.get_freeze_count()
            yield pd.DataFrame([(pyspark.__file__, early, frozen)])

    row = spark.range(1).mapInPandas(look, "file STRING, early BOOLEAN, frozen INT").collect()[0]
    assert row.early
    assert row.frozen > 10_000  # else each task pays for a look at them
    assert ".zip" not in row.file


def test_the_daemons_imports_start_no_thread() -> None:
    """A process that forks must have none (see daemon.py)."""
    code = (
        "import importlib, pathlib\n"
        "from kafkamq.spark import daemon\n"
        "for name in {*daemon.IMPORTS, 'pyspark.worker'}:\n"
        "    importlib.import_module(name)\n"
        "print(len(list(pathlib.Path('/proc/self/task').iterdir())))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **THREADLESS, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
        timeout=within(60),
    )
    assert done.stdout.strip() == "1", done.stderr
