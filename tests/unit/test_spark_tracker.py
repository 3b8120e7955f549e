"""The Spark tracker's driver when its JVM is gone."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
from pyspark import SparkContext

from kafkamq.config import ServiceConfig
from kafkamq.spark.failures import QueryFailedError, SparkGoneError
from kafkamq.spark.tracker.tracker import SparkTracker


class Query:
    """Of a JVM that is gone: everything fails, with what py4j says."""

    @property
    def isActive(self) -> bool:  # noqa: N802 - Spark's
        raise ConnectionRefusedError(111, "Connection refused")


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_jvm_that_has_ended_is_one_final_error(
    has_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["true"] if has_ended else ["sleep", "600"]
    with subprocess.Popen(command) as process:
        try:
            gateway = SimpleNamespace(proc=process)
            monkeypatch.setattr(SparkContext, "_gateway", gateway)
            tracker = SparkTracker(ServiceConfig(bootstrap_servers="x:1"), checkpoint="file:///no")
            found = tracker._step(SimpleNamespace(query=Query()))  # type: ignore[arg-type]
        finally:
            process.kill()
    assert isinstance(found, SparkGoneError if has_ended else QueryFailedError)
    assert ("JVM has ended" in str(found)) is has_ended
