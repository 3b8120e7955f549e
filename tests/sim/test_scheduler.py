"""The simulator's threads: in the order of a seed, on a virtual clock, nothing real among them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError

import pytest
from harness.simulation.executors import Executors, Queues
from harness.simulation.primitives import Threading
from harness.simulation.scheduler import Scheduler, SimulationOver, StuckError
from harness.simulation.swapping import leftovers, load_shells, swapped

from kafkamq.queue import producer
from kafkamq.transport import clock

NOT_SIMULATED: list[str] = []


class World:
    def __init__(self, seed: int = 0, preempt_every: int = 2) -> None:
        self.scheduler = Scheduler(seed, preempt_every=preempt_every)
        self.threading = Threading(self.scheduler)
        self.queue = Queues(self.threading)
        self.futures = Executors(self.threading)
        self.sleep = self.scheduler.sleep

    def run(self, call: Callable[[], object]) -> None:
        try:
            self.scheduler.run("main", call)
        finally:
            self.scheduler.close()
        assert not self.scheduler.failures

    def threads(self, *calls: Callable[[], object]) -> None:
        threads = [self.threading.Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def order_of(seed: int) -> list[int]:
    world, order = World(seed), []

    def count(number: int) -> None:
        for _ in range(3):
            world.sleep(0)
            order.append(number)

    world.run(lambda: world.threads(*(lambda n=n: count(n) for n in range(4))))
    return order


def test_a_seed_decides_the_order() -> None:
    assert order_of(1) == order_of(1)
    assert len({tuple(order_of(seed)) for seed in range(20)}) > 15


@pytest.mark.parametrize("seed", range(10))
def test_who_is_interrupted_before_a_lock_leaves_it_to_the_next(seed: int) -> None:
    """Also where it had its turn already."""
    world, inside = World(seed), []
    lock = world.threading.Lock()

    def enter(name: str) -> None:
        try:
            with lock:
                inside.append(name)
        except InterruptedError:
            inside.append("interrupted")

    def main() -> None:
        lock.acquire()
        names = ["first", "second"]
        threads = [world.threading.Thread(target=enter, args=(each,), name=each) for each in names]
        for thread in threads:
            thread.start()
            world.sleep(0.1)
        lock.release()
        process = world.scheduler.current.process
        first = next((each for each in process.tasks if each.name == "first"), None)
        if first is not None:  # else it has run
            world.scheduler.interrupt(first, InterruptedError())
        for thread in threads:
            thread.join()

    world.run(main)
    assert inside in (["interrupted", "second"], ["second", "interrupted"])
    assert not lock.locked()


@pytest.mark.parametrize("seed", range(20))
def test_a_lock_lets_one_in(seed: int) -> None:
    world = World(seed)
    lock, inside, seen = world.threading.Lock(), [], []

    def enter() -> None:
        for _ in range(5):
            with lock:
                inside.append(1)
                world.sleep(0)
                seen.append(len(inside))
                inside.pop()

    world.run(lambda: world.threads(enter, enter, enter))
    assert set(seen) == {1}


def test_locks_as_threading_has_them() -> None:
    world = World()
    lock, again = world.threading.Lock(), world.threading.RLock()

    def use() -> None:
        assert lock.acquire()
        assert not lock.acquire(blocking=False)
        before_s = world.scheduler.now_s()
        assert not lock.acquire(timeout=2)
        assert world.scheduler.now_s() - before_s >= 2
        with again, again:
            assert again.acquire(blocking=False)
            again.release()
        lock.release()
        with pytest.raises(RuntimeError):
            lock.release()

    world.run(use)


def test_without_preemption_races_stay_unseen_and_with_it_they_show() -> None:
    def lost(every: int) -> int:
        found = 0
        for seed in range(30):
            world, total = World(seed, every), [0]
            lock = world.threading.Lock()

            def add(world: World = world, total: list[int] = total, lock: object = lock) -> None:
                for _ in range(5):
                    value = total[0]
                    with lock:  # type: ignore[attr-defined]
                        pass
                    total[0] = value + 1

            world.run(lambda world=world, add=add: world.threads(add, add))
            found += total[0] != 10
        return found

    assert lost(0) == 0
    assert lost(2) > 5


@pytest.mark.parametrize("seed", range(10))
def test_conditions_events_queues_and_semaphores(seed: int) -> None:
    world = World(seed)
    changed, event = world.threading.Condition(), world.threading.Event()
    queue, got, free = world.queue.Queue(2), [], world.threading.Semaphore(1)

    def give() -> None:
        for number in range(6):
            with free:
                queue.put(number)
        with changed:
            changed.notify_all()
        event.set()

    def take() -> None:
        with changed:
            assert changed.wait_for(lambda: len(got) == 0, 1)
        got.extend(queue.get(timeout=5) for _ in range(6))

    def late() -> None:
        assert event.wait(10)
        with pytest.raises(world.queue.Empty):
            world.queue.SimpleQueue().get(timeout=0.5)
        with changed:
            assert not changed.wait(0.1)

    world.run(lambda: world.threads(give, take, late))
    assert got == list(range(6))


@pytest.mark.parametrize("seed", range(10))
def test_executors(seed: int) -> None:
    world = World(seed)

    def fail() -> None:
        raise KeyError("no")

    def use() -> None:
        pool = world.futures.ThreadPoolExecutor(2)
        slow = [pool.submit(world.sleep, 5) for _ in range(2)]
        waiting = pool.submit(pow, 2, 5)
        assert waiting.cancel()
        with pytest.raises(FutureTimeoutError):
            slow[0].result(1)
        done, pending = world.futures.wait(slow, timeout=1)
        assert (len(done), len(pending)) == (0, 2)
        assert all(each.result() is None for each in slow)
        failed = pool.submit(fail)
        with pytest.raises(KeyError):
            failed.result()
        with pytest.raises(CancelledError):
            waiting.result()
        assert list(pool.map(pow, [2, 3], [2, 2])) == [4, 9]
        pool.shutdown()

    world.run(use)


def test_a_killed_process_stops_where_it_stands() -> None:
    world, seen = World(), []
    child = world.scheduler.process("child")

    def die_slowly() -> None:
        try:
            seen.append("runs")
            world.sleep(10)
        finally:
            if not world.scheduler.is_over:
                seen.append("finally")

    def main() -> None:
        world.scheduler.spawn(child, "child", die_slowly)
        world.sleep(1)
        child.kill()
        world.sleep(100)

    world.run(main)
    assert seen == ["runs"]


def test_a_process_may_end_itself() -> None:
    world, seen = World(), []
    child = world.scheduler.process("child")

    def end() -> None:
        try:
            child.kill()
        finally:
            if not world.scheduler.is_over:
                seen.append("finally")

    def main() -> None:
        world.scheduler.spawn(child, "child", end)
        world.sleep(1)

    world.run(main)
    assert not seen
    assert not child.is_alive


def test_a_frozen_process_stands_still() -> None:
    world, seen = World(), []
    child = world.scheduler.process("child")

    def tick() -> None:
        while True:
            seen.append(int(world.scheduler.now_s()))
            world.sleep(1)

    def main() -> None:
        world.scheduler.spawn(child, "child", tick)
        world.sleep(2.5)
        child.freeze()
        world.sleep(10)
        child.thaw()
        world.sleep(1.2)

    world.run(main)
    assert seen == [1, 2, 3, 13, 14]


def test_what_can_never_go_on_is_told_with_its_stacks() -> None:
    world = World()
    first, second = world.threading.Lock(), world.threading.Lock()

    def take(one: object, other: object) -> None:
        with one:  # type: ignore[attr-defined]
            world.sleep(1)
            with other:  # type: ignore[attr-defined]
                pass

    with pytest.raises(StuckError, match=r"(?s)nobody can run.*test_scheduler\.py:\d+ take"):
        world.run(lambda: world.threads(lambda: take(first, second), lambda: take(second, first)))


def test_what_spins_is_told() -> None:
    scheduler = Scheduler(0, max_turns=1000)

    def spin() -> None:
        while True:
            scheduler.sleep(0)

    with pytest.raises(StuckError, match="turns were not enough"):
        scheduler.run("main", spin)


def test_threads_that_end_by_an_exception_are_told() -> None:
    scheduler = Scheduler(0)
    threads = Threading(scheduler)

    def main() -> None:
        thread = threads.Thread(target=lambda: 1 // 0)
        thread.start()
        thread.join()

    scheduler.run("main", main)
    assert "ZeroDivisionError" in scheduler.failures[0]


def test_what_is_done_under_an_atomic_lock_is_one_step() -> None:
    scheduler = Scheduler(3, preempt_every=1)
    threads, atomic, seen = Threading(scheduler), Threading(scheduler, is_atomic=True), []
    lock, inner = atomic.RLock(), threads.Lock()

    def step(number: int) -> None:
        for _ in range(5):
            with lock:
                seen.append(number)
                with inner:
                    seen.append(number)

    def main() -> None:
        each = [threads.Thread(target=step, args=(number,)) for number in range(3)]
        for thread in each:
            thread.start()
        for thread in each:
            thread.join()

    scheduler.run("main", main)
    assert seen[::2] == seen[1::2]


def test_nothing_runs_after_the_end() -> None:
    world = World()
    world.run(lambda: None)
    with pytest.raises(SimulationOver):
        world.threading.Lock().acquire()


def test_a_real_thread_that_comes_upon_this_world_is_named_with_who_left_it() -> None:
    world = World()
    told: list[str] = []

    def ask() -> None:
        try:
            world.scheduler.require_own("open clients")
        except AssertionError as error:
            told.append(str(error))

    def main() -> None:
        ask()
        stranger = threading.Thread(target=ask, name="kafkamq-topics")
        vars(stranger)["left_by"] = "tests/unit/test_x.py::test_y"
        stranger.start()
        stranger.join()

    world.run(main)
    (text,) = told
    assert "kafkamq-topics, left by tests/unit/test_x.py::test_y" in text


# ---- the names of the shells


def test_nothing_real_is_left_in_the_shells_and_nothing_simulated_outlives_the_block() -> None:
    before = {module.__name__: dict(vars(module)) for module in load_shells()}
    real = leftovers(load_shells())
    assert "kafkamq.queue.producer.threading" in real
    with swapped(Scheduler(0)):
        assert leftovers(load_shells()) == NOT_SIMULATED
        assert producer.threading is not threading
    assert {module.__name__: dict(vars(module)) for module in load_shells()} == before
    assert leftovers(load_shells()) == real


def test_shells_read_the_virtual_clock() -> None:
    scheduler = Scheduler(0)
    read: list[int] = []

    def look() -> None:
        read.append(clock.monotonic_ms())
        scheduler.sleep(3600)
        read.append(clock.monotonic_ms())

    with swapped(scheduler):
        scheduler.run("main", look)
    assert read[1] - read[0] == 3_600_000
