"""How far a queue is, and where it goes on: behind a kill, when Kafka has dropped its group's
offsets, and in a topic recreated.

The parts are called as Spark calls them; a broker, but no Spark.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]
from pyspark import cloudpickle
from pyspark.sql.streaming.datasource import ReadMaxRows
from tests.integration.queue_logs import delete_group
from tests.integration.test_holes import recreate
from tests.integration.tracker_logs import Logs
from tests.spark.test_queue_reader import (
    OPTIONS,
    SCHEMA,
    end,
    identity,
    offsets,
    plan,
    rows,
    starts,
    tasks_of,
)
from tests.waiting import wait_until, within

from kafkamq import Service
from kafkamq.errors import DataLossError, StateError
from kafkamq.markers.positions import Positions
from kafkamq.queue.names import group_of
from kafkamq.spark.options import parse_source_options
from kafkamq.spark.queues import leasing
from kafkamq.spark.queues.leasing import QueueReader
from kafkamq.spark.source import streaming
from kafkamq.transport.admin import Admin
from kafkamq.transport.log_reader import LogReader, log_reader

pytestmark = pytest.mark.spark


@pytest.fixture
def logs(bootstrap: str, namespace: str) -> Logs:
    return Logs(bootstrap, namespace, partitions=1)


@pytest.fixture
def queries(logs: Logs) -> Iterator[list[QueueReader]]:
    made: list[QueueReader] = []
    yield made
    for reader in made:
        reader.stop()


def start(logs: Logs, queries: list[QueueReader]) -> QueueReader:
    """A start of a query; the one before has ended."""
    if queries:
        queries[-1].stop()
    queries.append(QueueReader(parse_source_options(OPTIONS, logs.config), SCHEMA))
    return queries[-1]


def forget(logs: Logs) -> None:
    delete_group(logs.bootstrap, group_of(logs.config, "emails"))


def delete_to(logs: Logs, offset: int) -> None:
    place = TopicPartition(logs.config.message_topic, 0, offset)
    admin = AdminClient({"bootstrap.servers": logs.bootstrap})
    admin.delete_records([place])[place].result(within(30))


def topic_id(logs: Logs) -> bytes:
    with Admin(logs.config) as admin:
        return admin.require_topic(logs.config.message_topic).topic_id


def position(logs: Logs) -> int:
    with Admin(logs.config) as admin:
        group = group_of(logs.config, "emails")
        return admin.committed([(group, (logs.config.message_topic, 0))])[0].offset


def member(logs: Logs) -> Consumer:
    group = group_of(logs.config, "emails")
    return Consumer(
        {"bootstrap.servers": logs.bootstrap, "group.id": group, "enable.auto.commit": False}
    )


def worked_to(logs: Logs, offset: int) -> None:
    """Workers have acked everything before, and are gone."""
    worker = member(logs)
    place = TopicPartition(logs.config.message_topic, 0, offset)
    worker.commit(offsets=[place], asynchronous=False)
    worker.close()


@contextmanager
def live_worker(logs: Logs) -> Iterator[None]:
    worker = member(logs)
    worker.subscribe([logs.config.message_topic])
    wait_until(lambda: worker.poll(0.1) is not None or bool(worker.assignment()))
    yield
    worker.close()


def test_the_position_is_behind_a_batch_before_its_rows_are_seen(
    logs: Logs, queries: list[QueueReader]
) -> None:
    """R5: however its query ends, nobody is handed the batch again but by a tracker."""
    logs.send(3, key=b"emails")
    first = start(logs, queries)
    begin = first.initialOffset()
    planned, tasks = plan(first, begin)
    assert position(logs) == 3
    found = rows(first, tasks)
    again = start(logs, queries)
    place = again.initialOffset()
    assert offsets(rows(again, tasks_of(again, place, planned))) == [0, 1, 2], "the query itself"
    assert again.latestOffset(planned, ReadMaxRows(100)) == planned
    end(logs, found)
    other = start(logs, queries)
    logs.send(1, key=b"emails", value=b"new")
    _, tasks = plan(other)
    assert offsets(rows(other, tasks)) == [3], "a new checkpoint"
    other.stop()
    logs.send(1, key=b"emails", value=b"newer")
    service = Service(logs.bootstrap, logs.namespace)
    with service, service.queue("emails").consumer() as consumer:
        message = consumer.receive(within(30))
        assert message is not None
        assert message.payload == b"newer"
        message.ack()


@pytest.mark.parametrize("batch", [0, 1])
def test_a_batch_that_is_repeated_does_not_set_the_position_back(
    logs: Logs, queries: list[QueueReader], batch: int
) -> None:
    """Workers went on behind it while Spark stood still."""
    logs.send(2, key=b"emails")
    first = start(logs, queries)
    begin = first.initialOffset()
    planned, _ = plan(first, begin)
    for _ in range(batch):
        logs.send(2, key=b"emails")
        begin = planned
        planned, _ = plan(first, begin)
    last = 2 * batch + 2
    first.stop()
    logs.send(4, key=b"emails")
    worked_to(logs, last + 3)
    again = start(logs, queries)
    begin = begin if batch else again.initialOffset()
    assert offsets(rows(again, tasks_of(again, begin, planned))) == [last - 2, last - 1]
    assert position(logs) == last + 3
    _, tasks = plan(again, planned)
    assert offsets(rows(again, tasks)) == [last + 3], "what they left"


def test_a_batch_0_without_messages_is_not_repeated_with_those_before_it(
    logs: Logs, queries: list[QueueReader]
) -> None:
    """Spark asks anew where the queue begins, and workers have gone on."""
    logs.send(3, key=b"emails")
    worked_to(logs, 3)
    first = start(logs, queries)
    begin = first.initialOffset()
    empty = first.latestOffset(begin, ReadMaxRows(100))
    assert empty == begin
    first.stop()
    logs.send(2, key=b"emails")
    worked_to(logs, 4)
    again = start(logs, queries)
    assert tasks_of(again, again.initialOffset(), empty) == []
    assert starts(logs) == {}
    _, tasks = plan(again, empty)
    assert offsets(rows(again, tasks)) == [4]


def test_a_batch_whose_end_does_not_say_where_it_began_is_handed_out(
    logs: Logs, queries: list[QueueReader]
) -> None:
    """A checkpoint from before that was written down: nothing is behind the position unseen."""
    logs.send(3, key=b"emails")
    first = start(logs, queries)
    begin = first.initialOffset()
    planned = first.latestOffset(begin, ReadMaxRows(100))
    old = {name: values for name, values in planned.items() if name != ":from"}
    again = start(logs, queries)
    found = rows(again, tasks_of(again, begin, old))
    assert offsets(found) == [0, 1, 2]
    end(logs, found)
    assert again.latestOffset(old, ReadMaxRows(100)) == old
    assert position(logs) == 3


@pytest.mark.parametrize("comes", ["between two batches", "before its STARTs are in the log"])
def test_a_query_ends_where_workers_came_and_went(
    logs: Logs, queries: list[QueueReader], comes: str
) -> None:
    """What they acked was handed out again, and the position set back."""
    logs.send(3, key=b"emails")
    query = start(logs, queries)
    planned, tasks = plan(query)
    end(logs, rows(query, tasks))
    assert query.latestOffset(planned, ReadMaxRows(100)) == planned
    logs.send(6, key=b"emails")
    text = r"^workers went on with queue 'emails'.* stands at 8, Spark left it at 3"
    if comes == "between two batches":
        worked_to(logs, 8)
        with pytest.raises(StateError, match=text):
            query.latestOffset(planned, ReadMaxRows(2))
    else:
        after = query.latestOffset(planned, ReadMaxRows(2))
        worked_to(logs, 8)
        with pytest.raises(StateError, match=text):
            query.partitions(planned, after)
    assert position(logs) == 8
    again = start(logs, queries)
    _, tasks = plan(again, planned)
    assert offsets(rows(again, tasks)) == [8], "what they left"


def test_a_query_passes_others_messages_only_where_no_worker_was(
    logs: Logs, queries: list[QueueReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing, "PASS_S", 0.0)
    query = start(logs, queries)
    begin = query.initialOffset()
    logs.send(4, key=b"others")
    worked_to(logs, 3)
    with pytest.raises(StateError, match=r"^workers went on with queue 'emails'"):
        query.latestOffset(begin, ReadMaxRows(100))
    assert position(logs) == 3


@pytest.mark.parametrize("joins", ["before the plan", "before the STARTs are in the log"])
def test_a_query_ends_where_workers_join(
    logs: Logs, queries: list[QueueReader], joins: str
) -> None:
    """Also an idle one: both would hand out what comes, and it would set their position back."""
    logs.send(2, key=b"emails")
    query = start(logs, queries)
    planned, tasks = plan(query)
    end(logs, rows(query, tasks))
    assert query.latestOffset(planned, ReadMaxRows(100)) == planned
    text = r"^workers joined queue 'emails'"
    if joins == "before the plan":
        with live_worker(logs):
            logs.send(1, key=b"emails")
            with pytest.raises(StateError, match=text):
                query.latestOffset(planned, ReadMaxRows(100))
        assert starts(logs) == {0: 1, 1: 1}
    else:
        logs.send(1, key=b"emails")
        after = query.latestOffset(planned, ReadMaxRows(100))
        with live_worker(logs), pytest.raises(StateError, match=text):
            query.partitions(planned, after)
    assert position(logs) == 2


def test_a_reader_travels_to_where_it_works(logs: Logs) -> None:
    """Spark pickles it for its workers before anything is asked of it."""
    made = QueueReader(parse_source_options(OPTIONS, logs.config), SCHEMA)
    data = cloudpickle.dumps(made)  # type: ignore[no-untyped-call]
    assert isinstance(pickle.loads(data), QueueReader)


def test_what_was_acked_does_not_come_again_when_the_group_expired(
    logs: Logs, queries: list[QueueReader]
) -> None:
    """Not from a new checkpoint, and not from a worker."""
    logs.send(3, key=b"emails")
    first = start(logs, queries)
    planned, tasks = plan(first)
    end(logs, rows(first, tasks))
    assert first.latestOffset(planned, ReadMaxRows(100)) == planned
    second = start(logs, queries)
    forget(logs)
    logs.send(2, key=b"emails")
    planned, tasks = plan(second)
    found = rows(second, tasks)
    assert offsets(found) == [3, 4]
    end(logs, found)
    assert second.latestOffset(planned, ReadMaxRows(100)) == planned
    second.stop()
    forget(logs)
    with Service(logs.bootstrap, logs.namespace) as service:
        queue = service.queue("emails")
        queue.producer().send(b"new").result(within(30))
        with queue.consumer() as consumer:
            message = consumer.receive(within(30))
            assert message is not None
            assert message.payload == b"new"
            message.ack()


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_what_workers_did_since_is_not_done_again(
    logs: Logs, queries: list[QueueReader], has_checkpoint: bool
) -> None:
    """One was killed: of its last messages the log of markers knows, and the ledger does not."""
    logs.send(2, key=b"emails")
    first = start(logs, queries)
    stopped, tasks = plan(first)
    end(logs, rows(first, tasks))
    first.latestOffset(stopped, ReadMaxRows(100))
    first.stop()
    logs.send(1, key=b"others")
    logs.send(4, key=b"emails")
    kept = Positions(logs.config, group_of(logs.config, "emails"), "emails")
    kept.note({0: 3}, topic_id(logs))
    kept.close()
    for offset in (3, 4, 6):
        one = replace(identity(logs, 0), offset=offset)
        logs.start(one, key=b"emails", consumer="worker")
        logs.end(one, consumer="worker")
    forget(logs)
    _, tasks = plan(start(logs, queries), stopped if has_checkpoint else None)
    assert offsets(rows(queries[-1], tasks)) == [5, 6], "what nobody had begun, and what follows"


@pytest.mark.parametrize("goes_on_as", ["it runs", "query", "worker"])
def test_a_quiet_queue_outlives_the_messages_of_others(
    logs: Logs, queries: list[QueueReader], monkeypatch: pytest.MonkeyPatch, goes_on_as: str
) -> None:
    """Its position passes them, so nothing of it is missing when they are deleted."""
    monkeypatch.setattr(leasing, "PASS_S", 0.0)
    logs.send(2, key=b"emails")
    query = start(logs, queries)
    planned, tasks = plan(query)
    end(logs, rows(query, tasks))
    logs.send(5, key=b"others")
    assert query.latestOffset(planned, ReadMaxRows(100)) == planned, "they are no batch"
    delete_to(logs, 6)
    logs.send(1, key=b"emails", value=b"mine")
    if goes_on_as == "worker":
        query.stop()
        service = Service(logs.bootstrap, logs.namespace)
        with service, service.queue("emails").consumer() as consumer:
            message = consumer.receive(within(30))
            assert message is not None
            assert message.payload == b"mine"
            message.ack()
        return
    if goes_on_as == "query":
        query = start(logs, queries)
    planned, tasks = plan(query, planned)
    assert offsets(rows(query, tasks)) == [7]
    assert query.latestOffset(planned, ReadMaxRows(100)) == planned
    _, tasks = plan(start(logs, queries))
    assert tasks == [], "nor is it behind the batch"


def test_a_batch_that_was_done_may_be_deleted_before_the_next_start(
    logs: Logs, queries: list[QueueReader]
) -> None:
    """Nothing is missing: its query ended before it committed how far the queue is done."""
    logs.send(3, key=b"emails")
    query = start(logs, queries)
    planned, tasks = plan(query)
    end(logs, rows(query, tasks))
    query.stop()
    delete_to(logs, 3)
    logs.send(1, key=b"emails")
    planned, tasks = plan(start(logs, queries), planned)
    assert offsets(rows(queries[-1], tasks)) == [3]
    logs.send(1, key=b"emails")
    delete_to(logs, 5)
    with pytest.raises(DataLossError, match="1 records are gone"):
        start(logs, queries).latestOffset(planned, ReadMaxRows(100))


def test_the_position_in_a_topic_is_not_that_in_the_one_recreated(
    logs: Logs, queries: list[QueueReader]
) -> None:
    logs.send(3, key=b"emails")
    first = start(logs, queries)
    planned, tasks = plan(first)
    end(logs, rows(first, tasks))
    first.stop()
    recreate(logs.bootstrap, logs.config.message_topic)
    logs.send(5, key=b"emails")
    second = start(logs, queries)
    with pytest.raises(DataLossError, match="not the one of the checkpoint"):
        second.latestOffset(planned, ReadMaxRows(100))
    third = start(logs, queries)
    begin = third.initialOffset()
    third.partitions(begin, planned)
    assert position(logs) == 0, "nor is a batch of the other one that is repeated"
    _, tasks = plan(third, begin)
    assert offsets(rows(third, tasks)) == [0, 1, 2, 3, 4]


def test_a_partition_that_a_broker_knew_nothing_of_begins_where_the_queue_stands(
    logs: Logs, queries: list[QueueReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old metadata at the first look of a new checkpoint: what was acked there came again."""
    logs = Logs(logs.bootstrap, f"{logs.namespace}-two", partitions=2)
    for number in range(2):
        logs.send(3, key=b"emails", partition=number)
    first = start(logs, queries)
    planned, tasks = plan(first)
    end(logs, rows(first, tasks))
    assert first.latestOffset(planned, ReadMaxRows(100)) == planned
    second = start(logs, queries)
    with monkeypatch.context() as old:
        old.setattr(LogReader, "partition_count", lambda *_: 1)
        begin = second.initialOffset()
    assert list(begin[logs.config.message_topic]) == ["0"]
    logs.send(1, key=b"emails", partition=1)
    monkeypatch.setattr(streaming, "TOPOLOGY_S", 0.0)  # it looks again at once
    planned, tasks = plan(second, begin)
    assert offsets(rows(second, tasks)) == [3]
    assert planned[logs.config.message_topic] == {"0": 3, "1": 4}


def test_a_partition_that_is_added_to_a_known_queue_begins_at_its_beginning(
    logs: Logs, queries: list[QueueReader]
) -> None:
    """Where batch 0 is repeated Spark asks again where the queue begins, and it is not new then."""
    options = parse_source_options({**OPTIONS, "startingOffsets": "latest"}, logs.config)
    topic = logs.config.message_topic
    logs.send(1, key=b"emails")
    first = QueueReader(options, SCHEMA)
    queries.append(first)
    begin = first.initialOffset()
    logs.send(2, key=b"emails")
    planned = first.latestOffset(begin, ReadMaxRows(100))
    first.stop()
    admin = AdminClient({"bootstrap.servers": logs.bootstrap})
    admin.create_partitions([NewPartitions(topic, 2)])[topic].result(within(30))
    wait_until(lambda: log_reader(logs.config).partition_count(topic) == 2)
    producer = Producer({"bootstrap.servers": logs.bootstrap})
    for _ in range(3):
        producer.produce(topic, b"x", key=b"emails", partition=1)
    assert producer.flush(within(30)) == 0
    again = QueueReader(options, SCHEMA)
    queries.append(again)
    begin = again.initialOffset()
    assert begin[topic] == {"0": 1, "1": 0}
    assert offsets(rows(again, tasks_of(again, begin, planned))) == [1, 2]
    _, tasks = plan(again, planned)
    assert offsets(rows(again, tasks)) == [0, 1, 2]
