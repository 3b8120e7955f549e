"""Signs of life on a real broker (R36): who waits for whom, and who follows."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
from tests.integration.tracker_logs import Logs
from tests.waiting import wait_until, within

from kafkamq.errors import FencedError
from kafkamq.markers.tracker.ledger import claim
from kafkamq.markers.tracker.local import LocalTracker, run_standing_by
from kafkamq.markers.tracker.records import StatusReader
from kafkamq.markers.tracker.succession import Succession
from kafkamq.markers.wire.records import SignKind


@pytest.fixture
def logs(bootstrap: str, namespace: str) -> Logs:
    return Logs(bootstrap, namespace)


def claimed(logs: Logs, engine: str) -> int:
    return claim(logs.config, engine=engine, partitions=logs.marker_partitions).epoch


def test_r36_the_first_takes_over_the_second_waits_and_follows_when_it_ends(logs: Logs) -> None:
    with Succession(logs.config, stands_by=True) as second:
        with Succession(logs.config, stands_by=True) as first:
            first.stand_by("one")
            wait_until(lambda: first.is_chosen)
            first.take_over("one")
            second.stand_by("two")
            assert not second.wait(2.0)
            first.active(claimed(logs, "one"))
            assert not second.wait(6.0)  # longer than it waits in silence
            assert second.hears("one")
            assert second.seen_epoch == 1
        wait_until(lambda: second.is_chosen, timeout_s=30)


def test_r36_a_later_start_is_told_and_a_former_one_keeps_nobody_waiting(logs: Logs) -> None:
    with (
        Succession(logs.config, stands_by=True) as former,
        Succession(logs.config) as later,  # does not stand by: it takes over at its start
        Succession(logs.config, stands_by=True) as third,
    ):
        former.stand_by("former")
        wait_until(lambda: former.is_chosen)
        former.active(claimed(logs, "former"))
        later.take_over("later")
        later.active(claimed(logs, "later"))
        wait_until(lambda: former.is_succeeded)
        third.stand_by("third")
        assert not third.wait(6.0)
        later.pause()  # killed; the former one goes on, as if it knew nothing
        wait_until(lambda: third.is_chosen, timeout_s=30)


def test_r36_a_local_tracker_waits_for_another_engine_and_joins_its_own(logs: Logs) -> None:
    stop = threading.Event()
    waits = threading.Thread(target=run_standing_by, args=(logs.config, None, stop))
    with Succession(logs.config) as spark:
        spark.take_over("spark")
        spark.active(claimed(logs, "spark"))
        # Else nobody is there to wait for.
        wait_until(lambda: any(sign.kind is SignKind.ACTIVE for sign in logs.signs()))
        waits.start()
        waits.join(7.0)
        assert not _statuses(logs), "it works beside the other engine"
    wait_until(lambda: "local" in _statuses(logs))  # the other one has ended
    tracker = LocalTracker(logs.config)
    with pytest.raises(FencedError), tracker.in_thread() as replica:  # noqa: PT012
        wait_until(lambda: replica.partitions and replica.is_live)  # they share
        with Succession(logs.config) as spark:
            spark.take_over("spark")
            spark.active(claimed(logs, "spark"))
            ids = logs.send(20)
            logs.start(*ids, timeout_ms=200)
            wait_until(lambda: replica.is_over)
    stop.set()
    waits.join(within(60))
    assert not waits.is_alive()


def _statuses(logs: Logs) -> set[str]:
    with closing(StatusReader(logs.config)) as reader:
        return {status.engine for status in reader.read_to_end().values()}
