"""Workers in odd moments: a pause, a stop, a cancellation, a time limit in the midst of others."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.unit.shelf import Batch, Shelf
from tests.unit.test_hanging import state_of
from tests.waiting import wait_until, within

from kafkamq import ConfigError, Message, Worker, aio
from kafkamq.queue.consumer import Consumer
from kafkamq.runtime import loop_executor, thread_executor
from kafkamq.runtime.rules import hanging
from kafkamq.runtime.thread_executor import ThreadExecutor
from kafkamq.runtime.work_queue import HandlerCall, HandlerTimeoutError, Slot
from kafkamq.testing import MemoryService


class Opening:
    """A service whose consumers are opened when ``gate`` is, and say what they received."""

    def __init__(self, service: MemoryService) -> None:
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.received = 0
        self.consumers: list[Consumer] = []
        self._service = service
        self.handlers, self.cluster = service.handlers, service.cluster

    def open_consumer(self, *arguments: Any) -> Consumer:
        self.begun.set()
        self.gate.wait(within(60))
        consumer: Any = self._service.open_consumer(*arguments)
        receive_many: Callable[..., list[Message]] = consumer.receive_many

        def counted(*limits: Any) -> list[Message]:
            found = receive_many(*limits)
            self.received += len(found)
            return found

        consumer.receive_many = counted
        self.consumers.append(consumer)
        return consumer  # type: ignore[no-any-return]


def test_a_list_that_is_not_full_is_handled_in_a_pause() -> None:
    service = MemoryService()
    queue = service.queue("q")
    sizes: list[int] = []

    @queue.handler(batch_size=10, batch_linger=1.0, concurrency=1)
    def handle(messages: list[Message]) -> None:
        sizes.append(len(messages))

    opening = Opening(service)
    opening.gate.set()
    for body in (b"a", b"b", b"c"):
        queue.producer().send(body)
    with Worker(opening, telemetry=False) as worker:
        wait_until(lambda: opening.received == 3)
        worker.pause("q")
        wait_until(lambda: worker.handled == 3, timeout_s=20)
    assert sizes == [3]


def test_a_coroutine_that_ended_cancelled_does_not_hang() -> None:
    """Its cancellation is an outcome as any other: its slot is free."""
    service = MemoryService()
    queue = service.queue("cancelled", max_deliveries=1)

    @queue.handler(concurrency=1)
    async def handle(body: str) -> None:
        raise asyncio.CancelledError

    queue.producer().send(b"x")
    with Worker(service, hung_after=0.05, telemetry=False) as worker:
        wait_until(lambda: worker.handled == 1)
        time.sleep(0.1)
        state = state_of("handlers of cancelled")
        assert (state.is_live, state.detail) == (True, "")


def test_who_stops_a_second_time_waits_for_the_first() -> None:
    service = MemoryService()
    queue = service.queue("q", max_deliveries=1)
    begun, ended = threading.Event(), threading.Event()

    @queue.handler(concurrency=1)
    async def handle(body: str) -> None:
        begun.set()
        await asyncio.sleep(0.5)
        ended.set()

    queue.producer().send(b"x")
    worker = Worker(service, drain=30, telemetry=False)
    worker.start()
    assert begun.wait(within(30))
    first = threading.Thread(target=worker.stop)
    first.start()
    wait_until(lambda: worker.is_stopping)
    time.sleep(0.05)
    worker.stop()
    assert ended.is_set()
    first.join(within(30))
    assert (worker.handled, service.dead_letters()) == (1, [])


def test_a_start_that_is_cancelled_leaves_nothing_at_work() -> None:
    service = MemoryService()
    service.queue("q").handler()(lambda message: None)
    opening = Opening(service)

    async def main() -> None:
        worker = aio.Worker(opening, telemetry=False)
        task = asyncio.create_task(worker.run())
        await asyncio.to_thread(opening.begun.wait, 30)
        task.cancel()
        asyncio.get_running_loop().call_later(0.1, opening.gate.set)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    (consumer,) = opening.consumers
    assert consumer.is_closed


def test_a_coroutine_with_a_time_limit_may_clean_up_at_the_end() -> None:
    service = MemoryService()
    queue = service.queue("q")
    begun, cleaned = threading.Event(), threading.Event()

    @queue.handler(concurrency=1, timeout=50)
    async def handle(body: str) -> None:
        try:
            begun.set()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            cleaned.set()

    queue.producer().send(b"x")
    worker = Worker(service, drain=0.05, telemetry=False)
    worker.start()
    assert begun.wait(within(30))
    worker.stop()
    assert cleaned.is_set()


def test_an_async_generator_is_no_middleware() -> None:
    """Around a ``def`` handler nothing would call the handler, and its message would be done."""
    service = MemoryService()
    service.queue("q").handler()(lambda message: None)

    async def around(message: Message, call: object) -> AsyncIterator[None]:
        yield

    with pytest.raises(ConfigError, match="yields"):
        Worker(service, middleware=[around], telemetry=False).start()


class _Watched(Slot[Any]):
    """Its first handler ends, and the next one begins, while its time is read."""

    __slots__ = ("began_s", "is_next", "may_end")

    def __init__(self) -> None:
        self.is_next, self.may_end = threading.Event(), threading.Event()
        super().__init__()

    @property
    def claimed_s(self) -> float:
        found = self.began_s
        if time.monotonic() - found > 0.2 and not self.may_end.is_set():
            self.may_end.set()
            self.is_next.wait(within(10))
        return found

    @claimed_s.setter
    def claimed_s(self, now_s: float) -> None:
        self.began_s = now_s


def test_who_ends_just_in_time_leaves_its_time_to_nobody() -> None:
    slot = _Watched()

    class OneSlot(Shelf):
        def make_slot(self) -> _Watched:
            return slot

    def handle(name: str) -> str:
        if name == "slow":
            slot.may_end.wait(within(10))
        else:
            slot.is_next.set()
            time.sleep(0.05)
        return name

    shelf = OneSlot()
    executor = ThreadExecutor(shelf, HandlerCall(function=handle, timeout_ms=200), 1)
    shelf.add(Batch(["slow", "next"]))
    executor.start()
    shelf.wait(2)
    shelf.end(executor)
    assert shelf.outcomes == [("slow", "slow"), ("next", "next")]


def test_nothing_is_begun_behind_a_request_to_stop() -> None:
    """``run`` looks for the request now and then; a handler that ends meanwhile takes no more."""
    service = MemoryService()
    queue = service.queue("q")
    opening = Opening(service)
    opening.gate.set()
    worker = Worker(opening)  # type: ignore[arg-type]
    begun: list[str] = []

    @queue.handler(concurrency=1)
    def handle(body: str) -> None:
        begun.append(body)
        worker.request_stop()
        wait_until(lambda: worker.is_stopping)

    for name in (b"a", b"b"):
        queue.producer().send(name)
    worker.start()
    wait_until(lambda: worker.handled == 1)
    wait_until(lambda: opening.received == 2)
    worker.stop()
    assert begun == ["a"]


def test_a_call_that_takes_too_long_waits_for_a_thread_that_can_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container may have as many threads as it may have: nothing is lost meanwhile."""
    gate, refused = threading.Event(), threading.Event()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("crowded"):
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    shelf = Shelf()

    def handle(name: str) -> None:
        if name == "slow":
            gate.wait(within(60))

    call = HandlerCall(function=handle, name="crowded", timeout_ms=100)
    executor = ThreadExecutor(shelf, call, 1)
    executor.start()
    try:
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", refuse)
            shelf.add(Batch(["slow", "next"], is_serial=False))
            assert refused.wait(within(30))
        shelf.wait(2)
        assert [(name, type(said)) for name, said in shelf.outcomes] == [
            ("slow", HandlerTimeoutError)
        ]
    finally:
        gate.set()
        shelf.end(executor)


@pytest.mark.parametrize("executor", [thread_executor.ThreadExecutor, loop_executor.LoopExecutor])
def test_calls_that_are_left_alone_are_bounded(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than that, and their queue ends with an error that says what to do."""
    gate, left = threading.Event(), lambda count: 3
    monkeypatch.setattr(thread_executor, "max_left", left)
    monkeypatch.setattr(loop_executor, "max_left", left)
    assert hanging.max_left(1) == 64
    assert hanging.max_left(100) == 400
    shelf = Shelf()

    def hang(name: str) -> None:
        gate.wait(within(60))

    async def hang_async(name: str) -> None:
        while not gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    is_async = executor is loop_executor.LoopExecutor
    call = HandlerCall(function=hang_async if is_async else hang, timeout_ms=50)
    pool = executor(shelf, call, 4)
    shelf.add(*[Batch([name]) for name in "abcdefgh"])
    pool.start()
    try:
        wait_until(lambda: shelf.failure is not None, "the failure")
        assert isinstance(shelf.failure, HandlerTimeoutError)
        assert "calls of the handler go on although they took longer" in str(shelf.failure)
    finally:
        gate.set()
        shelf.end(pool)


@pytest.mark.parametrize("options", [{}, {"timeout": 60.0}, {"batch_size": 5}])
@pytest.mark.parametrize("is_async", [False, True])
def test_handlers_that_wait_keep_no_messages(options: dict[str, Any], is_async: bool) -> None:
    """Ten thousand of them would hold the last payloads, or lists, of each."""
    service = MemoryService()
    queue = service.queue("idle")

    def handle(message) -> None: ...

    async def handle_async(message) -> None: ...

    queue.handler(concurrency=4, **options)(handle_async if is_async else handle)
    for _ in range(20):
        queue.producer().send(b"x")

    def kept() -> list[object]:
        gc.collect()
        return [each for each in gc.get_objects() if isinstance(each, Message)]

    # What other tests have left need not be looked at each time: the collector passes it over.
    gc.freeze()
    try:
        with Worker(service, telemetry=False) as worker:
            wait_until(lambda: worker.handled == 20)
            wait_until(lambda: not kept(), "the end of the last payloads")
    finally:
        gc.unfreeze()
