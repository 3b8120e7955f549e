"""Results of handlers: in what order they come, and when their records are done."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from confluent_kafka import KafkaError
from tests.unit.test_parallel_work_queue import Placed, Room
from tests.waiting import wait_until, within

from kafkamq import Ack, DeadlineExceededError, Reject, StateError, aio
from kafkamq.config import Backoff
from kafkamq.parallel.config import OnExhausted
from kafkamq.parallel.engine import Source
from kafkamq.parallel.failure_policy import FailurePolicy, ParallelDeadLetters, Unwritten
from kafkamq.parallel.record import ParallelRecord
from kafkamq.parallel.results import (
    Handling,
    OutgoingRecord,
    ProducePublisher,
    Publisher,
    ResultStream,
)
from kafkamq.queue.json_values import BodyError
from kafkamq.queue.schemas.registry import BodyUnavailableError
from kafkamq.queue.sure_writer import Written
from kafkamq.runtime.loop_executor import LoopExecutor
from kafkamq.runtime.steps import Steps, take
from kafkamq.runtime.thread_executor import ThreadExecutor
from kafkamq.runtime.work_queue import Executor, HandlerCall
from kafkamq.transport.clients import open_producer
from kafkamq.transport.clock import monotonic_ms
from kafkamq.transport.memory.cluster import MemoryKafka, cluster_of, forget_cluster
from kafkamq.transport.memory.state import Fault
from kafkamq.types import DeadLetterReason

SOON = Backoff(first=0.01, max=0.01, jitter=0.0)


class Message:
    """A delivery report's."""

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return 0


class ResultProducer:
    """Takes results; refuses those of a value as often as told, for their size by default."""

    def __init__(self, refusals: dict[bytes, int]) -> None:
        self.refusals = refusals
        self.why: KafkaError | StateError = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
        self.log: list[int] = []

    def send(self, out: OutgoingRecord, told: Any, *_: Any) -> bool:
        value = out.value or b""
        if self.refusals.get(value, 0) > 0:
            self.refusals[value] -= 1
            if isinstance(self.why, StateError):
                raise self.why
            told(self.why, Message())
            return True
        self.log.append(int(value))
        told(None, Message())
        return True


class Works:
    """One worker, with a publisher of results."""

    def __init__(self, **settings: Any) -> None:
        self.room = Room(backoff=SOON, **settings)
        self.letters: list[int] = []
        self.failures: list[BaseException] = []
        queue, stats = self.room.queue, self.room.stats
        self.dead_letters = ParallelDeadLetters(queue.config, queue, stats)
        self.policy = FailurePolicy(
            queue.config, stats, self.write, self.failures.append, self.dead_letters.hold
        )

    def write(self, record: ParallelRecord, *_: object) -> Written:
        self.letters.append(record.offset)
        written = Written()
        written.end(None)
        return written

    def work(
        self,
        handler: Callable[[ParallelRecord], object],
        publisher: Publisher,
        keys: str,
        *,
        is_async: bool = False,
        is_done: Callable[[], bool],
    ) -> None:
        takes_all = isinstance(publisher, ResultStream)
        queue = Handling(self.room.queue, self.policy, publisher, takes_all=takes_all)
        call = HandlerCall(function=handler, wants_all=takes_all, publishes=True)
        pool: Executor = ThreadExecutor(queue, call, 1)
        if is_async:

            async def handle(record: ParallelRecord) -> object:
                await asyncio.sleep(0)
                return handler(record)

            pool = LoopExecutor(
                queue, HandlerCall(function=handle, wants_all=takes_all, publishes=True), 1
            )
        self.room.add(keys)
        self.room.speed_up()
        pool.start()

        def tended() -> bool:
            self.room.queue.tend()
            self.dead_letters.tend()
            return is_done()

        try:
            wait_until(tended, "all results")
        finally:
            self.room.queue.stop()
            pool.join(within(30))

    def produce(
        self,
        refusals: dict[bytes, int],
        keys: str,
        *,
        is_async: bool,
        why: KafkaError | StateError | None = None,
    ) -> list[int]:
        results = ResultProducer(refusals)
        results.why = why or results.why
        publisher = ProducePublisher(
            self.room.queue, self.policy, results, timeout_s=5, on_produced=None
        )

        def handle(record: ParallelRecord) -> OutgoingRecord:
            return OutgoingRecord(topic="out", key=record.key, value=b"%d" % record.offset)

        end = len(keys)
        self.work(
            handle, publisher, keys, is_async=is_async, is_done=lambda: self.room.committable == end
        )
        self.room.queue.scheduler.check()
        return results.log


@pytest.mark.parametrize("is_async", [False, True])
def test_what_was_sent_before_a_refused_result_of_its_key_is_sent_again_behind_it(
    is_async: bool,
) -> None:
    works = Works()
    log = works.produce({b"1": 3}, "aaaaaa", is_async=is_async)
    assert log == [0, 2, 3, 4, 5, 1, 2, 3, 4, 5]  # once, however often it is refused
    assert works.room.stats.failed == 3


def test_results_of_a_partition_that_has_gone_are_not_sent() -> None:
    """Its next owner processes the records again, and sends what comes of them."""
    works, results = Works(), ResultProducer({})
    room = works.room
    publisher = ProducePublisher(room.queue, works.policy, results, timeout_s=5, on_produced=None)

    def handle(record: ParallelRecord) -> OutgoingRecord:
        if record.offset == 1:
            room.queue.close(room.partition)
        return OutgoingRecord(topic="out", value=b"%d" % record.offset)

    works.work(handle, publisher, "ab", is_done=lambda: room.queue.totals().completed == 2)
    assert results.log == []


def test_what_fails_in_a_partition_that_has_gone_is_no_dead_letter() -> None:
    """Its next owner processes it again, and decides."""
    works = Works(max_attempts=1, dead_letter_topic="dead")
    room = works.room

    def handle(record: ParallelRecord) -> object:
        room.queue.close(room.partition)
        raise ValueError("poison")

    publisher = ProducePublisher(
        room.queue, works.policy, ResultProducer({}), timeout_s=5, on_produced=None
    )
    works.work(handle, publisher, "a", is_done=lambda: room.queue.totals().completed == 1)
    assert works.letters == []


def test_a_stream_tells_nothing_of_a_partition_that_has_gone() -> None:
    works = Works()
    room = works.room
    stream = ResultStream(room.queue)
    works.work(lambda _: "result", stream, "ab", is_done=lambda: room.queue.totals().completed == 2)
    room.queue.close(room.partition)
    ends = iter([False, False, True])
    assert list(stream.results(lambda: next(ends))) == []


def test_of_other_keys_nothing_is_sent_again() -> None:
    log = Works().produce({b"1": 2, b"2": 1}, "abcb", is_async=False)
    assert sorted(log) == [0, 1, 2, 3, 3]
    assert log.index(1) < len(log) - 1 - log[::-1].index(3)


def test_behind_a_dead_letter_nothing_is_sent_again() -> None:
    works = Works(max_attempts=2, dead_letter_topic="dead")
    log = works.produce({b"1": 9}, "aaaa", is_async=False)
    assert (log, works.letters) == ([0, 2, 3, 2, 3], [1])
    works = Works(max_attempts=1, dead_letter_topic="dead")
    log = works.produce({b"1": 9}, "aaaa", is_async=False)
    assert (log, works.letters) == ([0, 2, 3], [1])


@pytest.mark.parametrize("on_exhausted", [OnExhausted.DEAD_LETTER, OnExhausted.SKIP])
def test_what_was_given_up_behind_a_refused_result_is_not_handled_again(
    on_exhausted: OnExhausted,
) -> None:
    """Its dead letter is in Kafka: another attempt would write a second one."""
    works = Works(max_attempts=3, on_exhausted=on_exhausted, dead_letter_topic="dead")
    publisher = ProducePublisher(
        works.room.queue, works.policy, ResultProducer({b"0": 1}), timeout_s=5, on_produced=None
    )
    begun: list[int] = []

    def handle(record: ParallelRecord) -> object:
        begun.append(record.offset)
        if record.offset == 1:
            return Reject("no good")
        return OutgoingRecord(topic="out", key=record.key, value=b"%d" % record.offset)

    works.work(handle, publisher, "aaa", is_done=lambda: works.room.committable == 3)
    works.room.queue.scheduler.check()
    # The refusal may come before record 2 was begun: then that is begun once.
    assert begun in ([0, 1, 2, 0, 2], [0, 1, 0, 2])
    assert works.letters == ([1] if on_exhausted is OnExhausted.DEAD_LETTER else [])
    assert works.room.stats.processed == 3


@pytest.mark.parametrize("is_early", [False, True])
def test_a_record_whose_dead_letter_is_refused_is_not_handled_again_behind_another(
    is_early: bool,
) -> None:
    """The one before it is tried again; it waits for its letter, and what is behind it waits."""
    works = Works(max_attempts=1, dead_letter_topic="dead")
    refused = Written()
    refused.first.set_exception(RuntimeError("not now"))
    results = ResultProducer({b"0": 2})
    results.why = KafkaError(KafkaError._MSG_TIMED_OUT)
    begun: list[int] = []

    def write(record: ParallelRecord, *_: object) -> Written:
        works.letters.append(record.offset)
        return refused

    def handle(record: ParallelRecord) -> object:
        begun.append(record.offset)
        if record.offset == 1:
            return Reject("no good")
        if is_early and len(begun) == 3:  # while what is before it is tried again
            refused.last.set_result(None)
        return OutgoingRecord(topic="out", key=record.key, value=b"%d" % record.offset)

    def is_done() -> bool:
        if results.log and not refused.last.done():
            refused.last.set_result(None)
        return works.room.committable == 3

    works.policy = replace(works.policy, write=write)
    publisher = ProducePublisher(
        works.room.queue, works.policy, results, timeout_s=5, on_produced=None
    )
    works.work(handle, publisher, "aaa", is_done=is_done)
    works.room.queue.scheduler.check()
    assert begun == [0, 1, 0, 0, 2]
    assert works.letters == [1]
    assert works.room.queue.held == set()


def test_a_record_that_stalls_while_its_dead_letter_is_refused_has_one() -> None:
    works = Works(max_attempts=1, dead_letter_topic="dead")
    works.room.add("a")
    record = works.room.queue.find(works.room.partition, 0)
    assert record is not None
    letters = works.dead_letters
    first, second = [Written(partial(letters.is_open, record)) for _ in range(2)]
    letters.hold(record, DeadLetterReason.MAX_DELIVERIES, first)
    letters.hold(record, DeadLetterReason.MAX_LEASE, second)
    assert not second.drop_if_unwanted()
    first.end(None)
    assert second.drop_if_unwanted()
    works.dead_letters.tend()
    assert works.room.stats.dead_lettered == 1


def test_a_letter_that_is_written_before_its_run_is_released_is_the_only_one() -> None:
    works = Works(max_attempts=1, dead_letter_topic="dead")
    refused = Written()
    refused.first.set_exception(RuntimeError("not now"))
    results = ResultProducer({b"0": 1})
    results.why = KafkaError(KafkaError._MSG_TIMED_OUT)
    begun: list[int] = []

    def write(record: ParallelRecord, *_: object) -> Written:
        works.letters.append(record.offset)
        return refused

    def granted(_: float) -> bool:  # before the result is sent
        if works.letters and not refused.last.done():
            refused.last.set_result(None)
        return True

    def handle(record: ParallelRecord) -> object:
        begun.append(record.offset)
        if record.offset == 1:
            return Reject("no good")
        return OutgoingRecord(topic="out", key=record.key, value=b"%d" % record.offset)

    works.policy = replace(works.policy, write=write)
    publisher = ProducePublisher(
        works.room.queue, works.policy, results, 5, None, await_room=granted
    )
    works.work(handle, publisher, "aaa", is_done=lambda: works.room.committable == 3)
    works.room.queue.scheduler.check()
    assert (begun, works.letters) == ([0, 1, 0, 2], [1])


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_ends_the_reading_of_results_is_an_attempt(
    is_async: bool, kind: type[BaseException]
) -> None:
    works = Works(max_attempts=2, dead_letter_topic="dead")
    results = ResultProducer({})
    publisher = ProducePublisher(
        works.room.queue, works.policy, results, timeout_s=5, on_produced=None
    )

    def lazily(record: ParallelRecord) -> Iterator[OutgoingRecord]:
        if record.offset == 1:
            raise kind
        yield OutgoingRecord(topic="out", key=record.key, value=b"%d" % record.offset)

    works.work(
        lazily,
        publisher,
        "aaa",
        is_async=is_async,
        is_done=lambda: bool(works.failures) or works.room.committable == 3,
    )
    assert (works.failures, works.letters) == ([], [1])
    assert results.log[-1] == 2


def test_a_loop_whose_slot_ends_fails_its_consumer() -> None:
    """Else nothing is handled any more, and nobody knows."""

    class Broken:
        def publish(self, worker: object) -> Steps[None]:
            raise SystemExit(3)
            yield

    works = Works()
    works.work(
        lambda _: "result", Broken(), "a", is_async=True, is_done=lambda: bool(works.failures)
    )
    assert isinstance(works.failures[0], SystemExit)


def test_only_the_first_refusal_of_a_key_is_an_attempt() -> None:
    works = Works(max_attempts=2, dead_letter_topic="dead")
    log = works.produce({b"%d" % number: 1 for number in range(4)}, "aaaa", is_async=False)
    assert works.letters == []
    assert log[-4:] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "why",
    [
        KafkaError(KafkaError._MSG_TIMED_OUT),
        KafkaError(KafkaError._PURGE_QUEUE),
        KafkaError(KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND),
        KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED),
        KafkaError(KafkaError.UNKNOWN_PRODUCER_ID, "the client has ended", True),
        StateError("the producer is closed"),
    ],
    ids=str,
)
def test_a_result_that_is_not_written_is_no_failure_of_its_handler(
    why: KafkaError | StateError,
) -> None:
    """What is skipped then would be lost, though its handler ended well."""
    works = Works(max_attempts=1, on_exhausted=OnExhausted.SKIP, retry_on={ValueError: None})
    log = works.produce({b"1": 3}, "aaa", is_async=False, why=why)
    assert log[-2:] == [1, 2]
    assert works.room.stats.skipped == 0
    assert works.room.stats.failed == 3


def test_max_attempts_are_of_what_failed_by_itself() -> None:
    works = Works(max_attempts=2, dead_letter_topic="dead")
    record = Placed(0, "a")
    late = Unwritten(DeadlineExceededError("no answer"))
    due = [take(works.policy.apply(record, each)) for each in (late, late, ValueError("no"), late)]
    assert None not in due
    assert record.attempt == 5
    assert take(works.policy.apply(record, ValueError("no"))) is None
    assert works.letters == [0]


def test_a_body_that_nobody_can_read_yet_is_no_attempt() -> None:
    """The record is due again when the registry may be asked again, not by the back-off."""
    works = Works(max_attempts=1, dead_letter_topic="dead")
    record = Placed(0, "a")
    for _ in range(3):
        due_ms = take(works.policy.apply(record, BodyUnavailableError("nobody", delay_s=900.0)))
        assert due_ms is not None
        assert due_ms > monotonic_ms() + 600_000
    assert works.letters == []
    assert take(works.policy.apply(record, BodyError("no"))) is None
    assert works.letters == [0]


def test_a_stream_waits_for_results_alone() -> None:
    """Records with a verdict, and those that are given up, are done without being taken."""
    works = Works(max_attempts=1, dead_letter_topic="dead")
    stream = ResultStream(works.room.queue)

    def handle(record: ParallelRecord) -> object:
        if record.offset == 0:
            raise ValueError("poison")
        return {1: Reject("no"), 2: Ack(), 3: None}.get(record.offset, "result")

    found: list[int] = []

    def is_done() -> bool:
        results = stream.results(lambda: stream._waiting.empty())
        found.extend(record.offset for record, _ in results)
        return works.room.committable == 12

    works.work(handle, stream, "abcdefaabbcc", is_done=is_done)
    assert sorted(found) == list(range(3, 12))
    assert sorted(works.letters) == [0, 1]
    assert works.room.stats.processed == 12
    works.room.queue.scheduler.check()


def test_a_stream_waits_behind_a_failure() -> None:
    works = Works()
    stream = ResultStream(works.room.queue)

    def handle(record: ParallelRecord) -> int:
        if record.offset == 2 and record.attempt < 3:
            raise ValueError("not yet")
        return record.offset

    found: list[int] = []

    def is_done() -> bool:
        found.extend(record.offset for record, _ in stream.results(stream._waiting.empty))
        return works.room.committable == 5

    works.work(handle, stream, "aaaaa", is_done=is_done)
    assert found == [0, 1, 2, 3, 4]


def test_what_a_stream_holds_is_in_flight_until_the_next_result_is_asked_for() -> None:
    """A revocation waits for it; else another member would do again what is just being done."""
    works = Works()
    queue, partition = works.room.queue, works.room.partition
    stream = ResultStream(queue)

    def is_in_flight() -> bool:
        return queue.has_in_flight([partition])

    works.work(lambda _: "result", stream, "ab", is_done=lambda: stream._waiting.qsize() == 2)
    results = stream.results(lambda: not is_in_flight())
    taken = []
    for record, _ in results:
        assert is_in_flight()
        taken.append(record.offset)
    assert sorted(taken) == [0, 1]
    assert works.room.committable == 2


@pytest.fixture
def memory() -> Iterator[tuple[str, MemoryKafka]]:
    name = f"memory://{uuid.uuid4().hex}"
    cluster = cluster_of(name)
    for topic in ("in", "out"):
        cluster.create_topic(topic, 1)
    yield name, cluster
    forget_cluster(name)


def test_a_full_queue_does_not_block_the_callers_loop(memory: tuple[str, MemoryKafka]) -> None:
    """The loop turns between two looks whether there is room."""
    name, cluster = memory
    looks = 0  # since the loop turned
    has_blocked = has_room = False

    def is_full(_: object) -> bool:
        nonlocal looks, has_blocked
        looks += 1
        has_blocked = has_blocked or looks > 20
        return not has_room and not has_blocked

    async def handle(record: ParallelRecord) -> OutgoingRecord:
        return OutgoingRecord(topic="out", value=record.value)

    async def main() -> None:
        nonlocal looks, has_room
        async with aio.ParallelConsumer("in", bootstrap_servers=name, group_id="g") as consumer:
            produced = consumer.produce_and_stream(handle)
            cluster.faults.is_full = is_full
            told = asyncio.ensure_future(anext(produced))
            turns = 0
            while turns < 20 and not has_blocked:
                turns += bool(looks)
                looks = 0
                await asyncio.sleep(0.001)
            has_room = True
            assert (await told).result.value == b"x"

    sender = open_producer({"bootstrap.servers": name})
    sender.produce("in", b"x")
    sender.flush(within(10))
    asyncio.run(main())
    assert not has_blocked


def test_closing_what_connects_does_not_block_the_callers_loop(
    memory: tuple[str, MemoryKafka], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, cluster = memory
    asked, closers = threading.Event(), list[threading.Thread]()
    close = Source.close

    def closed(source: Source) -> None:
        closers.append(threading.current_thread())
        close(source)

    def lose(*_: object) -> Fault:
        asked.set()
        return Fault(is_lost=True)

    async def handle(record: ParallelRecord) -> None: ...

    async def main() -> None:
        consumer = aio.ParallelConsumer("in", bootstrap_servers=name, group_id="g")
        connecting = asyncio.ensure_future(consumer.poll(handle))
        while not asked.is_set():
            await asyncio.sleep(0.001)
        await consumer.close()
        with pytest.raises(StateError, match="closed while it connected"):
            await connecting

    monkeypatch.setattr(Source, "close", closed)
    cluster.faults.plan = lose
    asyncio.run(main())
    assert closers
    assert threading.main_thread() not in closers
