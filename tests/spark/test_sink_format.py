"""``format("kafkamq-sink")`` as users write it: streams, tables, repeated and changed batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from tests.integration.tracker_logs import Logs, read_topic
from tests.spark.test_source import produce
from tests.waiting import wait_until, within

from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError, StateError
from kafkamq.queue.wire.keys import key_partition, split_key
from kafkamq.spark.failures import query_failure
from kafkamq.spark.formats import register, register_source
from kafkamq.spark.sink.ledger import SinkLedger
from kafkamq.spark.sink.sink import by_slot, clear_sink_ledger, write_stream
from kafkamq.spark.sink.writer import DEDUP_HEADER
from kafkamq.types import Headers, MarkerType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PATIENCE_S = 120.0
Written = Counter[tuple[int | None, bytes | None, bytes | None, tuple[tuple[str, bytes], ...]]]


class Topics:
    """An input and an output topic of two partitions each; no namespace is made."""

    def __init__(self, bootstrap: str, prefix: str) -> None:
        self.bootstrap = bootstrap
        self.config = ServiceConfig(bootstrap_servers=bootstrap)
        self.into, self.out = f"{prefix}.in", f"{prefix}.out"
        admin = AdminClient({"bootstrap.servers": bootstrap})
        topics = [NewTopic(self.into, 2, 1), NewTopic(self.out, 2, 1)]
        for created in admin.create_topics(topics).values():
            created.result(within(30))

    def rows(self, spark: SparkSession) -> DataFrame:
        name = register_source(spark, self.config)
        return spark.readStream.format(name).option("topic", self.into).load()

    def table(self, spark: SparkSession, count: int) -> DataFrame:
        return spark.range(count, numPartitions=2).selectExpr("CAST(id AS STRING) AS value")

    def options(self) -> dict[str, str]:
        return {"kafka.bootstrap.servers": self.bootstrap, "topic": self.out}

    def run(self, frame: DataFrame, checkpoint: str, **more: str) -> str:
        """Write what there is, then end; returns the query's id."""
        register(frame.sparkSession)
        query = (
            frame.writeStream.format("kafkamq-sink")
            .options(**self.options(), **more)
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(PATIENCE_S)
        return query.id

    def save(self, frame: DataFrame, **more: str) -> None:
        register(frame.sparkSession)
        frame.write.format("kafkamq-sink").mode("append").options(**self.options(), **more).save()

    def written(self) -> Written:
        return Counter(
            (each.partition(), each.key(), each.value(), tuple(each.headers() or ()))
            for each in read_topic(self.bootstrap, self.out)
        )

    def values(self) -> Counter[bytes | None]:
        return Counter(each.value() for each in read_topic(self.bootstrap, self.out))


@pytest.fixture
def topics(bootstrap: str, namespace: str) -> Topics:
    return Topics(bootstrap, namespace)


@pytest.fixture(autouse=True)
def _no_query_left(spark: SparkSession) -> Iterator[None]:
    yield
    for query in spark.streams.active:
        query.stop()


def numbers(count: int) -> Counter[bytes | None]:
    return Counter(b"%d" % number for number in range(count))


def _second_task_fails(topics: Topics, flag: Path) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """While the flag is there: as if the job were killed after its first task had committed."""
    config, out, path = topics.config, topics.out, str(flag)

    def rows_of(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        from kafkamq.spark.batches import QUERY_ID

        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 1 and Path(path).exists():
            ledger = SinkLedger(config, topic=out, sink=str(context.getLocalProperty(QUERY_ID)))
            wait_until(lambda: ledger.entry(0) is not None, "the first task has written")
            raise RuntimeError("the job was killed")
        yield from batches

    return rows_of


HEADED = ("key", "value", "array(named_struct('key', 'n', 'value', value)) AS headers")


@pytest.mark.faults
def test_a_batch_that_was_cut_short_is_completed_byte_for_byte(
    spark: SparkSession, topics: Topics, checkpoint: str, tmp_path: Path
) -> None:
    produce(topics.bootstrap, topics.into, 400, partition=-1)
    flag = tmp_path / "killed"
    flag.touch()
    frame = topics.rows(spark).selectExpr(*HEADED)
    failing = frame.mapInArrow(_second_task_fails(topics, flag), frame.schema)
    with pytest.raises(Exception, match="the job was killed"):
        topics.run(failing, checkpoint)
    first = topics.written()
    assert 0 < sum(first.values()) < 400
    flag.unlink()
    topics.run(failing, checkpoint)
    after = topics.written()
    assert first <= after
    expected: Written = Counter()
    for number in range(400):
        key, value = b"k%d" % number, b"%d" % number
        expected[key_partition(key, 2), key, value, (("n", value),)] += 1
    assert after == expected
    Path(checkpoint, "commits", "0").unlink()  # as if the driver had died before it noted the end
    topics.run(failing, checkpoint)
    assert topics.written() == expected


@pytest.mark.faults
def test_a_batch_that_is_cut_otherwise_is_refused(
    spark: SparkSession, topics: Topics, checkpoint: str, tmp_path: Path
) -> None:
    produce(topics.bootstrap, topics.into, 200, partition=-1)
    flag = tmp_path / "killed"
    flag.touch()
    frame = topics.rows(spark).select("key", "value")
    failing = frame.mapInArrow(_second_task_fails(topics, flag), frame.schema)
    with pytest.raises(Exception, match="the job was killed"):
        topics.run(failing, checkpoint)
    before = topics.values()
    flag.unlink()
    with pytest.raises(Exception, match="as it was started before") as caught:
        topics.run(failing.coalesce(1), checkpoint)
    assert isinstance(query_failure(caught.value), StateError)
    assert topics.values() == before
    query = topics.run(failing, checkpoint)
    assert topics.values() == numbers(200)
    assert clear_sink_ledger(topics.config, topic=topics.out, sink_id=query) >= 3
    assert clear_sink_ledger(topics.config, topic=topics.out, sink_id=query) == 0


def test_slots_do_not_depend_on_tasks(
    spark: SparkSession, topics: Topics, checkpoint: str, tmp_path: Path
) -> None:
    produce(topics.bootstrap, topics.into, 200, partition=-1)
    flag = tmp_path / "killed"
    flag.touch()
    frame = by_slot(topics.rows(spark).select("key", "value"), 3)
    failing = frame.mapInArrow(_second_task_fails(topics, flag), frame.schema)
    with pytest.raises(Exception, match="the job was killed"):
        topics.run(failing, checkpoint)
    assert 0 < sum(topics.values().values()) < 200
    topics.run(frame.coalesce(1), checkpoint)
    assert topics.values() == numbers(200)


def test_a_table_is_written_once_under_its_id(spark: SparkSession, topics: Topics) -> None:
    topics.save(topics.table(spark, 100), sinkId="nightly-1")
    once = topics.written()
    topics.save(topics.table(spark, 100), sinkId="nightly-1")
    assert topics.written() == once
    assert topics.values() == numbers(100)
    with pytest.raises(Exception, match="a batch that changed"):
        topics.save(topics.table(spark, 90), sinkId="nightly-1")
    topics.save(topics.table(spark, 100))  # without an id each write is another one
    assert topics.values() == numbers(100) + numbers(100)


def test_a_write_in_foreach_batch_belongs_to_the_batch(
    spark: SparkSession, topics: Topics, checkpoint: str
) -> None:
    produce(topics.bootstrap, topics.into, 60, partition=-1)

    def take(frame: DataFrame, _: int) -> None:
        topics.save(frame)

    for _ in range(2):
        query = (
            topics.rows(spark).select("value").writeStream.foreachBatch(take)
            .option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        )  # fmt: skip
        assert query.awaitTermination(PATIENCE_S)
        Path(checkpoint, "commits", "0").unlink()
    assert topics.values() == numbers(60)


def sent(logs: Logs, queue_id: str) -> list[tuple[bytes | None, bytes | None, Headers]]:
    """User key, payload and headers of each message that was sent to a queue."""
    records = read_topic(logs.bootstrap, logs.config.message_topic)
    keys = [split_key(each.key()) for each in records]
    return [
        (key, each.value(), tuple(each.headers() or ()))
        for each, (owner, key) in zip(records, keys, strict=True)
        if owner == queue_id.encode()
    ]


def test_a_table_is_sent_to_a_queue_once_under_its_id(
    spark: SparkSession, bootstrap: str, namespace: str
) -> None:
    logs = Logs(bootstrap, namespace)
    register(spark, logs.config)
    rows = spark.sql(
        "SELECT CAST(id AS STRING) AS payload, CAST(id AS STRING) AS key, 'n' || id AS id, "
        "array(named_struct('key', 'h', 'value', 'v')) AS headers, 1.5 AS ttl, "
        "IF(id = 9, 600, 0) AS delay FROM range(10)"
    )

    def send(queue_id: str, frame: DataFrame = rows, sink_id: str = "nightly") -> None:
        options = {"queue": queue_id, "sinkId": sink_id}
        frame.write.format("kafkamq").options(**options).mode("append").save()

    for queue_id in ("emails", "emails", "others"):
        send(queue_id)
    expected = [
        (
            b"%d" % number,
            b"%d" % number,
            (("h", b"v"), ("kafkamq-id", b"n%d" % number), ("kafkamq-ttl-ms", b"1500")),
        )
        for number in range(9)
    ]
    assert sorted(sent(logs, "emails")) == expected
    assert sorted(sent(logs, "others")) == expected
    delayed = [marker for _, marker in logs.said() if marker.type is MarkerType.SCHEDULE]
    assert sorted((one.key, one.value, one.redeliver_after_ms) for one in delayed) == [
        (b"emails\x009", b"9", 600_000),
        (b"others\x009", b"9", 600_000),
    ]
    messages = spark.read.format("kafkamq").option("view", "messages").option("queue", "emails")
    again = ("value AS payload", "user_key AS key", "id", "headers", "ttl_ms / 1000 AS ttl")
    send("again", messages.load().selectExpr(*again))
    assert sorted(sent(logs, "again")) == expected, "a backfill, or a redrive, is a select"
    twice = ", ".join(f"named_struct('key', 'h', 'value', {each})" for each in ("'v'", "NULL"))
    send("twice", spark.sql(f"SELECT 'x' AS payload, 'i' AS id, array({twice}) AS headers"))
    assert sent(logs, "twice") == [
        (None, b"x", (("h", b"v"), ("h", None), ("kafkamq-id", b"i"))),
    ]
    reserved = "array(named_struct('key', 'kafkamq-id', 'value', 'x'))"
    for wrong, message in [
        (f"SELECT 'x' AS payload, {reserved} AS headers", "names of the protocol cannot be sent"),
        ("SELECT 'x' AS value", r"select value AS payload"),
    ]:
        with pytest.raises(Exception, match=message) as caught:
            send("emails", spark.sql(wrong), sink_id="")
        assert isinstance(query_failure(caught.value), ConfigError)
    assert len(sent(logs, "emails")) == 9


def test_a_stream_is_sent_to_a_queue_once(
    spark: SparkSession, topics: Topics, bootstrap: str, namespace: str, checkpoint: str
) -> None:
    logs = Logs(bootstrap, namespace)
    produce(topics.bootstrap, topics.into, 60, partition=-1)
    odd = "CAST(CAST(value AS STRING) AS INT) % 2"
    rows = topics.rows(spark).selectExpr("value AS payload", "key", f"{odd} AS delay")
    for _ in range(2):
        query = write_stream(
            rows, logs.config, queue="emails", checkpoint=checkpoint, slots=2, available_now=True
        )
        assert query.awaitTermination(PATIENCE_S)
        Path(checkpoint, "commits", "0").unlink()  # as if the driver had died before it noted it
    delayed = [marker for _, marker in logs.said() if marker.type is MarkerType.SCHEDULE]
    payloads = Counter(payload for _, payload, _ in sent(logs, "emails"))
    assert payloads + Counter(marker.value for marker in delayed) == numbers(60)
    assert len(delayed) == 30
    with pytest.raises(ConfigError, match="is of queue emails, not queue others"):
        write_stream(rows, logs.config, queue="others", checkpoint=checkpoint)


def test_without_transactions_each_row_is_marked(
    spark: SparkSession, topics: Topics, checkpoint: str
) -> None:
    produce(topics.bootstrap, topics.into, 50, partition=-1)
    frame = topics.rows(spark).selectExpr("key", "'same' AS value", *HEADED[2:])
    for _ in range(2):
        topics.run(frame, checkpoint, guarantee="at-least-once")
        Path(checkpoint, "commits", "0").unlink()
    records = read_topic(topics.bootstrap, topics.out)
    marks = Counter(dict(record.headers() or ())[DEDUP_HEADER] for record in records)
    assert len(marks) == 50
    assert set(marks.values()) == {2}  # what a reader drops copies by
    assert {header[0] for record in records for header in record.headers() or ()} == {
        "n", DEDUP_HEADER,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topik": "x"}, "unknown option topik: known are topic, queue"),
        ({"guarantee": "twice"}, "guarantee is 'twice': it must be one of 'exactly-once'"),
        ({"sinkId": "a/b"}, "sinkId is 'a/b': it must be"),
        ({"kafka.acks": "1"}, "every producer waits for all replicas"),
    ],
)
def test_options_that_cannot_work_are_named(
    spark: SparkSession, topics: Topics, options: dict[str, str], message: str
) -> None:
    with pytest.raises(Exception, match=message) as caught:
        topics.save(topics.table(spark, 1), **options)
    assert isinstance(query_failure(caught.value), ConfigError)


def test_a_row_is_in_the_partition_that_it_names(spark: SparkSession, topics: Topics) -> None:
    rows = spark.sql(
        "SELECT id || IF(id % 3 = 0, '', '-key') AS value, IF(id % 3 = 0, NULL, 'k') AS key, "
        "CAST(IF(id < 20, id % 2, NULL) AS INT) AS partition FROM range(30)"
    )
    topics.save(rows)
    once = {(value, partition) for partition, _, value, _ in topics.written()}
    assert len(once) == 30
    for value, partition in once:
        number = int((value or b"").removesuffix(b"-key"))
        if number < 20:
            assert partition == number % 2
        elif number % 3:
            assert partition == key_partition(b"k", 2)
    topics.save(rows)
    assert {(value, partition) for partition, _, value, _ in topics.written()} == once
    for number in (2, -5, 1 << 32):
        with pytest.raises(Exception, match=f"partition has {number}: .* has 2 parti") as caught:
            topics.save(spark.sql(f"SELECT 'x' AS value, {number} AS partition"))
        assert isinstance(query_failure(caught.value), ConfigError)
    assert len(topics.values()) == 30


@pytest.mark.parametrize("mode", ["complete", "update"])
def test_a_stream_that_does_not_append_is_refused(
    spark: SparkSession, topics: Topics, checkpoint: str, mode: str
) -> None:
    produce(topics.bootstrap, topics.into, 5, partition=-1)
    register(spark)
    counts = topics.rows(spark).groupBy("value").count().selectExpr("value")
    writer = counts.writeStream.format("kafkamq").options(**topics.options()).outputMode(mode)
    started = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True)
    with pytest.raises(Exception, match=r"only be appended to|does not support Update mode"):
        started.start().awaitTermination(PATIENCE_S)
    assert not topics.values()


def test_rows_that_cannot_be_written_are_refused(spark: SparkSession, topics: Topics) -> None:
    with pytest.raises(Exception, match="column key is bigint: it must be binary or string; cast"):
        topics.save(spark.range(1).selectExpr("'a' AS value", "id AS key"))
    with pytest.raises(Exception, match=r"a topic can only be appended to"):
        topics.table(spark, 1).write.format("kafkamq-sink").mode("overwrite").options(
            **topics.options()
        ).save()
    assert not topics.values()
