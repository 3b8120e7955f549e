"""Spark Connect: a queue through a server, from a process that has no JVM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.integration.tracker_logs import Logs
from tests.waiting import within

from kafkamq.types import Outcome

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

_SERVICE = "org.apache.spark.sql.connect.service.SparkConnectService"
_CLIENT = """
import json, sys
from pyspark.sql import SparkSession
from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.spark import ack, read_queue, register

_, port, servers, namespace, checkpoint = sys.argv
spark = SparkSession.builder.remote(f"sc://127.0.0.1:{port}").getOrCreate()
register(spark, ServiceConfig(bootstrap_servers=servers, namespace=namespace))
rows = read_queue(spark, "work")
rejects = rows.where("offset = 0").selectExpr("ack_token", "'reject' AS verdict")
both = rows.selectExpr("ack_token", "CAST(NULL AS STRING) AS verdict").union(rejects)
query = ack(both, checkpoint=checkpoint, available_now=True)
assert query.wait()
try:
    ack(rows, checkpoint=checkpoint, topic="out")
except ConfigError as error:
    refusal = str(error)
views = spark.read.format("kafkamq").option("view", "deliveries").load()
print(json.dumps([[row.outcome for row in views.collect()], refusal]))
"""

_APPENDING = """
import sys
from pyspark.sql import SparkSession
from kafkamq.spark.tables import ORIGIN, Table, insert_once

spark = SparkSession.builder.remote(f"sc://127.0.0.1:{sys.argv[1]}").getOrCreate()
rows = spark.table("appended").selectExpr("*", "'x' AS ack_token")
insert_once(rows, Table("appended", ORIGIN, is_iceberg=True))
print(spark.table("appended").count())
"""


@pytest.fixture
def port(spark: SparkSession) -> Iterator[int]:
    """Of a server in the JVM of the session that the tests share."""
    jvm = spark.sparkContext._gateway.jvm
    service = getattr(jvm, _SERVICE)
    settings = jvm.org.apache.spark.SparkEnv.get().conf()
    settings.set("spark.connect.grpc.binding.address", "127.0.0.1")
    settings.set("spark.connect.grpc.binding.port", "0")
    service.start(spark.sparkContext._jsc.sc())
    nothing = jvm.scala.Option.empty()
    try:
        yield getattr(getattr(jvm, f"{_SERVICE}$"), "MODULE$").localPort()
    finally:
        service.stop(nothing, nothing)


def run(program: Path, text: str, *arguments: object) -> str:
    """Run a program that has no JVM; return the last line that it prints."""
    program.write_text(text)  # PySpark takes `python -c` for a doctest
    done = subprocess.run(
        [sys.executable, program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=within(200),
    )
    return done.stdout.splitlines()[-1]


def test_a_queue_is_acknowledged_through_a_server(
    bootstrap: str, namespace: str, tmp_path: Path, port: int
) -> None:
    logs = Logs(bootstrap, namespace)
    logs.send(3, key=b"work")
    client = tmp_path / "client.py"
    said = run(client, _CLIENT, port, bootstrap, namespace, tmp_path / "checkpoint")
    outcomes, refusal = json.loads(said)
    assert sorted(outcomes) == ["ACK", "ACK", "REJECT"]
    assert len(logs.ends(Outcome.ACK)) == 2, "a message's rows are brought together"
    assert refusal.startswith("topic needs a session of this process")


def test_rows_that_a_table_has_are_not_appended_through_a_server(
    spark: SparkSession, tmp_path: Path, port: int
) -> None:
    """As into a table of Iceberg's, for which this Spark has no runtime."""
    spark.sql(
        "CREATE TABLE appended USING parquet AS SELECT 't' AS origin_topic, 0 AS origin_partition,"
        " 1L AS origin_offset, now() AS origin_timestamp"
    )
    try:
        assert run(tmp_path / "client.py", _APPENDING, port) == "1"
    finally:
        spark.sql("DROP TABLE appended")
