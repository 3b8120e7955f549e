"""The parts of a stream that acknowledges, called as Spark calls them; a broker, but no Spark.

What happens when a range is read again, in every state that its messages may be in.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)
from tests.integration.tracker_logs import Logs, read_topic
from tests.spark.queue_driver import output_topic
from tests.waiting import wait_until, within

from kafkamq.errors import ConfigError, StateError
from kafkamq.queue.names import group_of
from kafkamq.queue.namespace import Namespace, NamespaceFacts
from kafkamq.queue.wire.keys import marker_partition
from kafkamq.spark.marker_log import marker_log
from kafkamq.spark.options import parse_source_options
from kafkamq.spark.queues import starting
from kafkamq.spark.queues.acks import (
    AckSettings,
    AckToken,
    LateEnds,
    read_verdicts,
    report,
    write_ends,
)
from kafkamq.spark.queues.committing import CommitSettings, commit_slots
from kafkamq.spark.queues.leasing import QueuePartition, QueueReader
from kafkamq.spark.queues.starting import (
    LEFT,
    VOID,
    Handed,
    Starter,
    StartPlan,
    Waiting,
    handed_out,
)
from kafkamq.spark.source.columns import columns_of
from kafkamq.transport.log_reader import LogRange, LogReader, log_reader
from kafkamq.types import Headers, MarkerType, MessageId, Outcome

pytestmark = pytest.mark.spark

_KINDS: dict[str, Any] = {
    "STRING": StringType(), "BINARY": BinaryType(), "INT": IntegerType(), "BIGINT": LongType(),
    "TIMESTAMP": TimestampType(),
    "ARRAY<STRUCT<key: STRING, value: BINARY>>": ArrayType(
        StructType([StructField("key", StringType()), StructField("value", BinaryType())])
    ),
}  # fmt: skip
OPTIONS = {"view": "messages", "queue": "emails", "acknowledge": "true"}
SCHEMA = StructType([StructField(n, _KINDS[kind]) for n, kind in columns_of("messages", False)])


@pytest.fixture
def logs(bootstrap: str, namespace: str) -> Logs:
    return Logs(bootstrap, namespace)


@pytest.fixture
def reader(logs: Logs) -> Iterator[QueueReader]:
    made = QueueReader(parse_source_options(OPTIONS, logs.config), SCHEMA)
    yield made
    made.stop()


def plan(reader: QueueReader, start: Any = None) -> tuple[Any, list[QueuePartition]]:
    """The next batch: its end, and its tasks."""
    begin = reader.initialOffset() if start is None else start
    end = reader.latestOffset(begin, ReadMaxRows(100))
    tasks = [task for task in reader.partitions(begin, end) if isinstance(task, QueuePartition)]
    return end, tasks


def tasks_of(reader: QueueReader, start: Any, end: Any) -> list[QueuePartition]:
    """Of a batch that was planned before."""
    return [each for each in reader.partitions(start, end) if isinstance(each, QueuePartition)]


def rows(reader: QueueReader, tasks: list[QueuePartition]) -> list[dict[str, Any]]:
    return [row for task in tasks for part in reader.read(task) for row in part.to_pylist()]


def repeat(reader: QueueReader, start: Any, end: Any) -> list[dict[str, Any]]:
    """The rows of a batch that the next start of the query repeats."""
    restarted = QueueReader(reader.options, SCHEMA)
    try:
        return rows(restarted, tasks_of(restarted, start, end))
    finally:
        restarted.stop()


def offsets(found: list[dict[str, Any]]) -> list[int]:
    return [row["offset"] for row in found]


def end(logs: Logs, found: list[dict[str, Any]], verdict: str = "ack") -> None:
    verdicts = [{"ack_token": row["ack_token"], "verdict": verdict} for row in found]
    settings = AckSettings(config=logs.config)
    (done,) = write_ends([pa.RecordBatch.from_pylist(verdicts)], settings)
    assert done.to_pylist()[0]["late"] == 0


def starts(logs: Logs) -> Counter[int]:
    return Counter(
        marker.message_id.offset
        for _, marker in logs.said()
        if marker.type is MarkerType.START and marker.message_id is not None
    )


def identity(logs: Logs, offset: int) -> MessageId:
    """Name a message as workers do."""
    return next(
        marker.message_id
        for _, marker in logs.said()
        if marker.message_id is not None and marker.message_id.offset == offset
    )


def test_tasks_only_read(logs: Logs, reader: QueueReader) -> None:
    """STARTs are there before them, once, however often Spark asks and tasks are run."""
    for number in range(2):
        logs.send(3, key=b"emails\0user", partition=number)
    begin = reader.initialOffset()
    planned, tasks = plan(reader, begin)
    assert starts(logs) == Counter(dict.fromkeys(range(3), 2))
    renewed_by = {task.consumer_id for task in tasks}
    first = rows(reader, tasks)
    end(logs, first[:1])
    logs.end(identity(logs, 1), outcome=Outcome.REDELIVERED, consumer="engine")
    before = len(logs.markers())
    again = tasks_of(reader, begin, planned)
    assert [each["ack_token"] for each in rows(reader, again)] == [
        each["ack_token"] for each in first
    ]
    assert {task.consumer_id for task in again} == renewed_by
    assert len(logs.markers()) == before


def test_a_batch_that_is_repeated(logs: Logs, reader: QueueReader) -> None:
    logs.send(4, key=b"emails\0user")
    begin = reader.initialOffset()
    planned, tasks = plan(reader, begin)
    first = rows(reader, tasks)
    assert offsets(first) == [0, 1, 2, 3]
    assert [row["user_key"] for row in first] == [b"user"] * 4
    end(logs, first[:1])
    end(logs, first[1:2], "nack")
    logs.end(identity(logs, 1), outcome=Outcome.REDELIVERED, consumer="engine")
    logs.end(identity(logs, 2), outcome=Outcome.REDELIVERED, consumer="engine")
    again = repeat(reader, begin, planned)
    assert offsets(again) == [0, 1, 3], "verdicts and what is open; not what is a copy by now"
    assert starts(logs) == {0: 1, 1: 1, 2: 1, 3: 2}
    end(logs, again)
    assert offsets(repeat(reader, begin, planned)) == [0, 1, 3]
    assert starts(logs) == {0: 1, 1: 1, 2: 1, 3: 2}


def test_a_batch_that_is_repeated_and_repeated_hands_out_less(
    logs: Logs, reader: QueueReader
) -> None:
    """What kills its process would be repeated without end, and each time counted as alive."""
    logs.send(8, key=b"emails")
    begin = reader.initialOffset()
    planned, tasks = plan(reader, begin)
    assert len(rows(reader, tasks)) == 8
    found = [repeat(reader, begin, planned) for _ in range(6)]
    assert [offsets(each) for each in found] == [
        list(range(8)), [0, 1, 2, 3], [0, 1], [0], [0], []
    ]  # fmt: skip
    assert starts(logs) == {**dict.fromkeys(range(4, 8), 2), 2: 3, 3: 3, 1: 4, 0: 6}


def test_markers_are_sought_wherever_a_worker_may_have_written_them() -> None:
    """R26: partitions were added twice since the batch was planned, and it knew of the first."""
    facts = NamespaceFacts(b"", 1, 4, -1, -1, 1, 1)
    made = StartPlan(
        consumer_id="spark-a-b", facts=facts, marker_ends={0: 0, 1: 0}, is_repeated=True
    )
    for chunk in range(200):
        offset = chunk * 4096
        routes = made.routes([LogRange("t", 0, offset, offset + 100)])
        assert routes == {marker_partition(0, offset, count) for count in (2, 3, 4)}


def test_one_message_alone_is_handed_out_a_few_times() -> None:
    assert [handed_out(1, runs) for runs in range(4)] == [1, 1, 1, 0]
    assert [handed_out(10_000, runs) for runs in (1, 2, 3, 13, 14, 15, 16)] == [
        10_000, 5_000, 2_500, 2, 1, 1, 0
    ]  # fmt: skip
    assert handed_out(0, 0) == handed_out(0, 5) == 0


@pytest.mark.parametrize("tells_first", [False, True])
def test_a_batch_that_is_repeated_where_brokers_begin_to_tell_topic_ids(
    logs: Logs, reader: QueueReader, tells_first: bool
) -> None:
    """What was named without an id is the same message: its entry would have a twin otherwise."""
    logs.send(3, key=b"emails")
    first = _started(logs, reader, 0, tells=tells_first)
    assert offsets_of(first) == [0, 1, 2]
    named = identity(logs, 0)
    logs.end(named, consumer=f"{PLAN}0")
    logs.end(replace(named, offset=1), outcome=Outcome.REDELIVERED, consumer="engine")
    again = _started(logs, reader, 1, tells=not tells_first)
    assert offsets_of(again) == [0, 2]
    assert starts(logs) == {0: 1, 1: 1, 2: 2}
    assert len({m.message_id.topic_id for _, m in logs.said() if m.message_id is not None}) == 1


PLAN = "spark-abcd-"


def _started(
    logs: Logs,
    reader: QueueReader,
    run: int,
    *,
    tells: bool = True,
    share: Callable[[int, int], int] = handed_out,
    check: Callable[[], None] = lambda: None,
) -> Handed:
    """What a run of a batch of all messages in partition 0 hands out."""
    topic = logs.config.message_topic
    facts = Namespace(logs.config).facts()
    if not tells:
        facts = replace(facts, message_topic_id=b"")
    wanted = LogRange(topic, 0, 0, log_reader(logs.config).log_ends(topic, [0])[0])
    plan_of_run = StartPlan(
        consumer_id=f"{PLAN}{run}", facts=facts, marker_ends={}, is_repeated=run > 0
    )
    starter = Starter(plan_of_run, [wanted], reader.options, marker_log(logs.config), check)
    read = log_reader(logs.config).read(wanted)
    return starter.start([Waiting.of(each) for records in read for each in records], share)


def offsets_of(handed: Handed) -> list[int]:
    return sorted(at for starts in handed.values() for of in starts.values() for at in of)


def test_a_queue_goes_on_where_the_named_group_is(logs: Logs) -> None:
    """kafka-mq-go's workers have a group of their own: Spark takes over from them."""
    group = f"kafka-mq-{logs.namespace}"
    logs.send(3, key=b"emails")
    worker = Consumer({"bootstrap.servers": logs.bootstrap, "group.id": group})
    place = TopicPartition(logs.config.message_topic, 0, 2)
    worker.commit(offsets=[place], asynchronous=False)
    options = {**OPTIONS, "group": group}
    reader = QueueReader(parse_source_options(options, logs.config), SCHEMA)
    try:
        planned, tasks = plan(reader)
        assert offsets(rows(reader, tasks)) == [2]
        reader.latestOffset(planned, ReadMaxRows(100))
        assert worker.committed([place], timeout=within(30))[0].offset == 3
    finally:
        reader.stop()
        worker.close()


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_nobody_asked_for_is_started_before_the_position_passes_it(
    logs: Logs, reader: QueueReader, is_killed: bool
) -> None:
    """Also by the next start of a query that was killed when Spark knew its batch to be done."""
    for number in range(2):
        logs.send(4, key=b"emails", partition=number)
        logs.send(1, key=b"others", partition=number)
    planned = reader.latestOffset(reader.initialOffset(), ReadMaxRows(100))
    assert starts(logs) == {}
    if is_killed:
        reader.stop()
        reader = QueueReader(reader.options, SCHEMA)
    try:
        assert reader.latestOffset(planned, ReadMaxRows(100)) == planned
        assert starts(logs) == Counter(dict.fromkeys(range(4), 2)), "once in each partition"
        started = [m for _, m in logs.said() if m.type is MarkerType.START]
        assert {m.consumer_id.endswith(LEFT) for m in started} == {True}, "nobody renews them"
        assert reader.latestOffset(planned, ReadMaxRows(100)) == planned
        reader.stop()
        reader = QueueReader(reader.options, SCHEMA)
        assert reader.latestOffset(planned, ReadMaxRows(100)) == planned
        assert starts(logs) == Counter(dict.fromkeys(range(4), 2)), "nor are they STARTed again"
    finally:
        reader.stop()


def test_what_workers_settled_of_an_unfinished_batch_is_theirs(
    logs: Logs, reader: QueueReader
) -> None:
    logs.send(4, key=b"emails")
    begin = reader.initialOffset()
    planned, tasks = plan(reader, begin)
    first = rows(reader, tasks)
    logs.end(identity(logs, 0), outcome=Outcome.ACK, consumer="worker")
    logs.end(identity(logs, 1), outcome=Outcome.NACK, consumer="worker")
    end(logs, first[2:3])
    logs.end(identity(logs, 2), outcome=Outcome.ACK, consumer="worker")
    again = repeat(reader, begin, planned)
    assert offsets(again) == [2, 3], "what this batch ended is its own, whoever ended it too"
    assert starts(logs) == {0: 1, 1: 1, 2: 1, 3: 2}


def test_a_tracker_that_is_quicker_than_a_start(logs: Logs, reader: QueueReader) -> None:
    logs.send(2, key=b"emails")
    assert offsets_of(_started(logs, reader, 0)) == [0, 1]

    def settles_first(count: int, runs: int) -> int:
        logs.end(identity(logs, 0), outcome=Outcome.REDELIVERED, consumer="engine")
        return count

    assert offsets_of(_started(logs, reader, 1, share=settles_first)) == [1]
    voided = [
        marker.message_id.offset
        for _, marker in logs.said()
        if marker.consumer_id == VOID and marker.message_id is not None
    ]
    assert voided == [0]
    assert offsets_of(_started(logs, reader, 2)) == [1], "which is no verdict"


@pytest.mark.parametrize("has_batches", [True, False])
def test_what_was_done_while_a_run_stood_still_before_its_starts(
    logs: Logs, monkeypatch: pytest.MonkeyPatch, has_batches: bool
) -> None:
    """R5: it looks again; the END may be forgotten (R12), and its START would be tracked."""
    options = {**OPTIONS, "batchMarkers": str(has_batches).lower()}
    reader = QueueReader(parse_source_options(options, logs.config), SCHEMA)
    logs.send(3, key=b"emails")
    clock_ms, checks = starting.monotonic_ms, list[int]()

    def pauses(count: int, runs: int) -> int:
        for offset in (0, 2):
            one = MessageId(0, offset, Namespace(logs.config).facts().message_topic_id, 1)
            logs.start(one, key=b"emails", consumer="worker")
            logs.end(one, consumer="worker")
        monkeypatch.setattr(starting, "monotonic_ms", lambda: clock_ms() + 60_000)
        return count

    handed = _started(logs, reader, 0, share=pauses, check=lambda: checks.append(1))
    assert offsets_of(handed) == [1]
    assert starts(logs) == {0: 1, 1: 1, 2: 1}
    assert len(checks) == 1, "and whether another query has started"


def test_a_lease_that_ended_before_its_message_was_started_again(
    logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"view": "messages", "queue": "emails", "acknowledge": "true"}
    options["redeliveryTimeout"] = "1"
    reader = QueueReader(parse_source_options(options, logs.config), SCHEMA)
    try:
        logs.send(1, key=b"emails")
        begin = reader.initialOffset()
        planned, tasks = plan(reader, begin)
        (row,) = rows(reader, tasks)
        reader.stop()  # nobody renews
        (place,) = [record for record, m in logs.said() if m.type is MarkerType.START]
        passed_ms: list[int] = []  # each record behind the lease

        def is_over() -> bool:
            logs.raw_marker(place.partition() or 0, b"\xff")
            last_ms = logs.read(logs.config.marker_topic)[-1].timestamp()[1]
            if last_ms > place.timestamp()[1] + 1000:
                passed_ms.append(last_ms)
            return last_ms > (passed_ms or [last_ms])[0] + 600  # R3: a grace of half a second

        wait_until(is_over, "log time goes on")
        assert repeat(reader, begin, planned) == [], "the tracker will send a copy"
        assert [m.outcome for _, m in logs.said() if m.type is MarkerType.END] == []
        ends = read_verdicts([row])
        an_hour_ago_s = time.time() - 3600
        monkeypatch.setattr(time, "time", lambda: an_hour_ago_s)  # R9: the broker's time counts
        late_ends = LateEnds(marker_log(logs.config), ends)
        late_ends.fold()
        late = late_ends.find(ends)
        assert late == [ends[0].token], "also before a transaction's END can be read"
    finally:
        reader.stop()


def test_messages_are_renewed_one_by_one_in_the_first_minute(logs: Logs) -> None:
    """R7: also those whose holder a START of an earlier owner replaced."""
    options = {"view": "messages", "queue": "emails", "acknowledge": "true"}
    options["redeliveryTimeout"] = "1"
    reader = QueueReader(parse_source_options(options, logs.config), SCHEMA)

    def renewals(consumer_id: str) -> list[int | None]:
        """Offsets of the messages that KEEPALIVEs name, in their order; None: they name none."""
        return [
            None if marker.message_id is None else marker.message_id.offset
            for _, marker in logs.said()
            if marker.type is MarkerType.KEEPALIVE and marker.consumer_id == consumer_id
        ]

    try:
        logs.send(2, key=b"emails")
        logs.send(1, key=b"others")
        planned, tasks = plan(reader)
        ours = tasks[0].consumer_id
        assert offsets(rows(reader, tasks)) == [0, 1]
        logs.start(identity(logs, 0), key=b"emails", consumer="earlier owner")

        def is_ours_again() -> bool:
            holders = [
                marker.consumer_id
                for _, marker in logs.said()
                if marker.message_id == identity(logs, 0)
            ]
            return holders[-1] == ours and "earlier owner" in holders

        wait_until(is_ours_again, timeout_s=60)
        wait_until(lambda: set(renewals(ours)) >= {None, 0, 1})
        assert set(renewals(ours)) == {None, 0, 1}, "the other queue's message is its workers'"
        assert reader._gained_s is not None
        reader._gained_s -= 61
        logs.send(1, key=b"emails")
        _, tasks = plan(reader, planned)
        later = tasks[0].consumer_id
        wait_until(lambda: len(renewals(later)) > 1, timeout_s=60)
        assert set(renewals(later)) == {None}
    finally:
        reader.stop()


def test_other_queues_cost_no_batch_and_positions_move_on(logs: Logs, reader: QueueReader) -> None:
    logs.send(5, key=b"others")
    begin = reader.initialOffset()
    unchanged = reader.latestOffset(begin, ReadMaxRows(100))
    assert unchanged == begin
    logs.send(3, key=b"emails")
    planned = reader.latestOffset(begin, ReadMaxRows(100))
    assert planned[logs.config.message_topic]["0"] == 8
    tasks = [t for t in reader.partitions(begin, planned) if isinstance(t, QueuePartition)]
    assert offsets(rows(reader, tasks)) == [5, 6, 7]
    assert reader.latestOffset(planned, ReadMaxRows(100)) == planned


def test_a_reader_that_could_do_nothing_stops_without_an_error_of_its_own(logs: Logs) -> None:
    config = replace(
        logs.config,
        kafka={**logs.config.kafka, "security.protocol": "ssl", "ssl.ca.location": "/nope"},
    )
    broken = QueueReader(parse_source_options(OPTIONS, config), SCHEMA)
    with pytest.raises(ConfigError, match=r"ssl\.ca\.location"):
        broken.initialOffset()
    broken.stop()
    broken.stop()


def test_what_workers_did_while_spark_stood_still_is_not_done_again(
    logs: Logs, reader: QueueReader
) -> None:
    logs.send(2, key=b"emails")
    stopped, tasks = plan(reader)
    assert offsets(rows(reader, tasks)) == [0, 1]
    reader.stop()
    logs.send(3, key=b"emails")
    worker = Consumer(
        {"bootstrap.servers": logs.bootstrap, "group.id": group_of(logs.config, "emails")}
    )
    worker.commit(offsets=[TopicPartition(logs.config.message_topic, 0, 4)], asynchronous=False)
    worker.close()
    restarted = QueueReader(reader.options, SCHEMA)
    try:
        planned, tasks = plan(restarted, stopped)
        assert offsets(rows(restarted, tasks)) == [4]
        restarted.stop()
        restarted = QueueReader(reader.options, SCHEMA)
        repeated = tasks_of(restarted, stopped, planned)
        assert offsets(rows(restarted, repeated)) == [4], "also when the batch is repeated"
        logs.send(1, key=b"emails")
        _, tasks = plan(restarted, planned)
        assert offsets(rows(restarted, tasks)) == [5]
    finally:
        restarted.stop()


def test_all_late_messages_are_told() -> None:
    token = AckToken(MessageId(0, 0), 0, "spark-abcd-run", 1, 1000, 0, 0)
    late = [replace(token, message_id=MessageId(0, offset)) for offset in range(250)]
    (row,) = report(0, late).to_pylist()
    assert row["places"] == [f"0/{offset}" for offset in range(row["late"])]


def test_slots_write_once(logs: Logs, reader: QueueReader) -> None:
    out = output_topic(logs)
    logs.send(3, key=b"emails")
    _, tasks = plan(reader)
    found = rows(reader, tasks)
    empty = dict.fromkeys(("verdict", "delay", "reason", "headers", "partition", "topic"))
    output = [
        {**empty, "ack_token": row["ack_token"], "value": row["value"], "key": b"k", "_slot": 0}
        for row in found
    ]
    output[2] = {**output[2], "value": None, "verdict": "reject", "reason": "bad"}
    settings = CommitSettings(config=logs.config, topic=out, engine="ack-test", epoch=1)

    def commit(some: list[dict[str, Any]], batch: int) -> dict[str, Any]:
        (result,) = commit_slots(iter([pa.RecordBatch.from_pylist(some)]), settings, batch)
        found: dict[str, Any] = result.to_pylist()[0]
        return found

    done = {"ends": 3, "written": 2, "skipped": 0, "late": 0, "places": []}
    assert commit(output, 0) == done
    assert commit(output, 0) == {**done, "written": 0, "skipped": 2}
    with pytest.raises(StateError, match="checkpoint older than its ledger"):
        commit(output[:2], 0)
    assert commit(output[:2], 1)["written"] == 2
    assert len(read_topic(logs.bootstrap, out)) == 4
    ends = Counter(
        (marker.message_id.offset, marker.outcome.name)
        for _, marker in logs.said()
        if marker.type is MarkerType.END and marker.message_id is not None
    )
    assert ends == {(0, "ACK"): 3, (1, "ACK"): 3, (2, "REJECT"): 2}


def test_verdicts_are_not_written_into_another_namespace(
    monkeypatch: pytest.MonkeyPatch, logs: Logs, reader: QueueReader
) -> None:
    looks = count(step=6.0)
    clock = SimpleNamespace(monotonic=lambda: next(looks), sleep=time.sleep)
    monkeypatch.setattr("kafkamq.spark.marker_log.time", clock)
    other = Logs(logs.bootstrap, f"{logs.namespace}-other")
    logs.send(1, key=b"emails")
    (found,) = rows(reader, plan(reader)[1])
    settings = CommitSettings(config=other.config, topic="", engine="ack-test", epoch=1)
    empty = dict.fromkeys(("verdict", "delay", "reason", "value", "key", "partition", "topic"))
    part = pa.RecordBatch.from_pylist([{**empty, "ack_token": found["ack_token"], "_slot": 0}])
    named = f"the rows are of another topic than {other.config.message_topic} .*that read_queue"
    with pytest.raises(ConfigError, match=named):
        list(write_ends([part], settings))
    with pytest.raises(ConfigError, match=named):
        list(commit_slots(iter([part]), settings, 0))
    assert not other.said()
    end(logs, [found])


def test_a_nack_that_was_committed_stays_when_the_batch_is_repeated(
    logs: Logs, reader: QueueReader
) -> None:
    """Its output was not written, and is not now: the ledger has the batch."""
    out = output_topic(logs)
    logs.send(2, key=b"emails")
    begin = reader.initialOffset()
    planned, _ = plan(reader, begin)
    settings = CommitSettings(config=logs.config, topic=out, engine="ack-test", epoch=1)

    def commit(verdicts: list[dict[str, Any]]) -> None:
        empty = dict.fromkeys(("delay", "reason", "headers", "partition", "topic", "key"))
        output = [
            {**empty, "ack_token": row["ack_token"], "_slot": 0, **verdict}
            for row, verdict in zip(repeat(reader, begin, planned), verdicts, strict=True)
        ]
        assert len(list(commit_slots(iter([pa.RecordBatch.from_pylist(output)]), settings, 0))) == 1

    reject = {"verdict": "reject", "value": None, "reason": "expired"}  # a handler's own reason
    commit([{"verdict": "nack", "value": None, "delay": 600.0}, reject])
    commit([{"verdict": "ack", "value": b"done"}, reject])
    found = Counter(
        (marker.message_id.offset, marker.outcome.name)
        for _, marker in logs.said()
        if marker.type is MarkerType.END and marker.message_id is not None
    )
    assert found == {(0, "NACK"): 1, (1, "REJECT"): 2}
    assert read_topic(logs.bootstrap, out) == []


def test_a_batch_is_a_few_markers(logs: Logs, reader: QueueReader) -> None:
    """R28-R30: one START, of all but what tells the time; an END for each verdict, one jitter."""
    logs.send(40, key=b"emails")
    begin = reader.initialOffset()
    planned, tasks = plan(reader, begin)
    found = rows(reader, tasks)
    assert offsets(found) == list(range(40))
    started = [m for _, m in logs.markers() if m.type is MarkerType.START]
    assert len(started) <= 2
    assert started[-1].by_reference
    assert started[-1].key == b"emails"
    assert starts(logs) == Counter(range(40))
    repeated = repeat(reader, begin, planned)
    verdicts = [
        {"ack_token": row["ack_token"], "verdict": verdict}
        for row, verdict in zip(repeated, ("ack", "nack") * 20, strict=True)
    ]
    next(write_ends([pa.RecordBatch.from_pylist(verdicts)], AckSettings(config=logs.config)))
    ends = [m for _, m in logs.markers() if m.type is MarkerType.END]
    assert Counter(m.outcome for m in ends) == {Outcome.ACK: 1, Outcome.NACK: 1}
    assert sorted(one.offset for one in logs.ends(Outcome.NACK)) == list(range(1, 40, 2))


@pytest.mark.parametrize(
    ("options", "headers"),
    [
        pytest.param({"maxLease": "302400"}, (), id="R28: half of the retention"),
        pytest.param({}, (("kafkamq-delivery-count", b"5"),), id="R6: the last delivery"),
    ],
)
def test_what_no_start_may_refer_to_has_its_own(
    logs: Logs, options: dict[str, str], headers: Headers
) -> None:
    reader = QueueReader(parse_source_options({**OPTIONS, **options}, logs.config), SCHEMA)
    try:
        logs.send(key=b"emails")  # its START tells the time
        begin, tasks = plan(reader)
        assert offsets(rows(reader, tasks)) == [0]
        logs.send(key=b"emails", headers=headers)
        _, tasks = plan(reader, begin)
        assert offsets(rows(reader, tasks)) == [1]
    finally:
        reader.stop()
    started = [m for _, m in logs.markers() if m.type is MarkerType.START]
    assert [(m.value, m.batches) for m in started] == [(b"payload", ())] * 2


def test_a_batch_is_read_by_the_source_process_and_by_its_tasks_once(
    logs: Logs, reader: QueueReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The markers are not read at all where nothing was said since the batch was planned."""
    sizes: Counter[str] = Counter()
    plain = LogReader.read

    def counted(
        self: LogReader, wanted: LogRange, *, skips_lost: bool = False
    ) -> Iterator[list[Any]]:
        for records in plain(self, wanted, skips_lost=skips_lost):
            sizes[wanted.topic] += sum(len(each.value()) for each in records)
            yield records

    monkeypatch.setattr(LogReader, "read", counted)
    for number in range(2):
        logs.send(50, key=b"emails", value=b"x" * 1000, partition=number)
    _, tasks = plan(reader)
    assert len(rows(reader, tasks)) == 100
    assert sizes.total() <= 2.1 * 100 * 1000
    assert set(sizes) == {logs.config.message_topic}


def test_without_batch_markers_each_message_has_its_own(logs: Logs) -> None:
    options = parse_source_options({**OPTIONS, "batchMarkers": "false"}, logs.config)
    reader = QueueReader(options, SCHEMA)
    try:
        logs.send(3, key=b"emails")
        _, tasks = plan(reader)
        end(logs, rows(reader, tasks))
    finally:
        reader.stop()
    assert [m.batches for _, m in logs.markers()] == [()] * 6


def test_the_last_verdict_of_a_message_that_is_no_ack_counts(
    logs: Logs, reader: QueueReader
) -> None:
    logs.send(2, key=b"emails")
    _, tasks = plan(reader)
    tokens = [row["ack_token"] for row in rows(reader, tasks)]
    verdicts = ((0, "ack"), (1, "ack"), (0, "nack"), (0, "Reject"), (0, None))
    ends = read_verdicts(
        [{"ack_token": tokens[number], "verdict": verdict} for number, verdict in verdicts]
    )
    found = {each.token.message_id.offset: each.outcome for each in ends}
    assert found == {0: Outcome.REJECT, 1: Outcome.ACK}
    assert len(ends) == 2
