"""Queries use the executors that there are, not only those that had registered at their start."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from tests.integration.tracker_logs import read_topic
from tests.spark.tracker_runs import PATIENCE_S, Logs, settled, verdict, wait_until_live
from tests.waiting import wait_until, within

from kafkamq.spark import ack, read_queue, register
from kafkamq.spark import queue_streams as queues
from kafkamq.spark.checkpoint import Checkpoint, CheckpointNote
from kafkamq.spark.parallelism import announced_cores, cores, tracker_tasks
from kafkamq.spark.tracker import tracker
from kafkamq.spark.tracker.tracker import SparkTracker
from kafkamq.types import Outcome

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"spark.master": "local[4]", "spark.executor.instances": "9"}, 0),
        ({"spark.master": "yarn"}, 2),
        ({"spark.master": "k8s://x", "executor.instances": "8", "executor.cores": "4"}, 32),
        ({"spark.master": "spark://x:1"}, 0),
        ({"spark.master": "spark://x:1", "cores.max": "12"}, 12),
        ({"spark.master": "spark://x:1", "executor.instances": "3", "executor.cores": "2"}, 6),
        (
            {"spark.master": "yarn", "dynamicAllocation.enabled": "true", "executor.cores": "4"},
            0,
        ),
        (
            {
                "spark.master": "yarn",
                "dynamicAllocation.enabled": "true",
                "dynamicAllocation.minExecutors": "3",
                "executor.cores": "4",
            },
            12,
        ),
    ],
)
def test_cores_that_the_configuration_announces(settings: dict[str, str], expected: int) -> None:
    named = {
        name if name.startswith("spark.") else f"spark.{name}": value
        for name, value in settings.items()
    }
    assert announced_cores(named) == expected


def test_tasks_of_a_tracker() -> None:
    assert [tracker_tasks(8, cores) for cores in (0, 1, 2, 4, 50)] == [1, 1, 2, 4, 8]


def test_a_batch_keeps_its_slots_however_often_they_change() -> None:
    note = CheckpointNote.new("ack", topic="t", tasks=2).cut(8, since=5)
    again = note.cut(16, since=5)  # no batch was planned in between
    assert [again.tasks_of(batch) for batch in (4, 5, 6)] == [2, 16, 16]
    later = again.cut(3, since=9)
    assert [later.tasks_of(batch) for batch in (8, 9)] == [16, 3]
    assert later.cut(4, since=12).most == 16, "ledgers that an epoch is chosen above"


def test_what_a_start_that_was_killed_has_left_is_deleted(
    spark: SparkSession, tmp_path: Path
) -> None:
    """It had written its note, and not deleted the state of the one before."""
    folder = Checkpoint(spark, str(tmp_path))
    note = folder.write(CheckpointNote.new("spark", topic="t", tasks=2))
    for name in ("state", "offsets", "state-2", "state-3", "of the user"):
        (tmp_path / name).mkdir()
    folder.drop_earlier(note)
    assert {"state", "kafkamq.json"} < {each.name for each in tmp_path.iterdir()}
    for tasks in (3, 4):
        note = folder.write(note.moved(tasks, {}))
    folder.drop_earlier(note)
    left = {each.name for each in tmp_path.iterdir() if not each.name.startswith(".")}
    assert left == {"kafkamq-3.json", "state-3", "of the user"}
    assert folder.note("t") == note


def test_two_starts_on_one_folder_do_not_meet_in_a_file(
    spark: SparkSession, tmp_path: Path
) -> None:
    one, other = (Checkpoint(spark, str(tmp_path)) for _ in range(2))
    note = one.write(CheckpointNote.new("spark", topic="t", tasks=2))

    def look() -> None:
        for _ in range(50):
            other.require_writable()

    with ThreadPoolExecutor() as threads:
        looking = threads.submit(look)
        while not looking.done():
            note = one.write(note.cut(2, since=0))
        looking.result()
    assert one.note("t") == note


def test_a_local_session_has_the_cores_of_its_master(spark: SparkSession) -> None:
    assert cores(spark) == 2


@pytest.mark.timeout(900)
@pytest.mark.faults  # three starts of a tracker take long
def test_a_trackers_tasks_are_those_of_its_checkpoint_until_others_are_asked_for(
    spark: SparkSession,
    bootstrap: str,
    namespace: str,
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logs = Logs(bootstrap, namespace, marker_partitions=4)
    there = 2
    monkeypatch.setattr(tracker, "cores", lambda spark: there)

    def made(**options: Any) -> SparkTracker:
        return SparkTracker(
            logs.config, checkpoint=checkpoint, spark=spark, trigger_s=0.2, **options
        )

    held, silent = logs.send(40), logs.send(40)
    logs.start(*held, timeout_ms=3_600_000)
    with made() as first:
        wait_until_live(first, 4)
        assert first.tasks == 2
        logs.start(*silent, timeout_ms=500)
        wait_until(lambda: settled(logs, *silent), timeout_s=PATIENCE_S)
    there = 4
    more = logs.send(10)
    logs.start(*more, timeout_ms=500)
    with made() as second:
        wait_until_live(second, 4)
        wait_until(lambda: settled(logs, *more), timeout_s=PATIENCE_S)
        assert second.tasks == 2
    with made(tasks=3) as third:
        wait_until_live(third, 4)
        assert third.tasks == 3
        entries = sum(status.entries for status in third.statuses().values())
        assert entries == len(held), "what is held was not folded again"
        logs.end(*held)
        wait_until(
            lambda: not sum(status.entries for status in third.statuses().values()),
            timeout_s=PATIENCE_S,
        )
    assert Counter(logs.copied()) == Counter((one.partition, one.offset) for one in silent + more)
    assert Counter(logs.ends(Outcome.REDELIVERED)) == Counter(silent + more)
    verdict(logs).require_ok()


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.slow
def test_a_queue_that_is_acknowledged_follows_the_executors(
    spark: SparkSession,
    bootstrap: str,
    namespace: str,
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logs = Logs(bootstrap, namespace)
    register(spark, logs.config)
    out = f"{namespace}.out"
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(out, 1, 1)])[out].result(within(30))
    there = 1
    monkeypatch.setattr(queues, "cores", lambda spark: there)
    monkeypatch.setattr(queues, "FIRST_LOOK_S", 0.0)
    monkeypatch.setattr(queues, "NEXT_LOOK_S", 0.0)
    folder = Path(checkpoint)

    def run(count: int, **options: Any) -> int:
        logs.send(count, key=b"emails")
        stream = read_queue(spark, "emails", max_rows=8)
        rows = stream.select("ack_token", "value")
        query = ack(rows, checkpoint=checkpoint, topic=out, available_now=True, **options)
        assert query.wait(within(120)), "the query did not end"
        assert query.total.late == 0
        note = Checkpoint(spark, checkpoint).note(logs.config.ledger_topic)
        assert note is not None
        return note.tasks

    assert run(8) == 1
    there = 3
    assert run(8) == 3  # while it runs, from the next batch on
    newest = max(int(each.name) for each in (folder / "commits").iterdir() if each.name.isdigit())
    (folder / "commits" / str(newest)).unlink()  # its driver was killed: it comes again
    assert run(8) == 3
    assert run(8, slots=2) == 2
    assert len(read_topic(bootstrap, out)) == 32
    verdict(logs).require_ok()
