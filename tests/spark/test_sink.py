"""The exactly-once sink: batches that are repeated are not written again."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from tests.integration.tracker_logs import read_topic
from tests.spark.processes import driver
from tests.spark.test_source import produce
from tests.waiting import wait_until, within

from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError, StateError
from kafkamq.queue.topics import create_topics
from kafkamq.queue.wire.keys import key_partition
from kafkamq.spark.batches import BATCH_ID
from kafkamq.spark.checkpoint import Checkpoint
from kafkamq.spark.failures import QueryFailedError, query_failure
from kafkamq.spark.formats import register_source
from kafkamq.spark.queue_streams import ack, read_queue
from kafkamq.spark.sink import sink
from kafkamq.spark.sink.sink import write_stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PATIENCE_S = 120.0


@pytest.fixture
def config(bootstrap: str, namespace: str) -> ServiceConfig:
    config = ServiceConfig(bootstrap_servers=bootstrap, namespace=namespace)
    create_topics(config, partitions=2, marker_partitions=1, ledger_partitions=2)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    topics = [NewTopic(f"{namespace}.{name}", 2, 1) for name in ("in", "out")]
    for created in admin.create_topics(topics).values():
        created.result(within(30))
    return config


def source(spark: SparkSession, config: ServiceConfig, *, limit: int = 100_000) -> DataFrame:
    name = register_source(spark, config)
    return (
        spark.readStream.format(name)
        .option("topic", f"{config.namespace}.in")
        .option("maxRowsPerTrigger", limit)
        .load()
    )


def run(frame: DataFrame, config: ServiceConfig, checkpoint: str, **options: object) -> None:
    """Write what there is, then end."""
    query = write_stream(
        frame, config, topic=f"{config.namespace}.out", checkpoint=checkpoint,
        available_now=True, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    assert query.awaitTermination(PATIENCE_S)


def written(config: ServiceConfig) -> Counter[bytes | None]:
    return Counter(
        message.value() for message in read_topic(config.bootstrap_servers, _out(config))
    )


def _out(config: ServiceConfig) -> str:
    return f"{config.namespace}.out"


def expected(count: int) -> Counter[bytes | None]:
    return Counter(b"%d" % number for number in range(count))


def test_the_batch_is_a_property_of_the_task(
    spark: SparkSession, config: ServiceConfig, checkpoint: str
) -> None:
    """Internal to Spark, and what exactly-once rests on: pinned here."""
    produce(config.bootstrap_servers, f"{config.namespace}.in", 30)
    seen: set[tuple[int, int]] = set()

    def look(frames):  # type: ignore[no-untyped-def]
        import pandas as pd
        from pyspark import TaskContext

        for _ in frames:
            context = TaskContext.get()
            assert context is not None
            batch = int(context.getLocalProperty(BATCH_ID))
            yield pd.DataFrame([(batch,)], columns=["batch"])

    def take(frame: DataFrame, batch: int) -> None:
        seen.update((batch, row.batch) for row in frame.collect())

    query = (
        source(spark, config, limit=10).mapInPandas(look, "batch INT")
        .writeStream.foreachBatch(take).option("checkpointLocation", checkpoint)
        .trigger(availableNow=True).start()
    )  # fmt: skip
    assert query.awaitTermination(PATIENCE_S)
    assert seen == {(0, 0), (1, 1), (2, 2)}


def test_rows_keep_key_headers_and_partition(
    spark: SparkSession, config: ServiceConfig, checkpoint: str
) -> None:
    produce(config.bootstrap_servers, f"{config.namespace}.in", 40)
    frame = source(spark, config).selectExpr(
        "key",
        "value",
        "array(named_struct('key', 'n', 'value', value)) AS headers",
        "IF(offset = 0, 1, NULL) AS partition",
    )
    run(frame, config, checkpoint)
    messages = read_topic(config.bootstrap_servers, _out(config))
    assert Counter(message.value() for message in messages) == expected(40)
    for message in messages:
        assert message.headers() == [("n", message.value())]
        key = message.key()
        assert key == b"k" + (message.value() or b"")
        usual = 1 if message.value() == b"0" else key_partition(key, 2)
        assert message.partition() == usual


def _repeat_last_batch(checkpoint: str) -> None:
    """Make it look as if the driver had died before it noted the end of the last batch."""
    commits = Path(checkpoint, "commits")
    numbers = [int(path.name) for path in commits.iterdir() if path.name.isdigit()]
    (commits / str(max(numbers))).unlink()


def test_a_repeated_batch_is_skipped(
    spark: SparkSession, config: ServiceConfig, checkpoint: str
) -> None:
    topic = f"{config.namespace}.in"
    produce(config.bootstrap_servers, topic, 300)
    run(source(spark, config, limit=100).select("key", "value"), config, checkpoint)
    assert written(config) == expected(300)
    _require_its_topic(spark, config, checkpoint)
    _repeat_last_batch(checkpoint)
    _forget_its_topic(checkpoint)
    with pytest.raises(ConfigError, match="trigger_s is -1"):
        write_stream(
            source(spark, config).select("value"), config, topic="typo", checkpoint=checkpoint,
            trigger_s=-1,
        )  # fmt: skip
    produce(config.bootstrap_servers, topic, 50, first=300)
    run(source(spark, config, limit=100).select("key", "value"), config, checkpoint)
    assert written(config) == expected(350)
    _require_its_topic(spark, config, checkpoint)


def _require_its_topic(spark: SparkSession, config: ServiceConfig, checkpoint: str) -> None:
    """A batch that is repeated would lie in both."""
    rows = source(spark, config, limit=100).select("key", "value")
    for other, name in (("other", "topic other"), ("", "topics that the rows name")):
        named = rows.selectExpr("*", "'other' AS topic")
        with pytest.raises(ConfigError, match=rf"is of topic \S+\.out, not {name}: name another"):
            write_stream(named, config, topic=other, checkpoint=checkpoint)


def _forget_its_topic(checkpoint: str) -> None:
    """As a release before had written the note."""
    note = Path(checkpoint, "kafkamq.json")
    values = json.loads(note.read_bytes())
    del values["into"]
    note.write_text(json.dumps(values))
    note.with_name(".kafkamq.json.crc").unlink(missing_ok=True)


def test_a_changed_batch_is_not_taken_for_the_old_one(
    spark: SparkSession, config: ServiceConfig, checkpoint: str
) -> None:
    produce(config.bootstrap_servers, f"{config.namespace}.in", 50)
    run(source(spark, config).select("key", "value"), config, checkpoint)
    _repeat_last_batch(checkpoint)
    frame = source(spark, config).selectExpr("key", "value").where("offset <> 7")
    with pytest.raises(Exception, match="checkpoint older than its ledger") as caught:
        run(frame.select("key", "value"), config, checkpoint)
    assert isinstance(query_failure(caught.value), StateError)
    assert written(config) == expected(50)


def test_an_older_checkpoint_is_refused(
    spark: SparkSession, config: ServiceConfig, checkpoint: str
) -> None:
    produce(config.bootstrap_servers, f"{config.namespace}.in", 300)
    run(source(spark, config, limit=100).select("key", "value"), config, checkpoint)
    for folder in ("offsets", "commits"):
        for number in (1, 2):
            Path(checkpoint, folder, str(number)).unlink(missing_ok=True)
    with pytest.raises(Exception, match="checkpoint older than its ledger"):
        run(source(spark, config, limit=100).select("key", "value"), config, checkpoint)
    assert written(config) == expected(300)


@pytest.mark.faults
def test_slots_change_when_no_batch_is_left_to_be_repeated(
    spark: SparkSession,
    config: ServiceConfig,
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    produce(config.bootstrap_servers, f"{config.namespace}.in", 40)
    rows = source(spark, config).select("key", "value")
    with pytest.raises(ConfigError, match="slots is 5000"):
        run(rows, config, checkpoint, slots=5000)  # and does not keep the number
    run(rows, config, checkpoint, slots=3)
    Path(checkpoint, "commits", "0").unlink()  # as if the driver had been killed
    with pytest.raises(ConfigError, match="was made with 3, and its last batch"):
        run(source(spark, config).select("key", "value"), config, checkpoint, slots=2)
    monkeypatch.setattr(sink, "cores", lambda spark: 5)  # more have registered
    run(source(spark, config).select("key", "value"), config, checkpoint)
    assert written(config) == expected(40)
    assert _slots(spark, config, checkpoint) == 3
    for start in (40, 80):
        produce(config.bootstrap_servers, f"{config.namespace}.in", 40, first=start)
        run(source(spark, config).select("key", "value"), config, checkpoint)
        assert _slots(spark, config, checkpoint) == 5
        _repeat_last_batch(checkpoint)
        run(source(spark, config).select("key", "value"), config, checkpoint)
    run(source(spark, config).select("key", "value"), config, checkpoint, slots=2)
    assert _slots(spark, config, checkpoint) == 2
    assert written(config) == expected(120)


def _slots(spark: SparkSession, config: ServiceConfig, checkpoint: str) -> int:
    note = Checkpoint(spark, checkpoint).note(config.ledger_topic)
    assert note is not None
    return note.tasks


@pytest.mark.parametrize(
    ("columns", "message"),
    [(["key"], "needs `value`"), (["value", "offset"], "select and rename")],
)
def test_rows_that_cannot_be_written_are_refused(
    spark: SparkSession, config: ServiceConfig, checkpoint: str, columns: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(source(spark, config).select(*columns), config, checkpoint)


@pytest.mark.parametrize("place", ["nosuch://a/b", "{}/file/below"])
def test_a_checkpoint_that_cannot_be_opened_is_named(
    spark: SparkSession, config: ServiceConfig, tmp_path: Path, place: str
) -> None:
    Path(tmp_path, "file").touch()
    folder = place.format(tmp_path)
    rows = source(spark, config).select("value")
    with pytest.raises(QueryFailedError, match=f"^checkpoint {folder}: .* org.apache.hadoop"):
        write_stream(rows, config, topic=_out(config), checkpoint=folder)
    messages = read_queue(spark, "emails", config=config)
    with pytest.raises(QueryFailedError, match=f"^checkpoint {folder}: .* org.apache.hadoop"):
        ack(messages.select("ack_token"), config, checkpoint=folder)


_PROGRAM = """
import sys
from kafkamq.config import ServiceConfig
from kafkamq.spark.session import build_session
from kafkamq.spark.sink.sink import write_stream
from kafkamq.spark.formats import register_source
spark = build_session(settings={"spark.sql.shuffle.partitions": "2"})
config = ServiceConfig(bootstrap_servers=sys.argv[1], namespace=sys.argv[2])
stream = spark.readStream.format(register_source(spark, config))
rows = stream.option("topic", sys.argv[2] + ".in").option("maxRowsPerTrigger", 500).load()
write_stream(rows.select("key", "value"), config, topic=sys.argv[2] + ".out",
             checkpoint=sys.argv[3], trigger_s=0.0, slots=2).awaitTermination()
"""


@pytest.mark.faults
@pytest.mark.timeout(500)
def test_a_writer_that_is_killed_neither_loses_nor_repeats(
    spark: SparkSession, config: ServiceConfig, checkpoint: str
) -> None:
    count = 15_000
    produce(config.bootstrap_servers, f"{config.namespace}.in", count)
    arguments = [config.bootstrap_servers, config.namespace, checkpoint]
    for goal in (1500, 4000):
        with driver(_PROGRAM, *arguments) as process:
            wait_until(_reached(config, goal, process), timeout_s=PATIENCE_S)
        assert sum(written(config).values()) < count, "the kill came too late to show anything"
    run(source(spark, config).select("key", "value"), config, checkpoint)
    assert written(config) == expected(count)


def _reached(
    config: ServiceConfig, goal: int, process: subprocess.Popen[bytes]
) -> Callable[[], bool]:
    def is_reached() -> bool:
        assert process.poll() is None, "the writer ended by itself"
        return sum(written(config).values()) >= goal

    return is_reached


@pytest.fixture(autouse=True)
def _no_query_left(spark: SparkSession) -> Iterator[None]:
    yield
    for query in spark.streams.active:
        query.stop()
