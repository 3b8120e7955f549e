"""Stand-ins for the modules of time, chance and the operating system."""

from __future__ import annotations

import os
import random
import secrets
import time
import uuid
from collections.abc import Callable
from types import ModuleType
from typing import Any

from harness.simulation.scheduler import NS_PER_S, Scheduler


class Module:
    """A module's stand-in: what is not replaced is the module's own."""

    def __init__(self, module: ModuleType, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._module = module
        self.replaced = replaced

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


def time_module(scheduler: Scheduler) -> Module:
    """Virtual clocks; the wall clock is one of them, and a machine's suspension is none."""

    def monotonic_ns() -> int:
        return int(scheduler.now_s() * NS_PER_S)

    def wall_ns() -> int:
        return monotonic_ns() + scheduler.wall_offset_ns

    return Module(
        time,
        monotonic=scheduler.now_s,
        perf_counter=scheduler.now_s,
        monotonic_ns=monotonic_ns,
        perf_counter_ns=monotonic_ns,
        clock_gettime_ns=lambda _: monotonic_ns(),
        clock_gettime=lambda _: scheduler.now_s(),
        time=lambda: wall_ns() / NS_PER_S,
        time_ns=wall_ns,
        sleep=scheduler.sleep,
    )


def random_module(rng: random.Random) -> dict[ModuleType, Module]:
    """``random``, ``secrets`` and ``uuid`` out of one seed."""

    class SeededRandom(random.Random):
        """``random.Random()`` without a seed has one of ours."""

        def __init__(self, seed: object = None) -> None:
            super().__init__(rng.random() if seed is None else repr(seed))

    names = "random randint randrange choice choices sample shuffle uniform getrandbits"
    own = {name: getattr(rng, name) for name in names.split()}
    return {
        random: Module(random, Random=SeededRandom, **own),
        secrets: Module(
            secrets,
            token_hex=lambda count=32: rng.randbytes(count).hex(),
            token_bytes=rng.randbytes,
            randbits=rng.getrandbits,
            randbelow=rng.randrange,
            choice=rng.choice,
        ),
        uuid: Module(
            uuid,
            uuid4=lambda: uuid.UUID(bytes=rng.randbytes(16), version=4),
            uuid1=lambda *_: uuid.UUID(bytes=rng.randbytes(16), version=1),
        ),
    }


def os_module(scheduler: Scheduler, rng: random.Random) -> Module:
    """Process ids are the simulated processes'; nobody forks."""

    def getpid() -> int:
        task = scheduler.current
        return 0 if task is None else task.process.pid

    return Module(os, getpid=getpid, urandom=rng.randbytes, register_at_fork=lambda **_: None)


class AtExit:
    """``atexit`` per process: what runs when its first thread has returned."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def register(self, call: Callable[..., object], *args: object) -> Callable[..., object]:
        task = self._scheduler.current
        assert task is not None
        task.process.exit_calls.append((call, args))
        return call

    def unregister(self, call: Callable[..., object]) -> None:
        task = self._scheduler.current
        if task is not None:
            calls = task.process.exit_calls
            calls[:] = [each for each in calls if each[0] != call]
