"""Options of handlers: attempts, lists, rates, middleware for both kinds, threads in processes."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.contract import handlers
from tests.unit.parallel_handlers import WAIT, handler_elsewhere
from tests.waiting import wait_until, within

from kafkamq import (
    Ack,
    Backoff,
    ConfigError,
    Message,
    Nack,
    ParallelConsumer,
    Reject,
    Worker,
    aio,
)
from kafkamq.runtime.messages import Calls, RemoteMessages
from kafkamq.runtime.work_queue import Slot
from kafkamq.testing import Clock, MemoryService

SOON = Backoff(first=0.01, max=0.01, jitter=0.0)


@dataclass
class Order:
    id: int


def run(service: MemoryService, handled: int, **options: Any) -> None:
    """Until so many messages have their verdicts."""
    with Worker(service, telemetry=False, **options) as worker:
        wait_until(lambda: worker.handled >= handled, "the verdicts")
    assert worker.handled == handled


def queue_of(**options: Any) -> tuple[MemoryService, Any]:
    service = MemoryService()
    return service, service.queue("q", backoff=SOON, **options)


def send(queue: Any, *bodies: bytes) -> None:
    with queue.producer() as producer:
        for body in bodies:
            producer.send(body)


def letters(service: MemoryService) -> dict[bytes | None, tuple[str, str, int]]:
    return {
        letter.payload: (letter.reason, letter.error, letter.delivery_count)
        for letter in service.dead_letters()
    }


def test_only_some_exceptions_are_worth_another_attempt() -> None:
    service, queue = queue_of(max_deliveries=3)

    @queue.handler(retry_on=(OSError, KeyError))
    def handle(body: str, message: Message) -> None:
        if body == "again" and message.delivery_count < 3:
            raise TimeoutError("a kind of OSError")
        if body == "never":
            raise ValueError("no use")

    send(queue, b"again", b"never", b"fine")
    run(service, 5)
    assert letters(service) == {b"never": ("rejected", "ValueError: no use", 1)}


def test_a_kind_of_exception_may_have_a_back_off_of_its_own() -> None:
    clock = Clock()
    service = MemoryService(clock=clock)
    queue = service.queue("q", backoff=Backoff(first=3600.0, max=3600.0), max_deliveries=3)
    seen: Counter[str] = Counter()

    @queue.handler(
        retry_on={ConnectionError: Backoff(first=5.0, max=5.0, jitter=0.0), OSError: None}
    )
    def handle(body: str, message: Message) -> None:
        seen[body] += 1
        if message.delivery_count == 1:
            raise ConnectionError(body) if body == "soon" else OSError(body)

    send(queue, b"soon", b"late")
    with Worker(service, telemetry=False) as worker:
        wait_until(lambda: worker.handled == 2)
        clock.advance(10.0)
        wait_until(lambda: seen["soon"] == 2)
        assert seen["late"] == 1
        clock.advance(3 * 3600.0)
        wait_until(lambda: seen["late"] == 2)


def test_a_handler_may_have_fewer_attempts_than_its_queue() -> None:
    service, queue = queue_of(max_deliveries=5)
    seen: Counter[str] = Counter()

    @queue.handler(max_attempts=2)
    def handle(body: str) -> object:
        seen[body] += 1
        if body == "nack":
            return Nack()
        raise ValueError(body)

    send(queue, b"nack", b"raise")
    run(service, 4)
    assert seen == {"nack": 2, "raise": 2}
    assert letters(service) == {
        b"nack": ("rejected", "attempt 2 of 2 failed", 2),
        b"raise": ("rejected", "ValueError: raise", 2),
    }


def test_a_message_that_ended_its_worker_each_time_is_not_tried_once_more() -> None:
    clock = Clock()
    service = MemoryService(clock=clock)
    queue = service.queue("q", backoff=SOON, max_deliveries=5, redelivery_timeout=10.0)
    send(queue, b"x")
    with queue.consumer() as consumer:  # two workers that die over it
        for _ in range(2):
            message = consumer.receive(1.0)
            message.nack(delay=0.0)
    seen: list[str] = []
    queue.handler(max_attempts=2)(lambda message: seen.append("called"))
    with Worker(service, telemetry=False):
        wait_until(lambda: service.dead_letters(), "the dead letter")
    assert seen == []
    ((reason, error, count),) = letters(service).values()
    assert (reason, count) == ("rejected", 3)
    assert "the last of its attempts" in error


@pytest.mark.parametrize("is_async", [False, True])
def test_lists_have_a_verdict_for_all_or_one_for_each(is_async: bool) -> None:
    service, queue = queue_of(max_deliveries=2)
    calls: list[list[int]] = []

    def handle(orders: list[Order], messages: list[Message]) -> object:
        assert [message.payload for message in messages] == [
            b'{"id": %d}' % order.id for order in orders
        ]
        ids = [order.id for order in orders]
        calls.append(ids)
        if ids == [1, 2, 4]:  # the third one's body cannot be read
            return [None, Reject("two"), Ack()]
        raise ValueError("all of them")

    async def handle_async(orders: list[Order], messages: list[Message]) -> object:
        await asyncio.sleep(0)
        return handle(orders, messages)

    queue.handler(batch_size=4, batch_linger=30.0, concurrency=1)(
        handle_async if is_async else handle
    )
    send(queue, b'{"id": 1}', b'{"id": 2}', b"three", b'{"id": 4}')
    run(service, 4)
    assert calls == [[1, 2, 4]]
    found = letters(service)
    assert found[b'{"id": 2}'][:2] == ("rejected", "two")
    assert "no JSON" in found[b"three"][1]
    assert len(found) == 2


def test_a_list_that_fails_comes_again_as_a_whole() -> None:
    service, queue = queue_of(max_deliveries=2)
    sizes: list[int] = []

    @queue.handler(batch_size=10, concurrency=1)
    def handle(messages: list[Message]) -> None:
        sizes.append(len(messages))
        raise ValueError("no")

    send(queue, *[b"%d" % number for number in range(5)])
    run(service, 10)
    assert sum(sizes) == 10
    assert len(letters(service)) == 5


def test_a_list_that_is_not_full_waits_for_so_long() -> None:
    service, queue = queue_of()
    sizes: list[int] = []

    @queue.handler(batch_size=100, batch_linger=0.2, concurrency=1)
    def handle(messages: list[Message]) -> None:
        sizes.append(len(messages))

    began_s = time.monotonic()
    send(queue, b"a", b"b", b"c")
    run(service, 3)
    assert time.monotonic() - began_s >= 0.2
    assert sizes == [3]


def test_a_wrong_number_of_verdicts_is_a_failure_of_all() -> None:
    service, queue = queue_of(max_deliveries=1)
    queue.handler(batch_size=2, batch_linger=30.0, concurrency=1)(lambda messages: [None])
    send(queue, b"a", b"b")
    run(service, 2)
    wait_until(lambda: len(letters(service)) == 2, "the delays of both")
    assert all("2 records and returned 1" in error for _, error, _ in letters(service).values())


def test_the_rate_is_held() -> None:
    service, queue = queue_of()
    begun: list[float] = []

    @queue.handler(max_rate=50.0)
    def handle(message: Message) -> None:
        begun.append(time.monotonic())

    send(queue, *[b"x"] * 25)
    run(service, 25)
    assert begun[-1] - begun[0] > 24 / 50 - 0.15  # what a pause of 0.1 s may make up


def around(message: Message) -> Iterator[None]:
    log.append(("begin", message.payload))
    try:
        outcome = yield
    except KeyError as error:
        log.append(("error", error.args[0]))
        return Reject("a key is missing")
    log.append(("end", outcome))
    return None


log: list[tuple[str, object]] = []


@pytest.mark.parametrize("is_async", [False, True])
def test_a_generator_goes_around_handlers_of_both_kinds(is_async: bool) -> None:
    log.clear()
    service, queue = queue_of(max_deliveries=1)

    def handle(body: str) -> object:
        if body == "raise":
            raise KeyError("x")
        return Reject("no") if body == "reject" else None

    async def handle_async(body: str) -> object:
        await asyncio.sleep(0)
        return handle(body)

    queue.handler(concurrency=1)(handle_async if is_async else handle)

    def refuse(message: Message) -> Iterator[None]:
        if message.payload == b"early":
            return Reject("before the handler")
        yield
        return None

    send(queue, b"fine", b"reject", b"raise", b"early")
    run(service, 4, middleware=[refuse, around])
    assert log == [
        ("begin", b"fine"),
        ("end", None),
        ("begin", b"reject"),
        ("end", Reject("no")),
        ("begin", b"raise"),
        ("error", "x"),
    ]
    assert {payload: error for payload, (_, error, _) in letters(service).items()} == {
        b"reject": "no",
        b"raise": "a key is missing",
        b"early": "before the handler",
    }


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("returned", [None, Ack()])
def test_a_generator_that_catches_an_exception_leaves_it_the_outcome(
    is_async: bool, returned: Ack | None
) -> None:
    """Unless it returns another one: to count failures must not make them successes."""
    service, queue = queue_of(max_deliveries=1)
    failed = []

    def handle(body: str) -> None:
        raise OSError("the database is down")

    async def handle_async(body: str) -> None:
        handle(body)

    def counted(message: Message) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            failed.append(str(error))
            return returned

    queue.handler()(handle_async if is_async else handle)
    send(queue, b"x")
    run(service, 1, middleware=[counted])
    assert failed == ["the database is down"]
    errors = [error for _, error, _ in letters(service).values()]
    assert errors == ([] if returned else ["OSError: the database is down"])


def twice(message: Message) -> Iterator[None]:
    yield
    yield


def test_a_generator_that_yields_twice_fails_its_message() -> None:
    service, queue = queue_of(max_deliveries=1)
    queue.handler()(lambda message: None)
    send(queue, b"x")
    run(service, 1, middleware=[twice])
    ((_, error, _),) = letters(service).values()
    assert "yields once" in error


def test_both_kinds_of_handlers_under_one_worker_share_a_generator() -> None:
    log.clear()
    service = MemoryService()
    one, two = service.queue("one"), service.queue("two")
    one.handler()(lambda message: None)

    @two.handler()
    async def handle(message: Message) -> None: ...

    send(one, b"1")
    send(two, b"2")
    run(service, 2, middleware=[around])
    assert sorted(payload for what, payload in log if what == "begin") == [b"1", b"2"]
    with pytest.raises(ConfigError, match="or a generator function, which serves both"):
        Worker(service, middleware=[lambda message, call: call(message)]).start()


def test_an_exception_of_a_process_is_one_here() -> None:
    """Each time, and nobody else's."""
    service, queue = queue_of(max_deliveries=1)
    queue.handler(processes=1, threads=4)(handlers.raise_odd)
    send(queue, *[b"%d" % number for number in range(100)])
    run(service, 100)
    found = letters(service)
    assert set(found) == {b"%d" % number for number in range(1, 100, 2)}
    assert {error for _, error, _ in found.values()} == {"ValueError: odd"}


@pytest.mark.parametrize("handler", [handlers.meet, handlers.meet_async])
def test_processes_have_several_handlers_each(handler: Callable[..., object]) -> None:
    """Three of them wait for each other."""
    service, queue = queue_of(max_deliveries=1)
    queue.handler(processes=1, threads=3)(handler)
    send(queue, *[b"x"] * 6)
    run(service, 6)
    assert letters(service) == {}


def test_lists_in_processes() -> None:
    service, queue = queue_of(max_deliveries=1)
    queue.handler(processes=1, batch_size=3, batch_linger=30.0)(handlers.reject_odd)
    send(queue, b"1", b"2", b"3")
    run(service, 3)
    assert {payload: error for payload, (_, error, _) in letters(service).items()} == {
        b"1": "odd",
        b"3": "odd",
    }


def test_middleware_runs_in_the_process_of_its_handler() -> None:
    service, queue = queue_of(max_deliveries=1)
    queue.handler(processes=1)(handlers.where)
    send(queue, b"x")
    run(service, 1, middleware=[handlers.around])
    ((_, error, _),) = letters(service).values()
    inner, outer = (int(part.split()[-1]) for part in error.split(", "))
    assert inner == outer != os.getpid()
    with pytest.raises(ConfigError, match="such a deserializer and middleware"):
        Worker(service, middleware=[lambda message, call: call(message)]).start()


def test_a_stop_gives_back_what_processes_have(tmp_path: Path) -> None:
    """What a handler was at is nacked; what waited for it has lost no delivery."""
    service, queue = queue_of()
    queue.handler(processes=1)(handlers.begin_and_hang)
    worker = Worker(service, telemetry=False, drain=0.1)
    with worker:
        bodies = [str(tmp_path / name) for name in "abc"]
        send(queue, *[body.encode() for body in bodies])
        wait_until(Path(bodies[0]).exists)
    begun = [path.name for path in tmp_path.iterdir()]
    found: list[Message] = []
    with queue.consumer() as consumer:
        wait_until(lambda: len(found.extend(consumer.receive_many(3, 0.1)) or found) == 3)
    counts = {Path((each.payload or b"").decode()).name: each.delivery_count for each in found}
    assert counts == {"a": 2, "b": 1, "c": 1}
    assert begun == ["a"]


def test_calls_that_wait_behind_a_slow_one_are_asked_back() -> None:
    """A process has more than its handlers can begin, as they were quick. A stop spares them."""
    service, queue = queue_of(max_in_flight=10)
    queue.handler(processes=1)(handlers.where)
    (spec,) = service.handlers
    stopping, faults = threading.Event(), list[BaseException]()
    calls = Calls(spec, (), None)
    messages = RemoteMessages(calls, threading.Event(), faults.append, stopping)
    asked: list[Slot[Any]] = []
    slot = messages.make_slot()
    slot.give_back = lambda: asked.append(slot)
    messages.join([slot], pytest.fail)  # type: ignore[arg-type]  # nobody is woken here
    send(queue, b"a", b"b", b"c")
    with queue.consumer() as consumer:
        messages.add(consumer.receive_many(3, 1.0))
        _, *others = messages.take(slot, 3)

        def is_asked() -> bool:
            messages.tend()
            return bool(asked)

        wait_until(is_asked)
        for each in others:
            messages.done(slot, each, 0)
        again = messages.take(slot, 3)
        assert [run.messages[0].payload for run in again] == [b"c", b"b"]
        messages.stop()
        for each in again:
            messages.done(slot, each, 0)
        assert [message.payload for message in calls.spared] == [b"c", b"b"]


def test_a_worker_whose_process_does_not_come_up_hears_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process waits in an import, as for a lock or a server."""
    service, queue = queue_of()
    queue.handler(processes=1)(handler_elsewhere(monkeypatch, tmp_path, WAIT))
    worker = Worker(service, telemetry=False)
    runs = threading.Thread(target=worker.run, daemon=True)
    runs.start()
    wait_until((tmp_path / "begun").exists)
    worker.request_stop()
    runs.join(within(60))
    assert not runs.is_alive()
    assert worker.failure is None


# asyncio.


def test_on_the_callers_loop() -> None:
    service, queue = queue_of()
    loops: list[object] = []

    @queue.handler()
    async def handle(body: str, message: aio.Message) -> None:
        loops.append(asyncio.get_running_loop())
        assert isinstance(message, aio.Message)
        await message.ack()

    send(queue, b"a", b"b")

    async def main() -> None:
        async with aio.Worker(service, telemetry=False) as worker:
            while worker.handled < 2:
                assert not await worker.wait(0.01)
        assert loops == [asyncio.get_running_loop()] * 2
        assert [each.queue_id for each in worker.queues] == ["q"]

    asyncio.run(main())
    assert service.dead_letters() == []


def test_a_signal_drains_what_runs_and_gives_back_the_rest() -> None:
    service, queue = queue_of(max_deliveries=5)
    ended: list[str] = []
    worker = aio.Worker(service, telemetry=False)

    @queue.handler(concurrency=1)
    async def handle(body: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await worker.wait(within(60))
        ended.append(body)

    send(queue, b"first", b"second", b"third")
    asyncio.run(worker.run())
    assert ended == ["first"]
    with queue.consumer() as consumer:
        left = consumer.receive_many(5, 1.0)
        assert [(each.payload, each.delivery_count) for each in left] == [
            (b"second", 1),
            (b"third", 1),
        ]


def test_what_does_not_end_in_time_is_given_back() -> None:
    service, queue = queue_of()
    begun = threading.Event()

    @queue.handler(concurrency=1)
    async def handle(body: str) -> None:
        begun.set()
        await asyncio.sleep(60)

    send(queue, b"x")

    async def main() -> None:
        worker = aio.Worker(service, drain=0.05, telemetry=False)
        task = asyncio.create_task(worker.run())
        assert await asyncio.to_thread(begun.wait, 60)
        worker.request_stop()
        await asyncio.wait_for(task, 30)

    asyncio.run(main())
    with queue.consumer() as consumer:
        message = consumer.receive(1.0)
        assert message is not None
        assert message.delivery_count == 2


def test_def_handlers_run_in_threads_of_an_asyncio_worker() -> None:
    service, queue = queue_of()
    threads: list[str] = []
    queue.handler()(lambda message: threads.append(threading.current_thread().name))
    send(queue, b"x")

    async def main() -> None:
        async with aio.Worker(service, telemetry=False) as worker:
            while not worker.handled:
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert threads[0].startswith("kafkamq-q-")


@pytest.mark.parametrize("drain", [math.inf, math.nan, None, "30s", -1, True])
def test_the_time_for_the_end_is_one(drain: Any) -> None:
    """A bad time would be met at a signal, when nobody can mend it."""
    for worker in (Worker, aio.Worker):
        with pytest.raises(ConfigError, match=r"drain is .*: it must be"):
            worker(MemoryService(), drain=drain)


@pytest.mark.parametrize("time", [timedelta(seconds=30), 30, 1e11])
def test_an_end_may_take_long(time: Any) -> None:
    service, queue = queue_of()
    queue.handler()(lambda message: None)
    send(queue, b"x")
    run(service, 1, drain=time)
    consumer = ParallelConsumer("t", group_id="g", bootstrap_servers="memory://ends")
    consumer.close(time, drain=time)


def test_a_parallel_consumer_ends_within_a_time_that_is_one() -> None:
    servers = "memory://ends"
    with ParallelConsumer("t", group_id="g", bootstrap_servers=servers) as consumer:
        for end in (
            lambda: consumer.close(math.inf),
            lambda: consumer.close(drain="30s"),
            lambda: consumer.drain(math.nan),
            lambda: consumer.run(print, timeout=None),
        ):
            with pytest.raises(ConfigError, match=r"is .*: it must be"):
                end()
        consumer.close(-1.0)  # what is left of a time

    async def main() -> None:
        async with aio.ParallelConsumer("t", group_id="g", bootstrap_servers=servers) as consumer:
            with pytest.raises(ConfigError, match="drain is inf"):
                await consumer.drain(math.inf)

    asyncio.run(main())
