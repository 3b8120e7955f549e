"""Several runs of queries on one queue: one takes over from another, or repeats its batch.

The parts are called as Spark calls them; a broker, but no Spark.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    NewPartitions,
    NewTopic,
)
from pyspark.sql.streaming.datasource import ReadMaxRows
from tests.integration.tracker_logs import Logs, read_topic
from tests.spark.test_queue_position import position
from tests.spark.test_queue_reader import (
    OPTIONS,
    SCHEMA,
    end,
    identity,
    offsets,
    plan,
    repeat,
    rows,
    starts,
    tasks_of,
)
from tests.waiting import wait_until, within

from kafkamq.errors import ConfigError, FencedError, StateError
from kafkamq.queue.names import group_of
from kafkamq.queue.wire.keys import marker_partition
from kafkamq.spark.marker_log import MarkerLog
from kafkamq.spark.options import parse_source_options
from kafkamq.spark.queues import starting
from kafkamq.spark.queues.committing import CommitSettings, commit_slots
from kafkamq.spark.queues.leasing import QueueReader
from kafkamq.spark.queues.owner import QueueOwner
from kafkamq.types import Outcome

pytestmark = pytest.mark.spark


@pytest.fixture
def logs(bootstrap: str, namespace: str) -> Logs:
    return Logs(bootstrap, namespace)


@pytest.fixture
def reader(logs: Logs) -> Iterator[QueueReader]:
    made = QueueReader(parse_source_options(OPTIONS, logs.config), SCHEMA)
    yield made
    made.stop()


def test_a_later_start_takes_over_and_the_earlier_one_ends(logs: Logs, reader: QueueReader) -> None:
    """Whatever their checkpoints; a queue of another name is none of their business."""
    logs.send(2, key=b"emails")
    planned, tasks = plan(reader)
    found = rows(reader, tasks)
    end(logs, found)
    other = parse_source_options({**OPTIONS, "queue": "others"}, logs.config)
    beside, later = QueueReader(other, SCHEMA), QueueReader(reader.options, SCHEMA)
    try:
        plan(beside)
        assert reader.latestOffset(planned, ReadMaxRows(100)) == planned
        logs.send(1, key=b"emails")
        after, tasks = plan(later)
        assert offsets(rows(later, tasks)) == [2], "the earlier one has committed the others"
        text = r"^queue 'emails': another query started on it later \(epoch 2, .*; ours is 1\)"
        for _ in range(2):
            with pytest.raises(FencedError, match=text):
                reader.latestOffset(planned, ReadMaxRows(100))
        with pytest.raises(FencedError, match=text):
            reader.partitions(planned, after)
        assert later.latestOffset(after, ReadMaxRows(100)) == after
    finally:
        beside.stop()
        later.stop()


def test_a_query_that_was_paused_does_not_set_the_position_back(
    logs: Logs, reader: QueueReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has looked whether it is the latest start; when it goes on, it is not any more."""
    logs.send(6, key=b"emails")
    begin = reader.initialOffset()
    planned = reader.latestOffset(begin, ReadMaxRows(3))
    end(logs, rows(reader, tasks_of(reader, begin, planned)))
    after_pause = reader.latestOffset(planned, ReadMaxRows(100))
    later = QueueReader(reader.options, SCHEMA)

    def works() -> None:
        logs.send(1, key=b"emails")
        after, tasks = plan(later, planned)
        end(logs, rows(later, tasks))
        assert later.latestOffset(after, ReadMaxRows(100)) == after

    pauses, looks = [works], QueueOwner.check

    def check(owner: QueueOwner) -> None:
        looks(owner)
        while pauses:
            pauses.pop()()

    monkeypatch.setattr(QueueOwner, "check", check)
    try:
        with pytest.raises(FencedError, match=r"another query started on it later \(epoch 2"):
            reader.partitions(planned, after_pause)
        assert position(logs) == 7
        logs.send(1, key=b"emails")
        _, tasks = plan(later, later.initialOffset())
        end(logs, rows(later, tasks))
        assert position(logs) == 8, "the later one goes on"
    finally:
        later.stop()


def test_a_query_that_was_paused_before_its_starts_writes_none(
    logs: Logs, reader: QueueReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R5: its look is old by then, and what its successor has acked since may be forgotten."""
    logs.send(2, key=b"emails")
    begin = reader.initialOffset()
    planned = reader.latestOffset(begin, ReadMaxRows(100))
    later = QueueReader(reader.options, SCHEMA)
    clock_ms, looks = starting.monotonic_ms, MarkerLog.ends

    def works() -> None:
        end(logs, rows(later, tasks_of(later, begin, planned)))
        monkeypatch.setattr(starting, "monotonic_ms", lambda: clock_ms() + 60_000)

    pauses = [works]

    def ends(log: MarkerLog, partitions: Sequence[int]) -> dict[int, int]:
        found = looks(log, partitions)
        while pauses:
            pauses.pop()()
        return found

    monkeypatch.setattr(MarkerLog, "ends", ends)
    try:
        with pytest.raises(FencedError, match=r"another query started on it later \(epoch 2"):
            reader.partitions(begin, planned)
        assert starts(logs) == {0: 1, 1: 1}
    finally:
        later.stop()


def test_what_another_query_s_batch_has_ended_is_not_handed_out(
    logs: Logs, reader: QueueReader
) -> None:
    """Of a batch that this one had planned before it was killed; output, too."""
    logs.send(4, key=b"emails")
    killed = QueueReader(reader.options, SCHEMA)
    begin = killed.initialOffset()
    planned = killed.latestOffset(begin, ReadMaxRows(100))
    killed.stop()
    _, tasks = plan(reader)
    found = rows(reader, tasks)
    end(logs, found[:1])
    end(logs, found[1:2], "nack")
    again = repeat(reader, begin, planned)
    assert offsets(again) == [2, 3]
    end(logs, again)
    assert offsets(repeat(reader, begin, planned)) == [2, 3], "its own"


def test_a_checkpoint_of_another_queue_is_refused(logs: Logs, reader: QueueReader) -> None:
    """What the other one has not done up to there would be passed over, for its workers too."""
    logs.send(2, key=b"others")
    logs.send(1, key=b"emails")
    begin = reader.initialOffset()
    planned, _ = plan(reader, begin)
    other = parse_source_options({**OPTIONS, "queue": "others"}, logs.config)
    wrong, right = QueueReader(other, SCHEMA), QueueReader(other, SCHEMA)
    try:
        text = "the checkpoint is of queue emails, the query reads others: name another folder"
        with pytest.raises(ConfigError, match=text):
            wrong.latestOffset(planned, ReadMaxRows(100))
        with pytest.raises(ConfigError, match=text):
            wrong.partitions(begin, planned)
        _, tasks = plan(right)
        assert offsets(rows(right, tasks)) == [0, 1]
    finally:
        wrong.stop()
        right.stop()


def test_a_checkpoint_of_other_partitions_is_refused(logs: Logs, reader: QueueReader) -> None:
    """With these the group may stand before startingOffsets, which are of a new queue."""
    logs.send(2, key=b"emails")
    starting_at = json.dumps({logs.config.message_topic: {"0": 4}})
    given = {**OPTIONS, "partitions": "0"}
    named = parse_source_options({**given, "startingOffsets": starting_at}, logs.config)
    begin = reader.initialOffset()
    planned, _ = plan(reader, begin)
    one, same = (QueueReader(parse_source_options(given, logs.config), SCHEMA) for _ in range(2))
    later = QueueReader(named, SCHEMA)
    try:
        text = "the checkpoint is of partitions 0,1, the query reads 0: name another folder"
        with pytest.raises(ConfigError, match=text):
            one.latestOffset(planned, ReadMaxRows(100))
        with pytest.raises(ConfigError, match=text):
            one.partitions(begin, planned)
        assert reader.latestOffset(planned, ReadMaxRows(100)) == planned, "none took over"
        logs.send(2, key=b"emails")
        _, tasks = plan(later)
        assert offsets(rows(later, tasks)) == [2, 3]
        logs.send(1, key=b"emails")
        _, tasks = plan(same)
        assert offsets(rows(same, tasks)) == [4]
    finally:
        for each in (one, same, later):
            each.stop()


def is_latest(owner: QueueOwner) -> bool:
    try:
        owner.check()
    except FencedError:
        return False
    return True


def test_of_queries_that_start_at_one_moment_one_is_left(logs: Logs) -> None:
    owners = [QueueOwner(logs.config, "emails", group_of(logs.config, "emails")) for _ in range(3)]
    try:
        with ThreadPoolExecutor(len(owners)) as pool:
            list(pool.map(QueueOwner.take, owners))
        left = [owner for owner in owners if is_latest(owner)]
        assert len(left) == 1
        admin = AdminClient({"bootstrap.servers": logs.bootstrap})
        group = left[0]._key.transactional_id
        admin.delete_consumer_groups([group])[group].result(within(30))
        left[0].check()  # Kafka forgets what was committed long ago: that is no later start
        left[0].check()
    finally:
        for owner in owners:
            owner.close()


def test_markers_are_sought_where_they_were_written_when_partitions_are_added(
    logs: Logs, reader: QueueReader
) -> None:
    """R26: a range that is read again behind their growth, with what workers said since."""
    logs.send(4, key=b"emails")
    begin = reader.initialOffset()
    planned, tasks = plan(reader, begin)
    rows(reader, tasks)
    reader.stop()
    messages = [identity(logs, offset) for offset in range(4)]
    logs.end(messages[0], outcome=Outcome.REDELIVERED, consumer="engine")
    before = logs.place(messages[0])
    more = next(n for n in range(3, 40) if marker_partition(0, 0, n) != before)
    admin = AdminClient({"bootstrap.servers": logs.bootstrap})
    topic = logs.config.marker_topic
    admin.create_partitions([NewPartitions(topic, more)])[topic].result(within(30))
    wait_until(lambda: len(logs._producer.list_topics(topic).topics[topic].partitions) == more)
    logs.marker_partitions = more
    logs.start(messages[1], key=b"emails", consumer="worker")  # a worker that knows of them
    logs.end(messages[1], consumer="worker")
    restarted = QueueReader(reader.options, SCHEMA)
    try:
        repeated = tasks_of(restarted, begin, planned)
        found = rows(restarted, repeated)
        assert offsets(found) == [2, 3]
        end(logs, found)
    finally:
        restarted.stop()
    assert offsets(repeat(reader, begin, planned)) == [2, 3]
    places: dict[int, set[int | None]] = {}
    for record, marker in logs.said():
        if marker.message_id is not None and marker.consumer_id.startswith("spark-"):
            places.setdefault(marker.message_id.offset, set()).add(record.partition())
    assert places[2] == places[3] == {before}, "one message's markers share a partition"


def test_a_repeated_batch_may_have_other_rows(logs: Logs, reader: QueueReader) -> None:
    """A join with a table that has gained a row, and lost one: the log tells per message."""
    out = f"{logs.config.namespace}-out"
    admin = AdminClient({"bootstrap.servers": logs.bootstrap})
    admin.create_topics([NewTopic(out, 1, 1)])[out].result(within(30))
    logs.send(4, key=b"emails")
    begin = reader.initialOffset()
    planned = reader.latestOffset(begin, ReadMaxRows(100))
    columns = dict.fromkeys(("verdict", "delay", "reason", "headers", "partition", "topic", "key"))

    def run(matched: set[int], epoch: int, batch: int = 0) -> tuple[int, int]:
        """A start of the query that repeats the batch; rows that were written, and skipped."""
        settings = CommitSettings(config=logs.config, topic=out, engine="joins", epoch=epoch)
        restarted = QueueReader(reader.options, SCHEMA)
        try:
            found = rows(restarted, tasks_of(restarted, begin, planned))
        finally:
            restarted.stop()
        output = [
            {**columns, "ack_token": row["ack_token"], "value": b"%d" % row["offset"], "_slot": 0}
            for row in found
            if row["offset"] in matched
        ]
        (done,) = commit_slots(iter([pa.RecordBatch.from_pylist(output)]), settings, batch)
        result = done.to_pylist()[0]
        return result["written"], result["skipped"]

    assert run({0, 1}, 1) == (2, 0)
    assert run({1, 2}, 2) == (1, 1)
    assert run({0, 1, 2, 3}, 3) == (1, 3)
    assert run({0, 1, 2, 3}, 3) == (0, 4)
    assert Counter(each.value() for each in read_topic(logs.bootstrap, out)) == Counter(
        b"%d" % number for number in range(4)
    )
    with pytest.raises(StateError, match="rows that changed while the query ran"):
        run({0}, 3)
    # An older copy of the checkpoint plans another batch of that number.
    logs.send(1, key=b"emails")
    begin, (planned, _) = planned, plan(reader_again := QueueReader(reader.options, SCHEMA))
    reader_again.stop()
    with pytest.raises(StateError, match="checkpoint older than its ledger"):
        run({4}, 4)
