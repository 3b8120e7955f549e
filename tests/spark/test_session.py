"""The session of a process: what is somebody else's stays as it is; no other cluster is used."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import SparkSession
from tests.waiting import within

from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.spark import register, session
from kafkamq.spark.jobs.sql import view_session
from kafkamq.spark.session import build_session, session_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.spark]

CONFIG = ServiceConfig(bootstrap_servers="x:1")
# What kafkamq would have otherwise.
OTHER = {
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "false",
    "spark.sql.session.timeZone": "America/New_York",
    "spark.sql.streaming.noDataMicroBatches.enabled": "true",
    "spark.sql.streaming.stateStore.providerClass": "some.Other",
}


def test_a_session_elsewhere_is_not_taken_for_the_cluster(spark: SparkSession) -> None:
    with pytest.raises(ConfigError, match=r"this process has a Spark session on local\[2\]: stop"):
        build_session(master="spark://127.0.0.1:7077")
    assert build_session(master="local[4]").sparkContext is spark.sparkContext


@pytest.fixture
def theirs(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[SparkSession]:
    """The session, as if kafkamq had not made it."""
    monkeypatch.setattr(session, "_built", None)
    before = {name: spark.conf.get(name, None) for name in OTHER}
    for name, value in OTHER.items():
        spark.conf.set(name, value)
    # PySpark notes which one is active twice, in the JVM and here, and this sets both: the note
    # here is of whichever session made a table from Python last, in any thread.
    spark.createDataFrame([(1,)])
    yield spark
    for name, old in before.items():
        spark.conf.unset(name) if old is None else spark.conf.set(name, old)


def test_a_session_of_somebody_else_keeps_its_settings_and_tables(theirs: SparkSession) -> None:
    register(theirs, CONFIG)
    theirs.range(3).createOrReplaceTempView("messages")
    try:
        ours = build_session(settings={"spark.sql.shuffle.partitions": "7"})
        with view_session(CONFIG, master="local[2]") as asked:
            assert "queue_id" in asked.table("messages").columns
        assert theirs.table("messages").columns == ["id"]
    finally:
        theirs.catalog.dropTempView("messages")
    assert {name: theirs.conf.get(name) for name in OTHER} == OTHER
    assert theirs.conf.get("spark.sql.shuffle.partitions") == "2"
    assert ours.sparkContext is theirs.sparkContext
    assert ours.conf.get("spark.sql.shuffle.partitions") == "7"
    wanted = session_settings(master="local[2]", driver_memory="1g")
    assert {name: ours.conf.get(name) for name in OTHER if name in wanted} == {
        name: wanted[name] for name in OTHER if name in wanted
    }
    found = SparkSession.getActiveSession()
    assert found is not None
    assert found.conf.get("spark.sql.session.timeZone") == OTHER["spark.sql.session.timeZone"]


def test_registering_needs_neither_an_installers_files_nor_java_here(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(asked: str) -> str:
        raise metadata.PackageNotFoundError(asked)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    assert register(spark, CONFIG) is spark
    assert build_session().sparkContext is spark.sparkContext


def test_what_tests_give_sparks_processes(spark: SparkSession) -> None:
    """No archive of PySpark that each would compile, and long enough to connect."""
    home = Path(os.environ["SPARK_HOME"])
    assert (home / "jars").is_dir()
    assert not (home / "python").exists()
    name = "spark.python.authenticate.socketTimeout"
    assert spark.sparkContext.getConf().get(name) == f"{within(60):.0f}s"


def test_a_python_process_of_sparks_says_nothing_when_it_starts() -> None:
    """Whatever it says is in the tracker's log."""
    first = Path(session.__file__).with_name("at_start")
    done = subprocess.run(
        [sys.executable, "-c", "pass"],
        env={**os.environ, "PYTHONPATH": str(first)},
        capture_output=True,
        text=True,
        check=True,
        timeout=within(60),
    )
    assert done.stderr == ""
