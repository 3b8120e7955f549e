"""What ``kafkamq spark`` starts, and the archive that a session ships to a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile

import pytest
from typer.testing import CliRunner

from kafkamq.cli.app import app
from kafkamq.cli.spark import jobs as commands
from kafkamq.errors import ConfigError
from kafkamq.spark.cluster import (
    daemon_environment,
    master_command,
    package_archive,
    worker_command,
)


def test_commands_are_spark_class_of_the_installed_pyspark() -> None:
    program, *master = master_command(host="h", port=1, web_port=2)
    assert os.access(program, os.X_OK)
    assert program.endswith("/pyspark/bin/spark-class")
    assert master == [
        "org.apache.spark.deploy.master.Master", "--host", "h", "--port", "1", "--webui-port", "2",
    ]  # fmt: skip
    worker = worker_command("spark://h:1", cores=3, memory="2g", host="w", work_folder="/work")
    assert worker[2:] == [
        "spark://h:1", "--cores", "3", "--memory", "2g", "--webui-port", "0", "--host", "w",
        "--work-dir", "/work",
    ]  # fmt: skip


@pytest.mark.parametrize("master", ["h:1", "spark://h", ""])
def test_a_master_that_is_none_is_refused(master: str) -> None:
    with pytest.raises(ConfigError, match="must be spark://host:port"):
        worker_command(master, cores=1, memory="1g")


def test_a_memory_that_is_no_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory is 'lots': it must be"):
        worker_command("spark://h:1", cores=1, memory="lots")


def test_executors_run_this_python_unless_told() -> None:
    assert daemon_environment({})["PYSPARK_PYTHON"] == sys.executable
    given = daemon_environment({"PYSPARK_PYTHON": "other", "HOME": "/"})
    assert (given["PYSPARK_PYTHON"], given["HOME"]) == ("other", "/")


def test_the_program_becomes_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(commands, "_become", became.append)
    for arguments in (["master", "--port", "7000"], ["worker", "spark://h:7000", "--cores", "2"]):
        done = CliRunner().invoke(app, ["spark", *arguments])
        assert done.exit_code == 0, done.output
    assert "7000" in became[0]
    assert became[1][2:5] == ["spark://h:7000", "--cores", "2"]


def test_the_archive_is_the_whole_package() -> None:
    archive = package_archive()
    names = zipfile.ZipFile(archive).namelist()
    assert {"kafkamq/__init__.py", "kafkamq/spark/log4j2.properties"} <= set(names)
    program = (
        "import kafkamq, kafkamq.spark.sink.sink, kafkamq.spark.tracker.query; "
        "print(kafkamq.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(archive)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(archive))
