"""What Spark itself brings, on our data: its state reader, and a declarative pipeline."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.spark.tracker_runs import PATIENCE_S, Logs, settled, tracking
from tests.waiting import wait_until, within

from kafkamq.types import Outcome

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).with_name("uv")
_OF_CONNECT = ("grpcio", "grpcio-status", "googleapis-common-protos", "zstandard", "pyyaml")
_WITH_A_CATALOG = ("--conf", "spark.sql.catalogImplementation=hive")  # that outlives a run


def test_the_state_reader_reads_what_a_tracker_has_folded(
    spark: SparkSession, bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    """The statements of docs/spark.md, on the checkpoint of a tracker that runs."""
    logs = Logs(bootstrap, namespace, marker_partitions=1)
    checkpoint = str(tmp_path / "checkpoint")
    with tracking(logs, spark, checkpoint) as running:
        fired = logs.send(3)
        logs.start(*fired, timeout_ms=200)
        wait_until(lambda: settled(logs, *fired), timeout_s=PATIENCE_S)
        logs.start(*logs.send(10), timeout_ms=600_000)
        wait_until(lambda: running.statuses()[0].entries == 10, timeout_s=PATIENCE_S)
        text = (ROOT / "docs" / "spark.md").read_text("utf-8")
        (block,) = re.findall(r"```python\n([^`]*\"statestore\"[^`]*)```", text)
        names: dict[str, Any] = {"spark": spark, "checkpoint": checkpoint}

        def folded() -> int:
            """Return up to where the last batch has folded that Spark has committed."""
            exec(compile(block, "spark.md", "exec"), names)
            (row,) = names["rows"] = names["folded"].collect()
            return int(row.next_offset)

        wait_until(lambda: folded() >= 3 + 3 + 10, timeout_s=PATIENCE_S)
        (row,) = names["rows"]
        assert row.redelivered == 3
        assert row.dead_lettered == 0
        assert all(each.size > 0 for each in names["chunks"].collect())
        assert names["chunks"].count() > 0


def test_a_pipeline_takes_in_what_ended_since_its_last_run(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    """The example, as ``spark-pipelines`` runs it: twice, in a process each."""
    import pandas as pd
    import pyspark

    packages = tmp_path / "packages"  # what of pyspark[pipelines] kafkamq[spark] does not bring
    install = [UV, "pip", "install", "--quiet", "--no-deps", "--target", packages]
    subprocess.run([*install, *_OF_CONNECT], check=True, timeout=within(200))
    spec = tmp_path / "pipeline.yml"
    text = (ROOT / "examples" / spec.name).read_text("utf-8")
    spec.write_text(text.replace("/tmp/kafkamq-pipeline", str(tmp_path)))
    spec.with_suffix(".py").write_bytes((ROOT / "examples" / "pipeline.py").read_bytes())
    home = Path(pyspark.__file__).parent
    tables = tmp_path / "spark-warehouse"
    logs = Logs(bootstrap, namespace)
    for number in (1, 2):
        acked, rejected = logs.send(2, key=b"work")
        logs.start(acked, rejected, timeout_ms=600_000)
        logs.end(acked)
        logs.end(rejected, outcome=Outcome.REJECT, reason="no")
        subprocess.run(
            [home / "bin" / "spark-pipelines", "run", "--spec", spec, *_WITH_A_CATALOG],
            cwd=tmp_path,
            env={
                **os.environ,
                "SPARK_HOME": str(home),
                "PYSPARK_PYTHON": sys.executable,
                "PYTHONPATH": os.pathsep.join([str(packages), str(ROOT / "src")]),
                "KAFKAMQ_BOOTSTRAP_SERVERS": bootstrap,
                "KAFKAMQ_NAMESPACE": namespace,
            },
            check=True,
            timeout=within(300),
        )
        deliveries = pd.read_parquet(tables / "ended_deliveries")
        assert len(deliveries) == 2 * number
        outcomes = pd.read_parquet(tables / "outcomes")
        found = {row.outcome: row.deliveries for row in outcomes.itertuples()}
        assert found == {"ACK": number, "REJECT": number}


_WHERE = """
from pyspark.sql.datasource import DataSource
from kafkamq.spark.session import build_session

class Where(DataSource):
    def schema(self):
        import pyspark
        return "archived INT" if ".zip" in pyspark.__file__ else "compiled INT"

spark = build_session()
spark.dataSource.register(Where)
print(spark.read.format("Where").load().columns)
"""


def test_python_beside_the_driver_has_pyspark_compiled() -> None:
    """From the archive, which Spark puts first, each process would compile it again."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    del environment["SPARK_HOME"]  # that of the tests has no archive
    done = subprocess.run(
        [sys.executable, "-c", _WHERE],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=within(100),
    )
    assert done.stdout.splitlines()[-1] == "['compiled']"
