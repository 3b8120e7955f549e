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
query = ack(rows, checkpoint=checkpoint, available_now=True)
assert query.wait()
try:
    ack(rows, checkpoint=checkpoint, topic="out")
except ConfigError as error:
    refusal = str(error)
views = spark.read.format("kafkamq").option("view", "deliveries").load()
print(json.dumps([[row.outcome for row in views.collect()], refusal]))
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


def test_a_queue_is_acknowledged_through_a_server(
    bootstrap: str, namespace: str, tmp_path: Path, port: int
) -> None:
    logs = Logs(bootstrap, namespace)
    logs.send(3, key=b"work")
    program = tmp_path / "client.py"  # PySpark takes `python -c` for a doctest
    program.write_text(_CLIENT)
    done = subprocess.run(
        [sys.executable, program, str(port), bootstrap, namespace, str(tmp_path / "checkpoint")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=within(200),
    )
    outcomes, refusal = json.loads(done.stdout.splitlines()[-1])
    assert outcomes == ["ACK"] * 3
    assert len(logs.ends(Outcome.ACK)) == 3
    assert refusal.startswith("topic needs a session of this process")
