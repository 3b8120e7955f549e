"""Transactions of the parallel consumer, with a producer that only remembers."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from tests.unit.test_parallel_work_queue import PLACE, Placed, Room
from tests.waiting import wait_until, within

from kafkamq import ParallelConsumer
from kafkamq.errors import BrokerError
from kafkamq.parallel import transactions
from kafkamq.parallel.commits import Assignment
from kafkamq.parallel.failure_policy import FailurePolicy
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.results import MAX_WAITING, OutgoingRecord, ProducedStream
from kafkamq.parallel.rules.flow import FlowLimits, PartitionFlow, StallDetector
from kafkamq.parallel.rules.offsets import OffsetTracker
from kafkamq.parallel.transactions import TransactionCommitter, TransactionPublisher
from kafkamq.parallel.work_queue import PoolRun, PoolWorker
from kafkamq.runtime.steps import take_async
from kafkamq.transport.clients import open_consumer, open_producer
from kafkamq.transport.memory.cluster import cluster_of
from kafkamq.transport.memory.state import Fault


class Report:
    """Of a delivery."""

    def __init__(self, offset: int) -> None:
        self.place = (0, offset)

    def partition(self) -> int:
        return self.place[0]

    def offset(self) -> int:
        return self.place[1]


class Producer:
    """Keeps what is committed; refuses values that are too large, as a broker does."""

    def __init__(self, *_: object, **__: object) -> None:
        self.is_ready = True
        self.open: list[bytes] = []
        self.committed: list[bytes] = []
        self.offsets: list[TopicPartition] = []
        self.commits = Commits()
        self.aborts = 0
        self.is_refused = False
        self.room: threading.Event | None = None  # what a record waits for
        self.reports: list[Callable[[], None]] = []  # of what was produced, until a commit

    def begin(self) -> None:
        self.open = []

    def offer(self, record: tuple[Any, ...], *, on_delivery: Callable[..., None]) -> bool:
        if self.room is None:
            self.produce(record, on_delivery=on_delivery)
        return self.room is None

    def produce(self, record: tuple[Any, ...], *, on_delivery: Callable[..., None]) -> None:
        if self.room is not None:
            assert self.room.wait(within(5))
        value = record[3]
        self.open.append(value)
        if len(value) > 100:
            self.is_refused = True
            on_delivery(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), None)
        else:
            report = Report(len(self.reports) + 100)
            self.reports.append(lambda: on_delivery(None, report))

    def send_offsets(
        self, positions: list[TopicPartition], membership: bytes, *, timeout_s: float
    ) -> None:
        if membership != self.commits.generation:
            raise BrokerError("not a member any more", code="ILLEGAL_GENERATION")
        if self.commits.refuses is not None:
            raise KafkaException(KafkaError(self.commits.refuses))
        self.offsets += positions

    def report(self) -> None:
        reports, self.reports = self.reports, []
        for each in reports:
            each()

    def commit(self, *, timeout_s: float) -> None:
        if self.is_refused:
            raise BrokerError("a delivery failed", code="MSG_SIZE_TOO_LARGE", is_retriable=True)
        self.report()
        self.committed += self.open

    def abort(self) -> None:
        self.aborts += 1
        self.is_refused = False


class Commits:
    """Of the consumer; the broker knows one generation."""

    generation = b"1"
    refuses: int | None = None

    @property
    def member(self) -> bytes:
        return self.generation


class Hall(Room):
    """A work queue with a committer of transactions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        super().__init__(**settings)
        monkeypatch.setattr(transactions, "TransactionalProducer", Producer)
        self.queue.is_deferred = True
        self.rewinds = 0
        self.commits = Commits()
        self.assignment = self.assignment_of()
        self.committer = TransactionCommitter(
            self.queue.config,
            self.queue,
            self.commits,  # type: ignore[arg-type]
            lambda: [self.assignment],
            self.stats,
            pytest.fail,
            self.rewind,
        )
        self.producer: Producer = self.committer._producer  # type: ignore[assignment]
        self.producer.commits = self.commits

    def assignment_of(self) -> Assignment:
        flow, stalls = PartitionFlow(self.queue.config.limits), StallDetector(stall_after_ms=1000)
        return Assignment(self.partition, flow, stalls, 0, self.partition.tracker.version)

    def send(self, worker: PoolWorker) -> None:
        for _ in self.committer.send(worker):
            pass

    def rewind(self) -> None:
        self.rewinds += 1

    def again(self) -> None:
        """The partition is read again from its start."""
        self.partition = self.queue.assign(PLACE, OffsetTracker(0))
        self.assignment = self.assignment_of()
        self.end = 0

    def handled(self, keys: str, sizes: dict[int, int] | None = None) -> PoolWorker:
        """A worker with results that it has not published."""
        self.add(keys)
        self.speed_up()
        worker = self.workers[0]
        for run in self.queue.take(worker):
            worker.finished.append(run)
            run.outputs = [(record, self.result(record, sizes or {})) for record in run.records]
        return worker

    def result(self, record: ParallelRecord, sizes: dict[int, int]) -> OutgoingRecord:
        value = (b"%d" % record.offset).ljust(sizes.get(record.offset, 0))
        return OutgoingRecord(topic="out", value=value)


def refused(hall: Hall, worker: PoolWorker) -> list[tuple[PoolRun, ParallelRecord, BaseException]]:
    return list(hall.committer.refused(worker))


def outputs_of(worker: PoolWorker) -> list[int]:
    return [record.offset for run in worker.finished for record, _ in run.outputs or ()]


def test_results_and_offsets_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    hall = Hall(monkeypatch)
    worker = hall.handled("abc")
    assert refused(hall, worker) == []
    hall.send(worker)
    assert not hall.committer._commit()
    assert hall.producer.committed == [b"0", b"1", b"2"]
    assert [each.offset for each in hall.producer.offsets] == [3]


def test_results_without_new_offsets_are_refused_of_a_former_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is done lies beyond the end of a map that is cut."""
    limits = FlowLimits(max_free_map_chars=1, max_map_chars=1)
    hall = Hall(monkeypatch, limits=limits)
    send_offsets = hall.producer.send_offsets

    def late(*args: Any, **more: Any) -> None:
        hall.commits.generation = b"2"
        send_offsets(*args, **more)

    monkeypatch.setattr(hall.producer, "send_offsets", late)
    worker = hall.handled("abc")
    del worker.finished[0]
    refused(hall, worker)
    hall.send(worker)
    assert hall.committer._commit()
    assert (hall.producer.committed, hall.producer.aborts) == ([], 1)


def test_a_transaction_does_not_go_without_its_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done beyond the offset would come again, and its results a second time."""
    hall = Hall(monkeypatch)
    worker = hall.handled("abc")
    refused(hall, worker)
    hall.send(worker)
    hall.commits.refuses = KafkaError.OFFSET_METADATA_TOO_LARGE
    with pytest.raises(BrokerError, match=r"raise offset\.metadata\.max\.bytes"):
        hall.committer._commit()
    assert (hall.producer.aborts, hall.producer.committed) == (1, [])


@pytest.mark.parametrize("when", ["before the commit", "on the way", "behind its offsets"])
def test_what_is_of_a_partition_that_has_gone_is_not_committed(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """On the way its offsets wait for a coordinator, while the group moves on; behind them its
    topic was made again, and the member is the same."""
    hall = Hall(monkeypatch)
    worker = hall.handled("abc")
    refused(hall, worker)
    hall.send(worker)
    send_offsets = hall.producer.send_offsets

    def go() -> None:
        hall.queue.scheduler.close(hall.partition)

    def late(*args: Any, **more: Any) -> None:
        if when == "on the way":
            go()
            hall.commits.generation = b"2"
        send_offsets(*args, **more)
        go()

    if when == "before the commit":
        go()
    else:
        monkeypatch.setattr(hall.producer, "send_offsets", late)
    assert hall.committer._commit()
    assert hall.producer.committed == []
    assert bool(hall.producer.offsets) is (when == "behind its offsets")
    assert (hall.producer.aborts, hall.rewinds) == (1, 1)


def test_an_event_loop_goes_on_while_a_transaction_has_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hall = Hall(monkeypatch)
    room = hall.producer.room = threading.Event()
    policy = FailurePolicy(hall.queue.config, hall.stats, pytest.fail, pytest.fail, pytest.fail)
    publisher = TransactionPublisher(hall.committer, policy)
    worker = hall.handled("abc")

    async def others() -> None:
        await asyncio.sleep(0.01)
        assert hall.committer.gate.locked()
        room.set()

    async def both() -> None:
        await asyncio.gather(take_async(publisher.publish(worker)), others())

    asyncio.run(asyncio.wait_for(both(), within(30)))
    assert not hall.committer.gate.locked()
    assert not hall.committer._commit()
    assert hall.producer.committed == [b"0", b"1", b"2"]


def test_results_of_an_old_assignment_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    hall = Hall(monkeypatch)
    worker = hall.handled("abc")
    refused(hall, worker)
    hall.queue.scheduler.close(hall.partition)
    hall.send(worker)
    assert not hall.committer._commit()
    assert hall.producer.committed == []
    assert hall.producer.aborts == 0


def test_who_is_to_blame_has_had_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    hall = Hall(monkeypatch)
    sizes = {1: 300, 2: 200}  # Kafka refuses the batch for the larger one's sake
    worker = hall.handled("abc", sizes)
    assert refused(hall, worker) == []
    hall.send(worker)
    assert hall.committer._commit()
    assert hall.producer.aborts == 1
    hall.again()
    worker = hall.handled("abc", sizes)
    ((run, record, error),) = refused(hall, worker)
    assert record.offset == 1
    assert record.attempt == 1
    assert isinstance(error, BrokerError)
    assert outputs_of(worker) == [0, 2]
    # With that attempt counted, it may be sent again.
    record._failure = transactions.Failure(1, error, "")
    run.outputs = [(record, hall.result(record, sizes))]
    assert refused(hall, worker) == []
    assert outputs_of(worker) == [0, 1, 2]
    hall.committer.give_up(record)  # nor is there a second dead letter
    assert refused(hall, worker) == []
    assert outputs_of(worker) == [0, 2]


def test_a_record_that_another_worker_gives_up_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An abort brings it here again while its dead letter is on its way: there is to be one."""
    hall = Hall(monkeypatch)
    sizes = {1: 300}
    worker = hall.handled("abc", sizes)
    assert refused(hall, worker) == []
    hall.send(worker)
    assert hall.committer._commit()
    hall.again()
    worker = hall.handled("abc", sizes)
    ((_, record, _),) = refused(hall, worker)
    hall.again()  # another's failure has aborted a transaction
    hall.add("abc")
    other = hall.workers[1]
    assert hall.queue.take(other) == []
    hall.committer.give_up(record)
    hall.send(worker)
    assert [each.offset for run in hall.queue.take(other) for each in run.records] == [0, 1, 2]


def test_who_is_done_after_all_is_to_blame_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hall = Hall(monkeypatch)
    worker = hall.handled("ab", {1: 200})
    refused(hall, worker)
    hall.send(worker)
    hall.committer._commit()
    hall.again()
    worker = hall.handled("ab")
    assert len(refused(hall, worker)) == 1
    hall.send(worker)  # as a dead letter is in place: done without a result
    assert not hall.committer._commit()
    assert hall.producer.committed == [b"0"]
    assert hall.committer._blamed == {}


class Ear:
    """What ``on_produced`` is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, bytes | None, int, int]] = []
        self.fails = False

    def __call__(
        self, record: ParallelRecord, result: OutgoingRecord, partition: int, offset: int
    ) -> None:
        self.told.append((record.offset, result.value, partition, offset))
        if self.fails:
            raise OSError("not now")


def test_results_are_told_behind_the_commit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hall, ear = Hall(monkeypatch), Ear()
    ear.fails = True  # it counts for nothing
    hall.committer.on_produced = ear
    worker = hall.handled("abc")
    refused(hall, worker)
    hall.send(worker)
    hall.producer.report()
    assert ear.told == []  # Kafka has them, in a transaction that may be aborted
    assert not hall.committer._commit()
    assert ear.told == [(0, b"0", 0, 100), (1, b"1", 0, 101), (2, b"2", 0, 102)]
    worker = hall.handled("d")
    refused(hall, worker)
    hall.send(worker)
    hall.committer._commit()
    assert [value for _, value, _, _ in ear.told[3:]] == [b"3"]


def test_of_what_is_aborted_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where Kafka confirms it later than that."""
    hall, ear = Hall(monkeypatch), Ear()
    hall.committer.on_produced = ear
    worker = hall.handled("abc", {1: 200})
    refused(hall, worker)
    hall.send(worker)
    late = hall.producer.reports.copy()
    assert hall.committer._commit()
    assert hall.producer.aborts == 1
    hall.producer.reports.clear()
    hall.again()
    worker = hall.handled("a")
    refused(hall, worker)
    hall.send(worker)
    for report in late:
        report()
    hall.committer._commit()
    assert ear.told == [(0, b"0", 0, 100)]


def test_a_transaction_with_much_to_tell_is_committed_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hall = Hall(monkeypatch)
    asked: list[None] = []
    monkeypatch.setattr(hall.committer, "request", lambda: asked.append(None))
    monkeypatch.setattr(transactions, "MAX_UNTOLD", 3)
    hall.committer.on_produced = Ear()
    for keys, count in (("ab", 0), ("cd", 1)):
        worker = hall.handled(keys)
        refused(hall, worker)
        hall.send(worker)
        hall.producer.report()
        hall.send(hall.workers[1])
        assert len(asked) == count


def test_a_stream_of_what_is_produced_has_its_bound() -> None:
    is_ending = False
    stream = ProducedStream(lambda: is_ending)
    record, result = Placed(0, "a"), OutgoingRecord(topic="out", value=b"")
    for number in range(MAX_WAITING):
        assert stream.await_room(0.0)
        stream.put(record, result, 0, number)
    assert not stream.await_room(0.0)
    found = stream.results(lambda: is_ending)
    assert next(found).offset == 0
    assert stream.await_room(0.0)
    stream.put(record, result, 0, MAX_WAITING)
    assert not stream.await_room(0.0)
    is_ending = True
    assert stream.await_room(0.0)
    stream.put(record, result, 0, MAX_WAITING + 1)
    assert [each.offset for each in found] == list(range(1, MAX_WAITING + 2))


def test_who_leaves_a_stream_is_told_what_was_left(caplog: pytest.LogCaptureFixture) -> None:
    stream = ProducedStream(lambda: False)
    record, result = Placed(0, "a"), OutgoingRecord(topic="out", value=b"")
    for number in range(3):
        stream.put(record, result, 0, number)
    found = stream.results(lambda: False)
    assert next(found).topic == "out"
    found.close()
    stream.put(record, result, 0, 3)  # nobody is there
    (line,) = caplog.records
    assert (line.levelname, line.count) == ("WARNING", 2)  # type: ignore[attr-defined]


def kafka_of(*orders: tuple[bytes, bytes | None]) -> str:
    """The address of a Kafka in memory with values and keys in "orders", and with a topic "out"."""
    servers = f"memory://{uuid.uuid4().hex}"
    for topic in ("orders", "out"):
        cluster_of(servers).create_topic(topic, 1)
    producer = open_producer({"bootstrap.servers": servers})
    for value, key in orders:
        producer.produce("orders", value, key)
    producer.flush(5)
    return servers


def test_a_key_is_in_one_handler_at_a_time_whatever_is_aborted() -> None:
    """Its partition is read again while its handler is still at work."""
    servers = kafka_of((b"slow", b"K"), (b"next", b"K"), (b"quick", b"other"))
    at_work, most, calls = Counter[bytes](), Counter[bytes](), Counter[bytes]()

    def refuse(kind: str, _client: str, _place: object) -> Fault | None:
        # The transaction that has its result is refused, and that of the start before it.
        if kind != "end_transaction" or calls[b"quick"] >= 2:
            return None
        return Fault(error=KafkaError(KafkaError.INVALID_TXN_STATE))

    cluster_of(servers).faults.plan = refuse
    go_on = threading.Event()

    def handle(record: ParallelRecord) -> OutgoingRecord:
        key, value = record.key or b"", record.value or b""
        at_work[key] += 1
        calls[value] += 1
        most[key] = max(most[key], at_work[key])
        if value == b"slow":
            go_on.wait(30)
        at_work[key] -= 1
        return OutgoingRecord(topic="out", value=value)

    with ParallelConsumer(
        "orders",
        group_id="g",
        bootstrap_servers=servers,
        concurrency=4,
        commit_mode="transactional",
    ) as consumer:
        consumer.poll_and_produce(handle)
        wait_until(lambda: calls[b"quick"] >= 2)
        assert (calls[b"slow"], calls[b"next"]) == (1, 0)
        go_on.set()
        wait_until(lambda: calls[b"next"] == 1)
    assert (calls[b"slow"], most[b"K"]) == (2, 1)


def test_no_transaction_is_made_of_what_is_only_read() -> None:
    servers = kafka_of((b"slow", None))
    member = open_consumer({"bootstrap.servers": servers, "group.id": "g"})
    member.commit(offsets=[TopicPartition("orders", 0, 0)], asynchronous=False)
    ends: list[str] = []

    def see(kind: str, _client: object, _place: object) -> None:
        if kind == "end_transaction":
            ends.append(kind)

    cluster_of(servers).faults.plan = see
    is_at_work, go_on = threading.Event(), threading.Event()

    def handle(record: ParallelRecord) -> OutgoingRecord:
        is_at_work.set()
        go_on.wait(30)
        return OutgoingRecord(topic="out", value=record.value)

    with ParallelConsumer(
        "orders", group_id="g", bootstrap_servers=servers, commit_mode="transactional"
    ) as consumer:
        consumer.poll_and_produce(handle)
        assert is_at_work.wait(within(10))
        consumer.commit_soon()
        wait_until(lambda: consumer.health().uncommitted == 0)
        assert ends == []
        go_on.set()
        wait_until(lambda: bool(ends))
    (committed,) = member.committed([TopicPartition("orders", 0)], timeout=5)
    member.close()
    assert (len(ends), committed.offset) == (1, 1)
