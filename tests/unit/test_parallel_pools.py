"""Where the work queue takes work back before a worker has begun it; a loop that is gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import pytest
from tests.unit.test_parallel_work_queue import Room

from kafkamq.parallel.failure_policy import FailurePolicy
from kafkamq.parallel.results import Handling
from kafkamq.runtime.loop_executor import LoopExecutor
from kafkamq.runtime.messages import Calls
from kafkamq.runtime.thread_executor import ThreadExecutor
from kafkamq.runtime.work_queue import HandlerCall, enter, is_inside
from kafkamq.testing import MemoryService

if TYPE_CHECKING:
    from collections.abc import Iterator


def handling(room: Room, failures: list[BaseException]) -> Handling:
    def no_dead_letters(*_: object) -> None:
        raise AssertionError("none is written here")

    policy = FailurePolicy(
        room.queue.config, room.stats, no_dead_letters, failures.append, no_dead_letters
    )
    return Handling(room.queue, policy)


def test_nobody_is_called_with_an_empty_list() -> None:
    room = Room(batch_size=4)
    room.add("abcd")
    calls: list[object] = []
    pool = ThreadExecutor(handling(room, []), HandlerCall(function=calls.append), 1)
    one, _ = room.workers
    assert room.queue.take(one)
    room.queue.recall([room.partition])
    pool._process_list(one, calls.append)
    assert calls == []
    assert room.queue.take(one) == []
    assert room.committable == 0

    async def handle(records: object) -> None:
        calls.append(records)

    room = Room(batch_size=4)
    room.add("abcd")
    loop = asyncio.new_event_loop()
    coroutines = LoopExecutor(handling(room, []), HandlerCall(function=handle), 1, loop)
    one, _ = room.workers
    assert room.queue.take(one)
    room.queue.recall([room.partition])
    loop.run_until_complete(coroutines._process_list(one, handle))
    loop.close()
    assert calls == []


def test_a_loop_that_was_closed_is_told_once_and_wakes_nobody() -> None:
    room, failures = Room(), []
    loop = asyncio.new_event_loop()
    loop.close()
    pool = LoopExecutor(handling(room, failures), HandlerCall(function=print), 2, loop)
    pool.wake(room.workers)
    pool.wake(room.workers)
    pool.cancel()
    assert len(failures) == 1
    assert pool.join(0)


def test_an_error_of_cancelling_is_an_attempt_unless_it_is_the_worker_that_is_cancelled() -> None:
    room = Room()
    room.add("ab")

    async def handle(record: object) -> None:
        raise asyncio.CancelledError

    async def wait(record: object) -> None:
        await asyncio.sleep(60)

    async def cancelled(pool: LoopExecutor) -> None:
        task = asyncio.ensure_future(pool._process(room.workers[1], wait))
        await asyncio.sleep(0)
        task.cancel()
        await task

    loop = asyncio.new_event_loop()
    one, two = room.workers
    assert room.queue.take(one)
    assert room.queue.take(two)
    pool = LoopExecutor(handling(room, []), HandlerCall(function=handle), 1, loop)
    loop.run_until_complete(pool._process(one, handle))
    assert one.current is not None
    ((record, _),) = one.current[0].failed
    assert record.offset == 0
    assert isinstance(record.last_error, asyncio.CancelledError)
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(cancelled(pool))
    loop.close()


@pytest.mark.parametrize("takes_lists", [False, True])
def test_a_coroutine_that_is_collected_gives_no_verdict(takes_lists: bool) -> None:
    """Its owner closed the loop under it: whoever reads the message next decides."""
    service = MemoryService()

    @service.queue("q").handler(batch_size=2 if takes_lists else 0)
    async def handle(message) -> None:
        await asyncio.sleep(60)

    def swallows(message: object) -> Iterator[None]:
        with contextlib.suppress(BaseException):
            yield

    (spec,) = service.handlers
    run = Calls(spec, [swallows], None).run_async
    room = Room(batch_size=2)
    room.add("a")
    loop = asyncio.new_event_loop()
    pool = LoopExecutor(handling(room, []), HandlerCall(function=run), 1, loop)
    one, _ = room.workers
    assert room.queue.take(one)
    step = pool._process_list(one, run) if takes_lists else pool._process(one, run)
    loop.call_soon(step.send, None)  # it waits in the handler
    loop.call_soon(loop.stop)
    loop.run_forever()
    step.close()
    loop.close()
    assert not any(run.failed for run in one.runs)
    assert one.finished == []
    assert room.committable == 0


def test_inside_is_what_a_thread_or_its_tasks_were_called_for() -> None:
    owner, other = object(), object()
    assert not is_inside(owner)

    async def main() -> list[bool]:
        enter(owner)
        task = asyncio.create_task(ask())
        return [await task, await asyncio.to_thread(is_inside, owner), is_inside(other)]

    async def ask() -> bool:
        return is_inside(owner)

    assert asyncio.run(main()) == [True, True, False]
    assert not is_inside(owner)


@pytest.mark.parametrize("count", [0, 1])
def test_a_worker_in_order_goes_on_behind_what_was_taken_back(count: int) -> None:
    room = Room()
    room.add("aaaaa")
    room.speed_up()
    one, two = room.workers
    (run,) = room.queue.take(one)
    room.work(one, count)
    room.queue.tend()
    assert [record.offset for record in run.records] == list(range(count + 1))
    assert room.queue.take(two) == []  # the key is still the first one's
    assert room.committable == count
    one.finished.append(run)
    room.queue.collect(one)
    assert room.committable == count + 1
    room.speed_up()
    taken = [record.offset for each in room.queue.take(two) for record in each.records]
    assert taken == list(range(count + 1, 5))
    room.queue.scheduler.check()


def test_handlers_that_never_wait_leave_turns_to_others_of_their_loop() -> None:
    room = Room()
    count = 2_000
    room.add("ab" * (count // 2))

    async def handle(record: object) -> None:
        """Need 100 us without a wait: all of them need many turns on a machine of any speed."""
        began_s = time.perf_counter()
        while time.perf_counter() - began_s < 0.0001:
            pass

    async def turns() -> int:
        loop = asyncio.get_running_loop()
        pool = LoopExecutor(handling(room, []), HandlerCall(function=handle), 2, loop)
        pool.start()
        found = 0
        while room.committable < count:
            found += 1
            await asyncio.sleep(0)
        room.queue.stop()
        while not pool.join(0):
            await asyncio.sleep(0)
        return found

    assert asyncio.run(turns()) > 5
