"""Results of the parallel consumer: produced, streamed, in transactions; lists and processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest
from tests.integration.parallel_kills import ready_children
from tests.integration.parallel_processes import Unloadable, double_check, hang, square
from tests.integration.parallel_tools import (
    Seen,
    committed,
    fill,
    make,
    make_topic,
    read_all,
)
from tests.waiting import wait_until, within

from kafkamq import BrokerError, ConfigError, Nack, OutgoingRecord, ParallelRecord, Produced
from kafkamq.config import Backoff

SOON = Backoff(first=0.05, max=0.05, jitter=0.0)


@pytest.mark.parametrize("mode", ["asynchronous", "transactional"])
@pytest.mark.parametrize("is_async", [False, True])
def test_results_are_produced(bootstrap: str, namespace: str, mode: str, is_async: bool) -> None:
    topic, results = make_topic(bootstrap, namespace), make_topic(bootstrap, f"{namespace}-out", 2)
    fill(bootstrap, topic, [f"k{n % 20}" for n in range(2000)])
    told: list[tuple[int, int, bytes]] = []

    def on_produced(_: object, result: OutgoingRecord, partition: int, offset: int) -> None:
        told.append((partition, offset, result.value or b""))

    def handle(record: ParallelRecord) -> object:
        if record.offset % 100 == 7 and record.attempt == 1:
            raise OSError("not yet")
        if record.offset % 10 == 0:
            return None
        out = OutgoingRecord(topic=results, key=record.key, value=b"%d" % record.offset)
        return out if record.offset % 2 else [out, out]

    async def handle_async(record: ParallelRecord) -> object:
        return handle(record)

    with make(bootstrap, topic, namespace, commit_mode=mode, backoff=SOON) as consumer:
        consumer.poll_and_produce(handle_async if is_async else handle, on_produced)
        wait_until(lambda: committed(bootstrap, namespace, topic) == (2000, ""), what="the commit")
    expected = {n: 1 if n % 2 else 2 for n in range(2000) if n % 10}
    found = read_all(bootstrap, results, sum(expected.values()), 2)
    counts: dict[int, int] = {}
    by_key: dict[bytes, list[int]] = {}
    for record in found:
        counts[int(record.value())] = counts.get(int(record.value()), 0) + 1
        by_key.setdefault(record.key(), []).append(int(record.value()))
    assert counts == expected
    assert all(offsets == sorted(offsets) for offsets in by_key.values())
    places = [(record.partition(), record.offset(), record.value()) for record in found]
    assert sorted(told) == sorted(places)  # each once


def test_an_aborted_transaction_is_processed_again(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    results = make_topic(bootstrap, f"{namespace}-out", max_message_bytes="50000")
    fill(bootstrap, topic, [f"k{n % 20}" for n in range(500)])
    attempts: dict[int, int] = {}

    def handle(record: ParallelRecord) -> OutgoingRecord:
        attempts[record.offset] = attempts.get(record.offset, 0) + 1
        is_large = record.offset == 250 and attempts[250] == 1  # the broker refuses it
        value = b"x" * 100_000 if is_large else b"%d" % record.offset
        return OutgoingRecord(topic=results, key=record.key, value=value)

    told: list[Produced] = []
    with make(bootstrap, topic, namespace, commit_mode="transactional") as consumer:
        for produced in consumer.produce_and_stream(handle):
            told.append(produced)
            if len(told) == 500:
                consumer.close()
    assert committed(bootstrap, namespace, topic) == (500, "")
    assert attempts[250] >= 2
    found = read_all(bootstrap, results, 500)
    assert sorted(int(record.value()) for record in found) == list(range(500))
    places = {(record.offset(), int(record.value())) for record in found}
    assert {(each.offset, each.record.offset) for each in told} == places
    assert len(told) == 500  # of what was aborted nobody is told


@pytest.mark.parametrize("mode", ["asynchronous", "transactional"])
def test_published_results_are_told_to_the_end_however_slow_who_asks(
    bootstrap: str, namespace: str, mode: str
) -> None:
    """Handlers wait for it; the consumer is closed while most is not told, and nothing is lost."""
    topic, results = make_topic(bootstrap, namespace), make_topic(bootstrap, f"{namespace}-out", 2)
    fill(bootstrap, topic, [f"k{n % 50}" for n in range(6000)])
    begun = threading.Semaphore(0)

    def handle(record: ParallelRecord) -> OutgoingRecord:
        begun.release()
        return OutgoingRecord(topic=results, key=record.key, value=record.value)

    consumer = make(bootstrap, topic, namespace, commit_mode=mode, max_open=100)
    told: list[Produced] = []
    for produced in consumer.produce_and_stream(handle):
        told.append(produced)
        if len(told) == 10:
            # Until no handler is begun any more, as those that are wait for room. On a busy machine
            # none is begun for a second while a transaction ends, and then none is in flight.
            while begun.acquire(timeout=1.0) or not consumer.health().in_flight:
                pass
            consumer.close()
    end, _ = committed(bootstrap, namespace, topic)
    assert 10 <= end < 6000
    places = {(each.partition, each.offset) for each in told}
    assert len(places) == len(told)
    found = read_all(bootstrap, results, len(told), 2)
    assert {(record.partition(), record.offset()) for record in found} == places
    assert all(each.topic == results and each.result.value == each.record.value for each in told)


def test_a_stream_of_results(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n % 5}" for n in range(3000)])
    consumer = make(bootstrap, topic, namespace)
    found = []
    for record, result in consumer.stream(lambda record: int(record.value or b"") * 2):
        found.append((record.offset, result))
        if len(found) == 2500:
            break
    consumer.close()
    assert sorted(found)[:10] == [(n, 2 * n) for n in range(10)]
    assert committed(bootstrap, namespace, topic)[0] <= max(offset for offset, _ in found)
    again = set()
    with make(bootstrap, topic, namespace) as consumer:
        for record, _ in consumer.stream(lambda record: None):
            again.add(record.offset)
            if len(again) == 501:  # what was not taken, and the one that the loop was left at
                break
    assert again == set(range(3000)) - {offset for offset, _ in found[:-1]}


def test_where_nothing_is_committed_an_aborted_transaction_begins_again_where_it_began(
    bootstrap: str, namespace: str
) -> None:
    """The log's end, where the group was to start, is beyond what was aborted by then."""
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, ["old"])
    seen = Seen()
    options = {"commit_mode": "transactional", "start": "latest"}
    with make(bootstrap, topic, namespace, **options) as consumer:
        producer = consumer._engine.committer._producer
        commit, is_open = producer.commit, threading.Event()

        def fail(**more: float) -> None:
            if not is_open.is_set():
                raise BrokerError("no coordinator", code="COORDINATOR_NOT_AVAILABLE")
            commit(**more)

        producer.commit = fail
        consumer.poll_and_produce(seen)
        wait_until(lambda: consumer.health().partitions)
        fill(bootstrap, topic, [f"k{n}" for n in range(20)])
        failures = consumer._engine.stats.commit_failures
        wait_until(lambda: consumer._engine.stats.commit_failures > failures + 2)
        is_open.set()
        wait_until(lambda: committed(bootstrap, namespace, topic)[0] == 21, what="the commit")
    assert {offset for _, offset in seen.places} == set(range(1, 21))


def test_lists_with_a_verdict_for_each(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n}" for n in range(1000)])
    sizes, attempts = [], dict.fromkeys(range(1000), 0)

    def handle(records: list[ParallelRecord]) -> list[object]:
        sizes.append(len(records))
        for record in records:
            attempts[record.offset] += 1
        bad = [record.offset in (3, 500) and record.attempt == 1 for record in records]
        return [Nack(delay=0.02) if is_bad else None for is_bad in bad]

    with make(
        bootstrap, topic, namespace, batch_size=20, batch_linger=0.05, concurrency=2
    ) as consumer:
        consumer.poll(handle)
        wait_until(lambda: committed(bootstrap, namespace, topic) == (1000, ""), what="the commit")
    assert max(sizes) == 20
    assert sum(sizes) / len(sizes) > 12
    assert {offset for offset, count in attempts.items() if count == 2} == {3, 500}
    assert set(attempts.values()) == {1, 2}


def test_a_list_that_fails_is_tried_again_whole(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n % 3}" for n in range(30)])
    calls: list[list[int]] = []

    def handle(records: list[ParallelRecord]) -> None:
        calls.append([record.offset for record in records])
        if len(calls) == 1:
            raise OSError("not yet")

    with make(bootstrap, topic, namespace, batch_size=10, concurrency=1, backoff=SOON) as consumer:
        consumer.poll(handle)
        wait_until(lambda: committed(bootstrap, namespace, topic) == (30, ""), what="the commit")
    done = [offset for call in calls[1:] for offset in call]
    assert sorted(done) == list(range(30))
    for key in range(3):
        mine = [offset for offset in done if offset % 3 == key]
        assert mine == sorted(mine)


@pytest.mark.parametrize("ordering", ["key", "unordered"])
def test_processes(bootstrap: str, namespace: str, tmp_path: Path, ordering: str) -> None:
    """One that dies in the middle costs an attempt of one record, and nothing else."""
    topic = make_topic(bootstrap, namespace)
    with make(
        bootstrap, topic, namespace, processes=2, backoff=SOON, ordering=ordering
    ) as consumer:
        consumer.poll(double_check)
        wait_until(lambda: len(ready_children(consumer)) == 2, what="both processes")
        first = set(ready_children(consumer))
        fill(bootstrap, topic, [str(tmp_path / f"k{n % 4}") for n in range(200)])
        wait_until(lambda: committed(bootstrap, namespace, topic) == (200, ""), what="the commit")
        wait_until(lambda: len(set(ready_children(consumer)) - first) == 1, what="a new process")
        second = set(ready_children(consumer)) - first
    lines = [path.read_text().split() for path in tmp_path.glob("k*")]
    assert sorted({int(line) for each in lines for line in each}) == list(range(200))
    pids = {int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")}
    assert first <= pids <= first | second
    assert os.getpid() not in first | second
    if ordering == "key":
        for each in lines:
            offsets = [int(line) for line in each]
            assert offsets == sorted(offsets)


def test_results_of_processes_and_what_ends_them(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    """Who ends its process is to blame, and nobody beside it, however they were taken."""
    topic, results = make_topic(bootstrap, namespace), make_topic(bootstrap, f"{namespace}-out")
    letters = make_topic(bootstrap, f"{namespace}-dead")
    headers = [("folder", str(tmp_path).encode())]
    fill(bootstrap, topic, [f"k{n % 4}" for n in range(40)], headers=headers)
    options = {"max_attempts": 2, "dead_letter_topic": letters, "backoff": SOON}
    told: list[tuple[int, int]] = []
    with make(bootstrap, topic, namespace, processes=2, **options) as consumer:
        consumer.poll_and_produce(
            square, lambda _, out, __, offset: told.append((int(out.value or b""), offset))
        )
        wait_until(lambda: committed(bootstrap, namespace, topic) == (40, ""), "the commit", 60)
    found = read_all(bootstrap, results, 38)
    values = sorted(int(record.value()) for record in found)
    assert values == [number**2 for number in range(40) if number not in (7, 8)]
    assert sorted(told) == sorted((int(record.value()), record.offset()) for record in found)
    errors = {
        int(letter.value()): dict(letter.headers())["kafkamq-error"]
        for letter in read_all(bootstrap, letters, 2)
    }
    assert sorted(errors) == [7, 8]
    assert b"cannot leave its process" in errors[7]
    assert b"WorkerDiedError" in errors[8]
    attempts = sorted(path.name for path in tmp_path.glob("tried-*") if path.name[-1] != "1")
    assert attempts == ["tried-9-2"]


def test_processes_that_hang_or_cannot_begin(
    bootstrap: str, namespace: str, tmp_path: Path
) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [str(tmp_path / "begun")])
    children = set(multiprocessing.active_children())
    consumer = make(bootstrap, topic, namespace, processes=1)
    consumer.poll(hang)
    wait_until(lambda: (tmp_path / "begun").exists(), what="the handler")
    consumer.close(timeout=0.2)
    assert set(multiprocessing.active_children()) <= children
    assert committed(bootstrap, namespace, topic)[0] <= 0
    consumer = make(bootstrap, topic, namespace, processes=1, max_attempts=1, on_exhausted="skip")
    consumer.poll(Unloadable())
    with pytest.raises(ConfigError, match="before it could begin"):
        consumer.wait(within(60))
    consumer.close()
    assert committed(bootstrap, namespace, topic)[0] <= 0  # it is no record's fault


def test_what_does_not_go_together(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    with (
        make(bootstrap, topic, namespace, processes=2) as consumer,
        pytest.raises(ConfigError, match="imported"),
    ):
        consumer.poll(lambda record: None)
    with (
        make(bootstrap, topic, namespace, commit_mode="transactional") as consumer,
        pytest.raises(ConfigError, match="poll_and_produce"),
    ):
        consumer.poll(Seen())
    fill(bootstrap, topic, ["a"])
    called = threading.Event()
    with make(bootstrap, topic, namespace, backoff=SOON) as consumer:
        consumer.poll_and_produce(lambda record: called.set() or "text")
        wait_until(called.is_set)
        time.sleep(0.1)
        assert threading.active_count() > 1
    assert committed(bootstrap, namespace, topic)[0] <= 0


def test_the_rate_is_held(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n}" for n in range(2000)])
    times: list[float] = []
    with make(bootstrap, topic, namespace, max_rate=400, concurrency=8) as consumer:
        consumer.poll(lambda record: times.append(time.monotonic()))
        wait_until(lambda: len(times) > 1200)
    first, last = times[100], times[1100]
    assert 1000 / (last - first) < 400 * 1.15  # a tenth of a second may be made up for
