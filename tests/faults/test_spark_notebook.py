"""The notebook of examples/: its cells run in their order, and answer what a namespace holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.integration.tracker_logs import Logs

from kafkamq.types import Outcome

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.timeout(580)]

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "ten_questions.ipynb"


def cells() -> Iterator[str]:
    for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "committed without what a run printed"
            yield "".join(cell["source"])


def test_ten_answers(
    spark: SparkSession, bootstrap: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del spark  # the one that the notebook finds
    logs = Logs(bootstrap, namespace)
    acked, nacked, held, _ = logs.send(4, key=b"emails")
    logs.start(acked, nacked, held, timeout_ms=600_000)
    logs.end(acked)
    logs.end(nacked, outcome=Outcome.NACK, delay_ms=600_000, reason="OSError: no route")
    monkeypatch.setenv("KAFKAMQ_BOOTSTRAP_SERVERS", bootstrap)
    monkeypatch.setenv("KAFKAMQ_NAMESPACE", namespace)
    names: dict[str, Any] = {}
    for cell in cells():
        exec(compile(cell, NOTEBOOK.name, "exec"), names)
    assert {row.outcome: row.n for row in names["outcomes"]} == {"ACK": 1, "NACK": 1, "open": 1}
    assert {row.state for row in names["under_way"]} == {"held", "waiting"}
    assert [row.n for row in names["durations"]] == [1]
    assert names["waits"]
    assert [(row.kind, row.n) for row in names["failures"]] == [("OSError", 1)]
    assert not names["repeated"]
    assert not names["letters"]
    assert not names["late"]
    assert sum(row.n for row in names["workers"]) == 3
    assert [row.n for row in names["untouched"]] == [1]
