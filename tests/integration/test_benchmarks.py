"""Every row of every benchmark at a hundredth of its size: a row that measures nothing is noticed.

What compares with programs in Java and Go, which would be built first, runs without them.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import within

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[2]
NO_PEER = "--no-peer"
BRIEF = ("--rounds", "1", "--sustained", "12", "--idle", "3", "--seconds", "5", "--rate", "5000")
RUNS = [
    pytest.param("queue.py", ("--rounds", "1"), 25, id="queue"),
    pytest.param("batches.py", ("--rounds", "1", NO_PEER), 24, id="batches"),
    pytest.param("claims.py", ("--rounds", "1"), 5, id="claims"),
    pytest.param("parallel.py", ("--rounds", "1", NO_PEER), 67, id="parallel"),
    pytest.param("compare.py", (), 25, id="compare"),
    pytest.param("web.py", (), 31, id="web"),
    pytest.param("spark_queue.py", (), 3, id="spark_queue", marks=pytest.mark.spark),
    pytest.param("spark.py", BRIEF, 26, id="spark", marks=pytest.mark.spark),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("script", "arguments", "count"), RUNS)
def test_every_row_measures(script: str, arguments: tuple[str, ...], count: int) -> None:
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", "--json", *arguments],
        cwd=ROOT,
        env={**os.environ, "BENCH_SCALE": "0.01"},
        capture_output=True,
        text=True,
        timeout=within(1700),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [row["row"] for row in rows if not math.isfinite(row["ours"])] == []
    assert len(rows) == count, [row["row"] for row in rows]


def test_no_benchmark_is_left_out() -> None:
    scripts = {
        path.name
        for path in Path(ROOT, "benchmarks").glob("*.py")
        if '"--json"' in path.read_text(encoding="utf-8")
    }
    assert scripts == {run.values[0] for run in RUNS}
