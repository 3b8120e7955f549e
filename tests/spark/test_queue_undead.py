"""A task that was thought dead commits its slot while the same batch is repeated elsewhere.

A driver is killed, its executors notice later; or an executor does not answer for a while, and its
tasks are given to others. The parts are called as Spark calls them; a broker, but no Spark.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from tests.integration.tracker_logs import Logs, read_topic
from tests.spark.test_queue_reader import OPTIONS, SCHEMA, plan, rows, tasks_of
from tests.waiting import deadline_after, wait_until, within

from kafkamq.errors import FencedError, StateError
from kafkamq.markers.tracker.ledger import Ledger, LedgerKey
from kafkamq.spark.checkpoint import CheckpointNote
from kafkamq.spark.marker_log import MarkerLog, marker_log
from kafkamq.spark.options import parse_source_options
from kafkamq.spark.queues.acks import ENDED, AckToken, LateEnds, read_verdicts
from kafkamq.spark.queues.committing import CommitSettings, commit_slots, next_epoch
from kafkamq.spark.queues.leasing import QueueReader
from kafkamq.types import MarkerType, MessageId, Outcome

pytestmark = pytest.mark.spark

_EMPTY = dict.fromkeys(("verdict", "delay", "reason", "headers", "partition", "topic", "key"))
Rows = list[dict[str, Any]]


class Batch:
    """One batch of two messages, which several runs work on."""

    def __init__(self, logs: Logs) -> None:
        self.logs = logs
        self.out = f"{logs.config.namespace}-out"
        admin = AdminClient({"bootstrap.servers": logs.bootstrap})
        admin.create_topics([NewTopic(self.out, 1, 1)])[self.out].result(within(30))
        logs.send(3, key=b"emails")
        self._options = parse_source_options(OPTIONS, logs.config)
        self._readers = [QueueReader(self._options, SCHEMA)]
        self._begin = self._readers[0].initialOffset()
        self._planned, self._tasks = plan(self._readers[0], self._begin)

    def handed_out(self, *, again: bool = False) -> Rows:
        """The rows: of the first run, or of a run that repeats the batch."""
        if not again:
            return rows(self._readers[0], self._tasks)
        self._readers.append(QueueReader(self._options, SCHEMA))
        return rows(self._readers[-1], tasks_of(self._readers[-1], self._begin, self._planned))

    def commit(self, found: Rows, verdicts: Mapping[int, str], *, epoch: int) -> tuple[int, int]:
        """In a worker; rows of output that were written, and passed over."""
        result = self.report(found, verdicts, epoch=epoch)
        return result["written"], result["skipped"]

    def report(self, found: Rows, verdicts: Mapping[int, str], *, epoch: int) -> dict[str, Any]:
        """Return all that the worker says, as its ``commit`` does."""
        settings = CommitSettings(
            config=self.logs.config, topic=self.out, engine="undead", epoch=epoch
        )
        output = [
            {**_EMPTY, "ack_token": row["ack_token"], "_slot": 0, **_row(at, verdicts[at])}
            for row in found
            if (at := row["offset"]) in verdicts
        ]
        (done,) = commit_slots(iter([pa.RecordBatch.from_pylist(output)]), settings, 0)
        result: dict[str, Any] = done.to_pylist()[0]
        return result

    def outputs(self) -> Counter[bytes | None]:
        return Counter(each.value() for each in read_topic(self.logs.bootstrap, self.out))

    def ends(self, offset: int) -> set[str]:
        return {
            marker.outcome.name
            for _, marker in self.logs.said()
            if marker.type is MarkerType.END
            and marker.message_id is not None
            and marker.message_id.offset == offset
        }

    def close(self) -> None:
        for each in self._readers:
            each.stop()


def _row(offset: int, verdict: str) -> dict[str, Any]:
    is_acked = verdict == "ack"
    value = b"%d" % offset  # also of a nack, which has no output
    return {"value": value, "verdict": verdict, "delay": None if is_acked else 600.0}


@pytest.fixture
def batch(bootstrap: str, namespace: str) -> Iterator[Batch]:
    made = Batch(Logs(bootstrap, namespace))
    yield made
    made.close()


@pytest.mark.parametrize("epoch", [1, 2], ids=["executor lost", "driver lost"])
def test_what_it_nacked_is_not_acked_without_its_output(batch: Batch, epoch: int) -> None:
    first = batch.handed_out()
    again = batch.handed_out(again=True)  # before the first one commits
    batch.commit(first, {0: "nack", 1: "ack", 2: "ack"}, epoch=1)
    batch.commit(again, {0: "ack", 1: "ack", 2: "ack"}, epoch=epoch)
    assert batch.ends(0) == {"NACK"}, "an ack now would be one whose output nobody wrote"
    assert batch.outputs() == Counter([b"1", b"2"])


def test_what_it_wrote_is_not_written_again_beside_other_rows(batch: Batch) -> None:
    first = batch.handed_out()
    again = batch.handed_out(again=True)
    assert batch.commit(first, {0: "ack", 1: "ack"}, epoch=1) == (2, 0)
    assert batch.commit(again, {1: "ack", 2: "ack"}, epoch=2) == (1, 1)
    assert batch.outputs() == Counter([b"0", b"1", b"2"])


def test_a_batch_that_is_repeated_after_kafka_has_forgotten_the_ledger(batch: Batch) -> None:
    """It does so after ``offsets.retention.minutes``; the markers may be kept for longer."""
    every = {0: "nack", 1: "ack", 2: "ack"}
    assert batch.commit(batch.handed_out(), every, epoch=1) == (2, 0)
    config = batch.logs.config
    group = f"kafkamq.{config.ledger_topic}.undead.0"
    admin = AdminClient({"bootstrap.servers": batch.logs.bootstrap})
    admin.delete_consumer_groups([group])[group].result(within(30))
    again = batch.handed_out(again=True)
    assert batch.commit(again, {**every, 0: "ack"}, epoch=1) == (0, 3)
    assert batch.ends(0) == {"NACK"}
    assert batch.outputs() == Counter([b"1", b"2"])


@pytest.mark.parametrize("before", ["begin", "commit"])
def test_a_driver_that_goes_on_after_a_pause_ends_no_later_one(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """It takes the slot's producer away, in the middle, before it reads that it is the earlier."""
    first, again = batch.handed_out(), batch.handed_out(again=True)
    batch.commit(first, {0: "ack"}, epoch=2)
    config, method = batch.logs.config, getattr(Ledger, before)
    key = LedgerKey(f"kafkamq.{config.ledger_topic}.undead.0", config.ledger_topic, 0)

    def disturbed(ledger: Ledger, *arguments: Any, **options: Any) -> object:
        if before == "begin":
            method(ledger, *arguments, **options)
        monkeypatch.setattr(Ledger, before, method)
        with pytest.raises(FencedError, match="started later"):
            Ledger(config, key, engine="undead", epoch=1).open()
        return None if before == "begin" else method(ledger, *arguments, **options)

    monkeypatch.setattr(Ledger, before, disturbed)
    assert batch.commit(again, {0: "ack", 1: "ack", 2: "ack"}, epoch=3) == (2, 1)
    assert batch.outputs() == Counter([b"0", b"1", b"2"])


def test_a_driver_that_goes_on_after_a_pause_lets_a_later_one_alone(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks into the ledger before it takes any producer away: it may have many tasks."""
    first, again = batch.handed_out(), batch.handed_out(again=True)
    batch.commit(first, {0: "ack"}, epoch=2)
    commit, commits = Ledger.commit, 0

    def disturbed(ledger: Ledger, *arguments: Any, **options: Any) -> object:
        nonlocal commits
        commits += 1
        with pytest.raises(FencedError, match="started later"):
            batch.commit(first, {0: "ack"}, epoch=1)
        return commit(ledger, *arguments, **options)

    monkeypatch.setattr(Ledger, "commit", disturbed)
    assert batch.commit(again, {0: "ack", 1: "ack", 2: "ack"}, epoch=3) == (2, 1)
    assert commits == 1


@pytest.mark.parametrize("when", ["it is in the middle", "the later one is"])
def test_an_earlier_driver_commits_nothing_behind_a_later_start(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Also before the later one has written in the slot, whose first batch it does not end."""
    config, first = batch.logs.config, batch.handed_out()
    note = CheckpointNote(topic=config.ledger_topic, tasks=1, engine="undead")
    earlier, commit = next_epoch(config, note), Ledger.commit
    every = {0: "ack", 1: "ack", 2: "ack"}
    if when == "it is in the middle":
        epochs = []

        def disturbed(ledger: Ledger, *arguments: Any, **options: Any) -> object:
            monkeypatch.setattr(Ledger, "commit", commit)
            epochs.append(next_epoch(config, note))
            return commit(ledger, *arguments, **options)

        monkeypatch.setattr(Ledger, "commit", disturbed)
        with pytest.raises(FencedError, match="started later"):
            batch.commit(first, {0: "ack"}, epoch=earlier)
        (later,) = epochs
        again = batch.handed_out(again=True)
    else:
        later, again = next_epoch(config, note), batch.handed_out(again=True)
        key = LedgerKey(f"kafkamq.{config.ledger_topic}.undead.0", config.ledger_topic, 0)

        def disturbed(ledger: Ledger, *arguments: Any, **options: Any) -> object:
            monkeypatch.setattr(Ledger, "commit", commit)
            with pytest.raises(FencedError, match="started later"):
                batch.commit(first, {0: "ack"}, epoch=earlier)
            with pytest.raises(FencedError, match="started later"):
                Ledger(config, key, engine="undead", epoch=earlier).open()
            return commit(ledger, *arguments, **options)

        monkeypatch.setattr(Ledger, "commit", disturbed)
    assert later == earlier + 1
    assert batch.commit(again, every, epoch=later) == (3, 0)
    assert batch.outputs() == Counter([b"0", b"1", b"2"])


@pytest.mark.parametrize("before", ["fence", "commit"])
def test_two_starts_at_one_moment_have_an_epoch_each(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    config, method, epochs = batch.logs.config, getattr(Ledger, before), list[int]()
    note = CheckpointNote(topic=config.ledger_topic, tasks=1, engine="undead")

    def disturbed(ledger: Ledger, *arguments: Any, **options: Any) -> object:
        monkeypatch.setattr(Ledger, before, method)
        epochs.append(next_epoch(config, note))
        return method(ledger, *arguments, **options)

    monkeypatch.setattr(Ledger, before, disturbed)
    assert [next_epoch(config, note), *epochs] == [2, 1]


def test_a_later_start_has_what_the_ledger_held(batch: Batch) -> None:
    """Its batch may have other rows than that of the earlier one, and is whole or told apart."""
    config, first = batch.logs.config, batch.handed_out()
    note = CheckpointNote(topic=config.ledger_topic, tasks=1, engine="undead")
    again = batch.handed_out(again=True)
    assert batch.commit(first, {0: "ack", 1: "ack"}, epoch=next_epoch(config, note)) == (2, 0)
    for rest in ({0: "ack", 1: "ack"}, {1: "ack", 2: "ack"}):
        later = next_epoch(config, note)
        written, skipped = batch.commit(again, rest, epoch=later)
        assert written + skipped == 2
    assert batch.outputs() == Counter([b"0", b"1", b"2"])
    with pytest.raises(StateError, match="rows that changed while the query ran"):
        batch.commit(again, {0: "ack", 2: "ack"}, epoch=later)


def started(batch: Batch, *, timeout_ms: int = 1000) -> Rows:
    """The rows of three messages that nobody renews; the first one has a lease of a minute."""
    logs = batch.logs
    topic, consumer = logs.config.message_topic, "spark-abcd-run"
    found = []
    for offset in range(3):
        one, lease_ms = MessageId(0, offset), timeout_ms if offset else 60_000
        (at,) = logs.start(one, key=b"emails", consumer=consumer, timeout_ms=lease_ms)
        start_ms = logs.read(logs.config.marker_topic)[-1].timestamp()[1]
        token = AckToken(one, logs.place(one), consumer, 1, lease_ms, at, start_ms)
        found.append({"ack_token": token.encode(), "offset": offset, "topic": topic})
    return found


def wait_for_its_end(found: Rows) -> None:
    """Wait until the leases of the last message have ended, with the grace of R3."""
    token = read_verdicts(found)[-1].token
    wait_until(lambda: time.time() * 1000 > token.start_ms + token.timeout_ms + 600)


def late_of(batch: Batch, found: Rows) -> list[AckToken]:
    ends = read_verdicts(found)
    late_ends = LateEnds(marker_log(batch.logs.config), ends)
    late_ends.fold()
    return late_ends.find(ends) or []


@pytest.mark.parametrize("log_shows_it", [True, False], ids=["by the log", "by their ENDs' times"])
def test_who_is_late_has_its_output_with_its_copy(batch: Batch, log_shows_it: bool) -> None:
    """Its ENDs are written and judged before the commit, whatever the log said before.

    When the task's result is lost, the same run makes it again.
    """
    found = started(batch)
    wait_for_its_end(found)
    route = read_verdicts(found)[0].token.marker_partition
    deadline_s = deadline_after(30)
    while log_shows_it and len(late_of(batch, found)) < 2:
        assert time.monotonic() < deadline_s, "log time stands still"
        batch.logs.raw_marker(route, b"\xff")
    assert log_shows_it == bool(late_of(batch, found))
    verdicts = {0: "ack", 1: "ack", 2: "reject"}
    result = batch.report(found, verdicts, epoch=1)
    assert (result["ends"], result["written"], result["late"]) == (1, 1, 2)
    assert sorted(result["places"]) == ["0/1", "0/2"]
    assert batch.outputs() == Counter([b"0"])
    assert [batch.ends(offset) for offset in range(3)] == [{"ACK"}, set(), set()]
    again = batch.report(found, verdicts, epoch=1)
    assert again["skipped"] == 1
    # By now the log may show that a tracker grants some of them a grace (R3).
    assert not log_shows_it or again["late"] == 2
    assert batch.outputs() == Counter(b"%d" % offset for offset in range(again["ends"]))


def test_what_was_late_is_not_acked_without_its_output(batch: Batch) -> None:
    """The ledger has the slot with its digest; another run STARTs again what is open."""
    found, verdicts = started(batch), {0: "ack", 1: "ack", 2: "ack"}
    wait_for_its_end(found)
    assert batch.report(found, verdicts, epoch=1)["late"] == 2
    late = MessageId(0, 1), MessageId(0, 2)
    batch.logs.end(*late, outcome=Outcome.REDELIVERED, consumer="")
    again = started(batch, timeout_ms=60_000)
    token = read_verdicts(again)[0].token
    again[0]["ack_token"] = replace(token, start_offset=ENDED).encode()
    assert batch.commit(again, verdicts, epoch=2) == (2, 1)
    assert batch.outputs() == Counter([b"0", b"1", b"2"])


def test_an_abort_that_another_task_was_quicker_with_is_tried_again(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = started(batch)
    wait_for_its_end(found)
    config, abort = batch.logs.config, Ledger.abort
    key = LedgerKey(f"kafkamq.{config.ledger_topic}.undead.0", config.ledger_topic, 0)

    def disturbed(ledger: Ledger, **options: Any) -> None:
        monkeypatch.setattr(Ledger, "abort", abort)
        with closing(Ledger(config, key, engine="undead", epoch=1)) as other:
            other.open()
        abort(ledger, **options)

    monkeypatch.setattr(Ledger, "abort", disturbed)
    assert batch.report(found, {0: "ack", 1: "ack", 2: "ack"}, epoch=1)["ends"]
    assert batch.outputs()[b"0"] == 1


def test_what_is_renewed_while_the_transaction_is_open_is_not_late(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was in the log behind half of the lease when the transaction began."""
    found = started(batch, timeout_ms=4000)
    begin = Ledger.begin

    def begun(ledger: Ledger) -> None:
        monkeypatch.setattr(Ledger, "begin", begin)
        begin(ledger)
        batch.logs.keepalive(MessageId(0, 0), consumer="spark-abcd-run", timeout_ms=60_000)
        wait_for_its_end(found)

    monkeypatch.setattr(Ledger, "begin", begun)
    result = batch.report(found, {0: "ack", 1: "ack", 2: "ack"}, epoch=1)
    assert (result["ends"], result["written"], result["late"]) == (3, 3, 0)
    assert batch.outputs() == Counter([b"0", b"1", b"2"])


def test_what_others_wrote_before_is_not_read_while_the_transaction_is_open(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = started(batch, timeout_ms=60_000)
    end = read_verdicts(found)[0]
    token = replace(end.token, timeout_ms=0)
    found[0]["ack_token"] = token.encode()
    for _ in range(200):
        batch.logs.raw_marker(token.marker_partition, b"\xff")
    read, begin = MarkerLog.read, Ledger.begin
    counts: list[int] = []

    def counted(log: MarkerLog, *arguments: int) -> Iterator[Any]:
        for record in read(log, *arguments):
            counts[-1] += 1
            yield record

    def begun(ledger: Ledger) -> None:
        begin(ledger)
        counts.append(0)

    counts.append(0)
    monkeypatch.setattr(MarkerLog, "read", counted)
    monkeypatch.setattr(Ledger, "begin", begun)
    result = batch.report(found, {0: "ack", 1: "ack", 2: "ack"}, epoch=1)
    assert result["late"] == 0
    assert counts[0] >= 200
    assert sum(counts[1:]) == 0


def test_a_transaction_that_kafka_ended_says_so_and_is_made_again(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = started(batch, timeout_ms=60_000)
    config = batch.logs.config
    quick = {**config.kafka, "transaction.timeout.ms": "2000"}
    batch.logs.config = replace(config, kafka=quick)
    log, commit = marker_log(config), Ledger.commit
    route = read_verdicts(found)[0].token.marker_partition

    def slow(ledger: Ledger, *arguments: Any, **options: Any) -> object:
        monkeypatch.setattr(Ledger, "commit", commit)
        wait_until(lambda: log.ends([route]) == log.tops([route]), "Kafka ends the transaction")
        return commit(ledger, *arguments, **options)

    monkeypatch.setattr(Ledger, "commit", slow)
    with caplog.at_level("INFO"):
        assert batch.commit(found, {0: "ack", 1: "ack", 2: "ack"}, epoch=1) == (3, 0)
    (said,) = [each for each in caplog.records if "is made again" in each.message]
    assert "longer than transaction.timeout.ms (2000)" in vars(said)["error"]
    assert batch.outputs() == Counter([b"0", b"1", b"2"])
