"""The demo's verdict is right on a log by hand, and turns red when that log is edited."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from tests.e2e.verdict_log import FakeLog, good_log, in_batches, register

from kafkamq.dev.demo.verdict import Verdict, verdict_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.faults]


def _drop_ack(log: FakeLog) -> None:
    """Nothing says what became of `plain`."""
    log.markers = [row for row in log.markers if row.get("offset") != 0 or row["type"] == "START"]


def _drop_dead_letter(log: FakeLog) -> None:
    log.dead_letters = []


def _wrong_reason(log: FakeLog) -> None:
    log.dead_letters[0]["reason"] = "expired"


def _drop_copy(log: FakeLog) -> None:
    """`held` was ended as redelivered, but its copy is not there."""
    log.messages = [
        row for row in log.messages if row["id"] != "held" or row["delivery_count"] == 1
    ]


def _drop_fired(log: FakeLog) -> None:
    log.messages = [row for row in log.messages if row["id"] != "later"]


def _unfinished_schedule(log: FakeLog) -> None:
    """The tracker is off: the delayed message never came."""
    _drop_fired(log)
    log.markers = [row for row in log.markers if not row["of_schedule"]]


def _second_copy(log: FakeLog) -> None:
    log.message("held", 5250, queue="mails", count=2, origin=3)


def _early_redelivery(log: FakeLog) -> None:
    """A copy of `plain`, which was acknowledged 10 ms after its START."""
    log.message("plain", 6600, count=2, origin=0)
    log.end(0, "REDELIVERED", 6600)


def _no_reason_to_redeliver(log: FakeLog) -> None:
    """`slow` was kept alive, and copied 100 ms after a sign of life."""
    log.markers = [
        row for row in log.markers if not (row.get("outcome") == "ACK" and row.get("offset") == 1)
    ]
    log.message("slow", 5500, kind="slow", count=2, origin=1)
    log.end(1, "REDELIVERED", 5500)


def _done_twice(log: FakeLog) -> None:
    """The killed worker had finished `held`, but not said so."""
    log.done("held", 1)


def _late_ack(log: FakeLog) -> None:
    """An ACK after the lease's end changes nothing: the copy is right."""
    place = log.message("late", 6600)
    log.start(place, 6600)
    log.marker("TICK", 11_000)
    log.end(place, "ACK", 11_100)
    again = log.message("late", 11_200, count=2, origin=place)
    log.end(place, "REDELIVERED", 11_200)
    log.start(again, 11_300)
    log.end(again, "ACK", 11_400)


def _nothing(log: FakeLog) -> None:
    """The log as it is."""


RED: dict[Callable[[FakeLog], None], tuple[str, ...]] = {
    _drop_ack: ("lost",),
    _drop_dead_letter: ("lost", "poison_missing", "unexplained"),
    _wrong_reason: ("poison_missing",),
    _drop_copy: ("lost", "unexplained"),
    _drop_fired: ("lost",),
    _unfinished_schedule: ("lost",),
    _second_copy: ("unexplained",),
    _early_redelivery: ("in_time_redelivered", "unexplained"),
    _no_reason_to_redeliver: ("lost", "unexplained"),
}
GREEN = (_nothing, _done_twice, _late_ack)
EDITS = (*GREEN, *RED)
FAULTS = ("lost", "poison_missing", "in_time_redelivered", "unexplained")
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> Rows:
    """The verdict over two logs per edit, all in one run: a run takes seconds."""
    logs = []
    for number, edit in enumerate((*EDITS, *EDITS)):
        logs.append(good_log(number))
        edit(logs[-1])
        if number >= len(EDITS):
            in_batches(logs[-1])
    assert sum(len(row.get("batches") or ()) for row in logs[-1].markers) > 5
    register(logs, spark)
    return verdict_rows(spark)


def verdict_on(edit: Callable[[FakeLog], None], rows: Rows, *, batched: bool = False) -> Verdict:
    """The verdict on the log with this edit alone, all of its queues together."""
    own = f"{EDITS.index(edit) + batched * len(EDITS)}/"
    mine = [row for row in rows if row["queue"].startswith(own)]
    assert mine
    total = {
        name: sum(row[name] for row in mine)
        for name in mine[0]
        if name != "queue" and not name.startswith("late")
    }
    return Verdict.from_rows([{**total, "queue": ""}, *mine])


def test_a_good_log_passes(rows: Rows) -> None:
    verdict = verdict_on(_nothing, rows)
    assert verdict.failures == []
    total = verdict.total
    assert (total.sent, total.acked, total.redelivered, total.dead_lettered) == (5, 4, 2, 1)
    assert (total.lost, total.duplicated, total.poison) == (0, 0, 1)
    mails, orders = verdict.queues
    assert (mails.queue, mails.sent, mails.redelivered) == ("0/mails", 2, 1)
    # Due, and after it there: orders' poison 560 -> 1100 and 2010 -> 2310; mails' later
    # 2004 -> 2304, and held 4050 -> 5200.
    assert orders.late_p50_s == pytest.approx(0.42)
    assert mails.late_p50_s == pytest.approx(0.725)
    assert mails.late_p99_s == pytest.approx(1.15, abs=0.01)
    as_json = verdict.as_json()
    assert as_json["verdict"] == "ok"
    assert [queue["queue"] for queue in as_json["queues"]] == ["0/mails", "0/orders"]


@pytest.mark.parametrize("edit", GREEN, ids=lambda edit: edit.__name__)
def test_batches_mean_what_single_markers_mean(rows: Rows, edit: Callable[[FakeLog], None]) -> None:
    single, batched = verdict_on(edit, rows), verdict_on(edit, rows, batched=True)
    assert batched.failures == []
    assert replace(batched.total, late_p50_s=None, late_p99_s=None) == replace(
        single.total, late_p50_s=None, late_p99_s=None
    )


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batched"])
@pytest.mark.parametrize("edit", RED, ids=lambda edit: edit.__name__)
def test_an_edited_log_fails(rows: Rows, edit: Callable[[FakeLog], None], batched: bool) -> None:
    verdict = verdict_on(edit, rows, batched=batched)
    red = {name for name in FAULTS if getattr(verdict.total, name)}
    assert red == set(RED[edit]), verdict.total
    assert verdict.as_json()["verdict"] == "failed"


def test_processed_twice_comes_from_the_histories(rows: Rows) -> None:
    verdict = verdict_on(_done_twice, rows)
    assert verdict.total.duplicated == 1
    assert verdict.is_ok  # at least once: allowed, and told
    assert verdict_on(_nothing, rows).total.duplicated == 0


def test_a_late_ack_may_be_redelivered(rows: Rows) -> None:
    verdict = verdict_on(_late_ack, rows)
    assert verdict.failures == []
    assert (verdict.total.acked, verdict.total.redelivered) == (5, 3)


def test_totals_are_of_all_queues(rows: Rows) -> None:
    verdict = Verdict.from_rows(rows)
    assert verdict.total.sent == sum(queue.sent for queue in verdict.queues)
    assert verdict.total.lost == sum(queue.lost for queue in verdict.queues) > 0
    assert not verdict.is_ok


def test_what_no_log_shows_is_a_failure_too() -> None:
    empty = Verdict.from_rows([])
    assert empty.as_json()["verdict"] == "failed"
    broken = Verdict(total=empty.total, queues=(), errors=("no Java",)).as_json()
    assert (broken["verdict"], broken["failures"], broken["sent"]) == ("failed", ["no Java"], 0)
    row = {"queue": "", "sent": 9, "acked": 9}
    assert Verdict.from_rows([row], sent_confirmed=9).is_ok
    assert not Verdict.from_rows([row], sent_confirmed=10).is_ok
    assert not Verdict.from_rows([row], is_settled=False).is_ok
