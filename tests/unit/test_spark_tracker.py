"""The Spark tracker's driver when its JVM is gone, and how its owner stops it."""

from __future__ import annotations

import subprocess
import threading
from types import SimpleNamespace

import pytest
from pyspark import SparkContext

from kafkamq.config import ServiceConfig
from kafkamq.spark.failures import QueryFailedError, SparkGoneError
from kafkamq.spark.tracker import tracker as tracker_module
from kafkamq.spark.tracker.tracker import SparkTracker, run_spark_tracker

CONFIG = ServiceConfig(bootstrap_servers="x:1")


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
            tracker = SparkTracker(CONFIG, checkpoint="file:///no")
            found = tracker._step(SimpleNamespace(query=Query()))  # type: ignore[arg-type]
        finally:
            process.kill()
    assert isinstance(found, SparkGoneError if has_ended else QueryFailedError)
    assert ("JVM has ended" in str(found)) is has_ended


def test_the_event_of_the_caller_is_not_set_by_a_tracker_that_ends() -> None:
    """Others may look at it, too."""
    stop = threading.Event()
    SparkTracker(CONFIG, checkpoint="file:///no", stop=stop).stop()
    assert not stop.is_set()


def test_a_stop_does_not_wait_for_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()

    class Hangs(SparkTracker):
        def start(self) -> SparkTracker:
            return self

        def wait(self, timeout_s: float | None = None) -> bool:
            assert not stop.is_set(), "it waits behind its stop"
            stop.set()
            return False

    monkeypatch.setattr(tracker_module, "SparkTracker", Hangs)
    run_spark_tracker(CONFIG, checkpoint="file:///no", stop=stop)
