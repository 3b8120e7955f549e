"""The session of a process: what is somebody else's stays as it is; no other cluster is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import SparkSession
from tests.integration.cli_tools import Commands
from tests.waiting import within

from kafkamq.config import ServiceConfig
from kafkamq.errors import ConfigError
from kafkamq.spark import register, session
from kafkamq.spark.jobs.sql import view_session
from kafkamq.spark.session import build_session, session_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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


# Stands for Spark's own: it writes down what it is given, and ends, or not.
SUBMIT = """#!/bin/sh
printf '%s\\n' "$@" > "$SEEN/arguments"
while [ $# -gt 0 ]; do
    if [ "$1" = --properties-file ]; then cat "$2" > "$SEEN/file"; fi
    shift
done
echo $$ > "$SEEN/pid"
eval "$THEN"
"""
STAYS = "trap '' TERM; while true; do sleep 0.1; done"
# As a tracker, whose first Ctrl-C is a wish.
TRACKER = """
from kafkamq.runtime.signals import stop_on_signals

stop_on_signals(print)
"""
BUILDS = """
import json, os, sys
from kafkamq.spark.session import build_session

try:
    build_session(settings=json.loads(sys.argv[1]))
except BaseException as error:
    print(type(error).__name__)
"""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def started(
    tmp_path: Path,
    settings: Mapping[str, object],
    then: str = "exit 1",
    *,
    before: str = "",
    **environment: str,
) -> tuple[str, str, str]:
    """The command line and the file of settings that a new JVM gets, and how its start ended."""
    home = script(tmp_path / "bin" / "spark-submit", SUBMIT).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", before + BUILDS, json.dumps(settings)],
        env={
            **os.environ,
            "SPARK_HOME": str(home),
            "SEEN": str(tmp_path),
            "THEN": then,
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=within(60),
    )
    file = tmp_path / "file"
    arguments = (tmp_path / "arguments").read_text()
    return arguments, file.read_text() if file.exists() else "", done.stdout.strip()


def test_no_setting_of_the_user_is_on_a_command_line(tmp_path: Path) -> None:
    given = {"spark.hadoop.fs.s3a.secret.key": "a\\b=\u00fc", "spark.driver.memory": "2g"}
    arguments, file, ended = started(tmp_path, given)
    assert ended == "PySparkRuntimeError"
    assert "s3a" not in arguments
    assert "spark.driver.memory" not in arguments
    assert "spark.driver.host=127.0.0.1" in arguments
    assert "--load-spark-defaults" in arguments
    assert file.splitlines() == [
        r"spark.hadoop.fs.s3a.secret.key=a\\b\=\u00fc",
        "spark.driver.memory=2g",
    ]


def test_settings_that_are_no_text_or_not_of_ascii_reach_java(tmp_path: Path) -> None:
    given = {"spark.a": 4, "spark.b": False, "spark.c": 0.5, "spark.\u00fc x": " "}
    _, file, _ = started(tmp_path, given)
    assert file.splitlines() == [
        "spark.a=4",
        "spark.b=false",
        "spark.c=0.5",
        r"spark.\u00fc\ x=\ ",
    ]


@pytest.mark.parametrize("joined", [" ", "="])
def test_a_file_that_submit_arguments_name_is_read_below_the_settings(
    tmp_path: Path, joined: str
) -> None:
    theirs = tmp_path / "theirs.conf"
    theirs.write_text("spark.driver.memory 1g\nspark.b \u00fc")
    arguments, file, _ = started(
        tmp_path,
        {"spark.driver.memory": "2g"},
        PYSPARK_SUBMIT_ARGS=f"--properties-file{joined}{theirs} --conf spark.c=d pyspark-shell",
    )
    assert file.splitlines() == [
        "spark.driver.memory 1g",
        "spark.b \u00fc",
        "spark.driver.memory=2g",
    ]
    assert str(theirs) not in arguments
    assert arguments.endswith("--conf\nspark.c=d\npyspark-shell\n")
    # Spark does not read its defaults, either, where it is given a file.
    assert "--load-spark-defaults" not in arguments


def test_a_file_that_submit_arguments_name_and_that_is_not_there_is_told(tmp_path: Path) -> None:
    script(tmp_path / "bin" / "spark-submit", SUBMIT)
    done = subprocess.run(
        [sys.executable, "-c", BUILDS, '{"spark.a": "b"}'],
        env={
            **os.environ,
            "SPARK_HOME": str(tmp_path),
            "PYSPARK_SUBMIT_ARGS": "--properties-file /nowhere pyspark-shell",
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=within(60),
    )
    assert done.stdout.strip() == "ConfigError"


def test_spark_itself_reads_the_settings(spark: SparkSession) -> None:
    """Those of Java's system were there before the first question of PySpark's."""
    name = "spark.sql.shuffle.partitions"
    found = spark.sql(f"SELECT java_method('java.lang.System', 'getProperty', '{name}')")
    assert found.collect() == [("2",)]


@pytest.mark.skipif(sys.platform != "linux", reason="a file has a name elsewhere")
@pytest.mark.parametrize("signal_name", ["TERM", "KILL"])
def test_no_file_of_settings_stays_when_the_process_is_ended(
    tmp_path: Path, signal_name: str
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    then = f"kill -{signal_name} $PPID; exit 1"
    _, file, ended = started(tmp_path, {"spark.a": "b"}, then, TMPDIR=str(temporary))
    assert (file, ended) == ("spark.a=b\n", "")
    assert [path for path in temporary.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("settings", "tasks"),
    [({}, "8"), ({"spark.sql.shuffle.partitions": "99"}, None), ({"spark.master": "yarn"}, None)],
)
def test_a_local_session_shuffles_into_few_tasks_unless_settings_say_otherwise(
    tmp_path: Path, settings: dict[str, str], tasks: str | None
) -> None:
    arguments, _, _ = started(tmp_path, settings)
    found = [line for line in arguments.splitlines() if "spark.sql.shuffle.partitions" in line]
    assert found == ([f"spark.sql.shuffle.partitions={tasks}"] if tasks else [])
    is_local = "spark.master" not in settings
    assert ("spark.databricks.delta.snapshotPartitions=2" in arguments) == is_local
    assert ("spark.driver.bindAddress=127.0.0.1" in arguments) == is_local


@pytest.mark.parametrize("then", ["exec sleep 600", STAYS])
def test_ctrl_c_while_the_jvm_starts_ends_both(tmp_path: Path, then: str) -> None:
    """Else PySpark leaves the JVM behind, for ever."""
    _, _, ended = started(tmp_path, {}, f"kill -INT $PPID; {then}")
    assert ended == "KeyboardInterrupt"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_the_second_ctrl_c_ends_a_tracker_whose_jvm_starts(tmp_path: Path) -> None:
    then = "while kill -INT $PPID; do sleep 0.1; done"
    _, _, ended = started(tmp_path, {}, then, before=TRACKER)
    assert ended.endswith("KeyboardInterrupt")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("then", ["exit 0", "head -c 1000000 /dev/zero; exit 1"])
def test_a_start_that_says_nothing_or_much_ends(tmp_path: Path, then: str) -> None:
    """PySpark waits for another code than 0; and nobody would read what Spark prints."""
    assert started(tmp_path, {}, then)[2] == "PySparkRuntimeError"


def test_ctrl_c_does_not_silence_java(tmp_path: Path) -> None:
    group = "$(cut -d' ' -f5 /proc/$PPID/stat)"
    java = f"#!/bin/sh\nkill -INT -{group}\necho 'openjdk version \"21.0.1\"' >&2\n"
    home = script(tmp_path / "bin" / "java", java).parents[1]
    program = """
import signal
from kafkamq.spark.session import check_environment

signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
print(check_environment()["java"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "JAVA_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=within(60),
        check=False,
        start_new_session=True,
    )
    assert done.stdout.split() == ["interrupted", "21.0.1"], done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("sql", "SELECT 1"),
        ("audit",),
        ("replay", "--everything"),
        ("dlq", "redrive", "--where", "true"),
        ("tracker", "--checkpoint", "/tmp/nowhere"),
    ],
)
def test_a_command_on_spark_names_the_package_that_is_too_old(
    bootstrap: str, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """Before it imports what an older PySpark does not have."""
    monkeypatch.setattr(metadata, "version", lambda name: "4.0.1")
    for name in list(sys.modules):
        if name.startswith(("kafkamq.spark.jobs", "kafkamq.spark.tracker")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kafkamq.spark.formats", None)
    monkeypatch.setitem(sys.modules, "kafkamq.spark.tracker.query", None)
    with pytest.raises(ConfigError, match=r"pyspark is 4\.0\.1: it must be"):
        Commands(bootstrap, "any").run(*arguments)
