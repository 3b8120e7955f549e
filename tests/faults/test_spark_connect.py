"""Spark Connect: a client without Java or PySpark's own package, and a server that restarts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.integration.tracker_logs import Logs
from tests.spark.processes import driver
from tests.waiting import wait_until, within

from kafkamq.types import Outcome

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).with_name("uv")
PATIENCE_S = 200.0
NEEDED = ("pyspark-client>=4.2,<4.3", "pandas<3", "pyarrow", "protobuf>=6.30,<8")

_SERVER = """
import sys, time
from kafkamq.spark.session import build_session
build_session(settings={
    "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.connect.grpc.binding.port": sys.argv[1],
})
time.sleep(3600)
"""

_CLIENT = """
import json, sys
from pyspark.sql import SparkSession
from kafkamq import KafkaMQError
from kafkamq.config import ServiceConfig
from kafkamq.spark import ack, map_messages, read_queue, register, register_views, write_stream

_, port, servers, namespace, checkpoint = sys.argv
spark = SparkSession.builder.remote(f"sc://127.0.0.1:{port}").getOrCreate()
config = ServiceConfig(bootstrap_servers=servers, namespace=namespace)
register(spark, config)
register_views(spark, config)
rows = spark.createDataFrame([(b"sent",)], "payload BINARY")
rows.write.format("kafkamq").option("queue", "work").mode("append").save()
done = map_messages(read_queue(spark, "work"), lambda message: message.payload)
query = ack(done, checkpoint=checkpoint, available_now=True)
assert query.wait()
outcomes = spark.sql("SELECT outcome, count(*) AS n FROM deliveries GROUP BY ALL").collect()

def said(start):
    try:
        start()
    except KafkaMQError as error:
        return f"{type(error).__name__}: {error}"

letters = spark.readStream.format("kafkamq").option("view", "dead_letters").load()
refusals = [
    said(lambda: ack(done, checkpoint=checkpoint, topic="out")),
    said(lambda: ack(done, checkpoint=checkpoint, on_late=print)),
    said(lambda: ack(done.selectExpr("*", "'out' AS topic"), checkpoint=checkpoint)),
    said(lambda: write_stream(letters, config, checkpoint=checkpoint, topic="out")),
]
print(json.dumps([{row.outcome: row.n for row in outcomes}, refusals]))
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with ``pyspark-client``, and without ``pyspark``."""
    folder = tmp_path_factory.mktemp("connect")
    python = folder / "bin" / "python"
    for words in (
        ("venv", "--quiet", "--python", sys.executable, folder),
        ("pip", "install", "--quiet", "--python", python, *NEEDED, "confluent-kafka"),
    ):
        subprocess.run([UV, *words], check=True, timeout=within(200))
    return python


@contextmanager
def server() -> Iterator[int]:
    """A Connect server; its port."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]

    def answers() -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) == 0

    with driver(_SERVER, str(port)) as process:
        wait_until(lambda: answers() or process.poll() is not None, timeout_s=PATIENCE_S)
        assert process.poll() is None
        yield port


def run(client: Path, port: int, logs: Logs, checkpoint: Path) -> tuple[dict[str, int], list[str]]:
    arguments = [str(port), logs.bootstrap, logs.config.namespace, str(checkpoint)]
    program = checkpoint.with_name("client.py")  # PySpark takes `python -c` for a doctest
    program.write_text(_CLIENT)
    done = subprocess.run(
        [client, program, *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=within(PATIENCE_S),
    )
    outcomes, refusals = json.loads(done.stdout.splitlines()[-1])
    return outcomes, refusals


def test_views_queues_and_the_sink_through_a_server_that_restarts(
    bootstrap: str, namespace: str, tmp_path: Path, client: Path
) -> None:
    logs = Logs(bootstrap, namespace)
    logs.send(3, key=b"work")
    with server() as port:
        outcomes, refusals = run(client, port, logs, tmp_path / "checkpoint")
    assert outcomes == {"ACK": 4}
    no_topic = "topic needs a session of this process"
    wanted = (no_topic, "on_late needs a", no_topic, "is one of Spark Connect")
    for said, text in zip(refusals, wanted, strict=True):
        assert said.startswith("ConfigError: ")
        assert text in said
    with server() as port:
        outcomes, _ = run(client, port, logs, tmp_path / "checkpoint")
    assert outcomes == {"ACK": 5}, "it goes on from its checkpoint"
    assert len(logs.ends(Outcome.ACK)) == 5
