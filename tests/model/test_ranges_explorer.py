"""Every sequence of a few events between members that share one partition by ranges.

Breadth first, from a partition of which a worked on a part; from each last state the faults stop,
and then nothing may be lost.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator

import pytest
from tests.model.explorer import Event, explore, naming, skew, wait
from tests.model.range_world import INTERVAL_S, SIZE, Process, RangeWorld

DEPTH = 4
MAX_STATES = 4000


def both_work() -> RangeWorld:
    """Members a and b hold a range each, and a has done a part of its own."""
    world = RangeWorld()
    for name in "ab":
        world.start(name, reads_all=True)
        world.turn(world.processes[name])
    world.work(world.processes["a"], SIZE // 2)
    world.now_s += INTERVAL_S / 2
    for process in world.processes.values():
        world.turn(process)
        assert world.live(process)
    return world


def one_died_long_ago(how: Callable[[RangeWorld, Process], None]) -> RangeWorld:
    """Member a is gone; b has been busy with one range so long that no reader sees a any more."""
    world = both_work()
    how(world, world.processes["a"])
    for _ in range(40):
        world.now_s += INTERVAL_S / 4
        world.turn(world.processes["b"])
    return world


BEGINNINGS = {
    "both work": both_work,
    "one died": lambda: one_died_long_ago(RangeWorld.crash),
    "one left": lambda: one_died_long_ago(RangeWorld.leave),
}


def of(name: str, act: Callable[[RangeWorld, Process], None]) -> Callable[[RangeWorld], None]:
    return lambda world: act(world, world.processes[name])


def begin(name: str, *, reads_all: bool) -> Callable[[RangeWorld], None]:
    return lambda world: world.start(name, reads_all=reads_all)


def work_on(world: RangeWorld, process: Process) -> None:
    world.work(process, SIZE // 2)


def events(world: RangeWorld) -> Iterator[Event[RangeWorld]]:
    yield "59 s pass", wait(INTERVAL_S - 1)
    yield "121 s pass", wait(2 * INTERVAL_S + 1)
    if not world.skew_s:
        yield "the clock steps ahead", skew(30)
        yield "the clock steps back", skew(-30)
    for name in "ab":
        process = world.processes.get(name)
        if process is None:
            yield f"{name} starts", begin(name, reads_all=True)
            yield f"{name} starts in the middle", begin(name, reads_all=False)
            continue
        yield f"{name} does all it can", of(name, RangeWorld.turn)
        yield f"{name} works", of(name, work_on)
        yield f"{name} plans", of(name, RangeWorld.plan)
        if process.in_flight:
            yield f"{name} writes", of(name, RangeWorld.land)
        if process.next_offset < len(world.records):
            yield f"{name} reads", of(name, RangeWorld.read)
        if world.crashes < 2:
            yield f"{name} dies", of(name, RangeWorld.crash)
            yield f"{name} leaves", of(name, RangeWorld.leave)


@pytest.mark.slow
@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_no_short_sequence_loses_anything(beginning: str) -> None:
    found = explore(BEGINNINGS[beginning](), events, depth=DEPTH, max_states=MAX_STATES)
    for state, path in random.Random(1).sample(found, min(len(found), 400)):
        with naming(path):
            pickle.loads(state).settle()
