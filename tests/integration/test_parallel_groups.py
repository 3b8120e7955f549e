"""The parallel consumer in groups: rebalances, positions that moved, bad input."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from tests.integration.parallel_tools import (
    Seen,
    commit,
    commit_as_java,
    committed,
    fill,
    make,
    make_topic,
)
from tests.waiting import wait_until, within

from kafkamq import BrokerError, ConfigError, DataLossError, Nack, ParallelConsumer, aio
from kafkamq.parallel.wire.offsets import encode

PROTOCOLS = {
    "cooperative": {},
    "eager": {"partition.assignment.strategy": "range"},
    "broker": {"group.protocol": "consumer"},
}


@pytest.mark.slow
@pytest.mark.parametrize("protocol", list(PROTOCOLS))
def test_members_come_and_go_and_nothing_is_done_twice(
    bootstrap: str, namespace: str, protocol: str
) -> None:
    """What is in flight when partitions go ends within the budget, and is committed first."""
    topic = make_topic(bootstrap, namespace, 4)
    fill(bootstrap, topic, [f"k{n % 40}" for n in range(3000)])
    pause_s = 0.02 if protocol == "broker" else 0.004  # it assigns with heartbeats, every 5 s
    seen = Seen(lambda record: time.sleep(pause_s))
    kafka = PROTOCOLS[protocol]
    first = make(bootstrap, topic, namespace, kafka=kafka, concurrency=4)
    first.poll(seen)
    wait_until(lambda: len(seen) > 300)
    second = make(bootstrap, topic, namespace, kafka=kafka, concurrency=4)
    second.poll(seen)
    wait_until(lambda: len(second.health().partitions) == 2, timeout_s=60, what="two each")
    wait_until(lambda: len(first.health().partitions) == 2, timeout_s=60)
    count = len(seen)
    wait_until(lambda: len(seen) > min(count + 200, 2800))
    first.close()
    wait_until(lambda: len(second.health().partitions) == 4, what="all partitions")
    wait_until(lambda: len(set(seen.places)) == 3000, what="all records")
    second.close()
    assert len(seen) == 3000
    assert seen.is_in_order()
    ends = [sum(at == partition for at, _ in seen.places) for partition in range(4)]
    assert [committed(bootstrap, namespace, topic, p) for p in range(4)] == [
        (end, "") for end in ends
    ]


def test_work_of_an_old_assignment_counts_nowhere(bootstrap: str, namespace: str) -> None:
    """A handler that outlasts the budget: its record is the new owner's, who does it again."""
    topic = make_topic(bootstrap, namespace, 2)
    fill(bootstrap, topic, ["a"] * 5, partition=0)
    fill(bootstrap, topic, ["b"] * 5, partition=1)
    gate = threading.Event()
    slow = Seen(lambda record: gate.wait(within(60)) and None)
    first = make(bootstrap, topic, namespace, revoke_timeout=0.2)
    first.poll(slow)
    wait_until(lambda: slow.at_once == 2)
    seen = Seen()
    second = make(bootstrap, topic, namespace)
    second.poll(seen)
    wait_until(lambda: len(seen) == 5, what="one partition, from its start")
    moved = seen.places[0][0]
    gate.set()
    wait_until(lambda: len(slow) == 6)  # the old record of the other's partition, and all of ours
    first.close()
    second.close()
    assert seen.places == [(moved, offset) for offset in range(5)]
    assert [place for place in slow.places if place[0] == moved] == [(moved, 0)]
    assert committed(bootstrap, namespace, topic, moved) == (5, "")
    assert committed(bootstrap, namespace, topic, 1 - moved) == (5, "")


def test_a_full_partition_that_goes_and_comes_back_is_read(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace, 2)
    for partition in range(2):
        fill(bootstrap, topic, ["a"] * 1500, partition=partition)
    gate = threading.Event()
    first = make(bootstrap, topic, namespace, max_open=20, revoke_timeout=0.2)
    first.poll(lambda record: gate.wait(within(60)) and None)
    wait_until(
        lambda: [assignment.is_paused for assignment in first._engine.assignments()] == [True, True]
    )
    second = make(bootstrap, topic, namespace)
    second.poll(Seen())
    wait_until(lambda: len(second.health().partitions) == 1, what="a partition each")
    second.close()
    wait_until(lambda: len(first.health().partitions) == 2, what="both again")
    gate.set()
    for partition in range(2):
        fill(bootstrap, topic, ["b"], partition=partition)
    for partition in range(2):
        wait_until(lambda p=partition: committed(bootstrap, namespace, topic, p) == (1501, ""))
    first.close()


@pytest.mark.parametrize("leave", [commit, commit_as_java])
def test_maps_of_others_and_positions_moved_by_hand(
    bootstrap: str, namespace: str, leave: Callable[..., None]
) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n}" for n in range(100)])
    holes = range(10, 90, 2)
    for name, offset, metadata, expected in (
        ("map", 10, encode(10, 89, [10, 20, 30]), [10, 20, 30, *range(90, 100)]),
        ("another map", 10, encode(10, 98, [10]), [10, 99]),
        ("many holes", 10, encode(10, 89, holes), [*holes, *range(90, 100)]),
        ("beyond the log", 10, encode(10, 100_000, [10]), list(range(10, 100))),
        ("runs", 10, "bgABAE8=", list(range(10, 100))),  # it may go on: it is not believed
        ("lower", 5, "", list(range(5, 100))),
        ("higher", 97, "", [97, 98, 99]),
    ):
        group = f"{namespace}-{name}"
        leave(bootstrap, group, topic, offset, metadata)
        seen = Seen()
        with make(bootstrap, topic, group) as consumer:
            consumer.poll(seen)
            wait_until(lambda: committed(bootstrap, group, topic)[0] == 100)  # noqa: B023
        assert sorted(at for _, at in seen.places) == expected, name


def test_where_a_new_group_begins(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, ["a"] * 10)
    with make(bootstrap, topic, f"{namespace}-latest", start="latest") as consumer:
        seen = Seen()
        consumer.poll(seen)
        wait_until(
            lambda: committed(bootstrap, f"{namespace}-latest", topic) == (10, ""), what="the start"
        )
        fill(bootstrap, topic, ["b"])
        wait_until(lambda: seen.places == [(0, 10)])
    consumer = make(bootstrap, topic, f"{namespace}-none", start="none")
    consumer.poll(Seen())
    with pytest.raises(DataLossError, match="no committed offset"):
        consumer.wait(within(60))
    consumer.close()


def test_deleted_records_are_an_error_or_skipped(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, ["a"] * 20)
    for group in (f"{namespace}-raise", f"{namespace}-skip"):
        commit(bootstrap, group, topic, 5)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.delete_records([TopicPartition(topic, 0, 12)]).values():
        future.result(within(20))
    consumer = make(bootstrap, topic, f"{namespace}-raise")
    consumer.poll(Seen())
    with pytest.raises(DataLossError, match=r"7 records .* are gone"):
        consumer.wait(within(60))
    consumer.close()
    seen = Seen()
    with make(bootstrap, topic, f"{namespace}-skip", on_data_loss="skip") as consumer:
        consumer.poll(seen)
        wait_until(lambda: committed(bootstrap, f"{namespace}-skip", topic) == (20, ""))
    assert seen.places == [(0, offset) for offset in range(12, 20)]


@pytest.mark.parametrize("mode", ["asynchronous", "transactional"])
def test_a_log_that_is_another_is_read_from_its_start(
    bootstrap: str, namespace: str, mode: str
) -> None:
    """A position beyond its end is of a log that was read before: what was done there says nothing.

    As the client sees a log that was cut, its position is moved there.
    """
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n % 7}" for n in range(60)])
    seen = Seen()
    options = {"on_data_loss": "skip", "commit_mode": mode}
    with make(bootstrap, topic, namespace, **options) as consumer:
        consumer.poll_and_produce(seen)
        wait_until(lambda: committed(bootstrap, namespace, topic) == (60, ""), what="the log")
        engine, moved = consumer._engine, threading.Event()

        def move() -> None:
            if not moved.is_set():
                moved.set()
                engine._source.group.seek({(topic, 0): 1000})

        engine.on_turn = move
        wait_until(lambda: len(seen) >= 120, what="the log, once more")
        wait_until(lambda: committed(bootstrap, namespace, topic) == (60, ""), what="the end")
    assert {offset for _, offset in seen.places[60:]} == set(range(60))


def test_markers_of_transactions_and_aborted_records(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    for number, is_aborted in enumerate((False, True, False, True)):
        keys = [f"k{n}" for n in range(5)]
        fill(bootstrap, topic, keys, transactional_id=f"{topic}-{number}", is_aborted=is_aborted)
    seen = Seen()
    with make(bootstrap, topic, namespace) as consumer:
        consumer.poll(seen)
        wait_until(lambda: committed(bootstrap, namespace, topic) == (24, ""), what="the log's end")
    assert sorted(at for _, at in seen.places) == [0, 1, 2, 3, 4, 12, 13, 14, 15, 16]


def test_compacted_holes_of_a_map(bootstrap: str, namespace: str) -> None:
    """A hole whose record is not in the log any more does not hold the offset back."""
    topic = make_topic(bootstrap, namespace)
    for number in range(3):  # aborted: offsets without records, as compaction leaves them
        is_aborted = number == 1
        fill(
            bootstrap,
            topic,
            ["a"] * 5,
            transactional_id=f"{topic}-{number}",
            is_aborted=is_aborted,
        )
    commit(bootstrap, namespace, topic, 2, encode(2, 16, [2, 7, 8, 14]))
    seen = Seen()
    with make(bootstrap, topic, namespace) as consumer:
        consumer.poll(seen)
        wait_until(lambda: committed(bootstrap, namespace, topic) == (18, ""))
    assert sorted(at for _, at in seen.places) == [2, 14]


def test_many_holes_slow_the_partition_down_and_never_stop_it(
    bootstrap: str, namespace: str
) -> None:
    """Half of the records are stuck: the map is full, but what is below its end goes on."""
    topic = make_topic(bootstrap, namespace)
    count = 40_000
    stuck = set(random.Random(1).sample(range(count), count // 2))
    fill(bootstrap, topic, [f"k{n}" for n in range(count)])
    gate = threading.Event()

    def handle(record: object) -> None:
        if record.offset in stuck and not gate.is_set():  # type: ignore[attr-defined]
            raise OSError("not yet")

    options = {"backoff": lambda record: 0.3, "max_open": 40_000, "concurrency": 4}
    with make(bootstrap, topic, namespace, **options) as consumer:
        consumer.poll(handle)
        wait_until(lambda: len(committed(bootstrap, namespace, topic)[1]) > 3072, what="a full map")
        assert len(committed(bootstrap, namespace, topic)[1]) < 4096
        gate.set()
        wait_until(
            lambda: committed(bootstrap, namespace, topic) == (count, ""),
            timeout_s=60,
            what="the rest",
        )


def test_maps_are_committed_with_a_nul_and_read_without_it(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n}" for n in range(20)])
    seen = Seen(lambda record: Nack(delay=60) if record.offset == 5 else None)
    with make(bootstrap, topic, namespace) as consumer:
        consumer.poll(seen)
        wait_until(lambda: len(seen) == 20)
    offset, metadata = committed(bootstrap, namespace, topic)
    assert offset == 5
    assert metadata.endswith("\0")
    again = Seen()
    with make(bootstrap, topic, namespace) as consumer:
        consumer.poll(again)
        wait_until(lambda: committed(bootstrap, namespace, topic)[0] == 20)
    assert again.places == [(0, 5)]


def test_bad_input(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    good = {"group_id": namespace, "bootstrap_servers": bootstrap}
    wrong: list[tuple[dict[str, object], str]] = [
        ({"group_id": ""}, "group_id"),
        ({"bootstrap_servers": ""}, "bootstrap_servers"),
        ({"kafka": {"enable.auto.commit": "true"}}, "enable.auto.commit"),
        ({"kafka": {"group.id": "other"}}, "group.id"),
        ({"kafka": {"no.such.property": "1"}}, "no.such.property"),
        ({"ordering": "random"}, "ordering"),
        ({"concurrency": 0}, "concurrency"),
        ({"max_attempts": 3}, "dead_letter_topic"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"batch_linger": 1.0}, "batch_size"),
        ({"commit_interval": -1}, "commit_interval"),
        ({"max_rate": 0}, "max_rate"),
        ({"start": "now"}, "start"),
        ({"on_stall": "dead-letter"}, "dead_letter_topic"),
        ({"group_id": 5}, "group_id"),
        ({"exact_metadata": True}, "exact_metadata is no option any more"),
        ({"exact_metadata": False}, "exact_metadata is no option any more"),
        ({"max_attempts": True, "dead_letter_topic": "d"}, "max_attempts"),
        ({"max_attempts": "3"}, "max_attempts"),
        ({"max_open": 2.5}, "max_open"),
        ({"max_open_bytes": 0}, "max_open_bytes"),
        ({"max_rate": "fast"}, "max_rate"),
        ({"backoff": 5}, "backoff"),
        ({"on_failure": 5}, "on_failure"),
        ({"dead_letter_topic": 5}, "dead_letter_topic"),
    ]
    for settings, name in wrong:
        with pytest.raises(ConfigError, match=name):
            ParallelConsumer(topic, **{**good, **settings})
    for topics in ([], [1], None, 5):
        with pytest.raises(ConfigError, match="topics"):
            ParallelConsumer(topics, **good)
    with pytest.raises(TypeError, match="no_such"):
        ParallelConsumer(topic, **good, no_such=1)
    with ParallelConsumer(topic, **good) as consumer:
        with pytest.raises(ConfigError, match="handler"):
            consumer.poll("not a function")
        consumer.poll(Seen())
        with pytest.raises(Exception, match="one handler"):
            consumer.poll(Seen())
    with aio_consumer(topic, good) as twin, pytest.raises(ConfigError, match="async def"):
        run(twin.poll(Seen()))
    with ParallelConsumer("^(", **good) as consumer, pytest.raises(ConfigError, match="topics"):
        consumer.poll(Seen())
    with (
        ParallelConsumer(f"{topic}-missing", **good) as consumer,
        pytest.raises(BrokerError, match="create it first"),
    ):
        consumer.poll(Seen())


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_a_handler_that_forgot_async(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, ["a"])

    async def coroutine(record: object) -> None:
        raise AssertionError("never awaited")

    with make(bootstrap, topic, namespace) as consumer:
        consumer.poll(lambda record: coroutine(record))
        with pytest.raises(ConfigError, match="async def"):
            consumer.wait(within(60))
    assert committed(bootstrap, namespace, topic)[0] <= 0


class aio_consumer:  # noqa: N801 - reads as a function
    """An asyncio twin that is ended without a loop."""

    def __init__(self, topic: str, good: dict[str, str]) -> None:
        self.consumer = aio.ParallelConsumer(topic, **good)

    def __enter__(self) -> aio.ParallelConsumer:
        return self.consumer

    def __exit__(self, *_: object) -> None:
        run(self.consumer.close())


def run(coroutine: object) -> object:
    import asyncio

    return asyncio.run(coroutine)  # type: ignore[arg-type]
