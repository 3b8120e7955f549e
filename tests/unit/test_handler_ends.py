"""Workers whose handlers, queues or applications behave badly: every message gets its verdict."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Optional
from unittest.mock import MagicMock

import pytest
from pydantic import BaseModel
from tests.contract.handlers import die_or_hang
from tests.unit.parallel_handlers import FAIL, handler_elsewhere
from tests.unit.test_handlers import Model, Order, parsed
from tests.waiting import within

from kafkamq import Ack, Backoff, BrokerError, ConfigError, Nack, Reject, StateError, Worker
from kafkamq.metrics.health import health
from kafkamq.queue.json_values import BodyError
from kafkamq.runtime import messages, process_executor
from kafkamq.runtime.loop_executor import LoopThread
from kafkamq.runtime.verdicts import understood
from kafkamq.testing import MemoryService


class BadError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def forgotten() -> None: ...


@pytest.fixture(autouse=True)
def unlogged() -> Iterator[None]:
    """Reports of tests travel between processes, which lone surrogates in log lines cannot."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


class Unequal:
    """An array, or a query's column, is so: what == gives is no bool."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("the truth value is ambiguous")

    __hash__ = None  # type: ignore[assignment]


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def exits(message) -> None:
    raise SystemExit(3)


def broken_text(message) -> None:
    raise BadError


def half_a_pair(message) -> None:
    raise FileNotFoundError("a name of bytes: \udcff")


def not_awaited(message) -> object:
    return forgotten()


def not_iterated_over(message) -> object:
    return (each for each in [message])


def not_gathered(message) -> object:
    return [exits_in_a_coroutine(message)]


def not_mapped(message) -> object:
    return map(exits, [message])


@contextlib.contextmanager
def managed(message):
    yield


def not_entered(message) -> object:
    return managed(message)


def still_under_way(message) -> object:
    return Future()


async def not_awaited_by_a_coroutine(message) -> object:
    return asyncio.get_running_loop().create_future()


def wrong_delay(message) -> object:
    return Nack(delay=-1.0, reason="\udcff")


def not_called(message) -> object:
    return Nack


def unspeakable(message) -> object:
    return Reject(Unspeakable())  # type: ignore[arg-type]


async def exits_in_a_coroutine(message) -> None:
    raise SystemExit(3)


async def exits_in_a_task(message) -> None:
    await asyncio.gather(exits_in_a_coroutine(message))


async def interrupts_in_a_task(message) -> None:
    async def interrupt() -> None:
        raise KeyboardInterrupt

    await asyncio.create_task(interrupt())


async def stops_its_loop(message) -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)
    raise ValueError("it goes on")


async def cancels_itself(message) -> None:
    raise asyncio.CancelledError


AT_ONCE = Backoff(first=0.0, jitter=0.0)

HANDLERS = [
    (exits, "SystemExit: 3"),
    (broken_text, "BadError"),
    (half_a_pair, "FileNotFoundError: a name of bytes: ?"),
    (not_awaited, "a coroutine, which it should have awaited: declare it with async def"),
    (not_iterated_over, "a generator, which nobody runs"),
    (not_gathered, "a list with coroutines, which it should have awaited"),
    (not_mapped, "a map, which nobody runs"),
    (not_entered, "a _GeneratorContextManager, which nobody runs"),
    (still_under_way, "a Future, whose work has perhaps not ended: return its result()"),
    (not_awaited_by_a_coroutine, "a Future, which it should have awaited"),
    (wrong_delay, "?"),
    (not_called, "should have called: return Nack()"),
    (unspeakable, "Unspeakable"),
    (exits_in_a_coroutine, "SystemExit: 3"),
    (exits_in_a_task, "SystemExit: 3"),
    (interrupts_in_a_task, "KeyboardInterrupt"),
    (stops_its_loop, "ValueError: it goes on"),
    (cancels_itself, ""),
]


@pytest.mark.parametrize(("function", "said"), HANDLERS)
def test_a_handler_that_ends_oddly_gives_its_message_back(function, said: str) -> None:
    service = MemoryService()
    queue = service.queue("q", max_deliveries=1, backoff=AT_ONCE)
    queue.handler(concurrency=1)(function)
    for _ in range(2):
        queue.producer().send(b"x")
    with Worker(service) as worker:
        while worker.handled < 2:
            assert not worker.wait(0.01)
    assert [said in letter.error for letter in service.dead_letters()] == [True, True]


@pytest.mark.parametrize(
    "outcome", [sqlite3.connect(":memory:").execute("select 1"), StringIO(), MagicMock(), [1]]
)
def test_what_is_left_of_work_that_was_done_is_no_failure(outcome: object) -> None:
    """A cursor is an iterator and a response is a context manager."""
    assert understood(outcome) == (Ack(), None)


def test_a_result_that_cannot_be_compared_counts_as_done() -> None:
    service = MemoryService()
    queue = service.queue("q", max_in_flight=5)
    queue.handler(concurrency=1)(lambda message: Unequal())
    for _ in range(20):
        queue.producer().send(b"x")
    with Worker(service) as worker:
        (consumer,) = service._connections._consumers
        while worker.handled < 20:
            assert not worker.wait(0.01)
        assert consumer.in_flight == 0
    assert worker.handled == 20
    assert service.dead_letters() == []


def test_a_second_run_leaves_the_first_one_at_work() -> None:
    service = MemoryService()
    queue = service.queue("q")
    queue.handler()(lambda message: None)
    with Worker(service) as worker:
        with pytest.raises(StateError, match="started before"):
            worker.run()
        queue.producer().send(b"x")
        while not worker.handled:
            assert not worker.wait(0.01)


def test_a_handler_that_no_process_can_load_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each of its messages would end as a dead letter that no handler ever saw."""
    service = MemoryService()
    queue = service.queue("q")
    queue.handler(processes=1)(handler_elsewhere(monkeypatch, tmp_path, FAIL))
    queue.producer().send(b"x")
    with pytest.raises(ConfigError, match="no libfoo"):
        Worker(service).start()
    with queue.consumer() as consumer:
        message = consumer.receive()
        assert message is not None
        assert message.delivery_count == 1


def test_a_process_that_cannot_be_replaced_costs_no_delivery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its message is held until one can start again."""
    service = MemoryService()
    queue = service.queue("q", max_deliveries=1, backoff=AT_ONCE)
    queue.handler(processes=1)(die_or_hang)
    refusals = iter(["no memory"] * 2)
    begin = process_executor._Process.begin

    def refuse(process: process_executor._Process, is_over: Callable[[], bool]) -> str | None:
        refusal = next(refusals, None) if queue_is_open.is_set() else None
        return begin(process, is_over) if refusal is None else refusal

    queue_is_open = threading.Event()
    monkeypatch.setattr(process_executor._Process, "begin", refuse)
    monkeypatch.setattr(process_executor, "PAUSE_S", 0.01)
    with Worker(service) as worker:
        queue_is_open.set()
        for body in (b"die", b"fine"):
            queue.producer().send(body)
        while worker.handled < 2:
            assert not worker.wait(0.01)
    assert [letter.payload for letter in service.dead_letters()] == [b"die"]
    assert next(refusals, None) is None


def test_a_message_is_given_back_whatever_its_error_says() -> None:
    service = MemoryService()
    queue = service.queue("q", max_deliveries=1, backoff=AT_ONCE)
    queue.producer().send(b"x")
    with queue.consumer() as consumer:
        message = consumer.receive()
        assert message is not None
        with pytest.raises(FileNotFoundError), message:
            half_a_pair(message)
    assert "a name of bytes: ?" in service.dead_letters()[0].error


def test_a_queue_that_cannot_start_closes_the_others() -> None:
    service = MemoryService()
    first, second = service.queue("first"), service.queue("second")
    first.handler()(exits)
    second.handler()(exits_in_a_coroutine)

    def open_consumer(spec, plan, _open=service.open_consumer):
        if spec.queue.queue_id == "second":
            raise ConfigError("not here")
        return _open(spec, plan)

    service.open_consumer = open_consumer  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="not here"):
        Worker(service).start()
    (opened,) = service._connections._consumers
    assert opened.is_closed


def test_a_handler_that_blocks_the_loop_does_not_hold_up_the_end() -> None:
    service = MemoryService()
    queue = service.queue("q")
    begun, gate = threading.Event(), threading.Event()

    @queue.handler(concurrency=1)
    async def block(body: str) -> None:
        begun.set()
        gate.wait(within(60))

    for number in range(3):
        queue.producer().send(b"%d" % number)
    worker = Worker(service, drain=0.1)
    worker.start()
    try:
        assert begun.wait(within(30))
        threading.Timer(1.0, gate.set).start()
        worker.stop()
    finally:
        gate.set()
    with queue.consumer() as consumer:
        assert {message.payload for message in consumer.receive_many(3, within(5.0))} >= {
            b"1",
            b"2",
        }


def test_coroutines_that_have_ended_are_not_waited_for() -> None:
    service = MemoryService()
    queue = service.queue("q")

    @queue.handler()
    async def handle(body: str) -> None: ...

    queue.producer().send(b"x")
    worker = Worker(service, telemetry=False, drain=3600)
    worker.start()
    while not worker.handled:
        assert not worker.wait(0.01)
    worker.stop()


def test_a_coroutine_that_swallows_its_cancellation_is_left_alone() -> None:
    """Its message is given back, and its place goes to the next one."""
    service = MemoryService()
    queue = service.queue("q", max_deliveries=1, backoff=AT_ONCE)
    gate = asyncio.Event()
    seen = []

    @queue.handler(concurrency=1, timeout=0.5)
    async def stay(body: str) -> None:
        seen.append(body)
        while body == "stay" and not gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await gate.wait()

    for body in (b"stay", b"go"):
        queue.producer().send(body)
    worker = Worker(service)
    with worker:
        while worker.handled < 2:
            assert not worker.wait(0.01)
        worker._loop.loop().call_soon_threadsafe(gate.set)
    assert seen == ["stay", "go"]
    assert ["took longer than" in letter.error for letter in service.dead_letters()] == [True]


def test_a_coroutine_that_swallows_its_cancellation_does_not_hold_up_the_end() -> None:
    service = MemoryService()
    queue = service.queue("q", max_deliveries=1, backoff=AT_ONCE)
    begun, is_over = threading.Event(), threading.Event()

    @queue.handler(concurrency=1)
    async def stay(body: str) -> None:
        begun.set()
        while not is_over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    queue.producer().send(b"x")
    worker = Worker(service, drain=0.1, telemetry=False)
    worker.start()
    assert begun.wait(within(30))
    try:
        worker.stop()
        assert service.dead_letters() == []
        (message,) = queue.consumer().receive_many(5, 0)
        assert message.delivery_count == 1
    finally:
        is_over.set()


def test_a_consumer_that_has_ended_ends_its_worker() -> None:
    """Also by an error that might pass: nothing would come any more."""
    service = MemoryService()
    queue = service.queue("q")
    queue.handler()(exits)
    worker = Worker(service)
    worker.start()
    (consumer,) = service._connections._consumers

    def fail() -> None:
        raise BrokerError("gone", code="_TRANSPORT", is_retriable=True)

    consumer._check_failure = fail  # type: ignore[method-assign]
    try:
        with pytest.raises(BrokerError, match="gone"):
            worker.wait(within(30))
    finally:
        worker.stop()


def test_a_loop_that_ends_under_its_handlers_ends_the_worker() -> None:
    """What they were at is given back."""
    service = MemoryService()
    queue = service.queue("q", backoff=AT_ONCE)
    begun = threading.Event()

    @queue.handler(concurrency=1)
    async def handle(body: str) -> None:
        begun.set()
        await asyncio.Event().wait()

    queue.producer().send(b"x")
    loop = LoopThread()
    worker = Worker(service, telemetry=False)
    worker.use_loop(loop)  # type: ignore[arg-type]  # as its own, which nobody else can end
    worker.start()
    try:
        assert begun.wait(within(30))
        loop.stop()
        with pytest.raises(StateError, match="the event loop of the handlers ended"):
            worker.wait(within(30))
        (receiving,) = [each for each in health.states() if each.name == "receiving of q"]
        assert not receiving.is_ready
    finally:
        worker.stop()
    (message,) = queue.consumer().receive_many(5, 5.0)
    assert message.delivery_count == 2


def test_telemetry_that_fails_costs_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    service = MemoryService()
    queue = service.queue("q")
    seen = []
    queue.handler()(lambda message: seen.append(message.payload))
    queue.producer().send(b"x")

    def fail(*_: object) -> object:
        raise RuntimeError("an exporter of the application's")

    monkeypatch.setattr(messages.Telemetry, "received", fail)
    monkeypatch.setattr(messages.Calls, "_delivery", fail)
    with Worker(service, telemetry=True) as worker:
        while not worker.handled:
            assert not worker.wait(0.01)
    assert seen == []  # given back, and the log says why


class Big(BaseModel):
    inner: Model


@dataclass
class Holder:
    model: Model
    models: list[Model]


def of_text_or_none(body: Optional[str]) -> None: ...  # noqa: UP045 - what users write
def of_order_or_none(body: Order | None) -> None: ...
def of_model_or_none(body: Model | None) -> None: ...
def of_models(body: list[Model]) -> None: ...
def of_holder(body: Holder) -> None: ...
def of_number(body: int) -> None: ...
def of_two(first: int, body: Order) -> None: ...


@pytest.mark.parametrize(
    ("function", "payload", "body"),
    [
        (of_text_or_none, None, None),
        (of_text_or_none, b"null", "null"),
        (of_text_or_none, b"no json", "no json"),
        (of_order_or_none, None, None),
        (of_order_or_none, b" null", None),
        (of_order_or_none, b'{"id": 1}', Order(1)),
        (of_model_or_none, b'{"id": 1}', Model(id=1)),
        (of_model_or_none, None, None),
        (of_models, b'[{"id": 1}]', [Model(id=1)]),
        (of_holder, b'{"model": {"id": 1}, "models": []}', Holder(Model(id=1), [])),
        (functools.partial(of_two, 1), b'{"id": 1}', Order(1)),
    ],
)
def test_bodies_by_annotation(function, payload, body) -> None:
    assert parsed(function, payload) == body


@pytest.mark.parametrize(
    ("function", "payload", "said"),
    [
        (of_number, b"1" * 5000, "number that is too long"),
        (of_models, b'[{"id": "x"}]', r"the body\[0\]: id: "),
        (of_holder, b'{"models": []}', "has no model"),
    ],
)
def test_bodies_that_are_refused(function, payload, said) -> None:
    with pytest.raises(BodyError, match=said):
        parsed(function, payload)


@dataclass
class Unknown:
    what: "Nowhere"  # type: ignore[name-defined]  # noqa: F821, UP037


def of_unknown(body: Unknown) -> None: ...


def test_a_dataclass_whose_fields_cannot_be_read_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="Nowhere"):
        MemoryService().queue("q").handler()(of_unknown)
