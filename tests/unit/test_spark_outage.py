"""Brokers that are away for a day do not end a Spark tracker, nor does their first hiccup then."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kafkamq.config import ServiceConfig
from kafkamq.errors import BrokerError, DataLossError, KafkaMQError
from kafkamq.metrics.health import health
from kafkamq.spark.failures import QueryFailedError
from kafkamq.spark.tracker.tracker import SparkTracker

STARTS = 2_000  # that fail: a day and a half


class Outage:
    """A tracker without Spark: its starts fail, then its first runs, as the test says."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, runs: int, last: KafkaMQError | None = None
    ) -> None:
        self.stop = threading.Event()
        self.last = last
        self.tracker = SparkTracker(
            ServiceConfig(bootstrap_servers="x:1"), checkpoint="file:///c", stop=self.stop
        )
        self.tracker._loop = health.add("outage", max_age_s=9.0)
        self.tracker._batches = health.add("outage's batches", max_age_s=9.0)
        self.starts = 0
        self.runs_that_fail = runs
        self.pauses: list[float] = []
        monkeypatch.setattr(self.tracker, "_launch", self._launch)
        monkeypatch.setattr(self.tracker, "_step", self._step)
        monkeypatch.setattr(self.tracker._stopping, "wait", self.pauses.append)

    def _launch(self, *, takeover: bool) -> None:
        self.starts += 1
        if self.starts <= STARTS:
            raise BrokerError("no broker answers", code="_TRANSPORT", is_retriable=True)
        run: Any = SimpleNamespace(has_progressed=False, is_turning=True, end=lambda: None)
        self.tracker._run = run

    def _step(self, run: Any) -> KafkaMQError | None:
        if self.runs_that_fail:
            self.runs_that_fail -= 1
            return QueryFailedError("the leader has moved")
        run.has_progressed = True
        self.stop.set()
        return self.last

    def end(self) -> BaseException | None:
        try:
            self.tracker._mind()
            return self.tracker._error
        finally:
            for loop in (self.tracker._loop, self.tracker._batches):
                health.remove(loop)


@pytest.mark.parametrize("runs", [0, 1])
def test_a_tracker_outlasts_an_outage(monkeypatch: pytest.MonkeyPatch, runs: int) -> None:
    outage = Outage(monkeypatch, runs=runs)
    assert outage.end() is None
    assert outage.starts == STARTS + 1 + runs
    assert max(outage.pauses) == 30.0


def test_runs_that_fail_before_their_first_batch_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    outage = Outage(monkeypatch, runs=1_000)
    assert isinstance(outage.end(), QueryFailedError)
    assert outage.starts == STARTS + 21


def test_an_error_behind_a_stop_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Outage(monkeypatch, runs=0, last=DataLossError("gone")).end() is None
