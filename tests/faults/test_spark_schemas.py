"""Queues on Spark whose bodies have schemas of a real registry: it hangs, and schemas change."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from google.type.money_pb2 import Money
from harness.registry import LocalRegistry
from tests.integration.schema_handlers import FIRST, SECOND, Order
from tests.integration.tracker_logs import Logs
from tests.waiting import within

from kafkamq import ConfigError, SchemaRegistry, SchemaRegistryError
from kafkamq.spark import ack, read_queue, register
from kafkamq.types import Outcome

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from kafkamq.queue.schemas.registry import Schema
    from kafkamq.spark import Batch

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.timeout(580)]


@pytest.fixture
def logs(spark: SparkSession, bootstrap: str, namespace: str) -> Logs:
    made = Logs(bootstrap, namespace)
    register(spark, made.config)
    return made


class Run:
    """Batches of one queue and checkpoint."""

    def __init__(self, spark: SparkSession, folder: Path, *columns: str) -> None:
        self._spark, self._folder, self._columns = spark, folder, columns
        self.rows: list[tuple[object, ...]] = []

    def __call__(self, schema: Schema, queue_id: str = "orders", **named: str) -> None:
        def keep(frame: DataFrame, batch: Batch) -> None:
            rows = frame.where("body IS NOT NULL").select(*self._columns)
            self.rows += map(tuple, rows.collect())

        stream = read_queue(self._spark, queue_id, schema=schema, **named)
        query = ack(stream, checkpoint=str(self._folder), each_batch=keep, available_now=True)
        assert query.wait(within(120))

    def sorted(self) -> list[tuple[object, ...]]:
        return sorted(self.rows, key=str)


def rejected(logs: Logs) -> dict[bytes | None, str]:
    """Reasons of REJECTs, by payload."""
    payloads = {
        (each.partition(), each.offset()): each.value()
        for each in logs.read(logs.config.message_topic)
    }
    return {
        payloads[one.message_id.partition, one.message_id.offset]: one.reason
        for _, one in logs.said()
        if one.outcome is Outcome.REJECT and one.message_id is not None
    }


def test_avro_that_changes_and_what_does_not_parse(
    spark: SparkSession,
    logs: Logs,
    schema_registry: LocalRegistry,
    namespace: str,
    tmp_path: Path,
) -> None:
    registry = SchemaRegistry(schema_registry.url)
    first = registry.avro(FIRST, subject=namespace)
    second = registry.avro(SECOND, subject=namespace)
    of_subject = registry.avro(subject=namespace)
    old = first.serialize(Order(1))
    bad = [b"no frame", old[:5] + b"\xff", b"\0\xff\xff\xff\xffx", None]
    for payload in (old, *bad):
        logs.send(value=payload, key=b"orders")
    run = Run(spark, tmp_path / "first", "body.id", "body.raw", "body.price")
    run(of_subject)
    assert run.rows == [(1, b"\xff", Decimal("1.50"))]
    reasons = rejected(logs)
    assert set(reasons) == set(bad)
    assert reasons[bad[0]] == "the payload has no id of a schema in front"
    assert reasons[bad[1]].startswith("it does not parse by its schema: ")
    assert "Schema 4294967295 not found" in reasons[bad[2]]
    assert reasons[None] == "the payload is null"

    # The next start has the columns that the subject has by then; both are read as that.
    new = second.serialize({**Order(2).__dict__, "note": "new"})
    logs.send(value=old, key=b"orders")
    logs.send(value=new, key=b"orders")
    later = Run(spark, tmp_path / "first", "body.id", "body.note")
    later(of_subject)
    assert later.sorted() == [(1, "none"), (2, "new")]
    # One that goes by the first definition passes over what it does not know.
    logs.send(value=new, key=b"orders")
    run = Run(spark, tmp_path / "first", "body.*")
    run(first)
    assert run.rows == [(2, "", b"\xff", Decimal("1.50"))]
    with pytest.raises(ConfigError, match="subject 'nobody': the registry has none"):
        read_queue(spark, "orders", schema=registry.avro(subject="nobody"))
    # What is kept has no verdict but the query's.
    logs.send(value=b"kept", key=b"orders")
    before = len(rejected(logs))
    Run(spark, tmp_path / "first", "body.*")(first, malformed="keep")
    assert len(rejected(logs)) == before


def test_protobuf(
    spark: SparkSession, logs: Logs, schema_registry: LocalRegistry, namespace: str, tmp_path: Path
) -> None:
    money = SchemaRegistry(schema_registry.url).protobuf(Money, subject=namespace)
    logs.send(value=money.serialize(Money(currency_code="EUR", units=3)), key=b"orders")
    run = Run(spark, tmp_path / "checkpoint", "body.*")
    run(money)
    assert run.rows == [("EUR", 3, 0)]


def test_a_registry_that_hangs_costs_no_message(
    spark: SparkSession, logs: Logs, schema_registry: LocalRegistry, namespace: str, tmp_path: Path
) -> None:
    """The query ends with an error that says so, and the next start repeats the batch."""
    writer = SchemaRegistry(schema_registry.url)
    known = writer.avro(FIRST, subject=f"{namespace}-known")
    other = writer.avro(SECOND, subject=f"{namespace}-other")
    reader = SchemaRegistry(schema_registry.url, timeout=0.2).avro(FIRST)
    logs.send(value=known.serialize(Order(1)), key=b"orders")
    run = Run(spark, tmp_path / "checkpoint", "body.id")
    run(reader)
    held = other.serialize({**Order(2).__dict__, "note": "new"})
    schema_registry.pause()
    try:
        logs.send(value=held, key=b"orders")
        with pytest.raises(SchemaRegistryError, match="the schema registry cannot be asked"):
            run(reader)
        with pytest.raises(SchemaRegistryError, match="the schema registry cannot be asked"):
            read_queue(
                spark, "orders",
                schema=SchemaRegistry(schema_registry.url, timeout=0.2).avro(subject=namespace),
            )  # fmt: skip
    finally:
        schema_registry.resume()
    assert not rejected(logs)
    run(reader)
    assert run.sorted() == [(1,), (2,)]
    assert not rejected(logs)
