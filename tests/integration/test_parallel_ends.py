"""The parallel consumer where something ends: handlers in odd ways, loops, starts, commits."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest
from tests.integration.parallel_tools import (
    Seen,
    committed,
    fill,
    make,
    make_topic,
    read_all,
)
from tests.sure_producer import SureProducer
from tests.waiting import wait_until, within

from kafkamq import (
    BrokerError,
    OutgoingRecord,
    ParallelConsumer,
    ParallelRecord,
    Reject,
    StateError,
    aio,
)
from kafkamq.config import Backoff
from kafkamq.runtime.thread_executor import ThreadExecutor
from kafkamq.transport.transactions import TransactionalProducer

SOON = Backoff(first=0.05, max=0.05, jitter=0.0)
ODD = {3: asyncio.CancelledError, 4: KeyboardInterrupt, 5: SystemExit, 6: GeneratorExit}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("batch_size", [0, 4])
def test_whatever_a_handler_raises_is_an_attempt(
    bootstrap: str, namespace: str, is_async: bool, batch_size: int
) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n}" for n in range(20)])
    attempts: Counter[int] = Counter()

    def handle(found: ParallelRecord | list[ParallelRecord]) -> None:
        records = found if isinstance(found, list) else [found]
        attempts.update(record.offset for record in records)
        for record in records:
            if record.offset in ODD and record.attempt == 1:
                raise ODD[record.offset]

    async def handle_async(found: ParallelRecord | list[ParallelRecord]) -> None:
        await asyncio.sleep(0)
        handle(found)

    options = {"backoff": SOON, "batch_size": batch_size, "concurrency": 3}
    with make(bootstrap, topic, namespace, **options) as consumer:
        consumer.poll(handle_async if is_async else handle)
        wait_until(lambda: committed(bootstrap, namespace, topic) == (20, ""), what="the commit")
        assert consumer.health().is_alive
    assert all(attempts[offset] >= 2 for offset in ODD)


def test_a_loop_that_ends_first_fails_its_consumer(bootstrap: str, namespace: str) -> None:
    """It does not go on as a member that does nothing."""
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, ["a"] * 10)
    begun = threading.Event()

    async def handle(record: ParallelRecord) -> None:
        begun.set()
        await asyncio.sleep(60)

    async def forget() -> aio.ParallelConsumer:
        consumer = aio.ParallelConsumer(topic, group_id=namespace, bootstrap_servers=bootstrap)
        await consumer.poll(handle)
        await asyncio.to_thread(begun.wait, 30)
        return consumer

    consumer = asyncio.run(forget())
    wait_until(lambda: consumer.health().state == "failed", what="the end")
    assert isinstance(consumer.failure, StateError)
    assert "event loop" in str(consumer.failure)
    asyncio.run(asyncio.wait_for(consumer.close(), within(60)))
    seen = Seen()
    with make(bootstrap, topic, namespace) as another:  # it has left
        another.poll(seen)
        wait_until(lambda: len(seen) == 10, what="all records")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_may_close_its_consumer(bootstrap: str, namespace: str, is_async: bool) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, ["a"] * 100)
    consumer = make(bootstrap, topic, namespace, ordering="partition")

    def handle(record: ParallelRecord) -> None:
        if record.offset == 30:
            consumer.close()
            consumer.drain()

    async def handle_async(record: ParallelRecord) -> None:
        handle(record)

    consumer.poll(handle_async if is_async else handle)
    assert consumer.wait(within(60))
    consumer.close()
    assert committed(bootstrap, namespace, topic)[0] == 31  # it begins nothing more


def test_a_close_ends_a_drain(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, ["a"] * 10)
    begun, gate = threading.Event(), threading.Event()

    def handle(record: ParallelRecord) -> None:
        begun.set()
        gate.wait(within(60))

    consumer = make(bootstrap, topic, namespace)
    consumer.poll(handle)
    assert begun.wait(within(60))
    drain = threading.Thread(target=consumer.drain, args=(1000.0,))
    drain.start()
    wait_until(lambda: consumer.health().state == "draining")
    consumer.close(timeout=0.1)
    assert consumer.health().state == "closed"
    gate.set()
    drain.join(within(60))
    assert not drain.is_alive()


def test_a_hook_may_close_its_consumer(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, ["a"] * 10)
    offsets: list[int] = []

    def on_committed(found: dict[tuple[str, int], int]) -> None:
        offsets.append(found[topic, 0])
        if offsets[-1] == 10:
            consumer.close()

    consumer = make(bootstrap, topic, namespace, on_committed=on_committed)
    consumer.poll(Seen())
    assert consumer.wait(within(60))
    assert offsets[-1] == 10


@pytest.mark.parametrize("what", ["transactions", "threads"])
def test_a_start_that_fails_leaves_nothing_behind(
    bootstrap: str, namespace: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, ["a"])
    before = set(threading.enumerate())
    mode = "transactional" if what == "transactions" else "asynchronous"
    consumer = make(bootstrap, topic, namespace, commit_mode=mode)

    def fail(*_: object) -> None:
        raise BrokerError(f"no {what} here", code="NO")

    owner, name = (TransactionalProducer, "init") if mode[0] == "t" else (ThreadExecutor, "start")
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(BrokerError, match=what):
        consumer.poll_and_produce(lambda record: None)
    consumer.close()
    assert consumer.health().state == "failed"
    left = set(threading.enumerate()) - before
    assert not [each for each in left if each.name == "kafkamq-commits"]


def test_a_commit_without_an_answer_delays_leaving_and_not_closing(
    bootstrap: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, ["a"] * 10)
    consumer = make(bootstrap, topic, namespace, commit_timeout=0.3)
    gate, is_inside = threading.Event(), threading.Event()
    commit = consumer._engine._source.commits.commit

    def slow(commits: list, *more: object) -> None:
        if any(each.offset == 10 for each in commits):
            is_inside.set()
            assert gate.wait(3600)  # longer than this test may take
        commit(commits, *more)

    monkeypatch.setattr(consumer._engine._source.commits, "commit", slow)
    consumer.poll(Seen())
    assert is_inside.wait(within(60))
    consumer.close(timeout=0.5)
    gate.set()  # now it leaves
    seen = Seen()
    fill(bootstrap, topic, ["b"])
    with make(bootstrap, topic, namespace) as another:
        another.poll(seen)
        wait_until(lambda: len(seen) >= 1, what="the next record")
    assert seen.places == [(0, 10)]


def test_runs_in_order_end_after_the_record_that_they_are_at(
    bootstrap: str, namespace: str
) -> None:
    """What its worker had taken along is not begun after ``close``, and what is done counts."""
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, ["a"] * 500)
    is_slow, begun = threading.Event(), threading.Event()

    def handle(record: ParallelRecord) -> None:
        if record.offset >= 300:
            begun.set()
            is_slow.wait(1.0)

    seen = Seen(handle)
    consumer = make(bootstrap, topic, namespace, commit_interval=60)
    consumer.poll(seen)
    assert begun.wait(within(60))
    consumer.close()
    assert len(seen) <= 303
    assert committed(bootstrap, namespace, topic) == (len(seen), "")


def test_results_that_are_none_fail_their_record_alone(bootstrap: str, namespace: str) -> None:
    """Wrong types, generators that raise, hooks that raise: neither the consumer nor others."""
    topic, results = make_topic(bootstrap, namespace), make_topic(bootstrap, f"{namespace}-out")
    letters = make_topic(bootstrap, f"{namespace}-dead")
    fill(bootstrap, topic, [f"k{n}" for n in range(20)])

    def breaking(record: ParallelRecord) -> object:
        yield OutgoingRecord(topic=results, value=record.value)
        raise OSError("in the middle")

    def handle(record: ParallelRecord) -> object:
        wrong: dict[int, object] = {3: "text", 4: 5, 5: [None], 6: breaking(record)}
        if record.offset == 7:
            return OutgoingRecord(topic=results, value="no bytes")
        if record.offset == 8:
            return OutgoingRecord(topic=results, value=b"", headers={"a": 1})
        found = wrong.get(record.offset)
        return OutgoingRecord(topic=results, value=record.value) if found is None else found

    def on_produced(*_: object) -> None:
        raise SystemExit

    options = {"max_attempts": 2, "backoff": SOON, "dead_letter_topic": letters}
    for mode in ("asynchronous", "transactional"):
        group = f"{namespace}-{mode}"
        with make(bootstrap, topic, group, commit_mode=mode, **options) as consumer:
            consumer.poll_and_produce(handle, on_produced)
            wait_until(lambda: committed(bootstrap, group, topic) == (20, ""))  # noqa: B023
    values = Counter(int(record.value()) for record in read_all(bootstrap, letters, 12))
    assert values == Counter(dict.fromkeys(range(3, 9), 2))


@pytest.mark.parametrize("mode", ["asynchronous", "transactional"])
def test_a_result_that_kafka_refuses_is_a_dead_letter_in_the_end(
    bootstrap: str, namespace: str, mode: str
) -> None:
    """Kafka refuses all that are in a batch with it; nobody else is to blame."""
    topic, letters = make_topic(bootstrap, namespace), make_topic(bootstrap, f"{namespace}-dead")
    results = make_topic(bootstrap, f"{namespace}-out", max_message_bytes="50000")
    fill(bootstrap, topic, [f"k{n % 20}" for n in range(200)])

    def handle(record: ParallelRecord) -> OutgoingRecord:
        value = b"x" * 100_000 if record.offset == 50 else b"%d" % record.offset
        return OutgoingRecord(topic=results, key=record.key, value=value)

    options = {"max_attempts": 2, "backoff": SOON, "dead_letter_topic": letters}
    with make(bootstrap, topic, namespace, commit_mode=mode, **options) as consumer:
        consumer.poll_and_produce(handle)
        wait_until(lambda: committed(bootstrap, namespace, topic) == (200, ""), "the commit", 60)
    found = sorted(int(record.value()) for record in read_all(bootstrap, results, 199))
    assert found == [number for number in range(200) if number != 50]
    (letter,) = read_all(bootstrap, letters, 1)
    assert letter.value() == b"50"


def test_a_dead_letter_that_is_too_large_refers_to_its_record(
    bootstrap: str, namespace: str
) -> None:
    topic = make_topic(bootstrap, namespace)
    letters = make_topic(bootstrap, f"{namespace}-dead", max_message_bytes="2000")
    producer = SureProducer({"bootstrap.servers": bootstrap})
    producer.produce(topic, b"x" * 100_000, b"large value", headers=[("a", b"1")])
    producer.produce(topic, b"large headers", b"key", headers=[("a", b"x" * 100_000)])
    producer.confirm(30)
    attempts: Counter[int] = Counter()

    def handle(record: ParallelRecord) -> Reject:
        attempts[record.offset] += 1
        return Reject("no use")

    options = {"backoff": SOON, "dead_letter_topic": letters}
    with make(bootstrap, topic, namespace, **options) as consumer:
        consumer.poll(handle)
        wait_until(lambda: committed(bootstrap, namespace, topic) == (2, ""), "the commit", 60)
    assert attempts == Counter([0, 1])
    found = {dict(each.headers())["kafkamq-id"]: each for each in read_all(bootstrap, letters, 2)}
    value, headers = (found[f"{topic}/0/{offset}".encode()] for offset in (0, 1))
    assert (value.value(), value.key(), dict(value.headers())["a"]) == (None, b"large value", b"1")
    assert (headers.value(), headers.key()) == (None, None)
    for offset, letter in enumerate((value, headers)):
        told = dict(letter.headers())
        assert told["kafkamq-payload-at"].startswith(f"{topic}/0/{offset}/".encode())
        assert told["kafkamq-queue-id"] == namespace.encode()


def test_a_stall_is_parked_when_the_dead_letters_are_back(
    bootstrap: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n}" for n in range(10)])
    letters = f"{namespace}-dead"  # there is no such topic yet
    gate = threading.Event()
    seen = Seen(lambda record: gate.wait(within(60)) and None if record.offset == 4 else None)
    options = {"stall_after": 1.0, "on_stall": "dead-letter", "dead_letter_topic": letters}
    kafka = {"message.timeout.ms": "1000"}
    with make(bootstrap, topic, namespace, kafka=kafka, **options) as consumer:
        consumer.poll(seen)
        wait_until(lambda: "it is tried again" in caplog.text, what="a refusal")
        wait_until(lambda: committed(bootstrap, namespace, topic)[0] == 4, what="those before it")
        make_topic(bootstrap, letters)
        wait_until(lambda: committed(bootstrap, namespace, topic)[0] == 10, what="the offset")
        gate.set()
    assert [letter.value() for letter in read_all(bootstrap, letters, 1)] == [b"4"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_refused_dead_letter_calls_no_handler_again(
    bootstrap: str, namespace: str, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    """What is behind it in its order waits for the letter; the rest does not."""
    topic, dead = make_topic(bootstrap, namespace), f"{namespace}-dead"  # not made yet
    fill(bootstrap, topic, ["a", "a", "b"])
    calls: list[int] = []

    def handle(record: ParallelRecord) -> Reject | None:
        calls.append(record.offset)
        return Reject("no good") if record.offset == 0 else None

    async def handle_async(record: ParallelRecord) -> Reject | None:
        return handle(record)

    kafka = {"message.timeout.ms": "1000"}
    told: list[str] = []
    options = {"backoff": Backoff(first=0.01, max=0.01), "dead_letter_topic": dead}
    options["on_dead_letter"] = lambda record, reason: told.append(reason)
    with make(bootstrap, topic, namespace, kafka=kafka, **options) as consumer:
        consumer.poll(handle_async if is_async else handle)
        wait_until(lambda: "it is tried again" in caplog.text, what="a refusal")
        assert sorted(calls) == [0, 2]
        make_topic(bootstrap, dead)
        wait_until(lambda: committed(bootstrap, namespace, topic)[0] == 3, what="the offset")
        assert sorted(calls) == [0, 1, 2]
    assert told == ["rejected"]
    (letter,) = read_all(bootstrap, dead, 1)
    assert dict(letter.headers())["kafkamq-error"] == b"no good"


def test_a_stream_on_the_callers_loop(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n % 5}" for n in range(1000)])

    async def double(record: ParallelRecord) -> int:
        await asyncio.sleep(0)
        return int(record.value or b"") * 2

    async def main() -> list[tuple[int, object]]:
        found = []
        async with aio.ParallelConsumer(
            topic, group_id=namespace, bootstrap_servers=bootstrap
        ) as consumer:
            async for record, result in consumer.stream(double):
                found.append((record.offset, result))
                if len(found) == 1000:
                    await consumer.close()
        return found

    found = asyncio.run(asyncio.wait_for(main(), within(60)))
    assert sorted(found) == [(number, 2 * number) for number in range(1000)]
    assert committed(bootstrap, namespace, topic)[0] >= 900  # the last one was not asked behind


@pytest.mark.parametrize("mode", ["asynchronous", "transactional"])
def test_produced_results_on_the_callers_loop(bootstrap: str, namespace: str, mode: str) -> None:
    topic, results = make_topic(bootstrap, namespace), make_topic(bootstrap, f"{namespace}-out")
    fill(bootstrap, topic, [f"k{n % 5}" for n in range(1000)])

    async def handle(record: ParallelRecord) -> OutgoingRecord:
        await asyncio.sleep(0)
        return OutgoingRecord(topic=results, value=record.value)

    async def main() -> list[tuple[int, bytes | None]]:
        found = []
        async with aio.ParallelConsumer(
            topic, group_id=namespace, bootstrap_servers=bootstrap, commit_mode=mode
        ) as consumer:
            async for produced in consumer.produce_and_stream(handle):
                found.append((produced.offset, produced.result.value))
                if len(found) == 1000:
                    await consumer.close()
        return found

    found = asyncio.run(asyncio.wait_for(main(), within(60)))
    assert committed(bootstrap, namespace, topic) == (1000, "")
    there = [(record.offset(), record.value()) for record in read_all(bootstrap, results, 1000)]
    assert sorted(found) == sorted(there)


def test_groups_whose_names_are_long_or_foreign(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, ["a"])
    for group in (namespace + "g" * 150, f"{namespace}-日本語のとても長いグループ名です"):
        seen = Seen()
        with make(bootstrap, topic, group) as consumer:
            consumer.poll(seen)
            wait_until(lambda: len(seen) == 1)  # noqa: B023


class Named(ParallelConsumer):
    """A user's own."""

    def commit_soon(self) -> None:
        self.asked = True
        super().commit_soon()


def test_two_topics_with_the_same_keys_in_a_class_of_ones_own(
    bootstrap: str, namespace: str
) -> None:
    topics = [make_topic(bootstrap, f"{namespace}-{name}") for name in "ab"]
    for topic in topics:
        fill(bootstrap, topic, [f"k{n % 5}" for n in range(500)])
    order: dict[tuple[str, bytes | None], list[int]] = {}
    gate = threading.Event()

    def handle(record: ParallelRecord) -> None:
        if record.topic == topics[0] and record.offset == 0:
            gate.wait(within(60))  # holds back its key in its topic, and nothing else
        order.setdefault((record.topic, record.key), []).append(record.offset)

    with Named(
        topics, group_id=namespace, bootstrap_servers=bootstrap, commit_interval=0.1
    ) as consumer:
        consumer.poll(handle)
        wait_until(lambda: sum(map(len, order.values())) == 900, what="all other keys")
        gate.set()
        wait_until(lambda: committed(bootstrap, namespace, topics[0]) == (500, ""))
        consumer.commit_soon()
        wait_until(lambda: committed(bootstrap, namespace, topics[1]) == (500, ""))
    assert len(order) == 10
    assert all(offsets == sorted(offsets) for offsets in order.values())
    assert consumer.asked


def test_nothing_at_all(bootstrap: str, namespace: str) -> None:
    """No records: a member like others, that commits where it begins and ends at once."""
    topic = make_topic(bootstrap, namespace, 2)
    consumer = make(bootstrap, topic, namespace)
    consumer.poll(Seen())
    wait_until(lambda: consumer.health().is_ready, what="its partitions")
    wait_until(lambda: committed(bootstrap, namespace, topic) == (0, ""), what="the start")
    consumer.drain()
