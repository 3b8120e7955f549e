"""Trackers that fail over, on Spark and locally: one waits, takes over, nothing is done twice."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.spark.tracker_runs import PATIENCE_S, Logs, gives_signs, settled, verdict
from tests.waiting import wait_until, within

from kafkamq.errors import ConfigError
from kafkamq.markers.tracker.local import LocalTracker, run_standing_by
from kafkamq.spark.tracker.tracker import StandbyTracker
from kafkamq.types import MessageId

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.faults, pytest.mark.timeout(900)]


@pytest.fixture
def logs(bootstrap: str, namespace: str) -> Logs:
    return Logs(bootstrap, namespace, marker_partitions=2)


class Fires:
    """Messages whose workers die, until all are settled; once each."""

    def __init__(self, logs: Logs) -> None:
        self.logs = logs
        self.ids: list[MessageId] = []

    def __call__(self) -> None:
        more = self.logs.send(20)
        self.logs.start(*more, timeout_ms=300)
        self.ids += more
        wait_until(lambda: settled(self.logs, *more), timeout_s=PATIENCE_S)

    def judge(self) -> None:
        pairs = [(one.partition, one.offset) for one in self.ids]
        assert Counter(self.logs.copied()) == Counter(pairs)
        verdict(self.logs).require_ok()


@contextmanager
def local_standby(logs: Logs) -> Iterator[threading.Event]:
    """In a thread; yields what stops it."""
    stop = threading.Event()
    thread = threading.Thread(target=run_standing_by, args=(logs.config, None, stop))
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(within(60))
        assert not thread.is_alive()


def test_one_stands_by_and_takes_over_from_a_local_one_that_hangs(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    """Its folder is no other one's; and one that is local waits for it, until it ends."""
    fire = Fires(logs)
    first = LocalTracker(logs.config)
    while not first.is_live:
        first.run_once()
    hangs = threading.Event()
    turns = threading.Thread(target=_turn, args=(first, hangs))
    turns.start()
    try:
        standby = StandbyTracker(logs.config, checkpoint=checkpoint, spark=spark, trigger_s=0.2)
        with standby:
            fire()
            assert standby.stands_by
            assert not standby.statuses(), "it works beside the active one"
            wait_until(lambda: gives_signs(logs, Path(checkpoint)), timeout_s=PATIENCE_S)
            other = StandbyTracker(logs.config, checkpoint=checkpoint, spark=spark)
            with pytest.raises(ConfigError, match="that of a tracker that runs"):
                other.start()
            hangs.set()  # no sign of life any more, and its clients live on
            turns.join(within(30))
            fire()
            assert not standby.stands_by
            with local_standby(logs):
                fire()
                assert not standby.stands_by
                assert standby.is_running
                standby.stop()  # it ends on purpose: the other one follows
                fire()
    finally:
        hangs.set()
        turns.join(within(30))
        first.close()
    fire.judge()


def _turn(tracker: LocalTracker, hangs: threading.Event) -> None:
    while not hangs.is_set():
        tracker.run_once()
