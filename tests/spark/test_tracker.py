"""The Spark tracker against a real broker: every outcome, restarts, takeovers, damage."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    NewPartitions,
)
from harness.markers import read_positions
from tests.integration.queue_logs import delete_group
from tests.spark.processes import driver, python_processes
from tests.spark.tracker_runs import (
    PATIENCE_S,
    Logs,
    settled,
    tracking,
    verdict,
    wait_until_live,
)
from tests.sure_producer import SureProducer
from tests.waiting import wait_until, within

from kafkamq.config import TrackerConfig
from kafkamq.errors import (
    DataLossError,
    FencedError,
    KafkaMQError,
    StateError,
    UnsupportedVersionError,
)
from kafkamq.markers.tracker.ledger import Ledger, LedgerKey
from kafkamq.markers.tracker.local import LocalTracker
from kafkamq.markers.tracker.settlement import ActionSettler, SettleReport
from kafkamq.metrics.catalog import LATENESS, SPARK_RUNNING
from kafkamq.metrics.health import health
from kafkamq.queue.wire.headers import read_message_headers
from kafkamq.spark import register
from kafkamq.spark.checkpoint import Checkpoint, CheckpointNote
from kafkamq.spark.tracker import tracker as tracker_module
from kafkamq.spark.tracker.tracker import SparkTracker, run_spark_tracker
from kafkamq.types import Marker, MarkerType, MessageId, Outcome, expand

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]


TRACE = (("trace", b"1"),)
FIFTH = (("kafkamq-delivery-count", b"5"),)


@pytest.fixture
def logs(bootstrap: str, namespace: str) -> Logs:
    return Logs(bootstrap, namespace)


def test_every_outcome(spark: SparkSession, logs: Logs, checkpoint: str) -> None:
    with tracking(logs, spark, checkpoint) as running:
        silent = [*logs.send(50, headers=TRACE), *logs.send(50, headers=TRACE, partition=1)]
        acked = logs.send(20, headers=TRACE)
        rejected, released, nacked, held, large = logs.send(5)
        (worn,) = logs.send(headers=FIFTH)
        logs.start(*silent, headers=TRACE)
        logs.start(*acked, headers=TRACE, timeout_ms=10_000)
        logs.start(rejected, released, nacked, timeout_ms=600_000)
        logs.start(held, consumer="busy", timeout_ms=600_000)
        logs.start(worn, count=5, headers=FIFTH)
        logs.start(large, value=None, by_reference=True)
        silent += start_together(logs)
        logs.end(*acked)
        logs.end(rejected, outcome=Outcome.REJECT, reason="bad input")
        logs.end(released, outcome=Outcome.RELEASE)
        logs.end(nacked, outcome=Outcome.NACK, delay_ms=1500, reason="later")
        later = logs.schedule(1000, headers=(("kafkamq-id", b"later"),))
        cancelled = logs.schedule(5000, partition=1)
        logs.end_schedule(cancelled)
        logs.raw_marker(0, b"\xff\xff no marker")
        logs.raw_marker(1, None)
        due = [*silent, rejected, released, nacked, worn, large]
        wait_until(lambda: settled(logs, *due), timeout_s=PATIENCE_S)
        wait_until(lambda: later in logs.ends(Outcome.REDELIVERED), timeout_s=PATIENCE_S)
        logs.end(held, consumer="busy")

        wait_until(lambda: not sum(s.entries for s in running.statuses().values()))
        assert sum(status.malformed for status in running.statuses().values()) == 2
        assert sum(s.redelivered for s in running.statuses().values()) == len(silent) + 4
        late = [LATENESS.distributions()[str(number),] for number in (0, 1)]
        assert sum(sum(each.counts) for each in late) >= len(due)
        assert SPARK_RUNNING.values()["tracker",] == 1

    assert_ended_together(logs, silent[100:])
    copies = {copy.origin: copy for copy in logs.copies()}
    expected = Counter((one.partition, one.offset) for one in [*silent, released, nacked, large])
    assert Counter(logs.copied()) == expected
    counts = {
        (copy.origin.partition, copy.origin.offset): copy.delivery_count
        for copy in copies.values()
        if copy.origin
    }
    assert counts.pop((released.partition, released.offset)) == 1
    assert set(counts.values()) == {2}
    assert all(
        copy.user == TRACE
        for copy in copies.values()
        if copy.origin and (copy.origin.partition, copy.origin.offset) in set(map(_pair, silent))
    )
    letters = {headers["kafkamq-reason"]: headers for _, headers in logs.dead_letters()}
    assert set(letters) == {b"rejected", b"max-deliveries"}
    assert letters[b"rejected"]["kafkamq-error"] == b"bad input"
    fired = [
        message
        for message in logs.read(logs.config.message_topic)
        if read_message_headers(message.headers()).id == "later"
    ]
    assert len(fired) == 1
    quarantined = logs.read(logs.config.quarantine_topic)
    assert {message.value() for message in quarantined} == {b"\xff\xff no marker", None}
    verdict(logs).require_ok()


def start_together(logs: Logs) -> list[MessageId]:
    """STARTs of batches, of which some are acked in a batch; returns the others."""
    ids = [*logs.send(30, headers=TRACE), *logs.send(30, headers=TRACE, partition=1)]
    logs.start_batch(*ids, timeout_ms=5000)
    logs.batch(*ids[::3], marker=Marker(MarkerType.END, consumer_id="worker"))
    return [*ids[1::3], *ids[2::3]]


def assert_ended_together(logs: Logs, ids: list[MessageId]) -> None:
    """R32: by batches of the tracker."""
    ends = [one for _, one in logs.markers() if one.outcome is Outcome.REDELIVERED and one.batches]
    named = [one.message_id for end in ends for one in expand(end) if one.message_id is not None]
    assert sorted(map(_pair, named)) == sorted(map(_pair, ids))
    assert len(ends) < len(ids)


def _pair(message_id: MessageId) -> tuple[int, int]:
    return message_id.partition, message_id.offset


@pytest.mark.faults
def test_a_restart_fires_what_fell_due_meanwhile_once_and_behind_its_tick(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    register(spark)  # formats need one setting of the session
    settings = dict(spark.conf.getAll)
    with tracking(logs, spark, checkpoint) as running:
        assert dict(spark.conf.getAll) == settings  # the session's other queries keep theirs
        ids = logs.send(300)
        logs.start(*ids, timeout_ms=4000)
        wait_until(
            lambda: (
                sum(status.entries for status in running.statuses().values()) == 300
                or logs.copied()  # on a machine so slow that it has begun to fire
            ),
            timeout_s=PATIENCE_S,
        )
        first = {status.epoch for status in running.statuses().values()}
    before = logs.copied()
    logs.end(*ids[::3])
    ended_ms = max(message.timestamp()[1] for message, _ in logs.markers()) + 4000
    wait_until(lambda: time.time() * 1000 > ended_ms, "the leases end while nobody tracks")
    with tracking(logs, spark, checkpoint) as running:
        late = set(ids) - set(ids[::3])
        wait_until(lambda: settled(logs, *late - _ids(before)), timeout_s=PATIENCE_S)
        (epoch,) = {status.epoch for status in running.statuses().values()}
        assert epoch == first.pop() + 1
    assert max(Counter(logs.copied()).values()) == 1
    verdict(logs).require_ok()
    live: set[int] = set()
    for message, marker in logs.markers():  # R17
        partition = message.partition()
        if marker.type is MarkerType.TICK and marker.engine_epoch == epoch:
            live.add(partition)
        if marker.type is MarkerType.END and marker.outcome is Outcome.REDELIVERED and not before:
            assert partition in live


def _ids(pairs: list[tuple[int, int]]) -> set[MessageId]:
    return {MessageId(partition, offset) for partition, offset in pairs}


@pytest.mark.faults
def test_a_lost_checkpoint_loses_no_message(
    spark: SparkSession, logs: Logs, checkpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    often = TrackerConfig(position_interval_ms=100)
    with tracking(logs, spark, checkpoint, often) as running:
        closed, opened = logs.send(200), logs.send(100)
        logs.start(*closed, *opened, timeout_ms=6000)
        logs.end(*closed)
        wait_until(
            lambda: (
                sum(status.entries for status in running.statuses().values()) == 100
                or logs.copied()  # on a machine so slow that it has begun to fire
            ),
            timeout_s=PATIENCE_S,
        )
    shutil.rmtree(checkpoint)
    caplog.set_level(logging.WARNING)
    with tracking(logs, spark, checkpoint):
        wait_until(lambda: settled(logs, *opened), timeout_s=PATIENCE_S)
    assert "folding again from the positions in the ledger" in caplog.text
    assert Counter(logs.copied()) == Counter(map(_pair, opened))
    verdict(logs).require_ok()


@pytest.mark.faults
def test_a_checkpoint_that_is_lost_while_it_runs_loses_no_message(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    """The next start has another id, and is no other engine."""
    with tracking(logs, spark, checkpoint) as running:
        shutil.rmtree(checkpoint, ignore_errors=True)
        ids = logs.send(50)
        logs.start(*ids, timeout_ms=300)
        wait_until(lambda: running.wait(0.05) or settled(logs, *ids), timeout_s=PATIENCE_S)
        assert running.is_running
    assert Counter(logs.copied()) == Counter(map(_pair, ids))
    verdict(logs).require_ok()


@pytest.mark.faults
def test_an_older_copy_of_the_checkpoint_is_refused(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    with tracking(logs, spark, checkpoint):
        ids = logs.send(10)
        logs.start(*ids, timeout_ms=300)
        wait_until(lambda: settled(logs, *ids), timeout_s=PATIENCE_S)
    shutil.copytree(checkpoint, f"{checkpoint}.old")
    with tracking(logs, spark, checkpoint):
        more = logs.send(10)
        logs.start(*more, timeout_ms=300)
        wait_until(lambda: settled(logs, *more), timeout_s=PATIENCE_S)
    shutil.rmtree(checkpoint)
    shutil.move(f"{checkpoint}.old", checkpoint)
    tracker = SparkTracker(logs.config, checkpoint=checkpoint, spark=spark)
    with pytest.raises(StateError, match="checkpoint older than its ledger"):
        tracker.start()


@pytest.mark.parametrize("why", ["an older copy", "no folder", "deleted unread"])
def test_a_start_that_is_refused_leaves_the_tracker_that_runs_alone(
    spark: SparkSession, logs: Logs, checkpoint: str, why: str
) -> None:
    """R22: a claim would fence it, and nobody would track."""
    config = logs.config
    note = CheckpointNote.new("spark", topic=config.marker_topic, tasks=1)
    running = Ledger(config, LedgerKey.of_markers(config, 0), engine=note.engine, epoch=1)
    try:
        running.open()
        running.begin()
        running.commit(0, batch=50, rows_done=0)
        if why == "an older copy":
            Checkpoint(spark, checkpoint).write(note)
        elif why == "no folder":
            Path(checkpoint).write_text("a file")
            checkpoint += "/below"
        else:
            place = TopicPartition(config.marker_topic, 0, logs.raw_marker(0, b"\xff") + 1)
            admin = AdminClient({"bootstrap.servers": logs.bootstrap})
            admin.delete_records([place])[place].result(within(30))
        with pytest.raises(KafkaMQError, match=r"older than its ledger|below|were deleted before"):
            SparkTracker(config, checkpoint=checkpoint, spark=spark).start()
        running.begin()
        running.commit(0, batch=51, rows_done=0)
    finally:
        running.close()


def test_a_start_that_is_stopped_claims_nothing(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    """It would fence the tracker that runs, and end."""
    stop = threading.Event()
    stop.set()
    run_spark_tracker(logs.config, checkpoint=checkpoint, spark=spark, stop=stop)
    key = LedgerKey.of_markers(logs.config, 0)
    assert not read_positions(logs.config, [key])


class StopAt(logging.Handler):
    """Sets an event when a start is through with one of its stages."""

    def __init__(self, stage: str, stop: threading.Event) -> None:
        super().__init__()
        self.stage, self.stop = stage, stop

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and record.args[:1] == (self.stage,):
            self.stop.set()


def test_a_start_that_is_stopped_behind_its_claim_starts_no_query(
    spark: SparkSession, logs: Logs, checkpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()
    at_ticks = StopAt("ticks", stop)
    logger = logging.getLogger("kafkamq.spark.tracker.tracker")
    logger.addHandler(at_ticks)
    try:
        with caplog.at_level(logging.DEBUG, logger.name):
            run_spark_tracker(logs.config, checkpoint=checkpoint, spark=spark, stop=stop)
    finally:
        logger.removeHandler(at_ticks)
    assert "ticks" in caplog.text
    assert "query: done" not in caplog.text
    assert logs.config.marker_topic not in " ".join(str(each.name) for each in spark.streams.active)


_STARTS = """
import json, sys, threading
from kafkamq.config import ServiceConfig
from kafkamq.errors import KafkaMQError
from kafkamq.spark.session import has_session
from kafkamq.spark.tracker.tracker import run_spark_tracker
servers, namespace, checkpoint, output = sys.argv[1:]
config = ServiceConfig(bootstrap_servers=servers, namespace=namespace)
stop, left = threading.Event(), []
try:
    run_spark_tracker(config, checkpoint=f"{sys.executable}/below", stop=stop)
except KafkaMQError:
    left.append(has_session())
stop.set()
run_spark_tracker(config, checkpoint=checkpoint, stop=stop)
left.append(has_session())
open(output, "w").write(json.dumps(left))
"""


def test_a_start_that_fails_or_is_stopped_ends_its_session(
    logs: Logs, checkpoint: str, tmp_path: Path
) -> None:
    config, left = logs.config, tmp_path / "left"
    values = (config.bootstrap_servers, config.namespace, checkpoint, str(left))
    with driver(_STARTS, *values) as process:
        assert process.wait(PATIENCE_S) == 0
    assert left.read_text() == "[false, false]"


@pytest.mark.faults
def test_a_later_start_takes_over_and_the_earlier_one_stops(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    ids = logs.send(200)
    logs.start(*ids, timeout_ms=3000)
    with (
        tracking(logs, spark, checkpoint) as first,
        tracking(logs, spark, f"{checkpoint}.other"),
    ):
        wait_until(lambda: settled(logs, *ids), timeout_s=PATIENCE_S)
        # The first one learns it when it writes next; so give it something to write.
        more = logs.send(50)
        logs.start(*more, timeout_ms=300)
        wait_until(lambda: settled(logs, *more), timeout_s=PATIENCE_S)
        with pytest.raises(FencedError):
            first.wait(PATIENCE_S)
    assert Counter(logs.copied()) == Counter(map(_pair, [*ids, *more]))
    verdict(logs).require_ok()


@pytest.mark.faults
def test_a_fence_that_is_no_later_start_is_followed_by_another_start(
    spark: SparkSession, logs: Logs, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that had asked for the id before it died; nothing is written in any ledger."""
    settle, fenced = ActionSettler.settle, []

    def settle_fenced(self: ActionSettler, ledger: Ledger, *of: Any, **more: Any) -> SettleReport:
        if fenced:
            return settle(self, ledger, *of, **more)
        fenced.append(ledger.key)
        dead = Ledger(logs.config, ledger.key, engine="", epoch=0)
        dead.fence()
        dead.close()
        return settle(self, ledger, *of, **more, reopen=False)  # it cannot be reached in time

    monkeypatch.setattr(ActionSettler, "settle", settle_fenced)
    ids = logs.send(50)
    logs.start(*ids, timeout_ms=300)
    with tracking(logs, spark, checkpoint) as running:
        wait_until(lambda: running.wait(0.05) or settled(logs, *ids), timeout_s=PATIENCE_S)
        assert running.is_running
    assert fenced
    assert Counter(logs.copied()) == Counter(map(_pair, ids))
    verdict(logs).require_ok()


@pytest.mark.faults
def test_local_and_spark_engines_take_over_from_each_other(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    """R22, in both orders: the later start wins, the earlier one stops, nothing is copied twice."""
    ids: list[MessageId] = []

    def fire() -> None:
        more = logs.send(20)
        logs.start(*more, timeout_ms=300)
        ids.extend(more)
        wait_until(lambda: settled(logs, *ids), timeout_s=PATIENCE_S)

    first = LocalTracker(logs.config)
    with pytest.raises(FencedError), first.in_thread():  # noqa: PT012
        wait_until(lambda: first.is_live)
        with tracking(logs, spark, checkpoint) as running:
            fire()
            wait_until(lambda: first.is_over)
            with LocalTracker(logs.config).in_thread() as heir:
                wait_until(lambda: heir.is_live)
                fire()
                with pytest.raises(FencedError):
                    running.wait(PATIENCE_S)
                fire()
    assert Counter(logs.copied()) == Counter(map(_pair, ids))
    verdict(logs).require_ok()


@pytest.mark.faults
def test_added_marker_partitions_are_tracked_without_a_restart(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    with tracking(logs, spark, checkpoint) as running:
        ids = logs.send(20)
        logs.start(*ids, timeout_ms=1000)
        admin = AdminClient({"bootstrap.servers": logs.bootstrap})
        topic = logs.config.marker_topic
        admin.create_partitions([NewPartitions(topic, 3)])[topic].result(within(30))
        logs.marker_partitions = 3
        wait_until_live(running, 3)
        new = next(
            MessageId(0, chunk * 4096)
            for chunk in range(1000)
            if logs.place(MessageId(0, chunk * 4096)) == 2
        )
        # It knows the new count.
        logs._producer = SureProducer({"bootstrap.servers": logs.bootstrap})
        logs.start(new, timeout_ms=1000)
        wait_until(lambda: settled(logs, *ids, new), timeout_s=PATIENCE_S)
    key = LedgerKey.of_markers(logs.config, 2)
    assert read_positions(logs.config, [key])[key].engine.startswith("spark-")


@pytest.mark.faults
def test_a_marker_of_a_newer_version_stops_it_with_what_to_do(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    with tracking(logs, spark, checkpoint) as running:
        logs.raw_marker(1, b"\x08\x03")  # version 3
        with pytest.raises(UnsupportedVersionError, match="upgrade"):
            running.wait(PATIENCE_S)


@pytest.mark.faults
def test_a_position_below_the_logs_start_stops_it(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    with tracking(logs, spark, checkpoint):
        pass
    ids = logs.send(100)
    logs.start(*ids, timeout_ms=600_000)
    admin = AdminClient({"bootstrap.servers": logs.bootstrap})
    place = TopicPartition(logs.config.marker_topic, logs.place(ids[0]), 50)
    for deleted in admin.delete_records([place]).values():
        deleted.result(within(30))
    tracker = SparkTracker(logs.config, checkpoint=checkpoint, spark=spark)
    with pytest.raises(DataLossError, match="records are gone"), tracker:
        tracker.wait(PATIENCE_S)


def test_starts_that_were_deleted_unread_are_noticed_without_checkpoint_and_position(
    spark: SparkSession, logs: Logs, checkpoint: str
) -> None:
    """Kafka has dropped the ledgers: the status of the last tracker says how far it was."""
    with LocalTracker(logs.config).in_thread() as local:
        wait_until(lambda: local.is_live)
    delete_group(logs.bootstrap, LedgerKey.of_markers(logs.config, 0).transactional_id)
    delete_group(logs.bootstrap, LedgerKey.of_markers(logs.config, 1).transactional_id)
    ids = logs.send(100)
    offsets = logs.start(*ids, timeout_ms=600_000)
    admin = AdminClient({"bootstrap.servers": logs.bootstrap})
    place = TopicPartition(logs.config.marker_topic, logs.place(ids[0]), offsets[50])
    for deleted in admin.delete_records([place]).values():
        deleted.result(within(30))
    for _ in range(2):
        tracker = SparkTracker(logs.config, checkpoint=checkpoint, spark=spark)
        with pytest.raises(DataLossError, match="records were deleted before they were read"):
            tracker.start()


@pytest.mark.faults  # only for its half minute
def test_a_batch_that_hangs_is_neither_ready_nor_live(
    spark: SparkSession, logs: Logs, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R24: the tracker's own loop goes on all the time."""
    monkeypatch.setattr(tracker_module, "LONG_BATCH_S", 3.0)
    monkeypatch.setattr(tracker_module, "MAX_BATCH_S", 5.0)
    with tracking(logs, spark, checkpoint):
        wait_until(health.is_ready, timeout_s=PATIENCE_S)
        workers = python_processes(os.getpid())
        assert workers
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        try:
            logs.start(*logs.send(10))
            wait_until(lambda: not health.is_ready(), timeout_s=PATIENCE_S)
            wait_until(lambda: not health.is_live(), timeout_s=PATIENCE_S)
            (hung,) = [state for state in health.states() if not state.is_live]
            assert hung.name == f"batches of the tracker of {logs.config.namespace}"
        finally:
            for pid in workers:
                os.kill(pid, signal.SIGCONT)
        wait_until(lambda: health.is_ready() and health.is_live(), timeout_s=PATIENCE_S)
