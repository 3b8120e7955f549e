"""The parallel consumer: everything is processed, in order where asked for, and survives ends."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from tests.integration.parallel_tools import (
    Seen,
    commit,
    committed,
    fill,
    make,
    make_topic,
    read_all,
)
from tests.waiting import wait_until, within

from kafkamq import Nack, ParallelRecord, Reject, StateError, aio
from kafkamq.config import Backoff
from kafkamq.parallel.wire.offsets import decode

SOON = Backoff(first=0.05, max=0.05, jitter=0.0)


@pytest.mark.parametrize("ordering", ["key", "partition", "unordered"])
def test_all_is_processed_once_in_order(bootstrap: str, namespace: str, ordering: str) -> None:
    topic = make_topic(bootstrap, namespace, 3)
    fill(bootstrap, topic, [None if n % 9 == 0 else f"k{n % 7}" for n in range(3000)])
    seen = Seen(lambda record: time.sleep(0.001) if record.offset % 50 == 0 else None)
    mode = "synchronous" if ordering == "partition" else "asynchronous"
    options = {"ordering": ordering, "concurrency": 8, "commit_mode": mode}
    with make(bootstrap, topic, namespace, **options) as consumer:
        consumer.poll(seen)
        wait_until(lambda: len(seen) >= 3000, what="all records")
    assert len(set(seen.places)) == len(seen) == 3000
    if ordering == "key":
        assert seen.is_in_order()
    if ordering == "partition":
        for partition in range(3):
            offsets = [offset for at, offset in seen.places if at == partition]
            assert offsets == sorted(offsets)
    ends = [sum(at == partition for at, _ in seen.places) for partition in range(3)]
    assert [committed(bootstrap, namespace, topic, p) for p in range(3)] == [
        (end, "") for end in ends
    ]


def test_coroutines_are_in_flight_up_to_the_limit(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n}" for n in range(3000)])
    at_once = most = done = 0
    is_full = asyncio.Event()

    async def handle(record: ParallelRecord) -> None:
        nonlocal at_once, most, done
        at_once += 1
        most = max(most, at_once)
        if at_once == 1000:
            is_full.set()
        await is_full.wait()
        await asyncio.sleep(0.2)  # one too many would begin
        at_once -= 1
        done += 1

    with make(bootstrap, topic, namespace, concurrency=1000) as consumer:
        consumer.poll(handle)
        wait_until(lambda: done == 3000)
    assert most == 1000
    assert committed(bootstrap, namespace, topic) == (3000, "")


def test_on_the_callers_event_loop(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n % 5}" for n in range(100)])

    async def main() -> None:
        loop, offsets = asyncio.get_running_loop(), []

        async def handle(record: ParallelRecord) -> None:
            assert asyncio.get_running_loop() is loop
            await asyncio.sleep(0.001)
            offsets.append(record.offset)

        async with aio.ParallelConsumer(
            topic, group_id=namespace, bootstrap_servers=bootstrap
        ) as consumer:
            await consumer.poll(handle)
            while len(offsets) < 100:
                await asyncio.sleep(0.01)
            assert consumer.health().is_ready
        assert sorted(offsets) == list(range(100))

    asyncio.run(asyncio.wait_for(main(), within(60)))
    assert committed(bootstrap, namespace, topic) == (100, "")


def test_a_restart_repeats_only_what_was_stuck(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n}" for n in range(20_001)])
    gate = threading.Event()
    seen = Seen(lambda record: gate.wait(within(60)) and None if record.offset == 0 else None)
    consumer = make(bootstrap, topic, namespace, max_open=30_000)
    consumer.poll(seen)
    wait_until(lambda: len(seen) == 20_000, what="all but the first")
    consumer.close(timeout=0.1)
    offset, metadata = committed(bootstrap, namespace, topic)
    assert offset == 0
    assert decode(0, metadata).incompletes == (0,)
    gate.set()
    again = Seen()
    with make(bootstrap, topic, namespace) as consumer:
        consumer.poll(again)
        wait_until(
            lambda: committed(bootstrap, namespace, topic) == (20_001, ""), what="the commit"
        )
    assert again.places == [(0, 0)]


def test_failures_are_tried_again_in_order_and_end_as_dead_letters(
    bootstrap: str, namespace: str
) -> None:
    topic, letters = make_topic(bootstrap, namespace), make_topic(bootstrap, f"{namespace}-dead")
    fill(bootstrap, topic, [f"k{n % 2}" for n in range(40)])
    attempts: dict[int, list[int]] = {}
    order: list[int] = []
    told: list[tuple[int, str]] = []

    def handle(record: ParallelRecord) -> object:
        attempts.setdefault(record.offset, []).append(record.attempt)
        if record.offset == 4:
            raise ValueError("never")
        if record.offset == 6 and record.attempt < 3:
            assert record.attempt == 1 or isinstance(record.last_error, OSError)
            raise OSError("not yet")
        if record.offset == 7:
            return Nack(delay=0.01) if record.attempt == 1 else None
        if record.offset == 9:
            return Reject("no use")
        if record.offset % 2 == 0:
            order.append(record.offset)
        return None

    with make(
        bootstrap,
        topic,
        namespace,
        max_attempts=3,
        backoff=SOON,
        dead_letter_topic=letters,
        on_dead_letter=lambda record, reason: told.append((record.offset, reason)),
    ) as consumer:
        consumer.poll(handle)
        wait_until(lambda: committed(bootstrap, namespace, topic) == (40, ""), what="the commit")
    assert attempts[4] == attempts[6] == [1, 2, 3]
    assert attempts[7] == [1, 2]
    assert attempts[9] == [1]
    assert order == [offset for offset in range(0, 40, 2) if offset != 4]
    assert sorted(told) == [(4, "max-deliveries"), (9, "rejected")]
    found = {record.value(): dict(record.headers()) for record in read_all(bootstrap, letters, 2)}
    assert set(found) == {b"4", b"9"}
    assert found[b"4"]["kafkamq-error"] == b"ValueError: never"
    assert found[b"4"]["kafkamq-delivery-count"] == b"3"
    assert found[b"4"]["kafkamq-origin"].startswith(f"{topic}/0/4/".encode())
    assert found[b"9"]["kafkamq-error"] == b"no use"


def test_without_its_dead_letter_no_offset_moves(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    letters = make_topic(bootstrap, f"{namespace}-dead", max_message_bytes="10")  # refuses all
    fill(bootstrap, topic, ["a", "b"])

    def handle(record: ParallelRecord) -> object:
        return Reject("no use") if record.offset == 0 else None

    with make(bootstrap, topic, namespace, backoff=SOON, dead_letter_topic=letters) as consumer:
        consumer.poll(handle)
        wait_until(lambda: committed(bootstrap, namespace, topic)[1], what="a map")
    offset, metadata = committed(bootstrap, namespace, topic)
    assert offset == 0
    assert decode(0, metadata).incompletes == (0,)


def test_pause_resume_and_drain(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n}" for n in range(400)])
    seen = Seen(lambda record: time.sleep(0.01))
    consumer = make(bootstrap, topic, namespace, concurrency=4)
    consumer.poll(seen)
    wait_until(lambda: len(seen) > 10)
    consumer.pause()
    wait_until(lambda: consumer.health().in_flight == 0)
    count = len(seen)
    assert consumer.health().state == "paused"
    time.sleep(0.2)
    assert len(seen) == count  # nothing new begins
    wait_until(lambda: committed(bootstrap, namespace, topic)[0] > 0)
    consumer.resume()
    wait_until(lambda: len(seen) > count)
    consumer.drain(timeout=within(60))
    assert len(seen) == 400
    assert consumer.health().state == "closed"
    assert committed(bootstrap, namespace, topic) == (400, "")


def test_closing_commits_what_ended_in_time_and_begins_nothing(
    bootstrap: str, namespace: str
) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n}" for n in range(100)])
    seen = Seen(lambda record: time.sleep(1.0))
    consumer = make(bootstrap, topic, namespace, concurrency=3, commit_interval=60)
    consumer.poll(seen)
    wait_until(lambda: seen.at_once == 3)
    consumer.close()
    consumer.close()
    assert len(seen) == 3
    offset, metadata = committed(bootstrap, namespace, topic)
    assert offset == 3 and metadata == ""
    with pytest.raises(StateError, match="closed"):
        consumer.poll(seen)
    make(bootstrap, topic, f"{namespace}-unused").close()


def test_a_stuck_record_holds_nobody_else_up(bootstrap: str, namespace: str) -> None:
    """Also those that its worker had taken along; what that one has done counts."""
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n % 50}" for n in range(5000)])
    gate, told = threading.Event(), []
    seen = Seen(lambda record: gate.wait(within(60)) and None if record.offset == 3000 else None)
    with make(
        bootstrap,
        topic,
        namespace,
        concurrency=2,
        ordering="unordered",
        stall_after=0.3,
        on_stall=lambda *facts: told.append(facts),
    ) as consumer:
        consumer.poll(seen)
        wait_until(lambda: len(seen) == 4999, what="all others")
        wait_until(lambda: (topic, 0, 3000) in [facts[:3] for facts in told], what="the report")
        gate.set()
        wait_until(lambda: committed(bootstrap, namespace, topic) == (5000, ""))


@pytest.mark.parametrize("is_retry", [False, True])
def test_a_stalled_record_is_parked_so_that_the_offset_moves(
    bootstrap: str, namespace: str, is_retry: bool
) -> None:
    topic, letters = make_topic(bootstrap, namespace), make_topic(bootstrap, f"{namespace}-dead")
    fill(bootstrap, topic, [f"k{n % 5}" for n in range(50)])
    gate = threading.Event()

    def handle(record: ParallelRecord) -> object:
        if record.offset == 7 and is_retry:
            return Nack(delay=60)
        if record.offset == 7:
            gate.wait(within(60))
            raise OSError("after all")  # nobody waits for it any more
        return None

    options = {"stall_after": 1.0, "on_stall": "dead-letter", "dead_letter_topic": letters}
    with make(bootstrap, topic, namespace, **options) as consumer:
        consumer.poll(handle)
        if is_retry:  # what waited behind it goes on
            wait_until(
                lambda: committed(bootstrap, namespace, topic) == (50, ""), what="the offset"
            )
        else:
            wait_until(lambda: committed(bootstrap, namespace, topic)[0] == 12, what="the offset")
            gate.set()
            wait_until(lambda: committed(bootstrap, namespace, topic) == (50, ""))
    (letter,) = read_all(bootstrap, letters, 1)
    assert letter.value() == b"7"
    assert dict(letter.headers())["kafkamq-reason"] == b"max-lease"


def test_foreign_metadata(bootstrap: str, namespace: str) -> None:
    topic = make_topic(bootstrap, namespace)
    fill(bootstrap, topic, [f"k{n}" for n in range(10)])
    for suffix, metadata in (("a", "some other tool's"), ("b", "AQAAAAA="), ("c", "ZQAAAAB/////")):
        group = f"{namespace}-{suffix}"
        commit(bootstrap, group, topic, 4, metadata)
        seen = Seen()
        with make(bootstrap, topic, group) as consumer:
            consumer.poll(seen)
            wait_until(lambda: len(seen) == 6)  # noqa: B023 - called in this round
        assert sorted(seen.places) == [(0, offset) for offset in range(4, 10)]
    commit(bootstrap, namespace, topic, 4, "some other tool's")
    consumer = make(bootstrap, topic, namespace, on_foreign_metadata="raise")
    consumer.poll(Seen())
    with pytest.raises(Exception, match="no offset map"):
        consumer.wait(within(60))
    assert consumer.health().state == "failed"
    consumer.close()
    assert committed(bootstrap, namespace, topic)[0] == 4
