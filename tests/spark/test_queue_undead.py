"""A task that was thought dead commits its slot while the same batch is repeated elsewhere.

A driver is killed, its executors notice later; or an executor does not answer for a while, and its
tasks are given to others. The parts are called as Spark calls them; a broker, but no Spark.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]
from tests.integration.tracker_logs import Logs, read_topic
from tests.spark.test_queue_reader import OPTIONS, SCHEMA, plan, rows, tasks_of
from tests.waiting import deadline_after, wait_until, within

from kafkamq.errors import FencedError
from kafkamq.markers.tracker.ledger import Ledger, LedgerKey
from kafkamq.spark.marker_log import marker_log
from kafkamq.spark.options import parse_source_options
from kafkamq.spark.queues.acks import AckToken, find_late, read_verdicts
from kafkamq.spark.queues.committing import CommitSettings, commit_slots
from kafkamq.spark.queues.leasing import QueueReader
from kafkamq.types import MarkerType, MessageId

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


def started(batch: Batch) -> Rows:
    """The rows of three messages that nobody renews; the first one has a lease of a minute."""
    logs = batch.logs
    topic, consumer = logs.config.message_topic, "spark-abcd-run"
    found = []
    for offset in range(3):
        one, timeout_ms = MessageId(0, offset), 1000 if offset else 60_000
        (at,) = logs.start(one, key=b"emails", consumer=consumer, timeout_ms=timeout_ms)
        start_ms = logs.read(logs.config.marker_topic)[-1].timestamp()[1]
        token = AckToken(one, logs.place(one), consumer, 1, timeout_ms, at, start_ms)
        found.append({"ack_token": token.encode(), "offset": offset, "topic": topic})
    wait_until(lambda: time.time() * 1000 > start_ms + 1600)  # with the grace of R3
    return found


@pytest.mark.parametrize("log_shows_it", [True, False], ids=["by the log", "by their ENDs' times"])
def test_who_is_late_has_its_output_with_its_copy(batch: Batch, log_shows_it: bool) -> None:
    """Its ENDs are written and judged before the commit, whatever the log said before."""
    found = started(batch)
    log, ends = marker_log(batch.logs.config), read_verdicts(found)
    deadline_s = deadline_after(30)
    while log_shows_it and len(find_late(log, ends)) < 2:
        assert time.monotonic() < deadline_s, "log time stands still"
        batch.logs.raw_marker(ends[0].token.marker_partition, b"\xff")
    assert log_shows_it == bool(find_late(log, ends))
    result = batch.report(found, {0: "ack", 1: "ack", 2: "reject"}, epoch=1)
    assert (result["ends"], result["written"], result["late"]) == (1, 1, 2)
    assert sorted(result["places"]) == ["0/1", "0/2"]
    assert batch.outputs() == Counter([b"0"])
    assert [batch.ends(offset) for offset in range(3)] == [{"ACK"}, set(), set()]
