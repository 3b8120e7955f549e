"""Options that the parallel consumer shares with workers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tests.unit.parallel_handlers import order_of, shout
from tests.unit.shelf import Batch, Shelf
from tests.unit.test_parallel_processes import Work
from tests.unit.test_parallel_verdicts import Office
from tests.unit.test_parallel_work_queue import Room
from tests.waiting import within

from kafkamq import Backoff, ConfigError, Nack, ParallelConsumer, ParallelRecord, Reject
from kafkamq.parallel.config import called, fan_out_of
from kafkamq.parallel.record import PlainRecord
from kafkamq.queue.json_values import BodyError
from kafkamq.runtime.loop_executor import LoopExecutor
from kafkamq.runtime.thread_executor import ThreadExecutor
from kafkamq.runtime.work_queue import Executor, HandlerCall, HandlerTimeoutError
from kafkamq.types import DeadLetterReason


@dataclass
class Order:
    id: int


class Message:
    """What a record is made of."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    def value(self) -> bytes:
        return self._value

    def topic(self) -> str:
        return "topic"

    def partition(self) -> int:
        return 0

    def headers(self) -> None:
        return None

    def timestamp(self) -> tuple[int, int]:
        return 1, 0


def record(value: bytes, offset: int = 0) -> ParallelRecord:
    return ParallelRecord(Message(value), offset, b"key")  # type: ignore[arg-type]


def of_order(order: Order) -> object:
    return order


def of_text(body: str, record: ParallelRecord) -> object:
    return body, record.offset


def of_record(record: ParallelRecord) -> object:
    return record


def of_anything(record: Any, limit: int = 3) -> object:
    return record


def of_strange(record: "Nowhere") -> object:  # type: ignore[name-defined]  # noqa: F821, UP037
    return record


def of_orders(orders: list[Order]) -> object:
    return [Reject(str(each.id)) for each in orders]


def of_records(records: list[ParallelRecord]) -> object:
    return records


def test_a_handler_may_be_annotated_for_the_value() -> None:
    one = record(b'{"id": 7}')
    assert called(of_order, ())(one) == Order(7)
    assert called(of_text, ())(record(b"x", 3)) == ("x", 3)
    with pytest.raises(BodyError):
        called(of_order, ())(record(b"no json"))
    for as_ever in (of_record, of_anything, of_strange):
        assert called(as_ever, ()) is as_ever
    found = called(of_orders, (), takes_lists=True)([one, record(b"no json"), one])
    assert [type(each) for each in found] == [Reject, BodyError, Reject]
    assert called(of_records, (), takes_lists=True) is of_records


def test_a_value_that_cannot_be_read_is_a_dead_letter_at_once() -> None:
    office = Office(max_attempts=5, dead_letter_topic="dead")
    assert office.apply(record(b"x"), BodyError("the payload is no JSON")) is None
    ((_, reason, said),) = office.letters
    assert reason is DeadLetterReason.REJECTED
    assert said == "the body cannot be read: the payload is no JSON"


def test_a_record_has_the_words_of_a_message() -> None:
    """So a handler that reads these runs in a ``Worker`` and here, also in another process."""
    office, one = Office(), record(b"x")
    assert office.apply(one, Nack()) is not None
    for each in (one, PlainRecord(*one.fields())):  # type: ignore[arg-type]  # as they are sent
        assert (each.payload, each.delivery_count) == (b"x", 2) == (each.value, each.attempt)
        assert each.raw_headers == each.headers


def test_only_some_exceptions_are_worth_another_attempt() -> None:
    office = Office(max_attempts=5, dead_letter_topic="dead", retry_on={OSError: None})
    assert office.apply(record(b"x"), TimeoutError("again")) is not None
    assert office.apply(record(b"x"), HandlerTimeoutError("again")) is not None
    assert office.apply(record(b"x"), Nack()) is not None
    assert office.letters == []
    assert office.apply(record(b"x"), ValueError("never")) is None
    ((_, reason, said),) = office.letters
    assert (reason, said) == (DeadLetterReason.REJECTED, "ValueError: never")


def test_a_kind_of_exception_may_have_a_back_off_of_its_own() -> None:
    soon = Backoff(first=0.0, max=0.0)
    office = Office(retry_on={ConnectionError: soon, OSError: None}, backoff=Backoff(first=60.0))
    due_ms = office.apply(record(b"x"), ConnectionError("again"))
    later_ms = office.apply(record(b"x"), OSError("again"))
    assert due_ms is not None
    assert later_ms is not None
    assert later_ms - due_ms > 20_000


def around(given: ParallelRecord) -> Iterator[None]:
    outcome = yield
    return (outcome, "around")


def test_middleware_goes_around_handlers_of_both_kinds() -> None:
    async def handle(record: ParallelRecord) -> object:
        return record.offset

    assert called(lambda record: record.offset, [around])(record(b"x", 3)) == (3, "around")
    assert asyncio.run(called(handle, [around])(record(b"x", 3))) == (3, "around")
    with pytest.raises(ConfigError, match="so must its middleware be"):
        called(handle, [lambda record, call: call(record)])


def test_in_processes_middleware_and_annotations_count_as_well() -> None:
    work = Work(order_of, wants_results=True, middleware=(shout,))
    try:
        work.start()
        work.shelf.add(Batch([record(b'{"id": 7}')]), Batch([record(b"no json", 1)]))
        work.shelf.wait(2)
        found = work.outcomes()
        assert found[0] == "ORDER 7"
        assert isinstance(found[1], BodyError)
    finally:
        work.shelf.end(work.executor)


async def hang_async(record: ParallelRecord) -> None:
    if record.value == b"hang":
        await asyncio.sleep(60)


@pytest.fixture
def hang() -> Iterator[Callable[[ParallelRecord], object]]:
    """A handler that hangs until its test is over."""
    gate = threading.Event()

    def handle(record: ParallelRecord) -> None:
        if record.value == b"hang":
            gate.wait(within(60))

    yield handle
    gate.set()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_that_takes_too_long_is_a_failure_and_the_others_go_on(
    hang: Callable[[ParallelRecord], object], is_async: bool
) -> None:
    """Also those behind it in its run, which another thread takes over."""
    shelf = Shelf()
    pool: Executor
    if is_async:
        pool = LoopExecutor(shelf, HandlerCall(function=hang_async, timeout_ms=200), 1)
    else:
        pool = ThreadExecutor(shelf, HandlerCall(function=hang, timeout_ms=200), 1)
    pool.start()
    try:
        values = (b"a", b"hang", b"b", b"c")
        shelf.add(Batch([record(value, at) for at, value in enumerate(values)], is_serial=False))
        shelf.add(Batch([record(b"d", 4)]))
        shelf.wait(5)
        ((failed, outcome),) = shelf.outcomes
        assert failed.offset == 1
        assert str(outcome) == "the handler took longer than 0.2 s"
        assert isinstance(outcome, HandlerTimeoutError)
        assert shelf.failure is None
    finally:
        shelf.stop()
        assert pool.join(within(10))


def test_what_threads_are_for() -> None:
    with pytest.raises(ConfigError, match="threads is for processes="):
        Room(threads=2)


@pytest.mark.parametrize(
    ("options", "error_text"),
    [
        ({"concurrency": "many"}, "concurrency is 'many': give a number, or 'auto'"),
        ({"concurrency": 16, "max_concurrency": 20}, "max_concurrency is for concurrency='auto'"),
        ({"concurrency": "auto", "max_concurrency": 0}, "is 0: it must be a whole number >= 1"),
        ({"concurrency": "auto", "max_concurrency": True}, "a whole number"),
        ({"concurrency": "auto", "processes": 2, "threads": 4}, "leave it out"),
    ],
)
def test_what_auto_goes_with(options: dict[str, Any], error_text: str) -> None:
    with pytest.raises(ConfigError, match=error_text):
        ParallelConsumer("topic", group_id="g", bootstrap_servers="nowhere:1", **options)


@pytest.mark.parametrize(
    ("options", "is_async", "expected"),
    [
        ({}, False, (16, 256)),
        ({}, True, (16, 2000)),
        ({"max_concurrency": 10}, True, (10, 10)),
        ({"processes": 2}, False, (8, 128)),
        ({"processes": 64, "max_concurrency": 32}, False, (1, 1)),
    ],
)
def test_where_auto_begins_and_how_far_it_may_go(
    options: dict[str, Any], is_async: bool, expected: tuple[int, int]
) -> None:
    """In each process."""
    config = replace(Room(is_auto=True, **options).queue.config, concurrency=16)
    fan_out = fan_out_of(config, is_async=is_async)
    assert fan_out is not None
    assert (fan_out.limit, fan_out.maximum) == expected
    assert fan_out_of(Room().queue.config, is_async=is_async) is None
