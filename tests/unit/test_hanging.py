"""Handlers that hang: when a pool of them is taken for hung, and what its health says of them."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sys
import threading
import urllib.request
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit import parallel_handlers as handlers
from tests.unit.shelf import Batch
from tests.unit.test_parallel_processes import Work, records
from tests.unit.test_parallel_work_queue import Room
from tests.waiting import wait_until, within

from kafkamq import ConfigError, Worker
from kafkamq.metrics import serve_metrics, stacks
from kafkamq.metrics.health import Handlers, Health, LoopState, health
from kafkamq.metrics.stacks import MAX_CALLS, MAX_CALLS_OF_POOL, MAX_FRAMES, MAX_POOLS
from kafkamq.parallel.config import make_config
from kafkamq.runtime.rules.hanging import Call, Slots
from kafkamq.testing import MemoryService
from kafkamq.web.workers import MAX_ANSWER_BYTES

HOUR_S = 3600.0


def at(*began_s: float) -> list[Call]:
    return [Call(begun, ("orders", 3, number)) for number, begun in enumerate(began_s)]


@pytest.mark.parametrize(
    ("slots", "hung_s"),
    [
        (Slots(0, ()), 0),
        (Slots(2, ()), 0),
        (Slots(2, at(100)), 0),  # the other one is free
        (Slots(2, at(100, 900)), 100),  # since the youngest began
        (Slots(2, at(100, 1000)), 0),  # one has ended its call just now
        (Slots(1, at(100)), 900),
        (Slots(2, at(100), turned_s=999.5), 0),
        (Slots(2, at(100), turned_s=400), 600),  # the loop holds all of them up
        (Slots(2, (), turned_s=400), 600),
        (Slots(2, at(100, 900), turned_s=400), 600),
        (Slots(2, at(100, 300), turned_s=999), 700),
    ],
)
def test_a_pool_hangs_while_no_slot_ends_its_call(slots: Slots, hung_s: float) -> None:
    assert slots.hung_s(1000) == hung_s
    assert slots.is_ready(1000) is (hung_s < 300)


def test_the_oldest_message_is_named_with_its_age() -> None:
    assert Slots(2, ()).describe(1000) == ""
    assert Slots(4, at(990, 400, 700), turned_s=1000).describe(1000) == (
        "3 of 4 handlers at work, the oldest for 600 s at orders-3@1"
    )
    assert Slots(4, at(990), turned_s=940).describe(1000) == (
        "1 of 4 handlers at work, the oldest for 10 s at orders-3@0; "
        "the event loop is blocked for 60 s"
    )


def test_health_asks_handlers_for_their_age(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(monotonic=lambda: now.s, s=1000.0)
    monkeypatch.setattr(sys.modules[Health.__module__], "time", now)
    slots = Slots(2, at(900, 1000))
    own = Health()
    pool = Handlers("of a test", HOUR_S, lambda: slots)
    own.watch(pool)
    verdicts = []
    for age_s in (0.0, 299.0, 300.0, HOUR_S, HOUR_S + 1):
        now.s = 1000 + age_s
        verdicts.append((own.is_live(), own.is_ready()))
    assert verdicts == [(True, True), (True, True), (True, False), (True, False), (False, False)]
    (state,) = own.states()
    assert "the oldest for 3701 s at orders-3@0" in state.detail
    slots = Slots(2, at(900))  # one has ended
    assert own.is_ready()
    own.remove(pool)
    assert own.states() == []


class Gate:
    """Where handlers hang."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.begun = 0
        self._lock = threading.Lock()

    def pass_by(self) -> None:
        with self._lock:
            self.begun += 1
        assert self.opened.wait(within(60))


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


def state_of(name: str) -> LoopState:
    (found,) = [state for state in health.states() if state.name == name]
    return found


def test_a_worker_whose_threads_all_hang_is_not_live(gate: Gate) -> None:
    service = MemoryService()
    queue = service.queue("hanging")

    @queue.handler(concurrency=2)
    def handle(body: str) -> None:
        if body != "quick":
            gate.pass_by()

    with Worker(service, hung_after=0.05) as worker:
        queue.producer().send(b"quick")
        queue.producer().send(b"a")
        wait_until(lambda: gate.begun == 1 and worker.handled == 1)
        state = state_of("handlers of hanging")
        assert (state.age_s, state.is_live, state.is_ready) == (0, True, True)
        assert re.match(r"1 of 2 handlers at work, the oldest for \d+ s at memory\.", state.detail)
        queue.producer().send(b"b")
        wait_until(lambda: not state_of("handlers of hanging").is_live)
        assert state_of("handlers of hanging").detail.startswith("2 of 2 handlers at work")
        gate.opened.set()
        wait_until(lambda: worker.handled == 3)
        state = state_of("handlers of hanging")
        assert (state.age_s, state.is_live, state.detail) == (0, True, "")
    assert "handlers of hanging" not in {state.name for state in health.states()}


def test_a_blocked_event_loop_hangs_all_of_its_coroutines(gate: Gate) -> None:
    service = MemoryService()
    queue = service.queue("blocked")

    @queue.handler(concurrency=8)
    async def handle(_: str) -> None:
        gate.pass_by()  # forgot that it must not wait

    with Worker(service, hung_after=0.05) as worker:
        assert state_of("handlers of blocked").is_live
        queue.producer().send(b"a")
        wait_until(lambda: not state_of("handlers of blocked").is_live)
        said = state_of("handlers of blocked").detail
        assert said.startswith("1 of 8 handlers at work")
        assert "the event loop is blocked for" in said
        gate.opened.set()
        wait_until(lambda: worker.handled == 1 and state_of("handlers of blocked").is_live)


async def _waits_for(gate: Gate) -> None:
    while not gate.opened.is_set():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("timeout", [None, 60.0])
@pytest.mark.parametrize("kind", ["a thread", "a coroutine", "a blocked loop"])
def test_the_metrics_port_says_what_handlers_are_at(
    gate: Gate, kind: str, timeout: float | None
) -> None:
    service = MemoryService()
    queue = service.queue("shown")

    def in_a_thread(body: str) -> None:
        if body == "secret":
            gate.pass_by()

    async def in_a_coroutine(body: str) -> None:
        if body == "secret":
            await _waits_for(gate)

    async def in_a_blocked_loop(body: str) -> None:
        if body == "secret":
            gate.pass_by()

    handler, last = {
        "a thread": (in_a_thread, "pass_by"),
        "a coroutine": (in_a_coroutine, "_waits_for"),
        "a blocked loop": (in_a_blocked_loop, "pass_by"),
    }[kind]
    queue.handler(concurrency=2, timeout=timeout)(handler)
    with serve_metrics(0, host="127.0.0.1") as server, Worker(service) as worker:
        sent = queue.producer().send(b"quick").result(within(30))
        wait_until(lambda: worker.handled == 1)
        (pool,) = pools_at(server.port)
        assert (pool["queue"], pool["slots"], pool["busy"], pool["calls"]) == ("shown", 2, 0, [])
        assert pool["handler"].endswith(f"in_{kind.replace(' ', '_')}")
        sent = queue.producer().send(b"secret").result(within(30))

        def stack() -> list[str]:
            calls = pools_at(server.port)[0]["calls"]
            return calls[0]["stack"] if calls else []

        wait_until(lambda: any(last in line for line in stack()), "its stack")
        ((call,),) = (each["calls"] for each in pools_at(server.port))
        assert (call["partition"], call["offset"]) == (sent.partition, sent.offset)
        assert call["for_ms"] >= 0
        assert call["runs_in"] == ("a thread" if kind == "a thread" else "a coroutine")
        outermost = call["stack"][0]
        assert re.match(r"unit/test_hanging\.py:\d+ .*in_a", outermost), "ours are left out"
        assert "secret" not in str(call)
        gate.opened.set()


def test_the_thread_that_took_over_is_shown(gate: Gate) -> None:
    service = MemoryService()
    queue = service.queue("late")
    calls: list[str] = []

    def late() -> None:
        gate.pass_by()

    @queue.handler(concurrency=1, timeout=0.5)
    def handle(body: str) -> None:
        calls.append(body)
        gate.pass_by() if len(calls) == 1 else late()

    with serve_metrics(0, host="127.0.0.1") as server, Worker(service, drain=0.0):
        for _ in range(2):
            queue.producer().send(b"x")

        def is_shown() -> bool:
            shown = [call["stack"] for call in pools_at(server.port)[0]["calls"]]
            return any("late" in line for stack in shown for line in stack)

        try:
            wait_until(is_shown, "the call behind the one that is left alone", 20.0)
        finally:
            gate.opened.set()


def test_handlers_in_processes_say_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(handlers.SEEN, f"{tmp_path}/seen")
    work = Work(handlers.step)
    pool = Handlers("of a test", HOUR_S, work.executor.slots, queue="apart")
    health.watch(pool)
    try:
        work.start()
        work.shelf.add(Batch(records("a")))
        with serve_metrics(0, host="127.0.0.1") as server:
            wait_until(lambda: pools_at(server.port)[0]["busy"] == 1)
            (call,) = pools_at(server.port)[0]["calls"]
        assert re.fullmatch(r"process \d+", call["runs_in"])
        assert call["stack"] == []
        Path(f"{tmp_path}/seen.0").touch()
        work.shelf.wait(1)
    finally:
        health.remove(pool)
        work.shelf.end(work.executor)


def test_what_is_told_of_handlers_is_bounded() -> None:
    depth, entered, leave = 3 * MAX_FRAMES, threading.Event(), threading.Event()

    def deeper(left: int) -> None:
        if left:
            deeper(left - 1)
        else:
            entered.set()
            leave.wait(within(60))

    thread = threading.Thread(target=deeper, args=(depth,))
    thread.start()
    assert entered.wait(within(60))
    calls = [Call(float(at), ("t", 0, at), thread.ident) for at in reversed(range(1000))]
    pools = [Handlers("of a test", HOUR_S, lambda: Slots(2000, calls)) for _ in range(300)]
    try:
        for pool in pools:
            health.watch(pool)
        with serve_metrics(0, host="127.0.0.1") as server:
            said = pools_at(server.port)
    finally:
        for pool in pools:
            health.remove(pool)
        leave.set()
        thread.join()
    assert len(said) == MAX_POOLS
    shown = [call for pool in said for call in pool["calls"]]
    assert len(shown) == MAX_CALLS
    assert [call["offset"] for call in said[0]["calls"]] == list(range(MAX_CALLS_OF_POOL))
    assert (said[0]["busy"], said[0]["slots"]) == (1000, 2000), "all are counted"
    assert {len(call["stack"]) for call in shown} == {MAX_FRAMES}


def test_long_stacks_are_cut_to_what_readers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Semaphore(0), threading.Event()
    name = "\u00fc" * 110
    scope: dict[str, Any] = {"entered": entered, "leave": leave}
    # As code that is generated has.
    exec(
        f"def {name}(left):\n"
        f"    return {name}(left - 1) if left else entered.release() or leave.wait(60)\n",
        scope,
    )
    thread = threading.Thread(target=scope[name], args=(MAX_FRAMES,))
    thread.start()
    assert entered.acquire(timeout=within(60))
    calls = [Call(float(at), ("t", 0, at), thread.ident) for at in range(MAX_CALLS_OF_POOL)]
    pools = [Handlers("of a test", HOUR_S, lambda: Slots(20, calls), queue="q") for _ in range(5)]
    try:
        for pool in pools:
            health.watch(pool)
        with serve_metrics(0, host="127.0.0.1") as server:
            address = f"http://127.0.0.1:{server.port}/handlers"
            with urllib.request.urlopen(address, timeout=within(10)) as answer:
                said = answer.read()
    finally:
        for pool in pools:
            health.remove(pool)
        leave.set()
        thread.join()
    assert len(said) < MAX_ANSWER_BYTES - 1000
    stacks = [call["stack"] for pool in json.loads(said)["pools"] for call in pool["calls"]]
    assert {len(stack) for stack in stacks} == {MAX_FRAMES // 4}
    assert all("threading.py" in stack[-1] for stack in stacks), "the innermost are left"


class Strange:
    """It has each attribute, as mocks and proxies do."""

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Strange:
        return self

    def __next__(self) -> None:
        return None

    def send(self, _: object) -> None:
        return None

    def throw(self, error: BaseException) -> None:
        raise error

    def __getattr__(self, name: str) -> Strange:
        if name.startswith("__"):
            raise AttributeError(name)
        return Strange()


def test_a_strange_awaitable_ends_no_answer() -> None:
    async def handle() -> None:
        await Strange()

    async def ask() -> Any:
        task = asyncio.ensure_future(handle())
        await asyncio.sleep(0)
        pool = Handlers("of a test", HOUR_S, lambda: Slots(1, [Call(0.0, ("t", 0, 0), task)]))
        health.watch(pool)
        try:
            return json.loads(stacks.handlers())["pools"]
        finally:
            health.remove(pool)
            task.cancel()

    ((call,),) = (each["calls"] for each in asyncio.run(ask()))
    assert [re.split(r"[ .]", line)[-1] for line in call["stack"]] == ["handle"]


def test_what_a_coroutine_within_its_time_had_is_held_no_longer() -> None:
    service, held = MemoryService(), list[Any]()
    queue = service.queue("within")

    @queue.handler(concurrency=1, timeout=60.0)
    async def handle(_: str) -> None:
        held.append(weakref.ref(asyncio.current_task()))

    with Worker(service) as worker:
        queue.producer().send(b"x")
        wait_until(lambda: worker.handled == 1)

        def is_gone() -> bool:
            gc.collect()
            return held[0]() is None

        wait_until(is_gone, "its task")


def test_an_answer_holds_no_frames() -> None:
    class Payload:
        """It is a local of a handler."""

    held: list[weakref.ref[Payload]] = []
    entered, leave = threading.Event(), threading.Event()

    def handle() -> None:
        payload = Payload()
        held.append(weakref.ref(payload))
        entered.set()
        leave.wait(within(60))

    thread = threading.Thread(target=handle)
    thread.start()
    assert entered.wait(within(60))
    gc.disable()
    try:
        stacks.handlers()
        leave.set()
        thread.join()
        assert held[0]() is None
    finally:
        gc.enable()


def pools_at(port: int) -> list[dict[str, Any]]:
    address = f"http://127.0.0.1:{port}/handlers"
    with urllib.request.urlopen(address, timeout=within(10)) as answer:
        return list(json.loads(answer.read())["pools"])


def test_without_a_time_it_is_the_queues_longest_lease() -> None:
    service = MemoryService()
    queue = service.queue("long", max_lease=1000.0)
    queue.handler()(lambda message: None)
    with Worker(service):
        assert state_of("handlers of long").max_age_s == 1000
    for wrong in (0, -1, "1"):
        with pytest.raises(ConfigError, match="hung_after"):
            Worker(service, hung_after=wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="hung_after"):
            make_config(
                service.config,
                "topic",
                "group",
                ordering="key",
                concurrency=1,
                options={"hung_after": wrong},  # type: ignore[typeddict-item]
            )


def test_the_desk_knows_what_workers_are_at() -> None:
    room = Room()
    room.speed_up()
    room.add("aaaabbbb")
    one, two = room.workers
    assert room.queue.calls(room.workers) == []
    room.queue.take(one)
    assert [str(call) for call in room.queue.calls(room.workers)] == ["topic-0@0"]  # not begun yet
    room.work(one, 2)  # two are done, the third is begun
    assert [str(call) for call in room.queue.calls(room.workers)] == ["topic-0@2"]
    room.queue.tend()  # takes back what is behind it
    (call,) = room.queue.calls(room.workers)
    assert (str(call), call.began_s) == ("topic-0@2", one.began_s)
    room.queue.take(two)
    assert len(room.queue.calls(room.workers)) == 2


def test_a_list_is_named_by_its_first_record() -> None:
    room = Room(batch_size=4)
    room.add("abcd")
    one, _ = room.workers
    room.queue.take(one)
    list(one.pending)
    assert [str(call) for call in room.queue.calls(room.workers)] == ["topic-0@0"]


def test_a_process_that_goes_on_in_its_list_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(handlers.SEEN, f"{tmp_path}/seen")
    work = Work(handlers.step)

    def is_at(offset: int) -> bool:
        calls = work.executor.slots().calls
        return [call.place for call in calls] == [("topic", 0, offset)]

    began: list[float] = []
    try:
        work.start()
        work.shelf.add(Batch(records("a", "b", "c")))
        for offset in range(3):
            wait_until(lambda: is_at(offset), "the next record")  # noqa: B023
            began += [call.began_s for call in work.executor.slots().calls]
            Path(f"{tmp_path}/seen.{offset}").touch()
        work.shelf.wait(3)
        assert work.executor.slots().calls == []
    finally:
        work.shelf.end(work.executor)
    assert sorted(set(began)) == began
