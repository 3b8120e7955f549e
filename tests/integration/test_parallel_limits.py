"""The parallel consumer and its limits: partitions, lists, delays, toggles; and two at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from confluent_kafka.admin import AdminClient
from tests.integration.parallel_processes import rest
from tests.integration.parallel_tools import (
    Seen,
    commit,
    committed,
    figure,
    figures,
    fill,
    make,
    make_topic,
)
from tests.waiting import wait_until, within

from kafkamq import DataLossError, ParallelRecord


def test_many_partitions_in_order_are_worked_on_at_once(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace, 12)
    for partition in range(12):
        fill(bootstrap, topic, ["a"] * 20, partition=partition)
    everyone, order = threading.Barrier(12, timeout=within(60)), defaultdict(list)

    def handle(record: ParallelRecord) -> None:
        if record.offset == 10:
            everyone.wait()  # breaks unless all partitions get there at the same time
        order[record.partition].append(record.offset)

    options = {"ordering": "partition", "concurrency": 12, "max_open": 5}
    with make(bootstrap, topic, namespace, **options) as consumer:
        consumer.poll(handle)
        wait_until(lambda: sum(map(len, order.values())) == 240, what="all records")
    assert not everyone.broken
    assert all(offsets == list(range(20)) for offsets in order.values())


@pytest.mark.parametrize("ordering", ["key", "partition", "unordered"])
def test_lists_in_every_order(bootstrap: str, namespace: str, ordering: str) -> None:
    """Never too long, nothing lost, and a list that fails comes again."""
    topic = make_topic(bootstrap, namespace, 2)
    fill(bootstrap, topic, [f"k{n % 6}" for n in range(600)])
    tries: Counter[tuple[int, int]] = Counter()
    done: dict[object, list[int]] = defaultdict(list)
    lock = threading.Lock()

    def handle(records: list[ParallelRecord]) -> None:
        assert 1 <= len(records) <= 16
        with lock:
            tries.update((record.partition, record.offset) for record in records)
            if any(record.attempt == 1 and record.offset % 50 == 7 for record in records):
                raise OSError("not yet")
            for record in records:
                group = record.key if ordering == "key" else record.partition
                done[record.partition, group].append(record.offset)

    options = {"ordering": ordering, "batch_size": 16, "backoff": lambda record: 0.02}
    with make(bootstrap, topic, namespace, **options) as consumer:
        consumer.poll(handle)
        wait_until(lambda: sum(map(len, done.values())) == 600, what="all records")
    assert len(tries) == 600
    assert max(tries.values()) >= 2
    if ordering != "unordered":
        assert all(offsets == sorted(offsets) for offsets in done.values())


def test_the_retry_delay_function_gets_the_attempt(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, ["a"])
    asked: list[int] = []
    times: list[float] = []

    def delay(record: ParallelRecord) -> float:
        asked.append(record.attempt)
        return 0.1 * len(asked)

    def handle(record: ParallelRecord) -> None:
        times.append(time.monotonic())
        if len(times) < 4:
            raise OSError("not yet")

    with make(bootstrap, topic, namespace, backoff=delay) as consumer:
        consumer.poll(handle)
        wait_until(lambda: committed(bootstrap, namespace, topic) == (1, ""), what="the commit")
    assert asked == [2, 3, 4]  # the attempt that is to come
    gaps = [after - before for before, after in pairwise(times)]
    assert all(gap >= 0.1 * number for number, gap in enumerate(gaps, 1))


def test_many_toggles_lose_and_repeat_nothing(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n % 9}" for n in range(3000)])
    seen = Seen(lambda record: time.sleep(0.0005))
    with make(bootstrap, topic, namespace) as consumer:
        consumer.poll(seen)
        while len(seen) < 3000:
            consumer.pause()
            consumer.pause()
            consumer.resume()
            time.sleep(0.002)
        wait_until(lambda: committed(bootstrap, namespace, topic) == (3000, ""))
    assert len(set(seen.places)) == len(seen) == 3000
    assert seen.is_in_order()


@pytest.mark.parametrize("is_in_flight", [False, True])
def test_a_full_partition_is_paused_and_others_go_on(
    bootstrap: str, namespace: str, is_in_flight: bool
) -> None:
    """Whether what fills it waits behind one record, or all of it is in flight."""
    topic = make_topic(bootstrap, namespace, 2)
    fill(bootstrap, topic, [f"k{n}" if is_in_flight else "a" for n in range(5000)], partition=0)
    fill(bootstrap, topic, [f"k{n}" for n in range(5000)], partition=1)
    gate = threading.Event()

    async def handle(record: ParallelRecord) -> None:
        while record.partition == 0 and not gate.is_set():
            await asyncio.sleep(0.05)

    place = (namespace, f"{topic}/0")
    with make(bootstrap, topic, namespace, max_open=20, concurrency=1500) as consumer:
        consumer.poll(handle)
        wait_until(lambda: committed(bootstrap, namespace, topic, 1) == (5000, ""))
        wait_until(lambda: figure("paused", place) == 1, what="its pause")
        # Nothing is read of it any more, and of what was, one handler after another is begun.
        opened = figure("open", place)
        assert 20 <= opened < 1020  # and one poll
        in_flight = opened if is_in_flight else 1
        wait_until(lambda: consumer.health().in_flight == in_flight, what="its handlers")
        gate.set()
        wait_until(lambda: committed(bootstrap, namespace, topic) == (5000, ""))


def test_an_offset_that_was_removed(bootstrap: str, namespace: str) -> None:
    """Each policy for a group that has none for a partition any more."""
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, ["a"] * 5)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for start, expected in (("earliest", 5), ("latest", 0), ("none", None)):
        group = f"{namespace}-{start}"
        commit(bootstrap, group, topic, 3)
        for future in admin.delete_consumer_groups([group]).values():
            future.result(within(20))
        seen = Seen()
        consumer = make(bootstrap, topic, group, start=start)
        consumer.poll(seen)
        if expected is None:
            with pytest.raises(DataLossError, match="no committed offset"):
                consumer.wait(within(60))
        else:
            wait_until(lambda: committed(bootstrap, group, topic) == (5, ""))  # noqa: B023
        consumer.close()
        assert len(seen) == (expected or 0)


def test_two_consumers_have_figures_of_their_own(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, ["a"] * 7)
    groups = [f"{namespace}-a", f"{namespace}-b"]

    def processed() -> dict[str, float]:
        found = figures("processed").items()
        return {labels[0]: value for labels, value in found if labels[0] in groups}

    with make(bootstrap, topic, groups[0]) as one, make(bootstrap, topic, groups[1]) as two:
        one.poll(Seen())
        two.poll(Seen())
        wait_until(lambda: processed() == {groups[0]: 7, groups[1]: 7}, what="both")
        one.close()
        assert processed() == {groups[1]: 7}
    assert processed() == {}


def test_records_without_a_key_in_no_order(bootstrap: str, namespace: str) -> None:
    """One of them that hangs holds nobody back; by default it would."""
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [None if n % 2 else "a" for n in range(200)])
    gate = threading.Event()
    seen = Seen(lambda record: gate.wait(within(60)) and None if record.offset == 1 else None)
    with make(bootstrap, topic, namespace, null_keys="parallel") as consumer:
        consumer.poll(seen)
        wait_until(lambda: len(seen) == 199, what="all others")
        gate.set()
        wait_until(lambda: committed(bootstrap, namespace, topic) == (200, ""))
    assert seen.by_key[0, b"a"] == list(range(0, 200, 2))


def test_keys_and_values_as_large_as_kafka_takes(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace, max_message_bytes="3000000")
    keys = ["x" * 900_000, "y" * 900_000, "", "x" * 900_000]
    fill(bootstrap, topic, keys)
    sizes: list[int] = []
    with make(bootstrap, topic, namespace, max_open_bytes=1) as consumer:
        consumer.poll(lambda record: sizes.append(len(record.key or b"")))
        wait_until(lambda: committed(bootstrap, namespace, topic) == (4, ""), what="the commit")
    assert sorted(sizes) == [0, 900_000, 900_000, 900_000]


async def rest_async(record: ParallelRecord) -> None:
    del record
    await asyncio.sleep(0.02)


@pytest.mark.parametrize("kind", ["threads", "coroutines", "processes"])
def test_as_many_handlers_as_bring_more(bootstrap: str, namespace: str, kind: str) -> None:
    """Handlers that only wait: there are more and more of them, up to the bound."""
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n}" for n in range(10_000)])
    options = {"concurrency": "auto", "max_concurrency": 48}
    if kind == "processes":
        options["processes"] = 2
    with make(bootstrap, topic, namespace, **options) as consumer:
        consumer.poll(rest_async if kind == "coroutines" else rest)
        assert figure("concurrency", (namespace,)) == 16
        wait_until(lambda: figure("concurrency", (namespace,)) > 30, what="more handlers")
        wait_until(lambda: consumer.health().in_flight > 30, what="them at work")
        wait_until(lambda: committed(bootstrap, namespace, topic) == (10_000, ""))
        assert figure("concurrency", (namespace,)) <= 48
